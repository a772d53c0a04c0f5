"""Errors that a user can mend: one line that names the key, its value and what would be right."""

from __future__ import annotations

import math

from pfl.datamodules import errors
from pfl.datamodules.errors import ConfigError

__all__ = ["ConfigError", "Diverged", "in_list", "printable", "require"]


class Diverged(ConfigError):
    """A model or a state is no longer finite: the run has diverged.

    Example:
        >>> issubclass(Diverged, ConfigError)
        True
    """


def require(name: str, value: object, holds: bool, expected: str) -> None:
    """Raises a ConfigError about a method's argument `name` unless `holds` and it is finite.

    Args:
        name: The argument, which the command line calls `model.<name>`.
        value: What was given for the argument.
        holds: Whether the value is possible.
        expected: The possible values, in words that continue "it must be".
    """
    if isinstance(value, float) and not math.isfinite(value):
        holds = False
        expected = expected.removesuffix(" and finite") + " and finite"
    errors.require_value(f"model.{name}", value, holds, expected)


def in_list(name: str) -> str:
    """Returns a name, in quotes where a comma would make it look like two.

    Example:
        >>> print(", ".join(map(in_list, ["St. Mary, north", "coast"])))
        'St. Mary, north', coast
    """
    if "," in name:
        return repr(name)
    return name


def printable(line: str) -> str:
    r"""Returns a line with the escapes of its control characters, which a terminal would obey.

    Example:
        >>> print(printable("\x1b[31mred"))
        \x1b[31mred
    """
    pieces = []
    for character in line:
        if not character.isprintable():
            character = character.encode("unicode_escape").decode()
        pieces.append(character)
    return "".join(pieces)
