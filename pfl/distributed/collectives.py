"""Sums and gathers over all processes of a run; they do nothing if there is one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pfl.clients.state_rows import Part

TOGETHER = 1 << 18  # values of a tensor up to which its copy is cheaper than another collective
PARTS = 3  # float32 numbers whose sum has all digits of a float64 number

_timeout: timedelta | None = None  # how long one process waits for another


def use_timeout(timeout: timedelta | None) -> None:
    """Sets how long one process waits for another in the groups that are made from now on."""
    global _timeout
    _timeout = timeout


def sum_over_processes(values: Tensor) -> Tensor:
    """Returns the sum of `values` over processes, computed in place.

    Every process must call this function, a process without clients as well. Lightning's `reduce`
    would add a barrier.
    """
    if _several_processes():
        torch.distributed.all_reduce(values)
    return values


class Gathered(NamedTuple):
    """What `sum_and_gather` returns, on the CPU.

    Attributes:
        counts: The sums of the counts over processes.
        numbers: The numbers of every process, by rank, float64 [processes, k].
    """

    counts: Tensor
    numbers: Tensor


def sum_and_gather(
    sums: Sequence[Tensor], counts: Tensor, numbers: Tensor, like: Tensor
) -> Gathered:
    """Adds `sums` up over processes, in place, and tells all processes the numbers of each.

    All of it travels in one tensor, but for sums that are long or not of the dtype of `like`: each
    of these travels alone. Every process must call this function, with the same shapes.

    Args:
        sums: Tensors on the device of `like`.
        counts: Small whole numbers, which are added up.
        numbers: Numbers of this process with all their digits, float64 [k].
        like: A tensor with the dtype and the device of what travels.
    """
    if not _several_processes():
        return Gathered(counts, numbers[None])
    # A process fills a row of its own: the sum with the zeros of the others is what it has sent.
    processes = torch.distributed.get_world_size()
    slots = like.new_zeros(processes, PARTS, len(numbers), device="cpu")
    slots[torch.distributed.get_rank()] = in_parts(numbers, like.dtype)
    head = torch.cat([slots.flatten(), counts.to(like.dtype)]).to(like.device)
    short = []
    for values in sums:
        if values.dtype == like.dtype and values.numel() <= TOGETHER:
            short.append(values)
        else:
            torch.distributed.all_reduce(values)
    together = torch.cat([head, *(values.flatten() for values in short)])
    torch.distributed.all_reduce(together)
    head, *totals = together.split([len(head), *(values.numel() for values in short)])
    for values, total in zip(short, totals, strict=True):
        values.copy_(total.view_as(values))
    head = head.cpu()
    gathered = head[: slots.numel()].view_as(slots).double()
    return Gathered(head[slots.numel() :], gathered.sum(1))


def in_parts(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns numbers of a dtype, [PARTS, k], whose sums in float64 are the float64 numbers [k].

    Each part is what the parts before it have left over.

    Example:
        >>> parts = in_parts(torch.tensor([2**24 + 1], dtype=torch.float64), torch.float32)
        >>> parts[:, 0].tolist()
        [16777216.0, 1.0, 0.0]
    """
    parts = []
    for _ in range(PARTS):
        part = numbers.to(dtype)
        parts.append(part)
        numbers = numbers - part
        numbers = numbers.where(numbers.isfinite(), 0.0)  # infinity has no rest
    return torch.stack(parts)


def first_says(value: bool) -> bool:
    """Returns the `value` of the first process, on every process."""
    if not _several_processes():
        return value
    told = torch.tensor([value])
    group = _gloo_group(torch.distributed.group.WORLD)
    torch.distributed.broadcast(told, 0, group=group)
    return bool(told)


def gather(value: Any) -> list[Any]:
    """Returns the `value` of every process, by rank, on every process."""
    if not _several_processes():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    group = _gloo_group(torch.distributed.group.WORLD)
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def gather_parts(parts: Iterator[Part], empty: Callable[[Tensor], Tensor]) -> list[Part]:
    """Returns the parts of all processes, by rank, on the first process; none on the others.

    The parts travel one at a time, since all of them may not fit into memory.

    Args:
        parts: The parts of this process.
        empty: Allocates a tensor for received values, of the shape and dtype of its argument.
    """
    if not _several_processes():
        return list(parts)
    if torch.distributed.get_rank() > 0:
        _send(parts)
        return []
    others = range(1, torch.distributed.get_world_size())
    return [*parts, *(part for rank in others for part in _receive(rank, empty))]


def _send(parts: Iterator[Part]) -> None:
    group = _gloo_group(torch.distributed.group.WORLD)
    for part in parts:
        tensors = {name: value for name, value in part.items() if isinstance(value, Tensor)}
        outline = part | {name: tensor.to("meta") for name, tensor in tensors.items()}
        torch.distributed.send_object_list([outline], 0, group)
        for tensor in tensors.values():
            torch.distributed.send(tensor, 0, group)
    torch.distributed.send_object_list([None], 0, group)


def _receive(rank: int, empty: Callable[[Tensor], Tensor]) -> Iterator[Part]:
    group = _gloo_group(torch.distributed.group.WORLD)
    while True:
        received: list[Any] = [None]
        torch.distributed.recv_object_list(received, rank, group)
        (part,) = received
        if part is None:
            return
        for name, value in part.items():
            if isinstance(value, Tensor):
                part[name] = empty(value)
                torch.distributed.recv(part[name], rank, group)
        yield part


@lru_cache(maxsize=1)
def _gloo_group(world: object) -> Any:
    """Returns a group of all processes that communicates through host memory.

    NCCL would put everything on the GPUs at once.
    """
    return torch.distributed.new_group(backend="gloo", timeout=_timeout)


def gather_rows(chunks: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns the chunks of all processes as one table, sorted by its columns from the left."""
    everyone = [chunk for process in gather(chunks) for chunk in process]
    if not everyone:
        return {}
    table = {name: np.concatenate([chunk[name] for chunk in everyone]) for name in everyone[0]}
    order = np.lexsort(list(table.values())[::-1])
    return {name: column[order] for name, column in table.items()}


def _several_processes() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
