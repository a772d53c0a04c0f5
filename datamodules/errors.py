"""The exception for mistakes in settings or data, and the checks that raise it."""

import numpy as np


class ConfigError(ValueError):
    """A mistake in the user's settings or data.

    The message is one line: the name of the argument, its value, and what the value must be.

    Example:
        >>> from datamodules import ConfigError, Dirichlet
        >>> try:
        ...     Dirichlet(alpha=-1)
        ... except ConfigError as error:
        ...     print(error)
        Dirichlet.alpha: -1; it must be positive and finite
    """


def require(key: str, value: object, holds: bool, expected: str) -> None:
    """Raises an error about an argument unless a condition holds.

    Args:
        key: The name of the argument, with its class: `Dirichlet.alpha`.
        value: The value of the argument.
        holds: Whether the value is right.
        expected: What the value must be, to follow the words "it must be".

    Raises:
        ConfigError: `holds` is false.
    """
    if not holds:
        raise ConfigError(f"{key}: {value!r}; it must be {expected}")


def check_whole(key: str, value: int, least: int = 1) -> int:
    """Returns `value` as an `int` if it is a whole number of at least `least`.

    Args:
        key: The name of the argument, with its class: `Dirichlet.min_size`.
        value: The value of the argument.
        least: The smallest value that is right.

    Raises:
        ConfigError: `value` is no integer, or a boolean, or below `least`.
    """
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    require(key, value, whole and value >= least, f"a whole number of at least {least}")
    return int(value)
