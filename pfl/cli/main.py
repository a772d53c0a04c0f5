"""The entry of the command line: which command runs, and the exit status of an error."""

from __future__ import annotations

import importlib
import os
import sys

from pfl.cli.app import FederatedCLI
from pfl.cli.messages import explain, quiet
from pfl.cli.user_code import cause, where
from pfl.distributed.launch import Ended, ProcessLost, report_signals

TRACEBACK = "PFL_TRACEBACK"  # environment variable: every error comes with its traceback
# Commands with a module of their own, which has a function `command`.
OTHERS = ("compare", "export", "partition", "report", "reproduce", "tune")


def main(args: list[str] | None = None) -> int:
    """Runs the command line.

    Args:
        args: The words of the command line; those of the program if None. `--traceback` among
            them shows the traceback of every error, as the variable `PFL_TRACEBACK=1` does.

    Returns:
        The exit status: 2 for a mistake of the user, told in one line, 1 for a lost process, and
        128 plus its number for a signal.
    """
    quiet()
    if args is None:
        args = sys.argv[1:]
        # For classes of the user; `pfl`, unlike `python -m pfl`, starts without this folder.
        sys.path.append(os.getcwd())
    everything = bool(os.environ.get(TRACEBACK)) or "--traceback" in args
    args = [arg for arg in args if arg != "--traceback"]
    try:
        with report_signals():
            if args and args[0] in OTHERS:
                module = importlib.import_module(f"pfl.cli.{args[0]}")
                module.command(args[1:])
            else:
                FederatedCLI(args)
    except Ended as error:
        return int(error.code or 1)
    except ProcessLost:  # the launcher has said why
        return 1
    except Exception as error:
        told = explain(error)
        line = told + cause(error) if told else where(error)
        if line is None or everything:
            raise
        print(f"error: {line}", file=sys.stderr)
        return 2
    return 0
