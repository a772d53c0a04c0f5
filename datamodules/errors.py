"""The one exception of this package, and the check that most of it needs."""

import numpy as np


class ConfigError(ValueError):
    """A mistake in the user's settings or data.

    The message is one line that names the key, its value and what would be right.
    """


def check_whole(key: str, value: int, least: int = 1, owner: str = "") -> int:
    """Return ``value`` if it is a whole number of at least ``least``; else raise ConfigError.

    Args:
        owner: The class whose argument it is, where the key alone does not tell.
    """
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
        of = f" of {owner}" if owner else ""
        raise ConfigError(f"{key}={value!r}{of} must be a whole number of at least {least}")
    return int(value)
