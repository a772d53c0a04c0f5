"""The command line's entry: which command runs, and what an error becomes."""

from __future__ import annotations

import logging
import sys

from pfl.cli.app import FederatedCLI
from pfl.cli.messages import explain
from pfl.distributed.launch import Ended, ProcessLost, told_of_signals


def main(args: list[str] | None = None) -> int:
    """Run the command line; the exit status.

    A user's mistake is one line and status 2, a lost process 1, a signal 128 and its number.
    """
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    words = sys.argv[1:] if args is None else args
    try:
        with told_of_signals():
            if words[:1] == ["reproduce"]:
                from pfl.cli.reproduce import command

                command(words[1:])
            else:
                FederatedCLI(args)
    except Ended as error:
        return int(error.code or 1)
    except ProcessLost:  # the launcher has told why
        return 1
    except Exception as error:
        line = explain(error)
        if line is None:
            raise
        print(f"error: {line}", file=sys.stderr)
        return 2
    return 0
