"""Functions compiled by TorchScript, and whether that worked.

PyTorch deprecates TorchScript (2.15: "not supported in Python 3.14+ and may break"). Everything
that uses it also runs as plain Python, with the same results: slower, and holding the interpreter's
lock (docs/architecture.md, "Without TorchScript").
"""

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

F = TypeVar("F", bound=Callable)


def scripted(function: F) -> F:
    """Returns `function` compiled by TorchScript, or unchanged where compiling it fails.

    A compiled call releases the interpreter's lock, so threads run such calls at the same time.
    Compiling takes milliseconds. `PYTORCH_JIT=0` in the environment switches TorchScript off.
    """
    with warnings.catch_warnings():
        # The deprecation recommends torch.compile, which takes seconds and holds the lock.
        warnings.simplefilter("ignore")
        try:
            # Without fusion: on GPUs it compiles kernels for new shapes, and short runs would wait.
            torch.jit.set_fusion_strategy([])
            return torch.jit.script(function)
        except Exception:  # a missing or broken TorchScript raises errors of many types
            return function


def is_scripted(function: Callable) -> bool:
    """Whether `function` is compiled, so that its calls release the interpreter's lock."""
    return isinstance(function, torch.jit.ScriptFunction)
