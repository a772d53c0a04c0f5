"""The server's half of a run whose clients are parties behind a `Channel`.

Everything else is what `pfl fit` runs: the loop with its cohorts, the method, the ledger, the
callbacks and the checkpoints. `Server.join` hands the method a transport to the parties.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from pfl.callbacks import EmbeddingFigure, LocalBaseline, Optimality
from pfl.clients import Clients
from pfl.communication import Message, by_name
from pfl.deploy import schema
from pfl.deploy.data import RemoteData
from pfl.deploy.parties import Parties
from pfl.errors import ConfigError
from pfl.method import Buffered, FederatedAlgorithm, exchange
from pfl.method.exported import has_own_models
from pfl.method.hooks import Method
from pfl.method.log import Log, logging_to
from pfl.method.scoring import Evaluation
from pfl.method.states import KEPT
from pfl.method.transport import Group, Read, Transport
from pfl.rounds.cohort import Cohort
from pfl.rounds.loop import FederatedLoop
from pfl.stages.private import GRADIENTS
from pfl.stages.stage import Messages

ROOM = 1 << 26  # bytes of an answer beside twice its messages: losses and tables
NEED_SAMPLES = (EmbeddingFigure, LocalBaseline, Optimality)


class Remote(Transport):
    """A transport to parties: all of a cohort are asked at the beginning of a round.

    A party that does not answer, or answers what it must not, is a client whose message is lost.

    Args:
        parties: The parties.

    Attributes:
        cohorts: The clients of the last rounds that were there when the round began, by round.
    """

    def __init__(self, parties: Parties) -> None:
        self.parties = parties
        self.cohorts: dict[int, np.ndarray] = {}
        self._firsts: dict[int, Messages] = {}  # what clients of the coming round have sent first
        self._columns: dict[str, schema.Columns] = {}  # of the tables
        self._method: Method

    def join(self, method: FederatedAlgorithm, loop: FederatedLoop) -> None:
        """Connects a method and its loop with the parties, before the run begins."""
        assert isinstance(loop.datamodule, RemoteData)
        self._method = method
        self.loop = loop
        self.parties.needs_sizes = method.weighting == "samples"
        method.connect(self)
        loop.connect(self._present)
        loop.datamodule.connect(self._meet)

    def _meet(self) -> dict[int, dict[str, Any]]:
        """Returns the facts of the parties that are there at first."""
        self.parties.wait(self.parties.enough)
        print("\n".join([*self.parties.lines(), self.parties.overview()]).rstrip(), flush=True)
        return self.parties.facts

    def _present(self, index: int, drawn: np.ndarray) -> np.ndarray:
        """Returns the clients of a round's cohort that are there when the round begins."""
        if index in self.cohorts:
            return self.cohorts[index]
        parties = self.parties
        data = self.loop.datamodule
        assert isinstance(data, RemoteData)
        parties.meet()
        parties.wait(1)
        for client, facts in parties.facts.items():
            data.add(client, facts)
        here = drawn[np.isin(drawn, list(parties.peers))]
        self._require(drawn, here, index)
        self.cohorts = {key: ids for key, ids in self.cohorts.items() if key == index - 1}
        self.cohorts[index] = here
        if self._method.sends_first:
            self._firsts = self._ask_first(self._method, here)
            self.cohorts[index] = np.array(sorted(self._firsts), np.int64)
        return self.cohorts[index]

    def _require(self, cohort: np.ndarray, here: Iterable[int], index: int) -> None:
        """Raises a ConfigError if a client of a cohort is away, and the method needs them all."""
        away = sorted(set(cohort.tolist()) - {*here})
        if self._method.needs_all_clients and away:
            raise ConfigError(
                f"party {away[0]} is away in round {index + 1}, and {type(self._method).__name__} "
                f"needs all clients in every round; start it again, and continue with ckpt_path: "
                f"auto"
            )

    # ---- what clients send first --------------------------------------------------------------

    def _one(self, client: int, round_index: int, work: float = 1.0) -> Clients:
        """Returns one client, of whose samples the server has none."""
        data = self.loop.client_data(self._method.device)
        return Clients(np.array([client], np.int64), round_index, data, work=work)

    def _nobody(self, round_index: int) -> Clients:
        """Returns no client: what is made of it has the names and widths of all messages."""
        data = self.loop.client_data(self._method.device)
        return Clients(np.empty(0, np.int64), round_index, data)

    def _ask_first(self, method: Method, ids: np.ndarray) -> dict[int, Messages]:
        """Asks clients for what they send first, and returns the messages of those who answer."""
        nobody = self._nobody(method.rounds)
        with method.in_full_precision(), logging_to(Log()):
            exchange.begin(method, self.stages, nobody)
            like = exchange.send_first(method, self.stages, nobody)
        ones = [self._one(client, method.rounds) for client in ids.tolist()]
        by_client = {int(one.ids[0]): one for one in ones}
        requests = {client: self.parties.task(one) for client, one in by_client.items()}
        firsts: dict[int, Messages] = {}
        answers = self.parties.ask("first", requests, 2 * _bytes_of(like) + ROOM)
        for client, answer in answers.items():
            with self.parties.naming(client, "first message"):
                one = by_client[client]
                firsts[client] = schema.read_messages(answer, like, one, self.stages)
        told = {client: schema.largest(messages) for client, messages in firsts.items()}
        for client, line in schema.far_away(told, 1.0).items():
            self.parties.blame(client, "first message", line)
            del firsts[client]
        return firsts

    def first_messages(self, method: Method, ids: np.ndarray) -> Iterator[tuple[Clients, Messages]]:
        """Yields clients and what they send first; those that are away have sent the last one."""
        firsts = self._firsts or self._ask_first(method, ids)
        self._firsts = {}
        for client in ids.tolist():
            one = self._one(client, method.rounds)
            if client in firsts:
                yield one, firsts[client]
                continue
            kept = {}
            for name in method.states.messages:
                kept[name] = Message(method.store.read(KEPT + name, one.ids), 0)
            yield one, kept

    # ---- a round ------------------------------------------------------------------------------

    def train(
        self, method: Method, cohort: Cohort, download: Messages, read: Read
    ) -> Iterator[Group]:
        sent: dict[int, _Sent] = {}
        requests = {}
        works = self.loop.participation.work(cohort.round, cohort.ids)
        for client, work in zip(cohort.ids.tolist(), works.tolist(), strict=True):
            one = self._one(client, cohort.round, work)
            log = Log()
            with logging_to(log):
                own = by_name(method.download_for(one.ids))
            sent[client] = _Sent(one, exchange.receive(one, download, own), log)
            requests[client] = self.parties.task(one)
        like = self._empty_messages(method, cohort, download)
        schema.other_columns({client: one.log for client, one in sent.items()}, self._columns)
        arrived: dict[int, _Answer] = {}
        what = f"round {cohort.round + 1}"
        answers = self.parties.ask("train", requests, 2 * _bytes_of(like) + ROOM)
        for client, answer in answers.items():
            with self.parties.naming(client, what):
                log = schema.read_log(answer, client, method.losses, method.tables)
                one = sent[client].clients
                messages = schema.read_messages(answer, like, one, self.stages)
                gradients = schema.read_gradients(answer)
                arrived[client] = _Answer(messages, log, gradients)
        told = {client: schema.largest(one.messages) for client, one in arrived.items()}
        ours = [n for one in sent.values() for n in schema.largest(one.clients.received).values()]
        wrong = schema.far_away(told, max(ours, default=1.0))
        logs = {client: one.log for client, one in arrived.items()}
        wrong |= schema.other_columns(logs, self._columns)
        for client, line in wrong.items():
            self.parties.blame(client, what, line)
            del arrived[client]
        self._require(cohort.ids, arrived, cohort.round)
        nobody = self._nobody(cohort.round)
        yield Group(nobody, 0, 0, Log(), read(nobody, like))
        for client in np.concatenate(cohort.chunks).tolist():
            clients, down, log = sent[client]
            if client not in arrived:
                yield Group(clients, down, 0, Log(), None)
                continue
            yield self._group(clients, down, log, arrived[client], read)

    def _group(
        self, clients: Clients, down: int | Tensor, log: Log, answer: _Answer, read: Read
    ) -> Group:
        """Returns a party that has answered, whose message may be lost all the same."""
        method = self._method
        log.extend(answer.log)
        if GRADIENTS in method.states.declared:
            spent = torch.full((1, 1), math.nan)  # the party does not say
            if answer.gradients is not None:
                spent.fill_(answer.gradients)
            method.store.write(GRADIENTS, clients.ids, spent)
        ((_, arrives),) = [part for part in self.loop.participation.parts(clients) if len(part[0])]
        if not arrives:
            return Group(clients, down, 0, log, None)
        up = exchange.number_of_bytes(answer.messages)
        return Group(clients, down, up, log, read(clients, answer.messages))

    def _empty_messages(self, method: Method, cohort: Cohort, download: Messages) -> Messages:
        """Returns what no client sends: messages [0, K] with the names and widths of all others."""
        nobody = self._nobody(cohort.round)
        with logging_to(Log()), method.in_full_precision():
            exchange.receive(nobody, download, by_name(method.download_for(nobody.ids)))
            exchange.begin(method, self.stages, nobody)
            return exchange.train_clients(method, self.stages, nobody)

    def settle(self, method: Method, group: Group) -> None:
        """Notes whose messages were counted; the clients keep their states themselves."""
        if group.parcel is not None:
            for client in group.clients.ids.tolist():
                self.parties.counted[client] = group.clients.round

    def numbers(self, lost: int) -> dict[str, float]:
        down, up = self.parties.wire
        return {"dropped": lost, "comm/uplink_wire_bytes": up, "comm/downlink_wire_bytes": down}

    def evaluation(self, method: Method) -> RemoteEvaluation:
        return RemoteEvaluation(method, self)


def _bytes_of(like: Messages) -> int:
    """Returns the bytes of the values of one client's messages."""
    return sum(m.values.shape[1:].numel() * m.values.element_size() for m in like.values())


class _Sent(NamedTuple):
    """A party, the bytes of what it was sent, and what was logged for it."""

    clients: Clients
    down: int | Tensor
    log: Log


class _Answer(NamedTuple):
    """What a party has answered: messages, what it has logged, and its private gradients so far."""

    messages: Messages
    log: Log
    gradients: float | None


class _Told:
    """The scores that parties have told, in place of `ClientScores`."""

    def __init__(self, count: int, names: list[str]) -> None:
        self.values = {name: np.full(count, np.nan) for name in names}
        self.values["count"] = np.zeros(count)

    def compute(self) -> dict[str, np.ndarray]:
        return self.values


class RemoteEvaluation(Evaluation):
    """An evaluation that the parties compute; the server asks all for their scores at its end.

    Args:
        method: The method.
        remote: The transport to the parties.
    """

    def __init__(self, method: Method, remote: Remote) -> None:
        self._splits: list[str] = []
        self._method = method
        self._parties = remote.parties
        self._data = remote.loop.client_data(method.device)
        super().__init__(remote.loop, method.device)

    def begin(self, receive: Callable[[Clients], None]) -> None:
        super().begin(receive)
        self._used = {}
        self._splits = []

    def update(self, algorithm: Method, clients: Clients) -> None:
        self._method = algorithm
        if clients.split not in self._splits:
            self._splits.append(clients.split)

    def finish(self) -> dict[str, float]:
        method = self._method
        if method.has_global:
            self._global_numbers = method.global_size()
        requests = {client: self._request(client) for client in self._parties.peers}
        kinds = []
        if method.has_global:
            kinds.append("global")
        if method.has_personalized:
            kinds.append("personalized")
        kinds += [f"finetuned/{k}" for k in self.finetuning.steps]
        names = ["accuracy", "loss", "count", *self.loop.metrics.names]
        told = {}
        for split in self._splits:
            for kind in kinds:
                told[split, kind] = _Told(self.loop.num_clients, names)
        self._metrics = dict(told)  # type: ignore[arg-type]
        for client, answer in self._parties.ask("evaluate", requests, ROOM).items():
            with self._parties.naming(client, "evaluation"):
                self._add(client, answer, told)
        return super().finish()

    def _request(self, client: int) -> dict[str, Any]:
        """Returns what a party is asked."""
        method = self._method
        one = Clients(np.array([client]), method.rounds, self._data)
        self._receive(one)
        model: Any = None
        if method.has_global:
            w = method.global_model
            model = "w"
            if not one.received.get("w", w[:0]).equal(w):
                model = w.cpu().numpy()
        return {
            **self._parties.task(one),
            "splits": self._splits,
            "model": model,
            "parameters": self._global_numbers or 0,
        }

    def _add(self, client: int, answer: dict[str, Any], told: dict[Any, _Told]) -> None:
        """Adds what one party has told; a WireError if it is not what was asked."""
        wanted = [(key, name) for key, table in told.items() for name in table.values]
        found, numbers = schema.read_scores(answer, wanted)
        for (key, name), value in found.items():
            told[key].values[name][client] = value
        self.numbers += numbers


def check_run(method: FederatedAlgorithm, loop: FederatedLoop) -> None:
    """Raises a ConfigError if a run has something that needs the samples of all clients."""
    if method.pooled:
        raise ConfigError(
            f"model: {type(method).__name__} trains on the samples of all clients together"
        )
    if isinstance(method, Buffered):
        raise ConfigError(
            f"model: {type(method).__name__} is asynchronous, which is for simulations; parties "
            f"train in rounds, take another method"
        )
    if method.family is not None:
        raise ConfigError(
            "model.network: Family is for simulations; real parties all have the same network"
        )
    for key in ("unseen", "attackers", "clock", "by_client"):
        if getattr(loop.participation, key) is not None:
            raise ConfigError(f"loop.{key}: it is for simulations; parties take null")
    if loop.neighbours is not None:
        raise ConfigError("loop.neighbours: it is for simulations; parties take null")
    if "train" in loop.evaluate:
        raise ConfigError("loop.evaluate: train; parties tell scores of val and test only")


def check_callback(kind: type) -> None:
    """Raises a ConfigError if callbacks of a class need the clients' samples."""
    if issubclass(kind, NEED_SAMPLES):
        raise ConfigError(
            f"trainer.callbacks: {kind.__name__} needs the clients' samples, which a server has "
            f"not; leave it out"
        )


class Server(pl.Callback):
    """Makes a run a server's: its clients are parties, and it has none of their samples.

    Args:
        parties: The parties.
    """

    def __init__(self, parties: Parties) -> None:
        self.parties = parties
        self.remote = Remote(parties)
        self._salts: dict[int, int] = {}  # as of `PrivateMean`

    def join(self, trainer: pl.Trainer, method: FederatedAlgorithm, loop: FederatedLoop) -> None:
        """Hands a method and its loop the transport to the parties, before the run begins.

        Raises:
            ConfigError: The run has something that needs the samples of all clients.
        """
        check_run(method, loop)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            check_callback(type(callback))
        if trainer.world_size > 1:
            raise ConfigError(f"trainer.devices: {trainer.world_size}; a server has one process")
        self.method = method
        self.loop = loop
        self.remote.join(method, loop)
        self.parties.saving = bool(trainer.checkpoint_callbacks)
        trainer.callbacks.append(self)  # type: ignore[attr-defined]

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tells the parties the number of classes from now on, and has noise follow the sums."""
        assert isinstance(self.loop.datamodule, RemoteData)
        self.parties.classes = self.loop.datamodule.num_classes
        private = self.method.run.private
        if private is not None and not private.privacy.reproducible:
            private.salts = self._salts

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.parties.saved(self.method.rounds)
        checkpoint["callbacks"][self.state_key] = self.state_dict()

    def on_train_end(self, *_: Any) -> None:
        """Tells the parties what was counted in the last round, and what their own models need."""
        method = self.method
        data = self.loop.client_data(method.device)
        ones = {k: Clients(np.array([k]), method.rounds, data) for k in self.parties.peers}
        if has_own_models(method):
            with method.in_full_precision():
                method.begin_evaluation()
                receive = self.remote.receiver(method)
                for one in ones.values():
                    receive(one)
        self.parties.ask("finish", {k: self.parties.task(one) for k, one in ones.items()})
        down, up = self.parties.wire
        print(f"The rounds' messages had {down} bytes to the parties, and {up} back.", flush=True)

    def state_dict(self) -> dict[str, Any]:
        cohorts = {index: ids.tolist() for index, ids in self.remote.cohorts.items()}
        return {"parties": self.parties.state_dict(), "cohorts": cohorts, "salts": self._salts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.parties.load_state_dict(state_dict["parties"])
        self._salts.update(state_dict.get("salts", {}))
        cohorts = state_dict["cohorts"].items()
        self.remote.cohorts = {index: np.array(ids, np.int64) for index, ids in cohorts}
