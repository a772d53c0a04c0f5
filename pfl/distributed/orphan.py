"""Lets a process that the first process of a run started die with it, as soon as Python runs."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

STARTED_BY = "PFL_STARTED_BY"  # environment variable: id of the process that started the others
PR_SET_PDEATHSIG = 1  # of Linux's prctl


def is_child() -> bool:
    """Returns whether the first process of a run started this one."""
    return os.environ.get(STARTED_BY, str(os.getpid())) != str(os.getpid())


def die_with_parent(dies: bool = True) -> None:
    """Lets the system kill this process when the process that started it dies; Linux only.

    Without it a process would not notice while it imports modules or leaves the interpreter. During
    a run the watch of `pfl.distributed.launch` does this, and also names the lost process.

    Args:
        dies: Whether this process dies so from now on.
    """
    if os.environ.get(STARTED_BY) == str(os.getppid()):
        number = 0
        if dies:
            number = signal.SIGKILL
        signal_with_parent(number)


def signal_with_parent(number: int) -> None:
    """Has the system send this process a signal when its parent dies, 0 for none; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
