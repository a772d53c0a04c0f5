"""Sums and gathers over all processes of a run; they do nothing if there is one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl.clients.state_rows import Part

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
