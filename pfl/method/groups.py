"""Groups of clients, so large that threads and memory are used well."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal, TypeVar

from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.memory import garbage_collection_cuda, is_oom_error

from pfl.clients import Clients
from pfl.engines.oracle import Oracle
from pfl.engines.threads import ClientThreads

R = TypeVar("R")
ONE_THREAD = ClientThreads(1)


def _nothing() -> None:
    pass


class ClientGroups:
    """Runs a function on groups of clients, by threads if there are any.

    Args:
        oracle: Runs the models; it holds memory that can be freed.

    Attributes:
        threads: The threads that train different groups at the same time.
        free_memory: Frees what else is held on the device.
    """

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.threads = ONE_THREAD
        self.free_memory: Callable[[], None] = _nothing
        self._limits = {"training": sys.maxsize, "evaluation": sys.maxsize}

    def use(self, threads: ClientThreads) -> None:
        """Trains groups in these threads from now on."""
        self.threads = threads

    def free_with(self, free_memory: Callable[[], None]) -> None:
        """Calls a function where the device's memory is short, to free what else is held there."""
        self.free_memory = free_memory

    def run(
        self,
        clients: Clients,
        work: Callable[[Clients], R],
        size: int | None = None,
        doing: Literal["training", "evaluation"] = "training",
    ) -> Iterator[tuple[Clients, R]]:
        """Yields groups of at most `size` clients with the result of `work`.

        Where a GPU's memory does not hold a group, the group is halved, its clients' states are
        loaded again, and no later group is larger. Where it does not hold one client, steps are no
        longer recorded.

        Args:
            clients: A chunk of clients.
            work: What is done with each group.
            size: The largest group; None: what the engine trains at once. Other groups would round
                otherwise.
            doing: What `work` does; training and evaluation have limits of their own.
        """
        if size is None:
            size = self.oracle.engine.group_size(len(clients), self.threads.count)
        groups = clients.groups(max(1, min(size, self._limits[doing])))
        if self.threads.count > 1:
            yield from zip(groups, self.threads.map(work, groups), strict=True)
            return
        while groups:
            group = groups.pop(0)
            try:
                made = work(group)
            except RuntimeError as error:
                if not is_oom_error(error):
                    raise
                if len(group) == 1 and not self.oracle.stop_recording():
                    raise
            else:
                yield group, made
                continue
            # Here, since the error kept all that the attempt had made.
            most = self._limits[doing] = -(-len(group) // 2)
            device = self.oracle.space.vector.device
            instead = f"with {most}"
            if len(group) == 1:
                instead = f"with the engine {self.oracle.engine.name}, which records no steps"
            rank_zero_warn(
                f"The memory of {device} does not hold {len(group)} clients at a time in {doing}; "
                f"the run continues {instead}",
                category=UserWarning,
            )
            self.free_memory()
            self.oracle.engine.release()
            if device.type == "cuda":
                garbage_collection_cuda()
            again = replace(group, state={}, buffers=None)
            groups = [part for one in (again, *groups) for part in one.groups(most)]
