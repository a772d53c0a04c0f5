"""The values that `pfl tune` may try for a key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scipy.stats.qmc import Halton

from pfl.errors import ConfigError

if TYPE_CHECKING:
    from optuna import Trial

Space = dict[str, Any] | list[Any]
"""`low` and `high`, both tried, and `log`; or a list of all values."""


def read_space(where: str, content: Any) -> dict[str, Space]:
    """Returns the checked values to try, by dotted key.

    Args:
        where: The place of the space, for errors.
        content: For each key `{low, high}`, perhaps with `log: true`, or a list of values. Whole
            numbers as `low` and `high` give whole numbers.

    Raises:
        ConfigError: A key has no such values.
    """
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: {content!r}; it must be keys and the values to try")
    return {str(key): _checked(f"{where}.{key}", values) for key, values in content.items()}


def _checked(where: str, values: Any) -> Space:
    if isinstance(values, list) and values:
        if all(value is None or isinstance(value, bool | int | float | str) for value in values):
            return values
    elif isinstance(values, dict) and {"low", "high"} <= values.keys() <= {"low", "high", "log"}:
        low, high, log = _number(values["low"]), _number(values["high"]), values.get("log", False)
        if (
            None not in (low, high)
            and isinstance(log, bool)
            and low < high
            and not (log and low <= 0)
        ):
            return {"low": low, "high": high, "log": log}
    raise ConfigError(
        f"{where}: {values!r}; it must be like {{low: 0.001, high: 1.0, log: true}}, or a list of "
        f"values"
    )


def _number(value: Any) -> Any:
    """Returns a number, also that of a text such as 1e-3, which YAML does not read as a number."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return value if isinstance(value, int | float) else None


def spread_evenly(spaces: dict[str, Space], count: int, seed: int) -> list[dict[str, Any]]:
    """Returns `count` points that cover the spaces evenly, by dotted key.

    They are the first points of a scrambled Halton sequence. Its coordinates do not depend on those
    behind them, so that runs whose first spaces are equal try the same values there.
    """
    points = Halton(len(spaces), rng=seed).random(count)
    named = (zip(spaces.items(), point.tolist(), strict=True) for point in points)
    return [{key: _at(space, share) for (key, space), share in point} for point in named]


def _at(space: Space, share: float) -> Any:
    """Returns the value of a space below which lies a share in [0, 1) of it."""
    if isinstance(space, list):
        return space[int(share * len(space))]
    low, high = space["low"], space["high"]
    whole = isinstance(low, int) and isinstance(high, int)
    high += whole  # a whole number has the room up to the next one
    value = low * (high / low) ** share if space["log"] else low + (high - low) * share
    return int(value) if whole else value


def suggest(trial: Trial, key: str, space: Space) -> Any:
    """Returns the value of a trial for a key, which the trial may already have."""
    if isinstance(space, list):
        return trial.suggest_categorical(key, space)
    if isinstance(space["low"], int) and isinstance(space["high"], int):
        return trial.suggest_int(key, space["low"], space["high"], log=space["log"])
    return trial.suggest_float(key, space["low"], space["high"], log=space["log"])
