"""Who carries the messages of a round between the server and the clients, and has these trained.

`Simulation` is what every run has unless it is given another transport: this process, and others
like it, train the clients of the cohort. `Pooled` trains on the samples of all of them. A server
whose clients are parties has `pfl.deploy.server.Remote`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from pfl.clients import Clients
from pfl.communication import by_name
from pfl.errors import ConfigError
from pfl.method import exchange
from pfl.method.hooks import Method
from pfl.method.log import Log, logging_to
from pfl.method.naming import name_clients
from pfl.method.round_totals import Parcel
from pfl.method.scoring import Evaluation
from pfl.rounds.cohort import Cohort
from pfl.rounds.loop import FederatedLoop
from pfl.stages.stage import Messages, Place, Stage

Read: TypeAlias = Callable[[Clients, Messages], Parcel]
"""What the server makes of the messages of C clients, in the thread that trained them."""


class Group(NamedTuple):
    """Clients that have trained together.

    Attributes:
        clients: The clients, with their new states.
        down: The bytes that each of them has received.
        up: The bytes that each of them has sent, as far as they have arrived.
        log: What the clients have logged.
        parcel: What the server has made of their messages; None: the messages are lost.
    """

    clients: Clients
    down: int | Tensor
    up: int | Tensor
    log: Log
    parcel: Parcel | None


class Transport(ABC):
    """Carries messages down and up, and has clients trained between.

    Attributes:
        stages: What acts on messages, once `set_up` was called.
        loop: Says who trains.
    """

    stages: Sequence[Stage]
    loop: FederatedLoop

    def set_up(self, method: Method, stages: Sequence[Stage], loop: FederatedLoop) -> None:
        """Prepares for a run; called before its first round."""
        self.stages = stages
        self.loop = loop

    @abstractmethod
    def first_messages(self, method: Method, ids: np.ndarray) -> Iterator[tuple[Clients, Messages]]:
        """Yields clients of this process, and what they send before they receive anything."""

    @abstractmethod
    def train(
        self, method: Method, cohort: Cohort, download: Messages, read: Read
    ) -> Iterator[Group]:
        """Yields the clients of this process in groups, once they have trained.

        The first group that arrives may have no clients: a process without clients yields one all
        the same, whose parcel has the names and widths of the messages.

        Args:
            method: The method.
            cohort: The clients.
            download: What the server sends to all of them.
            read: What the server makes of messages as they come.
        """

    def expected(self, cohort: Cohort) -> np.ndarray:
        """Returns the ids of the clients that `train` may yield at any process."""
        return cohort.ids

    @abstractmethod
    def settle(self, method: Method, group: Group) -> None:
        """Has clients keep their new states if their messages have arrived, or forget them."""

    @abstractmethod
    def evaluation(self, method: Method) -> Evaluation:
        """Returns an object that collects the scores of evaluation passes."""

    def numbers(self, lost: int) -> dict[str, float]:
        """Returns numbers of the transport for the row of a round; here none.

        Args:
            lost: The number of clients whose messages were lost.
        """
        return {}

    # ---- what an evaluation needs -------------------------------------------------------------

    def receiver(self, method: Method) -> Callable[[Clients], None]:
        """Returns a function that gives clients what the server would send them now."""
        common: Messages = by_name(method.download())
        for stage in self.stages:
            common = stage.down(common)

        def receive(clients: Clients) -> None:
            exchange.receive(clients, common, by_name(method.evaluation_for(clients.ids)))

        return receive


class Simulation(Transport):
    """This process, and others like it, train the clients of a cohort."""

    def first_messages(self, method: Method, ids: np.ndarray) -> Iterator[tuple[Clients, Messages]]:
        for clients in chunks_of(method, self.loop, ids, "train"):
            exchange.begin(method, self.stages, clients)
            yield clients, exchange.send_first(method, self.stages, clients)

    def train(
        self, method: Method, cohort: Cohort, download: Messages, read: Read
    ) -> Iterator[Group]:
        train_lost = partial(self.train_group, method, download, None)
        train_arriving = partial(self.train_group, method, download, read)
        begun = False
        for number, ids in enumerate(cohort.chunks):
            for coming in cohort.chunks[number + 1 : number + 2]:
                method.states.store.prefetch(coming)
            clients = Clients(ids, cohort.round, cohort.data)
            # A GPU may not hold the states of the whole chunk.
            if method.states.declared and method.device.type == "cpu":
                method.states.read(clients)
            for part, arrives in self.loop.participation.parts(clients):
                # A first chunk without clients runs as well: it gives the widths of the sums.
                if not len(part) and (begun or not arrives):
                    continue
                begun = begun or arrives
                work = train_arriving if arrives else train_lost
                for _, group in method.groups.run(part, work):
                    yield group

    def train_group(
        self, method: Method, download: Messages, read: Read | None, clients: Clients
    ) -> Group:
        """Trains a group of clients, in a thread if there are several."""
        log = Log()
        with logging_to(log), method.in_full_precision():
            own = by_name(method.download_for(clients.ids))
            down = exchange.receive(clients, download, own)
            try:
                exchange.begin(method, self.stages, clients)
                sent = exchange.train_clients(method, self.stages, clients)
                if read is None:
                    return Group(clients, down, 0, log, None)
                parcel = read(clients, sent)
                for stage in self.stages:
                    stage.keep(clients)
            except Exception as error:
                name_clients(error, method, self.loop, clients, f"in round {clients.round + 1}")
                raise
        return Group(clients, down, exchange.number_of_bytes(sent), log, parcel)

    def settle(self, method: Method, group: Group) -> None:
        if method.states.declared:
            method.states.commit(group.clients, counted=group.parcel is not None)

    def evaluation(self, method: Method) -> Evaluation:
        return Evaluation(self.loop, method.device, self.stages)


class Pooled(Simulation):
    """One process trains on the samples of all clients of the population, as those of client 0."""

    def expected(self, cohort: Cohort) -> np.ndarray:
        return np.zeros(1, np.int64)

    def train(
        self, method: Method, cohort: Cohort, download: Messages, read: Read
    ) -> Iterator[Group]:
        here = np.isin(cohort.ids[:1], np.concatenate(cohort.chunks))
        data = cohort.data.as_one_client(method.population)
        clients = Clients(np.zeros(here.sum(), np.int64), cohort.round, data)
        for _, group in method.groups.run(
            clients, partial(self.train_group, method, download, read)
        ):
            yield group


class Compared(Simulation):
    """A simulation that first compares clients that train together with clients that train alone.

    The engine "debug" asks for it.

    Attributes:
        compared: Whether there were clients to compare.
    """

    def __init__(self) -> None:
        self.compared = False

    def train(
        self, method: Method, cohort: Cohort, download: Messages, read: Read
    ) -> Iterator[Group]:
        for ids in cohort.chunks:
            if len(ids) < 2 or self.compared:
                continue
            # The largest, the smallest, and one between them.
            rows = np.unique(np.linspace(0, len(ids) - 1, 3).astype(int))
            some = Clients(ids[rows], cohort.round, cohort.data)
            with logging_to(Log()), method.in_full_precision():
                self._compare(method, download, some)
            self.compared = True
        yield from super().train(method, cohort, download, read)

    def _compare(self, method: Method, download: Messages, group: Clients) -> None:
        """Refuses a method whose clients influence each other if they train in one group.

        Values, states and bytes of clients that train together must be the same as if each client
        trained alone.

        Raises:
            ConfigError: They are not.
        """
        name = f"{type(method).__name__}.client_update"
        # First alone, so that an error names one client.
        alone = [self._trial(method, download, one) for one in group.groups(1)]
        together = self._trial(method, download, group)
        for row, client in enumerate(group.ids.tolist()):
            for what, values in alone[row].values.items():
                if not _close(together.values[what][row], values[0]):
                    raise ConfigError(
                        f"model: {name}: {what} of client {client} is another one if the client "
                        f"trains in a group of {len(group)} than alone; keep one row for each "
                        f"client, [C, K] and [C, 1], and move only the first `batch.clients` rows "
                        f"in a step"
                    )
            for what, nbytes in alone[row].nbytes.items():
                counted = together.nbytes[what][row]
                if counted != nbytes[0]:
                    raise ConfigError(
                        f"model: {name}: the message {what!r} of client {client} has {counted} "
                        f"bytes in a group of {len(group)} clients and {nbytes[0]} alone; a "
                        f"message has the shape [C, K]"
                    )

    def _trial(self, method: Method, download: Messages, clients: Clients) -> _Trial:
        """Trains clients, of whom nothing is kept."""
        trial = replace(clients, state={})
        exchange.receive(trial, download, by_name(method.download_for(trial.ids)))
        exchange.begin(method, self.stages, trial)
        # Compression makes large differences of small ones: which of two values is the k-th.
        before = [stage for stage in self.stages if stage.place < Place.CODE]
        sent = exchange.train_clients(method, before, trial)
        values = {f"the message {name!r}": message.values for name, message in sent.items()}
        for name, rows in trial.state.items():
            values[f"clients.state[{name!r}]"] = rows
        nbytes = {}
        for name, message in sent.items():
            nbytes[name] = torch.as_tensor(message.nbytes).expand(len(trial)).tolist()
        return _Trial(values, nbytes)


class _Trial(NamedTuple):
    """What clients have sent and remembered, by name, and the bytes of their messages."""

    values: dict[str, Tensor]
    nbytes: dict[str, list[int]]


def _close(actual: Tensor, expected: Tensor) -> bool:
    """Returns whether two rows are the same but for the order of sums."""
    scale = 0.0
    if expected.numel():
        scale = float(expected.abs().max())
    share = 1e-7
    if expected.dtype.itemsize < 8:
        share = 1e-3
    return torch.allclose(actual, expected, rtol=0, atol=share * (scale + 1e-6), equal_nan=True)


def chunks_of(
    method: Method, loop: FederatedLoop, ids: np.ndarray, split: Literal["train", "val", "test"]
) -> Iterator[Clients]:
    """Yields this process's share of some clients in chunks."""
    count = max(1, -(-len(ids) // loop.chunk_size))
    for part in loop.chunks(ids, split, count, owned=True):
        yield Clients(part, method.rounds, loop.client_data(method.device), split)
