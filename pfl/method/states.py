"""What is kept between rounds: the clients' states, and the messages that the server keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pfl.clients import Clients
from pfl.clients.store import ClientStore
from pfl.communication import Message
from pfl.context import RunContext
from pfl.distributed.collectives import sum_over_processes
from pfl.errors import ConfigError
from pfl.stages.stage import Initial

KEPT = "message "  # before the name of a kept message, beside the client states in the store


@dataclass(frozen=True)
class Declared:
    """What a method or a stage has declared to be kept for each client.

    Attributes:
        initial: The first row.
        sparse: Whether only the values that are not zero are stored.
        rounded: Whether `loop.state_dtype` may round the rows.
        always: Whether the state is kept even if the client's message is lost.
    """

    initial: Initial
    sparse: bool = False
    rounded: bool = True
    always: bool = False


class States:
    """The declarations of a method and its stages, and the store with the rows of all clients.

    Client states and kept messages lie in one store, which plans their memory together. A client
    writes its states, and they are kept when the server has counted the client's message.

    Args:
        owner: The name of the method, for error messages.

    Attributes:
        declared: The client states by name.
        messages: The kept messages by name.
        store: The rows; it exists once a run has begun.
        context: The facts of the run; they are there with the store.
    """

    store: ClientStore
    context: RunContext

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.declared: dict[str, Declared] = {}
        self.messages: dict[str, Declared] = {}

    def declare(
        self,
        name: str,
        initial: Initial,
        *,
        sparse: bool = False,
        rounded: bool = True,
        always: bool = False,
    ) -> None:
        """Declares a client state; see `FederatedAlgorithm.add_client_state` and `Declared`."""
        self._check(initial)
        self.declared[name] = Declared(initial, sparse, rounded, always)

    def keep(self, name: str, initial: Initial) -> None:
        """Declares a kept message; see `FederatedAlgorithm.keep_messages`."""
        self._check(initial)
        self.messages[name] = Declared(initial)

    def _check(self, initial: Initial) -> None:
        if not (callable(initial) or isinstance(initial, int | float)):
            raise ConfigError(
                f"model: {self.owner} declares a state or kept message with initial={initial!r}; "
                f"it must be a number, or a function that returns the first row, such as lambda: "
                f"self.global_model"
            )

    @property
    def names(self) -> list[str]:
        """Names of the client states; complete once the network has been inspected."""
        return list(self.declared)

    @property
    def all_names(self) -> list[str]:
        """Names of everything in the store: client states, then kept messages."""
        return [*self.declared, *(KEPT + name for name in self.messages)]

    def allocate(
        self, store: ClientStore, dtype: torch.dtype | None, model: Tensor, context: RunContext
    ) -> None:
        """Declares everything in a new store.

        Args:
            store: The store.
            dtype: The dtype of the rows of states and messages that may be rounded; None: the
                models'.
            model: The global model, [P].
            context: The facts of the run.
        """
        self.store = store
        self.context = context
        for name, state in self.declared.items():
            own = dtype if state.rounded else None
            row = self._first_row(name, state.initial, model)
            store.declare(name, row, dtype=own, sparse=state.sparse)
        for name, state in self.messages.items():
            row = self._first_row(name, state.initial, model)
            store.declare(KEPT + name, row, dtype=dtype, of_server=True)

    def _first_row(self, name: str, initial: Initial, model: Tensor) -> Tensor:
        """Returns the first row of a state or message, which must be one row of values."""
        row = first_row(initial, model)
        if isinstance(row, Tensor) and row.ndim == 1:
            return row
        given = type(row).__name__
        if isinstance(row, Tensor):
            given = f"a tensor {list(row.shape)}"
        raise ConfigError(
            f"model: {self.owner} declares {name!r} with a function that returns {given}; it must "
            f"return the first row, a tensor [width], [1] for one number"
        )

    def width(self, name: str) -> int:
        """Returns how many values a client's row of a state has."""
        return len(self.store.initial(name))

    def belongs_to(self, num_clients: int) -> bool:
        """Returns whether the rows of a population of M clients have been allocated."""
        return hasattr(self, "store") and self.store.num_clients == num_clients

    # ---- of some clients ----------------------------------------------------------------------

    def read(self, clients: Clients) -> None:
        """Reads the states of clients into `clients.state`."""
        store = self.store
        device = self.context.device
        clients.state = {name: store.read(name, clients.ids, device) for name in store.names}

    def commit(self, clients: Clients, counted: bool = True) -> None:
        """Keeps the states of clients, if the server has counted their messages.

        The number of private gradients is kept in any case: a client cannot know who has seen a
        message that was lost.
        """
        for name, state in self.declared.items():
            if counted or state.always:
                self.store.write(name, clients.ids, clients.state[name])

    def keep_messages(self, ids: np.ndarray, messages: Mapping[str, Message]) -> None:
        """Keeps messages [C, K] of clients, by name."""
        for name, message in messages.items():
            self.store.write(KEPT + name, ids, message.values)

    # ---- of all processes ---------------------------------------------------------------------

    def rows(self, name: str, ids: np.ndarray) -> Tensor:
        """Returns the rows [n, width] of some clients, on every process, which must all call it.

        A client that never took part has the initial value.
        """
        mine = self._own(ids)
        own = self.store.read(name, ids[mine], self.context.device)
        rows = own.new_zeros(len(ids), own.shape[1])
        rows[torch.from_numpy(mine)] = own
        return sum_over_processes(rows)

    def seen(self, name: str) -> np.ndarray:
        """Returns the ids of the clients with a row of their own, ascending; a collective call."""
        seen = torch.zeros(self.store.num_clients, device=self.context.device)
        seen[torch.from_numpy(self.store.seen(name))] = 1
        return np.flatnonzero(sum_over_processes(seen).cpu().numpy())

    def mean(self, name: str, at_once: int) -> Tensor:
        """Returns the mean row [width] over the M clients that train; a collective call.

        A client that never took part counts with the initial value.

        Args:
            name: The name in the store.
            at_once: How many rows are read at a time.
        """
        seen = self.store.seen(name)
        device = self.context.device
        owned = int(self._own(self.context.population).sum())
        total = (owned - len(seen)) * self.store.initial(name).to(device)
        for ids in np.split(seen, range(at_once, len(seen), at_once)):
            total += self.store.read(name, ids, device).sum(0)
        return sum_over_processes(total) / len(self.context.population)

    def _own(self, ids: np.ndarray) -> np.ndarray:
        """Returns which of the clients lie on this process, bool [n]."""
        return ids % self.context.processes == self.context.rank


def first_row(initial: Initial, model: Tensor) -> Tensor:
    """Returns the first row of a state."""
    if callable(initial):
        return initial()
    return torch.full_like(model, initial)
