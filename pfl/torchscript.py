"""Functions that run without the interpreter."""

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

F = TypeVar("F", bound=Callable)


def scripted(function: F) -> F:
    """Compiled by TorchScript, which takes milliseconds; as it is where there is no TorchScript.

    Its calls hold no lock, so threads run them at the same time. They also save the threads from
    handing that lock to each other: that takes longer than a small tensor operation.
    """
    with warnings.catch_warnings():
        # PyTorch recommends torch.compile instead, which takes seconds, and whose calls hold the
        # lock of the interpreter.
        warnings.simplefilter("ignore")
        try:
            # On GPUs it would compile kernels for new shapes, for which short runs would wait.
            torch.jit.set_fusion_strategy([])
            return torch.jit.script(function)
        except (AttributeError, RuntimeError):
            return function
