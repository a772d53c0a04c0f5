"""Runs whose clients have networks of their own: one method object for each network.

The method that Lightning runs is the server. Its *members* are methods of the same class with the
same arguments, one for each network of a `pfl.models.Family`: they have the parameter space of the
network, its engine and its constants, and act for the clients that have the network. What the
server and all clients share, such as the facts of the run, stands in the server and is read through
the members.

Rows of states are as wide as those of the widest network: a client's row begins with its own
values, and has zeros after them. Messages are described in `pfl.method.architectures`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from pfl.clients import Clients
from pfl.clients.store import ClientStore
from pfl.context import RunContext
from pfl.errors import ConfigError
from pfl.method import exchange
from pfl.method.checked import checked_as
from pfl.method.hooks import Method
from pfl.method.scoring import Evaluation, predictions
from pfl.method.states import KEPT, Declared, States, first_row
from pfl.method.transport import Group, Read, Simulation
from pfl.rounds.cohort import Cohort
from pfl.stages.stage import Messages, Stage


def clients_by_member(
    members: Sequence[Method], kinds: np.ndarray, clients: Clients
) -> Iterator[tuple[Method, Clients]]:
    """Yields each member that some of the clients have, with these clients."""
    own = kinds[clients.ids]
    for kind in np.unique(own):
        yield members[kind], clients.rows(np.flatnonzero(own == kind))


# ---- states --------------------------------------------------------------------------------------


class MemberStates(States):
    """The states of the clients that have one network: the first values of the store's rows.

    Args:
        own: What the member has declared.
    """

    def __init__(self, own: States) -> None:
        super().__init__(own.owner)
        self.declared = own.declared
        self.messages = own.messages
        self._first: dict[str, Tensor] = {}

    def join(self, store: ClientStore, first: dict[str, Tensor], context: RunContext) -> None:
        """Takes the store of the run, and the first row of each state of these clients."""
        self.store = store
        self.context = context
        self._first = first

    def width(self, name: str) -> int:
        return len(self._first[name])

    def read(self, clients: Clients) -> None:
        clients.state = {name: self._read(name, clients.ids) for name in self.store.names}

    def rows(self, name: str, ids: np.ndarray) -> Tensor:
        raise ConfigError(f"model: {self.owner} reads rows of clients; ask the server's method")

    def _read(self, name: str, ids: np.ndarray) -> Tensor:
        return read_rows(self.store, name, ids, self._first[name].to(self.context.device))


class FamilyStates(States):
    """The states of all clients, whose networks differ.

    Args:
        own: What the server's method has declared.
        members: The members' methods.
    """

    def __init__(self, own: States, members: Sequence[Method]) -> None:
        super().__init__(own.owner)
        self.declared = own.declared
        self.messages = own.messages
        self._members = members

    def allocate(
        self, store: ClientStore, dtype: torch.dtype | None, model: Tensor, context: RunContext
    ) -> None:
        self.store = store
        self.context = context
        first: list[dict[str, Tensor]] = [{} for _ in self._members]
        for name, state in self.declared.items():
            rows = self._first_rows(name, [m.states.declared[name] for m in self._members])
            for own, row in zip(first, rows, strict=True):
                own[name] = row
            kept = dtype
            if not state.rounded:
                kept = None
            store.declare(name, widest(rows), dtype=kept, sparse=state.sparse)
        for name in self.messages:
            rows = self._first_rows(name, [m.states.messages[name] for m in self._members])
            if len({len(row) for row in rows}) > 1:
                raise ConfigError(
                    f"model.network: {self.owner} keeps a message {name!r} of every client at the "
                    f"server, which is of another size for each network of the family"
                )
            store.declare(KEPT + name, rows[0], dtype=dtype, of_server=True)
        for member, own in zip(self._members, first, strict=True):
            cast(MemberStates, member.states).join(store, own, context)

    def _first_rows(self, name: str, declared: Sequence[Declared]) -> list[Tensor]:
        pairs = zip(declared, self._members, strict=True)
        rows = [first_row(state.initial, member.global_model) for state, member in pairs]
        return [row.detach().clone() for row in rows]  # a model will move

    def read(self, clients: Clients) -> None:
        """Reads nothing: a chunk has clients of several networks, and members read their states."""
        clients.state = {}

    def commit(self, clients: Clients, counted: bool = True) -> None:
        for name, state in self.declared.items():
            if counted or state.always:
                write_rows(self.store, name, clients.ids, clients.state[name])


def read_rows(store: ClientStore, name: str, ids: np.ndarray, first: Tensor) -> Tensor:
    """Returns the rows [C, K] of clients of one network, from a store with rows of the widest.

    Args:
        store: The store.
        name: The name of the state.
        ids: The ids of the C clients.
        first: The row [K] of clients that have none yet, on the device of the result.
    """
    rows = store.read(name, ids, first.device)[:, : len(first)]
    seen = torch.from_numpy(store.has(name, ids)).to(rows.device)
    return torch.where(seen[:, None], rows, first)


def write_rows(store: ClientStore, name: str, ids: np.ndarray, rows: Tensor) -> None:
    """Writes the rows [C, K] of clients of one network, with zeros up to the widest one."""
    width = len(store.initial(name))
    store.write(name, ids, pad(rows, (0, width - rows.shape[1])))


def widest(rows: Sequence[Tensor]) -> Tensor:
    """Returns the first row with zeros up to the width of the widest."""
    width = max(len(row) for row in rows)
    return pad(rows[0], (0, width - len(rows[0])))


# ---- rounds and evaluations ----------------------------------------------------------------------


class FamilySimulation(Simulation):
    """A simulation in which each client is trained by the member that has its network.

    Args:
        server: The method of the run.
        members: The members, by the number of the network.
        kinds: The number of each client's network, int64.
    """

    def __init__(self, server: Method, members: Sequence[Method], kinds: np.ndarray) -> None:
        self._server = server
        self.members = members
        self.kinds = kinds

    def first_messages(self, method: Method, ids: np.ndarray) -> Iterator[tuple[Clients, Messages]]:
        for kind, member in enumerate(self._acting(method)):
            yield from super().first_messages(member, ids[self.kinds[ids] == kind])

    def train(
        self, method: Method, cohort: Cohort, download: Messages, read: Read
    ) -> Iterator[Group]:
        members = self._acting(method)
        begun = False
        for ids in cohort.chunks:
            kinds = self.kinds[ids]
            groups: list[Group] = []
            for kind in np.unique(kinds):
                own = self._part(cohort, ids[kinds == kind])
                groups += super().train(members[kind], own, download, read)
            # Sums are added up in the order in which they would be with one network.
            places = {client: place for place, client in enumerate(ids.tolist())}
            for group in sorted(groups, key=lambda group: places.get(_first(group), -1)):
                begun = begun or group.parcel is not None
                yield group
        if not begun:  # a process without clients gives the widths of the sums
            yield from super().train(members[0], self._part(cohort, cohort.ids[:0]), download, read)

    def train_group(
        self, method: Method, download: Messages, read: Read | None, clients: Clients
    ) -> Group:
        if not len(clients):  # it gives the widths of the sums, which no network decides
            method = self.members[0]
            clients = replace(clients, state={})
        return super().train_group(method, download, read, clients)

    def receiver(self, method: Method) -> Callable[[Clients], None]:
        return super().receiver(self._server)

    def evaluation(self, method: Method) -> Evaluation:
        return FamilyEvaluation(self._server, self, self.loop, method.device, self.stages)

    def _acting(self, method: Method) -> list[Method]:
        """Returns the members, whose hooks are checked where those of the server are."""
        return [checked_as(method, member) for member in self.members]

    @staticmethod
    def _part(cohort: Cohort, ids: np.ndarray) -> Cohort:
        return Cohort(cohort.round, cohort.ids, [ids], cohort.data, cohort.seconds, cohort.may_fail)


def _first(group: Group) -> int | None:
    """Returns the id of the first client of a group; None if it has none."""
    if not len(group.clients):
        return None
    return int(group.clients.ids[0])


class FamilyEvaluation(Evaluation):
    """An evaluation in which each client's models are those of its network.

    Args:
        server: The method of the run, which has the global model.
        simulation: Says which member has a client's network.
        *args: The arguments of `Evaluation`.
    """

    def __init__(self, server: Method, simulation: FamilySimulation, *args: Any) -> None:
        self._server = server
        self._simulation = simulation
        super().__init__(*args)

    def update(self, algorithm: Method, clients: Clients) -> None:
        simulation = self._simulation
        if not len(clients):  # every process has the same kinds of scores
            super().update(simulation.members[0], clients)
        members = [checked_as(algorithm, member) for member in simulation.members]
        for member, own in clients_by_member(members, simulation.kinds, clients):
            super().update(member, own)
        if algorithm.has_global:
            self._global_numbers = self._server.global_size()

    def score_own(self, name: str, kind: str, algorithm: Method, clients: Clients) -> None:
        if not len(clients):
            self._metric(name, kind)
            return
        super().score_own(name, kind, algorithm, clients)

    def _score_models(self, name: str, algorithm: Method, clients: Clients) -> None:
        if algorithm.has_global:
            self._score_global(name, self._server, clients)
        if algorithm.has_personalized:
            self.score_own(name, "personalized", algorithm, clients)


def predictions_of_members(
    server: Method,
    receive: Callable[[Clients], None],
    stages: Sequence[Stage],
    clients: Clients,
) -> dict[str, np.ndarray]:
    """Returns what `predictions` does, of clients whose networks differ, in the clients' order.

    Args:
        server: The method of the run.
        receive: Gives clients of one network what the server would send them now.
        stages: What acts on messages.
        clients: The clients.
    """
    parts = []
    for member, own in clients_by_member(server.members, server.kinds, clients):
        receive(own)
        exchange.begin(member, stages, own)
        parts.append(predictions(member, own, server))
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    places = {client: place for place, client in enumerate(clients.ids.tolist())}
    order = np.argsort([places[client] for client in columns["client"].tolist()], kind="stable")
    return {name: column[order] for name, column in columns.items()}
