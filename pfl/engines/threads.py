"""Threads that train different clients at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

R = TypeVar("R")

GROUP_FLOATS = 1 << 20  # of what a thread works on at a time: about what a CPU's cache holds


class _Inside(threading.local):
    threads = False


_inside = _Inside()


def _begin() -> None:
    _inside.threads = True
    torch.set_num_threads(1)  # it is each thread's own: OpenMP would start as many for each


class ClientThreads:
    """Threads with one core each: layers of small batches use several cores badly, clients well.

    Args:
        count: How many; with 1 everything runs in the thread that calls.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ThreadPoolExecutor | None = None
        if count > 1:
            self._pool = ThreadPoolExecutor(count, "client", _begin)

    def workers(self, items: int) -> int:
        """How many threads share this many items; one of them asks for itself alone."""
        return 1 if _inside.threads else max(1, min(self.count, items))

    def map(self, work: Callable[..., R], *items: Sequence) -> Iterable[R]:
        """`work` of every item (or pair of items and so on), in their order.

        A single item has the caller's thread and cores, and so has what one of the threads asks.
        """
        if self._pool is None or self.workers(len(items[0])) == 1:
            return map(work, *items)
        return self._pool.map(work, *items)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
