"""A device other than the CPU, for machines without one: it computes on the CPU and keeps watch.

Its tensors say that they are on the `meta` device, whose tensors have no values of their own; here
each has a counterpart on the CPU, on which every operation really runs. What a GPU would refuse,
operations on tensors of two devices, fails here too, and what a GPU would have to be waited for is
counted. Kernels, streams and memory are a GPU's own and are not covered.
"""

from __future__ import annotations

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
from torch.utils._pytree import tree_flatten, tree_map_only

import pfl

DEVICE = torch.device("meta")
CPU = torch.device("cpu")
PACKAGE = Path(pfl.__file__).parent
aten = torch.ops.aten

# Whose result's shape, or Python value, depends on the values.
WAITS = {
    *(aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal),
    *(aten._unique2, aten.unique_dim, aten.unique_consecutive, aten._linalg_check_errors),
    *(aten._linalg_svd, aten._linalg_eigh),
}
_SET_DATA = vars(torch._C.TensorBase)["data"].__set__
COPIES = {aten._to_copy, aten.copy_}
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class OtherDevice(TorchDispatchMode):
    """Inside, `DEVICE` works.

    Attributes:
        waits: The operations for which the processor waited for the device, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        # By the storage's address, which is kept so that no other gets it: that of the device and
        # its counterpart's.
        self._storages: dict[int, tuple[Any, Any]] = {}
        self._around = ExitStack()

    def __enter__(self) -> OtherDevice:
        self._around.enter_context(_Functions())
        for name in ("autocast", "is_autocast_enabled"):
            self._around.enter_context(mock.patch.object(torch, name, _as_cpu(name)))
        # So that modules that move keep their parameters.
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
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        ours = [x for x in given if x.is_meta]
        self._check(func, args, kwargs, given)
        below = {id(x): self._below(x) for x in ours}
        args, kwargs = tree_map_only(Tensor, lambda x: below.get(id(x), x), (args, kwargs))
        asked = kwargs.get("device")
        if asked is not None:
            kwargs["device"] = CPU
        result = func(*args, **kwargs)
        if not (ours if asked is None else torch.device(asked) == DEVICE):
            return result
        same = {id(below[id(x)]): x for x in ours}
        for x in ours:  # operations such as squeeze_
            if (low := below[id(x)]).shape != x.shape:
                x.set_(x.untyped_storage(), low.storage_offset(), low.size(), low.stride())
        known = {self._counterpart(x)._cdata: x.untyped_storage() for x in ours}
        return tree_map_only(
            Tensor, lambda x: same[id(x)] if id(x) in same else self._above(x, known), result
        )

    def _check(self, func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> None:
        """Refuse what mixes devices, and book what has to be waited for."""
        kind = func.overloadpacket
        ours = [x for x in given if x.is_meta]
        others = [x for x in given if not x.is_meta]
        to = kwargs.get("device")
        waits = kind in WAITS and bool(ours)
        if kind in COPIES:
            up = not ours if kind is aten._to_copy else args[0].is_meta
            ends = {x.device for x in given} | ({torch.device(to)} if to is not None else set())
            hurried = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
            waits = len(ends) > 1 and not (up and hurried)
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
        """The tensor of the CPU behind one of ours."""
        low = torch.empty(0, dtype=x.dtype)
        return low.set_(self._counterpart(x), x.storage_offset(), x.size(), x.stride())

    def _above(self, low: Tensor, known: dict[int, Any]) -> Tensor:
        """The tensor of ours for one of the CPU; a view where its memory is one of ours."""
        storage = low.untyped_storage()
        above = known.get(storage._cdata)
        if above is None:
            above = torch.empty(storage.nbytes(), dtype=torch.uint8, device=DEVICE)
            above = above.untyped_storage()
            self._storages[above._cdata] = above, storage
        x = torch.empty(0, dtype=low.dtype, device=DEVICE)
        return x.set_(above, low.storage_offset(), low.size(), low.stride())


def _caller() -> str:
    """The module of the package from which an operation was called."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if PACKAGE in path.parents:
            return path.relative_to(PACKAGE.parent).as_posix()
        frame = frame.f_back
    return "none"


class _Functions(TorchFunctionMode):
    """What PyTorch does for a GPU before any operation runs, and not for `meta`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asked = kwargs.get("device")
        if func in (torch.tensor, torch.as_tensor) and asked and torch.device(asked) == DEVICE:
            return func(*args, **{**kwargs, "device": CPU}).to(DEVICE)
        if func is Tensor.new_tensor and args[0].is_meta:
            return torch.tensor(args[1], dtype=args[0].dtype).to(DEVICE)
        if func == _SET_DATA and args[0].device != args[1].device:
            torch.utils.swap_tensors(args[0], torch.nn.Parameter(args[1]))
            return None
        return func(*args, **kwargs)


def _as_cpu(name: str) -> Callable[..., Any]:
    """A function of PyTorch's that does not know `meta`."""
    function = getattr(torch, name)
    return lambda device, **kwargs: function("cpu" if device == "meta" else device, **kwargs)


class _Accelerator(CPUAccelerator):
    def setup_device(self, device: torch.device) -> None:
        assert device == DEVICE


def on_device() -> SingleDeviceStrategy:
    """The strategy of a Trainer that trains there."""
    return SingleDeviceStrategy(device=DEVICE, accelerator=_Accelerator())
