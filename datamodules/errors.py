"""The exception for mistakes in settings or data, and the checks that raise it."""

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import numpy as np


class ConfigError(ValueError):
    """A mistake in the user's settings or data.

    The message is one line: the name of the argument, its value, and what the value must be.

    Example:
        >>> from pfl.datamodules import ConfigError, Dirichlet
        >>> try:
        ...     Dirichlet(alpha=-1)
        ... except ConfigError as error:
        ...     print(error)
        Dirichlet.alpha: -1; it must be positive
    """


class RowError(ConfigError):
    """A mistake in one row of a table.

    Attributes:
        text: What is wrong.
        row: The row, from 1, after the names.
        place: The row in words, with the name of the file where that was given.

    Example:
        >>> print(RowError("the column 'age' holds 'old'; it must hold numbers", 8))
        the column 'age' holds 'old'; it must hold numbers (row 8 after the names)
    """

    def __init__(self, text: str, row: int, file: str = "") -> None:
        self.place = f"row {row} after the names"
        if file:
            self.place += f" of {file}"
        super().__init__(f"{text} ({self.place})")
        self.text = text
        self.row = row

    def of_client(self, client: object) -> ConfigError:
        """Returns the error with the name of the client that owns the row."""
        return ConfigError(f"{self.text} ({self.place}, of the client {str(client)!r})")


def add_note(error: Exception, text: str) -> None:
    """Adds a line below an error's own, which is of other code; does nothing before Python 3.11."""
    if hasattr(error, "add_note"):
        error.add_note(text)


def require_value(key: str, value: object, holds: bool, expected: str) -> None:
    """Raises a ConfigError about the argument `key` (`Dirichlet.alpha`) unless a condition holds.

    `expected` follows the words "it must be".
    """
    if not holds:
        raise ConfigError(f"{key}: {value!r}; it must be {expected}")


def check_keys(key: str, given: Iterable[object], known: Iterable[str]) -> None:
    """Raises a ConfigError that names the first key of a file's part that is none of the known."""
    names = list(known)
    unknown = [str(name) for name in given if name not in names]
    if unknown:
        raise ConfigError(f"{key}: {min(unknown)}: the keys are {', '.join(names)}")


def is_number(value: object) -> bool:
    """Returns whether a value of a file is a number: YAML reads 1e6 as text, and `yes` as true."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    """Returns whether a value is a whole number, of Python or NumPy."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_whole(key: str, value: int, least: int = 1) -> int:
    """Returns a `value` as an `int`: no boolean, at least `least`, and small enough for int64."""
    whole = is_whole(value)
    large = ""
    if whole and value >= 2**63:
        large = " and below 2**63"
    holds = whole and value >= least and not large
    require_value(key, value, holds, f"a whole number of at least {least}{large}")
    return int(value)


def check_optional(key: str, value: int | None, least: int = 1) -> int | None:
    """Returns None if `value` is None, and else what `check_whole` returns."""
    if value is None:
        return None
    return check_whole(key, value, least)


def optional_module(key: str, name: str, package: str | None = None) -> Any:
    """Returns a module of a package that `key` needs, or raises a ConfigError to install it."""
    try:
        return import_module(name)
    except ImportError as error:
        package = package or name.partition(".")[0]
        raise ConfigError(
            f"{key}; the package {package} must be installed, by: pip install {package}"
        ) from error


def error_line(error: Exception) -> str:
    """Returns the type and the message of an error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
