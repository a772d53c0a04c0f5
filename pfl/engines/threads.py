"""Threads that train different clients at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

R = TypeVar("R")

GROUP_FLOATS = 1 << 20  # values a thread works on at a time, about a CPU's cache


_inside = threading.local()


def _begin() -> None:
    _inside.threads = True
    torch.set_num_threads(1)  # a setting of each thread, else OpenMP starts as many for each


class ClientThreads:
    """A pool of single-core threads: small layers scale poorly over cores, clients scale well.

    A thread has one core even if there are more cores than clients: PyTorch's sums differ in their
    last bits by the number of cores, so that a result would depend on the size of the cohort.

    Args:
        count: Number of threads; with 1 everything runs in the calling thread.

    Example:
        >>> list(ClientThreads(2).map(lambda client: client * 10, [1, 2, 3]))
        [10, 20, 30]
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ThreadPoolExecutor | None = None
        if count > 1:
            self._pool = ThreadPoolExecutor(count, "client", _begin)

    def workers(self, items: int) -> int:
        """Returns how many threads share `items` tasks; 1 in a worker, since pools do not nest."""
        if hasattr(_inside, "threads"):
            return 1
        return max(1, min(self.count, items))

    def map(self, work: Callable[..., R], *items: Sequence) -> Iterable[R]:
        """Returns `work(item)` for every item (or pair of items and so on), in their order.

        A single item runs in the calling thread, with its cores; so do the calls of a worker.
        """
        if self._pool is None or self.workers(len(items[0])) == 1:
            return map(work, *items)
        return self._pool.map(work, *items)

    def close(self) -> None:
        """Ends the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
