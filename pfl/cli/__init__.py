"""The command line."""

from pfl.cli.main import main

__all__ = ["main"]
