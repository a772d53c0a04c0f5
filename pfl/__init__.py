"""Personalized federated learning on PyTorch Lightning."""

import os
import sys

# `python -m pfl` and the processes that it starts: Python has put the current folder first, where a
# file `random.py` of the user would stand for Python's own. It comes last, as in the command `pfl`.
if (
    sys.argv[:1] == ["-m"]
    and sys.orig_argv[-len(sys.argv) :][0] in ("pfl", "-mpfl", "pfl.__main__")
    and sys.path[:1] == [os.getcwd()]
):
    sys.path.append(sys.path.pop(0))

from importlib import import_module
from typing import TYPE_CHECKING, Any

if "PFL_STARTED_BY" in os.environ:  # a run's process, before it imports torch, which takes seconds
    from pfl.distributed.orphan import die_with_parent

    die_with_parent()

if TYPE_CHECKING:
    from pfl.distributed.strategy import ClientParallelStrategy
    from pfl.errors import ConfigError
    from pfl.rounds.loop import FederatedLoop
    from pfl.trainer import Trainer
    from pfl.version import __version__

__all__ = ["ClientParallelStrategy", "ConfigError", "FederatedLoop", "Trainer", "__version__"]
_MODULES = {  # by public name; imported when it is first used, so that `pfl --help` is quick
    "ClientParallelStrategy": "pfl.distributed.strategy",
    "ConfigError": "pfl.errors",
    "FederatedLoop": "pfl.rounds.loop",
    "Trainer": "pfl.trainer",
    "__version__": "pfl.version",
}


def __getattr__(name: str) -> Any:
    """Imports a public name."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(import_module(_MODULES[name]), name)
    return globals()[name]
