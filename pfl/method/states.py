"""What is kept between rounds: the clients' states, and the messages that the server keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from pfl.clients import Clients
from pfl.clients.store import ClientStore
from pfl.distributed.collectives import sum_over_processes
from pfl.errors import ConfigError
from pfl.method import statistics

if TYPE_CHECKING:
    from pfl.method.algorithm import FederatedAlgorithm

Initial = Callable[[], Tensor]
KEPT = "message "  # before the name of a kept message, beside the client states in the store
GRADIENTS = "private gradients"  # a client state: how many gradients have been taken


class States:
    """The declarations of a method, and the store with the rows of all clients.

    Client states and kept messages lie in one store, which plans their memory together. A client
    writes its states, and they are kept when the server has counted the client's message.

    Args:
        method: The method that declares them.

    Attributes:
        store: The rows; it exists once a run has begun.
    """

    store: ClientStore

    def __init__(self, method: FederatedAlgorithm) -> None:
        self.method = method
        self.declared: dict[str, tuple[Initial, bool]] = {}
        self._messages: dict[str, Initial] = {}

    def declare(self, name: str, initial: Initial | float, sparse: bool) -> None:
        """Declares a client state; see `FederatedAlgorithm.add_client_state`."""
        self.declared[name] = self._function(initial), sparse

    def keep(self, name: str, initial: Initial | float) -> None:
        """Declares a kept message; see `FederatedAlgorithm.keep_messages`."""
        self._messages[name] = self._function(initial)

    def _function(self, initial: Initial | float) -> Initial:
        if callable(initial):
            return initial
        if not isinstance(initial, int | float):
            raise ConfigError(
                f"model: {type(self.method).__name__} declares a state or kept message with "
                f"initial={initial!r}; it must be a number, or a function that returns the first "
                f"row, such as lambda: self.global_model"
            )
        return partial(self._filled, initial)

    def _filled(self, value: float) -> Tensor:
        return torch.full_like(self.method.global_model, value)

    @property
    def names(self) -> list[str]:
        """Names of the client states; complete once the network has been inspected."""
        method = self.method
        kept = {
            "buffers": method.keeps_model or method.buffer_policy == "local",
            "personal_buffers": method.personal_buffers is not None,
        }
        has_buffers = method.oracle.buffers.size > 0
        return [*self.declared, *(name for name, own in kept.items() if own and has_buffers)]

    @property
    def messages(self) -> dict[str, Initial]:
        """The first rows of the kept messages by name: "buffers" is kept with a model "w"."""
        if "w" in self._messages and statistics.travel(self.method):
            return {**self._messages, "buffers": self._global_buffers}
        return self._messages

    def _global_buffers(self) -> Tensor:
        return self.method.global_buffers

    @property
    def all_names(self) -> list[str]:
        """Names of everything in the store: client states, then kept messages."""
        return [*self.names, *(KEPT + name for name in self.messages)]

    def allocate(self, store: ClientStore, dtype: torch.dtype | None) -> None:
        """Declares everything in a new store.

        Args:
            store: The store.
            dtype: The dtype of the rows of declared states and messages; None: the models'.
        """
        method, self.store = self.method, store
        for name, (initial, sparse) in self.declared.items():
            store.declare(name, initial(), dtype=dtype, sparse=sparse)
        buffers = method.oracle.buffers.read(method.network, method.global_model)
        names, untrained = self.names, method.personal_buffers == "received"
        if "buffers" in names:
            store.declare("buffers", buffers)
        if "personal_buffers" in names:  # NaN: until training, the received model's
            first = torch.full_like(buffers, torch.nan) if untrained else buffers
            store.declare("personal_buffers", first)
        for name, initial in self.messages.items():
            store.declare(KEPT + name, initial(), dtype=dtype, of_server=True)

    # ---- of a chunk of clients ----------------------------------------------------------------

    def load(self, clients: Clients) -> None:
        """Reads the states and running statistics of a chunk of clients into `clients`."""
        method, store = self.method, self.store
        clients.dtype = method.space.vector.dtype
        clients.state = {name: store.read(name, clients.ids, method.device) for name in store.names}
        statistics.receive(method, clients)

    def commit(self, clients: Clients, counted: bool = True) -> None:
        """Keeps the states of clients, if the server has counted their messages.

        The number of private gradients is kept in any case: a client cannot know who has seen a
        message that was lost.
        """
        for name in self.store.names:
            if counted or name == GRADIENTS:
                self.store.write(name, clients.ids, clients.state[name])

    def chunks(
        self,
        ids: np.ndarray,
        split: Literal["train", "val", "test"],
        receive: Callable[[Clients], None] = lambda clients: None,
    ) -> Iterator[Clients]:
        """Yields this process's share of some clients in chunks, with states and messages."""
        method, loop = self.method, self.method.run.loop
        count = max(1, -(-len(ids) // loop.chunk_size))
        for part in loop.chunks(ids, split, count, owned=True):
            clients = Clients(part, method.rounds, loop.client_data(method.device), split)
            receive(clients)
            self.load(clients)
            yield clients

    # ---- of all processes ---------------------------------------------------------------------

    def rows(self, name: str, ids: np.ndarray) -> Tensor:
        """Returns the rows [n, width] of some clients, on every process, which must all call it.

        A client that never took part has the initial value.
        """
        mine = self._own(ids)
        own = self.store.read(name, ids[mine], self.method.device)
        rows = own.new_zeros(len(ids), own.shape[1])
        rows[torch.from_numpy(mine)] = own
        return sum_over_processes(rows)

    def seen(self, name: str) -> np.ndarray:
        """Returns the ids of the clients with a row of their own, ascending; a collective call."""
        seen = torch.zeros(self.store.num_clients, device=self.method.device)
        seen[torch.from_numpy(self.store.seen(name))] = 1
        return np.flatnonzero(sum_over_processes(seen).cpu().numpy())

    def mean(self, name: str) -> Tensor:
        """Returns the mean row [width] over the M clients that train; a collective call.

        A client that never took part counts with the initial value.
        """
        seen, method = self.store.seen(name), self.method
        owned = int(self._own(method.population).sum())
        total = (owned - len(seen)) * self.store.initial(name).to(method.device)
        size = method.run.loop.chunk_size
        for ids in np.split(seen, range(size, len(seen), size)):
            total += self.store.read(name, ids, method.device).sum(0)
        return sum_over_processes(total) / method.num_clients

    def _own(self, ids: np.ndarray) -> np.ndarray:
        """Returns which of the clients lie on this process, bool [n]."""
        trainer = self.method.trainer
        return ids % trainer.world_size == trainer.global_rank
