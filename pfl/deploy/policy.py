"""What a party does for a server, by its own file: everything else is refused, whoever asks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from pfl.datamodules.errors import check_keys, check_whole, require_value
from pfl.deploy.schema import OVERVIEW
from pfl.errors import ConfigError
from pfl.scores.names import SPLITS


@dataclass(frozen=True)
class Policy:
    """What a party gives, and how much work it does. None: whatever the run has.

    Attributes:
        splits: The splits whose scores it tells.
        scores: The names of these scores, such as accuracy and loss.
        messages: The names of the messages that may leave, such as w. Statistics of samples are
            messages as well: buffers of running statistics, or centroids.
        tables: The names of the tables whose rows may leave.
        work: The largest share of a round's local steps.
        rounds: The most times that it trains in one run.
        overview: What it tells of its samples before the first round, of `schema.OVERVIEW`.
        clip: The largest norm of what it sends after training, measured from the server's model.
        noise: The standard deviation of the noise that it adds to this, over `clip`.
    """

    splits: tuple[str, ...] = SPLITS
    scores: tuple[str, ...] | None = None
    messages: tuple[str, ...] | None = None
    tables: tuple[str, ...] | None = None
    work: float = 1.0
    rounds: int | None = None
    overview: tuple[str, ...] = ()
    clip: float | None = None
    noise: float | None = None

    @classmethod
    def read(cls, key: str, given: Any) -> Policy:
        """Returns the policy in a party's file; a ConfigError names a value that cannot be.

        Args:
            key: The name of the file and the key.
            given: The value; None: everything that a run has.
        """
        if given is None:
            return cls()
        names = [field.name for field in fields(cls)]
        require_value(key, given, isinstance(given, dict), f"a mapping with {', '.join(names)}")
        check_keys(key, given, names)
        values = dict(given)
        for name in ("splits", "scores", "messages", "tables", "overview"):
            if name not in values:
                continue
            listed = values[name]
            holds = isinstance(listed, list) and all(isinstance(one, str) for one in listed)
            require_value(f"{key}.{name}", listed, holds, "a list of names")
            values[name] = tuple(listed)
        wrong = set(values.get("splits", ())) - {*SPLITS}
        require_value(f"{key}.splits", given.get("splits"), not wrong, "some of val and test")
        wrong = set(values.get("overview", ())) - {*OVERVIEW}
        parts = f"some of {', '.join(OVERVIEW)}"
        require_value(f"{key}.overview", given.get("overview"), not wrong, parts)
        _check_noise(key, values)
        work = values.get("work", 1.0)
        holds = type(work) in (int, float) and 0 < work <= 1
        require_value(f"{key}.work", work, holds, "above 0 and at most 1")
        if "rounds" in values:
            check_whole(f"{key}.rounds", values["rounds"])
        return cls(**values)

    @property
    def adds_noise(self) -> bool:
        """Whether what leaves after training has noise of the party's own."""
        return bool(self.noise)

    def check_training(self, work: float, trained: int) -> None:
        """Refuses a round of training that is not in the policy.

        Args:
            work: The share of the local steps that the server asks for.
            trained: How many times the party has trained in this run.
        """
        if work > self.work:
            raise ConfigError(
                f"policy.work: the server asks for {work}; this party does {self.work}"
            )
        if self.rounds is not None and trained >= self.rounds:
            raise ConfigError(
                f"policy.rounds: this party has trained {trained} times in this run, which is all "
                f"that it does"
            )

    def check_names(self, key: str, names: Iterable[str]) -> None:
        """Refuses names that are not in a list of the policy.

        Args:
            key: The list: "splits", "scores", "messages" or "tables".
            names: What the server asks for, or would get.
        """
        listed = getattr(self, key)
        if listed is None:
            return
        for name in names:
            if name not in listed:
                raise ConfigError(
                    f"policy.{key}: the run has {name!r}, and this party gives {list(listed)}"
                )

    def check_log(self, messages: Mapping[str, Any], tables: Mapping[str, Any]) -> None:
        """Refuses what would leave after a round, if the policy does not have all of it."""
        self.check_names("messages", messages)
        self.check_names("tables", tables)


def _check_noise(key: str, values: dict[str, Any]) -> None:
    """Checks `clip` and `noise`; with noise, no rows of tables leave unless they are listed."""
    for name, holds, words in (
        ("clip", lambda value: value > 0, "a positive number"),
        ("noise", lambda value: value >= 0, "a number of at least 0"),
    ):
        value = values.get(name, 1.0)
        is_number = type(value) in (int, float) and math.isfinite(value)
        require_value(f"{key}.{name}", value, is_number and holds(value), words)
    if "noise" in values and "clip" not in values:
        raise ConfigError(
            f"{key}.noise: {values['noise']}; its deviation is this many times clip, which is "
            f"missing; give clip, the largest norm of what the party sends"
        )
    if values.get("noise"):
        values.setdefault("tables", ())
