"""Sums and gathers over all processes of a run; without several processes they do nothing."""

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
    """The sum over processes, in place. Every process takes part, also one without clients.

    Lightning's `reduce` would let them wait for each other once more.
    """
    if _several():
        torch.distributed.all_reduce(values)
    return values


def gather(value: Any) -> list[Any]:
    """`value` of every process, by rank, on every process; a list of one without processes."""
    if not _several():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    group = _by_gloo(torch.distributed.group.WORLD)
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def gather_parts(parts: Iterator[Part], empty: Callable[[Tensor], Tensor]) -> list[Part]:
    """All processes' parts, by rank, on the first process, and none on the others.

    They travel one at a time: all of them may be more than fits into memory.

    Args:
        empty: Makes room for a received tensor like one without values.
    """
    if not _several():
        return list(parts)
    if torch.distributed.get_rank() > 0:
        _send(parts)
        return []
    others = range(1, torch.distributed.get_world_size())
    return [*parts, *(part for rank in others for part in _receive(rank, empty))]


def _send(parts: Iterator[Part]) -> None:
    group = _by_gloo(torch.distributed.group.WORLD)
    for part in parts:
        tensors = {name: value for name, value in part.items() if isinstance(value, Tensor)}
        outline = part | {name: tensor.to("meta") for name, tensor in tensors.items()}
        torch.distributed.send_object_list([outline], 0, group)
        for tensor in tensors.values():
            torch.distributed.send(tensor, 0, group)
    torch.distributed.send_object_list([None], 0, group)


def _receive(rank: int, empty: Callable[[Tensor], Tensor]) -> Iterator[Part]:
    group = _by_gloo(torch.distributed.group.WORLD)
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
def _by_gloo(world: object) -> Any:
    """All processes, through host memory: NCCL would put everything on the GPUs at once."""
    return torch.distributed.new_group(backend="gloo", timeout=_timeout)


def gather_rows(chunks: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """One table of all processes' chunks, sorted by its columns from left to right."""
    everyone = [chunk for process in gather(chunks) for chunk in process]
    if not everyone:
        return {}
    table = {name: np.concatenate([chunk[name] for chunk in everyone]) for name in everyone[0]}
    order = np.lexsort(list(table.values())[::-1])
    return {name: column[order] for name, column in table.items()}


def _several() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
