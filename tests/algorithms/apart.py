"""A run whose clients are operating-system processes of their own, each with its samples alone.

Plain arrays and plain values pass between the processes. The processes last, and serve run after
run: `Parties` starts one for each client, and `Parties.run` is a run of an entry of `METHODS`.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

from datamodules import FederatedDataModule
from models import HalfSquaredError
from pfl import FederatedLoop
from pfl.clients import Clients
from pfl.communication import Message
from pfl.datamodules.samples.samples import TensorSamples
from pfl.method import FederatedAlgorithm
from pfl.method.party import Party, Task
from pfl.method.round import Round, received_now
from pfl.method.sides import Log, current_log
from tests.algorithms.methods import METHODS, normalized_network, small_network, small_world


def make(name: str, settings: dict[str, Any], normalized: bool) -> FederatedAlgorithm:
    """The method of an entry, as the server and every client make it."""
    network = normalized_network() if normalized else small_network()
    return METHODS[name].make(network, loss=HalfSquaredError(), engine="sequential", **settings)


def forget_samples(data: FederatedDataModule, but: int | None) -> None:
    """Overwrites all samples with NaN, but those of one client."""
    own = np.zeros(len(data.samples), bool)
    if but is not None:
        for split in ("train", "val", "test"):
            own[np.asarray(getattr(data.partition, split)[but], np.int64)] = True
    samples = data.samples
    assert isinstance(samples, TensorSamples)
    for values in (samples.inputs, samples.targets):
        values[torch.from_numpy(~own)] = torch.nan


# ---- the process of a client --------------------------------------------------------------------


def serve(pipe: Connection, client: int) -> None:
    """Does what the server asks, until it hangs up."""
    torch.set_num_threads(1)
    party: Party
    while True:
        try:
            what, *given = pipe.recv()
        except EOFError:
            return
        try:
            if what == "join":
                name, settings, normalized, rounds, loop = given
                data = small_world()
                data.setup()
                forget_samples(data, but=client)
                method = make(name, settings, normalized)
                party = Party(method, FederatedLoop(data, **loop), client, rounds, torch.float64)
                answer: Any = None
            elif what == "train":
                messages, log = party.train(task_of(given[0]))
                losses = {k: [(x.numpy(), n) for x, n in v] for k, v in log.losses.items()}
                answer = packed(messages), losses, log.tables
            elif what == "first":
                answer = packed(party.first_upload(task_of(given[0])))
            elif what == "evaluate":
                task, model = given
                model = None if model is None else torch.from_numpy(model)
                answer = party.evaluate(task_of(task), "test", model)
            else:
                party.settle(given[0])
                store = party.method.store
                answer = {n: store.read(n, np.array([client])).numpy() for n in store.names}
        except Exception as error:
            answer = error
        pipe.send(answer)


def packed(messages: dict[str, Message]) -> dict[str, tuple[Any, ...]]:
    """Messages as arrays and plain values."""
    return {
        name: (m.values.numpy(), np.asarray(m.nbytes), m.weighting, m.reduce)
        for name, m in messages.items()
    }


def unpacked(messages: dict[str, tuple[Any, ...]]) -> dict[str, Message]:
    return {
        name: Message(torch.from_numpy(values), torch.from_numpy(nbytes), *rest)
        for name, (values, nbytes, *rest) in messages.items()
    }


def task_of(plain: dict[str, Any]) -> Task:
    received = {name: torch.from_numpy(values) for name, values in plain["received"].items()}
    return Task(**{**plain, "received": received})


# ---- the server ---------------------------------------------------------------------------------


class RemoteRound(Round):
    """A round whose clients are asked over pipes."""

    def __init__(self, method: FederatedAlgorithm, index: int, parties: Parties) -> None:
        super().__init__(method, index)
        self.parties = parties
        self.train_clients = self.ask

    def ask(self, method: FederatedAlgorithm, clients: Clients) -> dict[str, Message]:
        """What one client sends; an empty group gives the shapes alone, and is not remote."""
        if not len(clients):
            return type(self).__mro__[1](method, self.index).train_clients(method, clients)
        (client,) = clients.ids.tolist()
        messages, losses, tables = self.parties.ask(client, "train", self.parties.task(clients))
        log = {k: [(torch.from_numpy(x), n) for x, n in v] for k, v in losses.items()}
        mine = current_log()
        assert mine is not None
        mine.extend(Log(log, tables))
        return unpacked(messages)

    def _train_part(self, clients: Clients, arrives: bool) -> None:
        super()._train_part(clients, arrives)
        if arrives:
            self.parties.counted.update(dict.fromkeys(clients.ids.tolist(), self.index))


class Server(pl.Callback):
    """Makes a run a server's: it has no samples once it trains, and clients answer over pipes."""

    def __init__(self, parties: Parties) -> None:
        self.parties = parties

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, FederatedAlgorithm)
        forget_samples(pl_module.run.loop.datamodule, but=None)
        parties, parties.method = self.parties, pl_module
        pl_module.new_round = (  # type: ignore[method-assign]
            lambda index: RemoteRound(pl_module, index, parties)
        )

        def first_upload(clients: Clients) -> dict[str, Message]:
            answers = [
                unpacked(parties.ask(client, "first", parties.task(clients.rows(slice(c, c + 1)))))
                for c, client in enumerate(clients.ids.tolist())
            ]
            return {
                name: Message(
                    torch.cat([m[name].values for m in answers]),
                    torch.stack([torch.as_tensor(m[name].nbytes) for m in answers]),
                )
                for name in (answers[0] if answers else ())
            }

        if pl_module.sends_first:
            pl_module.first_upload = first_upload  # type: ignore[method-assign]


class Parties:
    """The processes of some clients.

    Attributes:
        counted: By client, its last round that the server has counted.
    """

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.algorithms.apart"])
        self.pipes, self.processes = [], []
        self.method: FederatedAlgorithm
        self.counted: dict[int, int] = {}
        for client in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, client), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def close(self) -> None:
        """Ends the processes."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.close()
            process.join(10)

    def ask(self, client: int, *question: Any) -> Any:
        """A client's answer."""
        self.pipes[client].send(question)
        answer = self.pipes[client].recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def join(self, *run: Any) -> None:
        """Tells all clients about a new run."""
        self.counted = {}
        for client in range(len(self.pipes)):
            self.ask(client, "join", *run)

    def task(self, clients: Clients) -> dict[str, Any]:
        """A client's `Task` as arrays and plain values; only `received` is what methods send."""
        return {
            "round": clients.round,
            "received": {name: x.detach().numpy() for name, x in clients.received.items()},
            "personal": clients.personal_messages,
            "counted": self.counted.get(int(clients.ids[0])),
            "work": clients.work,
        }

    def states(self) -> dict[str, np.ndarray]:
        """The clients' states, [M, width] by name."""
        rows = [self.ask(i, "states", self.counted.get(i)) for i in range(len(self.pipes))]
        return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}

    def scores(self) -> dict[str, dict[str, list[float]]]:
        """The clients' scores of the models at the end, [M] by kind and name."""
        method, answers = self.method, []
        model = method.global_model.numpy() if method.has_global else None
        for client in range(len(self.pipes)):
            one = Clients(np.array([client]), method.rounds, None)  # type: ignore[arg-type]
            one.received = received_now(method)
            answers.append(self.ask(client, "evaluate", self.task(one), model))
        return {
            kind: {name: [a[kind][name] for a in answers] for name in scores}
            for kind, scores in answers[0].items()
        }
