"""A simulated device for machines without a GPU; it computes on the CPU.

Tensors of the simulated device report the device `meta`, whose tensors have no values. Each of them
has a counterpart on the CPU, on which every operation runs. As on a GPU, operations on tensors of
two devices fail. Operations that would make the processor wait for a GPU are counted. Kernels,
streams and memory of a GPU are not simulated.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import pfl

DEVICE = torch.device("meta")
CPU = torch.device("cpu")
PACKAGE = Path(pfl.__file__).parent
aten = torch.ops.aten

# Operations whose result is a Python value, or has a shape that depends on values.
WAITS = {
    *(aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal),
    *(aten._unique2, aten.unique_dim, aten.unique_consecutive, aten._linalg_check_errors),
    *(aten._linalg_svd, aten._linalg_eigh),
}
_SET_DATA = vars(torch._C.TensorBase)["data"].__set__
COPIES = {aten._to_copy, aten.copy_}
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class OtherDevice(TorchDispatchMode):
    """A context in which `DEVICE` works.

    Attributes:
        waits: The operations that made the processor wait for the device, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        # Storage of the device and its counterpart, by address. Both are kept, so that no other
        # storage gets the address.
        self._storages: dict[int, tuple[Any, Any]] = {}
        self._around = ExitStack()

    def __enter__(self) -> OtherDevice:
        self._around.enter_context(_Functions())
        for name in ("autocast", "is_autocast_enabled"):
            self._around.enter_context(mock.patch.object(torch, name, _as_cpu(name)))
        # Modules that move must keep their parameters.
        alike = mock.patch.object(torch, "_has_compatible_shallow_copy_type", lambda a, b: True)
        self._around.enter_context(alike)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._around.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given: list[Tensor] = []
        mapped((args, kwargs), given.append)
        ours = [x for x in given if x.is_meta]  # on the simulated device
        self._check(func, args, kwargs, given)
        below = {id(x): self._below(x) for x in ours}
        args, kwargs = mapped((args, kwargs), lambda x: below.get(id(x), x))
        requested = kwargs.get("device")
        if requested is not None:
            kwargs["device"] = CPU
        result = func(*args, **kwargs)
        if not (ours if requested is None else torch.device(requested) == DEVICE):
            return result
        same = {id(below[id(x)]): x for x in ours}
        for x in ours:  # operations such as squeeze_
            if (low := below[id(x)]).shape != x.shape:
                x.set_(x.untyped_storage(), low.storage_offset(), low.size(), low.stride())
        known = {self._counterpart(x)._cdata: x.untyped_storage() for x in ours}
        return mapped(result, lambda x: same[id(x)] if id(x) in same else self._above(x, known))

    def _check(self, func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> None:
        """Refuses operations that mix devices, and counts those that would wait for the device."""
        kind = func.overloadpacket
        ours = [x for x in given if x.is_meta]
        others = [x for x in given if not x.is_meta]
        to = kwargs.get("device")
        waits = kind in WAITS and bool(ours)
        if kind in COPIES:
            up = not ours if kind is aten._to_copy else args[0].is_meta  # to the device
            ends = {x.device for x in given} | ({torch.device(to)} if to is not None else set())
            non_blocking = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
            waits = len(ends) > 1 and not (up and non_blocking)
        elif kind in INDEXED:
            masked = any(x.dtype in (torch.bool, torch.uint8) for x in given[1:])
            fills = kind is not aten.index and given[-1].ndim == 0
            waits = bool(ours) and (bool(others) or (masked and not fills))
        elif kind is aten.repeat_interleave and ours:
            waits = kwargs.get("output_size") is None
        elif ours and any(x.ndim for x in others):
            raise RuntimeError(f"{func}: tensors on two devices, {[x.device for x in given]}")
        if waits:
            self.waits.append(f"{func} in {_caller()}")

    def _counterpart(self, x: Tensor) -> Any:
        return self._storages[x.untyped_storage()._cdata][1]

    def _below(self, x: Tensor) -> Tensor:
        """Returns the counterpart on the CPU of a tensor of the device."""
        low = torch.empty(0, dtype=x.dtype)
        return low.set_(self._counterpart(x), x.storage_offset(), x.size(), x.stride())

    def _above(self, low: Tensor, known: dict[int, Any]) -> Tensor:
        """Returns the tensor of the device for one on the CPU; a view if the storage is known."""
        storage = low.untyped_storage()
        above = known.get(storage._cdata)
        if above is None:
            above = torch.empty(storage.nbytes(), dtype=torch.uint8, device=DEVICE)
            above = above.untyped_storage()
            self._storages[above._cdata] = above, storage
        x = torch.empty(0, dtype=low.dtype, device=DEVICE)
        return x.set_(above, low.storage_offset(), low.size(), low.stride())


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Returns nested arguments with each tensor changed, as PyTorch's `tree_map`, but sooner."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)([mapped(one, change) for one in value])
    if type(value) is dict:
        return {name: mapped(one, change) for name, one in value.items()}
    return value


def _caller() -> str:
    """Returns the module of the package that called an operation."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith(f"{PACKAGE}{os.sep}"):
            return Path(frame.f_code.co_filename).relative_to(PACKAGE.parent).as_posix()
        frame = frame.f_back
    return "none"


class _Functions(TorchFunctionMode):
    """Functions that PyTorch handles for a GPU before any operation runs, but not for `meta`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to = kwargs.get("device")
        if func in (torch.tensor, torch.as_tensor) and to and torch.device(to) == DEVICE:
            return func(*args, **{**kwargs, "device": CPU}).to(DEVICE)
        if func is Tensor.new_tensor and args[0].is_meta:
            return torch.tensor(args[1], dtype=args[0].dtype).to(DEVICE)
        if func == _SET_DATA and args[0].device != args[1].device:
            torch.utils.swap_tensors(args[0], torch.nn.Parameter(args[1]))
            return None
        return func(*args, **kwargs)


def _as_cpu(name: str) -> Callable[..., Any]:
    """Returns a function of PyTorch with `meta` replaced by `cpu`."""
    function = getattr(torch, name)
    return lambda device, **kwargs: function("cpu" if device == "meta" else device, **kwargs)


class _Accelerator(CPUAccelerator):
    def setup_device(self, device: torch.device) -> None:
        assert device == DEVICE


def on_device() -> SingleDeviceStrategy:
    """Returns the strategy of a Trainer that trains on the simulated device."""
    return SingleDeviceStrategy(device=DEVICE, accelerator=_Accelerator())
