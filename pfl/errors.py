"""Mistakes of a user, told in one line that names the key, the value and what would be right."""

from __future__ import annotations

from datamodules.errors import ConfigError

__all__ = ["ConfigError", "Diverged", "require"]


class Diverged(ConfigError):
    """The models of a run are no longer finite."""


def require(name: str, value: object, holds: bool, wanted: str) -> None:
    """Raise a ConfigError about a method's argument `name` unless `holds`."""
    if not holds:
        raise ConfigError(f"model.{name}: {value!r}; it must be {wanted}")
