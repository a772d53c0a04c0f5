"""A stand-in for CUDA graphs on the CPU: what PyTorch computes is recorded, and replayed later."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.device import WAITS, mapped


class Recording(TorchDispatchMode):
    """Records all operations inside; `replay` computes them again, from and into the same tensors.

    As with a CUDA graph nothing of Python's runs in a replay, and operations whose result is a
    Python value are refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in WAITS:
            raise RuntimeError(f"{func} waits for the GPU, which a recording cannot hold")
        result = func(*args, **kwargs)
        # Places in memory, as the tensors themselves may be given other ones (`Parameter.data`).
        self.calls.append(mapped((func, args, kwargs, result), Tensor.detach))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            for old, new in zip(_flat(result), _flat(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():  # else a view, or changed in place
                    old.copy_(new)


class Recorder:
    """Records work on the CPU.

    Attributes:
        count: How often it has recorded.
    """

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, work: Any, device: torch.device, pool: Any) -> Any:
        self.count += 1
        work()
        with Recording() as recording:
            work()
        return recording.replay


def _flat(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, list | tuple):
        return [x for part in result for x in _flat(part)]
    return []
