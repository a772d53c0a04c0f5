"""The one exception of this package."""


class ConfigError(ValueError):
    """A mistake in the user's settings or data.

    The message is one line that names the key, its value and what would be right.
    """
