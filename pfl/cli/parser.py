"""The parser of the commands beside `fit`, `validate`, `test` and `predict`."""

from __future__ import annotations

import argparse
from typing import NoReturn

from pfl.errors import ConfigError


def at_least_one(text: str) -> int:
    """Returns the number that an option has, such as that of `--jobs`.

    Raises:
        ArgumentTypeError: The text is no whole number, or below 1.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}; it must be a whole number, at least 1")
    return int(text)


class CommandParser(argparse.ArgumentParser):
    """An argument parser that raises its complaints, with the name of the command before them.

    Example:
        >>> parser = CommandParser("pfl compare")
        >>> parser.error("there are no runs")
        Traceback (most recent call last):
        datamodules.errors.ConfigError: compare: there are no runs
    """

    def error(self, message: str) -> NoReturn:
        """Raises a ConfigError."""
        raise ConfigError(f"{self.prog.removeprefix('pfl ')}: {message}")
