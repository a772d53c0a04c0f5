"""Threads that train different clients at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


class ClientThreads:
    """Threads with one core each: layers of small batches use several cores badly, clients well.

    Args:
        count: How many; with 1 everything runs in the thread that calls.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ThreadPoolExecutor | None = None
        if count > 1:
            # The number of threads is one of each thread: OpenMP would start as many for each.
            self._pool = ThreadPoolExecutor(count, "client", torch.set_num_threads, (1,))

    def map(self, work: Callable[[T], R], items: list[T]) -> Iterable[R]:
        """`work` of every item, in their order. A single item has the caller's thread and cores."""
        if self._pool is None or len(items) == 1:
            return map(work, items)
        return self._pool.map(work, items)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
