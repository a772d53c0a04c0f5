"""One round of a method: what goes down, who trains, what comes up, what the server makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from pfl.aggregation.joined import Values, join, split
from pfl.aggregation.robust import RobustMean
from pfl.clients import Clients
from pfl.communication import Message
from pfl.errors import Diverged
from pfl.method import checks, statistics
from pfl.method.client_side import check_group, server_tensors, train_clients
from pfl.method.factors import PRODUCTS, aggregation_gap
from pfl.method.round_totals import RoundTotals, not_finite, value_range
from pfl.method.sides import Log, logging_to, on_side
from pfl.method.states import KEPT
from pfl.randomness import generator

if TYPE_CHECKING:
    from pfl.method.algorithm import FederatedAlgorithm

Messages = Mapping[str, Message]


class Exchange(NamedTuple):
    """What came of a group of clients: their messages, and what is booked for them.

    Attributes:
        sums: The weighted sums of the messages that the server gets as means.
        rows: The messages that the server gets one by one, [C, K].
        kept: The messages that the server keeps, [C, K].
        down, up: Each client's bytes.
        ranges: The least and the greatest value of each client state.
        log: What the clients have logged.
    """

    sums: dict[str, Tensor]
    rows: dict[str, Tensor]
    kept: dict[str, Tensor]
    down: Tensor | int
    up: Tensor | int
    ranges: dict[str, Tensor]
    log: Log


class Round:
    """A round in which one process, or several, simulate the server and the cohort.

    Args:
        method: The method.
        index: The round, from 0.

    Attributes:
        totals: What was added up over the clients so far.
        train_clients: The client's half of the round; where clients are apart from the server, a
            function that asks them.
    """

    def __init__(self, method: FederatedAlgorithm, index: int) -> None:
        self.method, self.index = method, index
        who = method.run.loop.participation
        attack = None if who.attackers is None else who.attackers.attack
        together = attack if who.collude else None
        robust = RobustMean(who.aggregation, together) if who.aggregation or together else None
        self.totals = RoundTotals(method.weighting, method.run.private, robust, method.factors)
        self.train_clients: Callable[[FederatedAlgorithm, Clients], Messages] = train_clients
        self._download: dict[str, Message] = {}

    # ---- down ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Collects what clients send first, and forms what all clients receive."""
        method = self.method
        if method.sends_first:
            for clients, messages in method.first_uploads(method.cohort(self.index)):
                references = self._references(messages)
                for name, message in self._attack(messages, clients, references).items():
                    method.states.store.write(KEPT + name, clients.ids, message.values)
                up = sum(message.nbytes for message in messages.values())
                self.totals.counts[3] += method.ledger.add(clients.ids, 0, up)[1]
        with on_side("server", "begin_round"):
            method.begin_round(self.index)
        self._download = common_download(method)

    def receive(self, clients: Clients) -> int | Tensor:
        """Gives the clients what they receive in this round; returns each client's bytes."""
        method = self.method
        with on_side("server", "download_for"):
            own = checks.downloads(method, method.download_for(clients.ids), clients)
        messages = {**self._download, **own}
        clients.received = {name: message.values for name, message in messages.items()}
        clients.personal_messages = frozenset(own)
        statistics.receive(method, clients)
        return sum(message.nbytes for message in messages.values())

    # ---- the clients --------------------------------------------------------------------------

    def train(self, clients: Clients) -> None:
        """Trains a chunk of clients, and keeps the states and messages of those that report."""
        method = self.method
        clients = self._pool(clients) if method.pooled else clients
        if method.device.type == "cpu":  # a GPU may not hold the states of the whole chunk
            method.states.load(clients)
        if method.oracle.engine.strict and not method.rounds_compared:
            method.rounds_compared = self._compare_groups(clients)
        whole = [(clients, True)]  # a pool does not fail
        parts = whole if method.pooled else method.run.loop.participation.parts(clients)
        for part, arrives in parts:
            # A first chunk without clients runs as well: it gives the shapes of the sums.
            if len(part) or (arrives and not self.totals.counts[:2].any()):
                self.train_part(part, arrives)

    def train_part(self, clients: Clients, arrives: bool) -> None:
        """Trains clients in groups; what they send and remember is kept only if it `arrives`."""
        method, totals = self.method, self.totals
        for group, sent in method.groups.run(clients, self._train_group):
            down, up = method.ledger.add(group.ids, sent.down, sent.up if arrives else 0)
            method.states.commit(group, arrives)  # else new states stay pending, and are forgotten
            if not arrives:
                totals.add_lost(len(group), down, up, sent.log)
                continue
            for name, values in sent.kept.items():
                method.states.store.write(KEPT + name, group.ids, values)
            totals.log.extend(sent.log)
            totals.note_ranges(sent.ranges)
            counts = [group.sizes.sum(), len(group), down, up]
            totals.add(sent.sums, counts, group.ids, sent.rows)

    def _train_group(self, clients: Clients) -> Exchange:
        """Trains a group of clients, in a thread if there are several."""
        method, totals, log = self.method, self.totals, Log()
        who = method.run.loop.participation
        measured = totals.private or totals.robust or who.attackers
        with logging_to(log), method.in_full_precision():
            if not clients.state:
                method.states.load(clients)
            down = self.receive(clients)
            messages = self.train_clients(method, clients)
            if measured and totals.references is None:
                totals.references = self._references(messages)
            messages = self._attack(messages, clients, totals.references or {})
            ranges = {name: value_range(rows) for name, rows in clients.state.items()}
            if method.personal_buffers == "received" and "personal_buffers" in clients.state:
                clients.state["personal_buffers"][clients.empty] = torch.nan  # nothing was trained
        up = sum(message.nbytes for message in messages.values())
        kept = {name: m.values for name, m in messages.items() if name in method.states.messages}
        rest = {name: m for name, m in messages.items() if name not in kept}
        rows = {name: m.values for name, m in rest.items() if m.reduce == "rows"}
        means = {name: m for name, m in rest.items() if m.reduce == "mean"}
        if totals.private is not None:
            checks.refuse_rows(method, rows)
        if totals.robust is not None:
            checks.require_means(method, means, messages)
            if totals.robust.limit is None:
                rows |= {name: message.values for name, message in means.items()}
        sums = totals.weigh(means, clients.sizes, method.space.vector)
        return Exchange(sums, rows, kept, down, up, ranges, log)

    def _attack(self, messages: Messages, clients: Clients, references: Values) -> Messages:
        """Returns the messages with what attackers send in place of theirs."""
        who = self.method.run.loop.participation
        if not messages or who.attackers is None or not who.attackers.attack.replaces("change"):
            return messages
        values = {name: message.values.clone() for name, message in messages.items()}
        for row in np.flatnonzero(who.attacking(self.index, clients.ids)):
            rng = generator(self.method.seed, "attack", self.index, int(clients.ids[row]))
            one = {name: rows[row : row + 1] for name, rows in values.items()}
            sent = who.attackers.attack.change(join(one, references)[0], rng)
            for name, message in split(sent, one, references).items():
                values[name][row] = message
        return {name: replace(m, values=values[name]) for name, m in messages.items()}

    def _references(self, messages: Messages) -> dict[str, Tensor]:
        """Returns the public values near which messages lie, by name, where they are not zero."""
        found = {n: m.reference for n, m in messages.items() if m.reference is not None}
        if "w" in messages and "w" in self._download and "w" not in found:
            sent = self._download["w"].values
            if sent.shape == messages["w"].values.shape[1:]:
                found["w"] = sent.clone()  # the server may write into what it sent
        return found

    def _pool(self, clients: Clients) -> Clients:
        """Returns the owner of all samples instead of the chunk with the cohort's first client.

        Returns no client instead of any other chunk.
        """
        method = self.method
        here = np.isin(method.cohort(self.index)[:1], clients.ids)
        pool = clients.data.as_one_client(method.population)
        return replace(clients, ids=np.zeros(here.sum(), np.int64), data=pool)

    def _compare_groups(self, clients: Clients) -> bool:
        """Trains three clients together and one by one, and compares; returns whether it could."""
        if len(clients) < 2:
            return False
        rows = np.unique(np.linspace(0, len(clients) - 1, 3).astype(int))
        group = clients.rows(rows)  # the largest, the smallest, and one between them
        with logging_to(Log()), self.method.in_full_precision():
            check_group(self.method, group, self.receive)
        return True

    # ---- up -----------------------------------------------------------------------------------

    def finish(self) -> dict[str, float]:
        """Adds everything up over processes, updates the global model; returns the round's row."""
        method, totals = self.method, self.totals
        totals.reduce()
        _, clients, down, up, dropped, _ = totals.counts.tolist()
        method.participants, method.participant_ids = int(clients), totals.ids
        if totals.private is not None:  # the number of clients that came is not public
            method.participants = totals.private.cohort
            totals.metrics |= totals.private.facts(method.rounds + 1)
        who, sizes = method.run.loop.participation, method.client_sizes[totals.ids]
        received = totals.means(self.index, sizes, who.attacking(self.index, totals.ids))
        self._require_none("the client state", totals.not_finite)
        self._require_none("the clients' message", not_finite(received or {}))
        if received is not None:
            if "buffers" in received:
                method.oracle.buffers.write(method.network, received.pop("buffers"))
            if PRODUCTS in received:
                gap = aggregation_gap(method.factors, received["w"], received[PRODUCTS])
                totals.metrics |= {} if gap is None else {"train/aggregation_gap": gap}
            with on_side("server", "server_update"):
                update = cast(Callable[[dict[str, Tensor]], object], method.server_update)
                checks.check_nothing(method, "server_update", update(checks.ByName(received)))
        self._step()
        method.rounds += 1
        method.samples_seen += totals.samples
        method.bytes_down += int(down)
        method.bytes_up += int(up)
        timed = who.clock is not None and not method.pooled
        losses = {f"{name}/loss": loss for name, loss in totals.mean_losses().items()}
        return {
            "round": method.rounds,
            **losses,
            "train/samples": method.samples_seen,
            "comm/uplink_bytes": method.bytes_up,
            "comm/downlink_bytes": method.bytes_down,
            **({"virtual_seconds": who.end(self.index)} if timed else {}),
            "participants": method.participants,
            **({"dropped": int(dropped)} if who.dropout else {}),
            **totals.metrics,
        }

    def _step(self) -> None:
        """Takes the step of the server's optimizer, and checks that all values are finite.

        Without a gradient (the method set the model itself, or no client took part) the step moves
        nothing. Lightning counts rounds, and saves checkpoints, by optimizer steps.
        """
        method = self.method
        optimizer, vector = cast(torch.optim.Optimizer, method.optimizers()), method.space.vector
        optimizer.step()
        gradient, vector.grad = vector.grad, None
        names = not_finite(server_tensors(method) | optimizer.state.get(vector, {}))
        if not names:
            return
        own = {name for name in names if name.startswith("self.")}
        if gradient is not None:
            own.discard("self.global_model")  # the optimizer has moved it
            own |= not_finite({"self.space.vector.grad": gradient})
        if own:
            raise Diverged(
                f"model: server_update of {type(method).__name__} gave values that are not finite "
                f"in round {method.rounds + 1}: {', '.join(sorted(own))}"
            )
        self._require_none("the server's", names)

    def _require_none(self, whose: str, not_finite: set[str]) -> None:
        """Raises Diverged if there are names of values that are not finite."""
        if not_finite:
            names = ", ".join(sorted(name.removeprefix("self.") for name in not_finite))
            raise Diverged(
                f"model.lr: {self.method.lr}; {whose} {names} is no longer finite in round "
                f"{self.method.rounds + 1}, a smaller rate may help"
            )


def receiver_now(method: FederatedAlgorithm) -> Callable[[Clients], None]:
    """Returns a function that gives clients what the server would send them now."""
    common = common_download(method)

    def receive(clients: Clients) -> None:
        with on_side("server", "evaluation_for"):
            own = checks.downloads(method, method.evaluation_for(clients.ids), clients)
        clients.received = {name: message.values for name, message in {**common, **own}.items()}
        clients.personal_messages = frozenset(own)

    return receive


def common_download(method: FederatedAlgorithm) -> dict[str, Message]:
    """Returns what the server sends to every client now, by name."""
    with on_side("server", "download"):
        messages = checks.downloads(method, method.download())
    return statistics.send_down(method, messages)
