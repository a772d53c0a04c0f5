"""One client apart from the server: its samples, its states, and its half of every round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pfl.clients import Clients
from pfl.errors import ConfigError
from pfl.method import exchange
from pfl.method.algorithm import FederatedAlgorithm
from pfl.method.facts import RunFacts
from pfl.method.log import Log, logging_to
from pfl.method.scoring import Evaluation
from pfl.rounds.loop import FederatedLoop
from pfl.stages.stage import Messages, Place, Stage, by_place


class Task(NamedTuple):
    """What the server sends a client at the beginning of its work.

    Attributes:
        round: The round, from 0.
        received: The messages of the server by name, [K] or, for this client alone, [1, K].
        personal: The names of the messages that are for this client alone.
        counted: The client's last round whose message the server has counted; None: none so far.
        work: The share of its local steps that the client takes.
    """

    round: int
    received: Mapping[str, Tensor]
    personal: frozenset[str] = frozenset()
    counted: int | None = None
    work: float = 1.0


class Party:
    """A client that trains in a process or on a machine of its own.

    The new states of a round are pending until the server's next task, which has the number of the
    last round whose message was counted; the states of any other round are forgotten. The server's
    half is `pfl.method.round.run_round`.

    Args:
        method: A method with the same arguments as the server's; its server states are not read.
        loop: A loop around a data module that has at least this client's samples.
        client: The client's id.
        max_rounds: The number of rounds of the run, if it is known.
        dtype: The dtype of the models.
        device: Where the client trains. What it receives may be anywhere.
        own: A stage of the client's own, which the server does not know.

    Raises:
        ConfigError: The method trains on the samples of all clients together.
    """

    def __init__(
        self,
        method: FederatedAlgorithm,
        loop: FederatedLoop,
        client: int,
        max_rounds: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        own: Stage | None = None,
    ) -> None:
        if method.pooled:
            raise ConfigError(
                f"model: {type(method).__name__} trains one model on the samples of all clients; "
                f"it cannot run where each client has its own"
            )
        loop.setup()
        self.method = method.to(device, dtype)
        self.loop = loop
        self.client = client
        single = dtype == torch.float32  # as the simulation, which stores nothing in 64-true
        method.begin_apart(RunFacts(loop, max_rounds=max_rounds), client, store=single)
        stages = [stage for stage in method.stages if stage.place <= Place.CODE]
        if own is not None:
            stages = by_place([*stages, own])
        self._stages = stages
        self._pending: Clients | None = None

    def train(self, task: Task) -> tuple[Messages, Log]:
        """Returns the client's messages [1, K] of a round, and what it has logged."""
        clients = self._clients(task)
        log = Log()
        with logging_to(log), self.method.in_full_precision():
            messages = exchange.train_clients(self.method, self._stages, clients)
            for stage in self._stages:
                stage.keep(clients)
        self._pending = clients
        return messages, log

    def first_upload(self, task: Task) -> Messages:
        """Returns what the client sends before it receives anything, [1, K] by name."""
        with self.method.in_full_precision():
            return exchange.send_first(self.method, self._stages, self._clients(task))

    def settle(self, counted: int | None) -> None:
        """Keeps the pending states if the server has counted their round, and else forgets them."""
        if self._pending is not None:
            self.method.states.commit(self._pending, self._pending.round == counted)
        self._pending = None

    def pending(self) -> dict[str, Tensor]:
        """Returns the client's states after its last training, [1, width] by name."""
        if self._pending is None:
            return {}
        return dict(self._pending.state)

    def restore(self, states: Mapping[str, Tensor]) -> None:
        """Takes states [1, width] by name as the client's; a state that is missing begins anew."""
        self._pending = None
        store = self.method.store
        for name in store.names:
            rows = states.get(name)
            if rows is None:
                rows = store.initial(name)[None]
            store.write(name, np.array([self.client]), rows.to(self.method.device))

    def evaluate(
        self,
        task: Task,
        splits: Sequence[str],
        model: Tensor | None = None,
        global_size: int | None = None,
    ) -> Evaluation:
        """Returns a finished pass, in which this client alone has scores.

        Args:
            task: What the server sends for the evaluation.
            splits: "val", "test" or both.
            model: The global model [P], where there is one to be scored.
            global_size: How many numbers describe the global model, by the server's count.
        """
        method = self.method
        self.settle(task.counted)
        method.progress.go_on_from(task.round)
        if global_size is not None:
            method.tell_global_size(global_size)
        if model is not None:
            method.global_model.copy_(model)
            if "buffers" in task.received:
                method.oracle.buffers.write(method.network, task.received["buffers"])
        evaluation = Evaluation(self.loop, method.device, self._stages)
        with method.in_full_precision():
            for split in splits:
                evaluation.update(method, self._clients(task, split))
        evaluation.finish()
        return evaluation

    def begun(self, task: Task) -> Clients:
        """Returns the client as it begins a task, with its states and what it has received."""
        self.method.progress.go_on_from(task.round)
        return self._clients(task)

    def _clients(self, task: Task, split: str = "train") -> Clients:
        """Returns the client with its states and what it has received."""
        method = self.method
        self.settle(task.counted)
        data = self.loop.client_data(method.device)
        clients = Clients(np.array([self.client]), task.round, data, split, work=task.work)
        received = task.received.items()
        clients.received = {name: values.to(method.device) for name, values in received}
        clients.personal_messages = task.personal
        exchange.begin(method, self._stages, clients)
        return clients
