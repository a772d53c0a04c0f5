"""The parties of a server, on the other ends of a `Channel`: who is there, what they are asked."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from pfl.clients import Clients
from pfl.deploy import schema
from pfl.deploy.channel import EVERY, Channel
from pfl.deploy.data import SAME, unlike
from pfl.deploy.overview import other_versions, overview_text, versions
from pfl.deploy.wire import LIMIT, WireError, pack, unpack
from pfl.deploy.worker import difference, digest
from pfl.errors import ConfigError

HELLO = 60.0  # seconds that a new party has to say who it is
HELLO_BYTES = 1 << 26  # the most bytes of what it says then
PAUSE = 1.0  # seconds before a peer that is not taken is asked again; each time twice as many
LONGEST_PAUSE = 60.0
REMARKS = ("versions", "overview", "noise")
LOOK = 0.25  # seconds between two looks for parties


@dataclass
class _Outside:
    """A peer that is not taken as a party.

    Attributes:
        line: The reason.
        pause: The seconds until it is asked again.
        again: When that is, by the clock `time.monotonic`.
    """

    line: str
    pause: float
    again: float


class Parties:
    """The parties of a run, from the server's side: who is connected, and what they have answered.

    Args:
        channel: Carries the messages.
        agreed: What server and parties must have in common: plain values by name.
        count: The number of parties, M.
        timeout: The seconds after which a party without an answer is left out of a round.
        enough: The number of parties that the run waits for before it begins; None: all.
        nodes: The peer of each client, in order, where a channel knows its peers by their keys; no
            other peer is taken, and none with another number. None: a client is the peer that tells
            this number first.

    Attributes:
        facts: What each party has told of its samples, by client.
        remarks: What it has told beside that, by client: versions, an overview of its samples, and
            whether it adds noise.
        peers: The peers of the parties that are there, by client.
        counted: By client, its last round whose message was counted.
        wire: Bytes of the messages of all rounds, to and from the parties.
    """

    def __init__(
        self,
        channel: Channel,
        agreed: dict[str, Any],
        count: int,
        timeout: float = 600.0,
        enough: int | None = None,
        nodes: Sequence[int] | None = None,
    ) -> None:
        if enough is None:
            enough = count
        self.nodes = nodes
        self.channel = channel
        self.agreed = agreed
        self.count = count
        self.timeout = timeout
        self.enough = enough
        self.run = uuid.uuid4().hex
        self.facts: dict[int, dict[str, Any]] = {}
        self.remarks: dict[int, dict[str, Any]] = {}
        self.versions = versions()
        self.peers: dict[int, int] = {}
        self.counted: dict[int, int] = {}
        self.saves: list[tuple[int, dict[int, int]]] = []  # `counted` at the last two checkpoints
        self.saving = False  # whether there are checkpoints
        self.wire = [0, 0]
        self.classes: int | None = None
        self._task = "hello"  # which was asked last
        channel.waits = self._tell_waiting
        self.needs_sizes = False  # whether the mean's weights are numbers of samples
        self._outside: dict[int, _Outside] = {}  # by peer
        self._strikes: dict[int, int] = {}  # answers out of the protocol, by client

    def meet(self) -> None:
        """Asks peers that are new who they are, and forgets parties that are gone.

        A peer that is refused, or does not answer, is asked again later: its party may have been
        mended. The pauses become longer, so that a stranger does not hold up the others.
        """
        here = self.channel.peers()
        self.peers = {client: peer for client, peer in self.peers.items() if peer in here}
        self._outside = {peer: one for peer, one in self._outside.items() if peer in here}
        now = time.monotonic()
        new = []
        for peer in sorted(here - set(self.peers.values())):
            if peer not in self._outside or self._outside[peer].again <= now:
                new.append(peer)
        hello = pack({"do": "hello", "agreed": self.agreed, "versions": self.versions})
        self._task = "hello"
        answers = self.channel.ask(dict.fromkeys(new, hello), min(HELLO, self.timeout))
        for peer in new:
            answer = answers.get(peer, "no answer")
            if isinstance(answer, str):  # it may be about to begin
                self._leave_outside(peer, schema.one_line(answer))
                continue
            try:
                self._take(peer, _answer(answer, HELLO_BYTES))
            except WireError as error:
                line = f"a party is refused: {schema.one_line(str(error))}"
                if peer not in self._outside or self._outside[peer].line != line:
                    rank_zero_warn(line)
                self._leave_outside(peer, line)
            else:
                self._outside.pop(peer, None)

    def _leave_outside(self, peer: int, line: str) -> None:
        """Notes why a peer is not taken, and when it is asked again."""
        pause = PAUSE
        if peer in self._outside:
            pause = min(2 * self._outside[peer].pause, LONGEST_PAUSE)
        self._outside[peer] = _Outside(line, pause, time.monotonic() + pause)

    def _take(self, peer: int, answer: dict[str, Any]) -> None:
        """Takes a peer as the party that it says it is; a WireError if it cannot be."""
        if "refused" in answer:
            raise WireError(str(answer["refused"]))
        facts = schema.read_facts(answer, self.count)
        remarks = {key: facts.pop(key) for key in REMARKS}
        client = facts["client"]
        if self.needs_sizes and facts["hides"]:
            raise WireError(
                f"model.weighting: samples; party {client} does not tell its number of samples, "
                f"use uniform"
            )
        if self.nodes is not None and self.nodes[client] != peer:
            raise WireError(f"node {peer} says that it is client {client}, which is another node")
        if client in self.peers:
            raise WireError(f"client {client} is there twice")
        if self._strikes.get(client, 0) >= schema.STRIKES:
            raise WireError(
                f"client {client} has broken the protocol {schema.STRIKES} times; start the server "
                f"again once it is mended"
            )
        self._compare(client, facts)
        known = self.facts.setdefault(client, facts)
        if (line := difference(facts, known)) is not None:
            raise WireError(f"client {client} has come back with other samples: {line}")
        self.remarks[client] = remarks
        self.peers[client] = peer

    def _compare(self, client: int, facts: dict[str, Any]) -> None:
        """Refuses a party whose samples mean something else than those of the run.

        All of it is that of the run's file if that has it, and else that of the party that came
        first.
        """
        for key in SAME:
            known = self.agreed.get(f"data.{key}")
            whose = "the run"
            if known is None:
                first = next(iter(self.facts), None)
                if first is None:
                    continue
                known = self.facts[first].get(key)
                whose = f"party {first}"
            line = unlike(key, facts.get(key), f"party {client}", known, whose)
            if line is not None:
                raise WireError(line)
        most = self.agreed.get("data.classes")
        if most is not None and (facts["classes"] is None or facts["classes"] > most):
            raise WireError(
                f"classes: party {client} has {facts['classes']}, and the run has {most}; it must "
                f"be at most {most}"
            )

    def wait(self, enough: int) -> None:
        """Waits until so many parties are there.

        A peer that is refused is named by `meet`, and does not end the wait.

        Raises:
            ConfigError: They do not come in time.
        """
        begin = time.monotonic()
        end = begin + self.timeout
        line = begin + EVERY
        while len(self.peers) < enough:
            self.meet()
            if len(self.peers) >= enough:
                return
            if time.monotonic() > end:
                here = f"{len(self.peers)} of {enough} parties are there"
                lines = dict.fromkeys(one.line for one in self._outside.values())
                raise ConfigError("; ".join([here, *lines]))
            if time.monotonic() > line:
                line = time.monotonic() + EVERY
                print("\n".join([f"waiting for {enough} parties:", *self.lines()]), flush=True)
            time.sleep(LOOK)

    def _tell_waiting(self, peers: set[int]) -> None:
        """Prints which peers have not answered yet."""
        clients = {peer: client for client, peer in self.peers.items()}
        names = []
        for peer in sorted(peers):
            if peer in clients:
                names.append(f"party {clients[peer]}")
            else:
                names.append(f"node {peer}")
        print(f"waiting for {', '.join(names)} ({self._task})", flush=True)

    def lines(self) -> list[str]:
        """Returns a line for each party: its samples, or why it is not there."""
        found = []
        for client in range(self.count):
            words = "is not there"
            if client in self.peers:
                facts = self.facts[client]
                words = "does not tell its numbers of samples"
                if not facts["hides"]:
                    train, val, test = facts["sizes"]
                    words = f"{train} samples to train with, {val} to validate, {test} to test"
                if self.remarks[client]["noise"]:
                    words += "; adds noise of its own"
                if others := other_versions(self.remarks[client]["versions"], self.versions):
                    words += f"; {', '.join(others)}"
            found.append(f"party {client}: {words}")
        found += [f"outside: {one.line}" for _, one in sorted(self._outside.items())]
        return found

    def overview(self) -> str:
        """Returns tables of what the parties tell of their samples; empty if they tell nothing."""
        told = {}
        names: dict[str, Any] = {}
        for client in sorted(self.peers):
            told[f"party {client}"] = self.remarks[client]["overview"]
            names = self.facts[client]
        return overview_text(told, names.get("class_names"), names.get("feature_names"))

    def task(self, clients: Clients) -> dict[str, Any]:
        """Returns the task of one client: what it has received, and what is counted."""
        client = int(clients.ids[0])
        keep = [self.counted]
        if self.saving:
            keep = [counted for _, counted in self.saves[:1]]
        return {
            "task": {
                "round": clients.round,
                "received": {name: x.cpu().numpy() for name, x in clients.received.items()},
                "personal": sorted(clients.personal_messages),
                "counted": self.counted.get(client),
                "work": clients.work,
            },
            "keep": next(iter(keep), {}).get(client),
        }

    def ask(
        self, what: str, requests: Mapping[int, dict[str, Any]], limit: int = LIMIT
    ) -> dict[int, Any]:
        """Returns the answers of those parties that have answered, by client; names the others.

        Args:
            what: The task: "first", "train", "evaluate" or "finish".
            requests: What each party gets, by client.
            limit: The most bytes of an answer.
        """
        head = {"do": what, "agreed": digest(self.agreed), "run": self.run, "classes": self.classes}
        here = {client: self.peers[client] for client in requests if client in self.peers}
        messages = {peer: pack(head | requests[client]) for client, peer in here.items()}
        self._task = what
        answers = self.channel.ask(messages, self.timeout)
        values = {}
        for client, peer in here.items():
            answer = answers.get(peer, f"no answer within {self.timeout:g} s")
            if what in ("first", "train"):
                self.wire[0] += len(messages[peer])
                if isinstance(answer, bytes):
                    self.wire[1] += len(answer)
            if isinstance(answer, str):
                self.leave_out(client, what, answer)
                continue
            with self.naming(client, what):
                value = _answer(answer, limit)
                if "refused" in value:
                    self.leave_out(client, what, str(value["refused"]))
                else:
                    values[client] = value
        return values

    def leave_out(self, client: int, what: str, line: str) -> None:
        """Says in a warning why a party is left out."""
        rank_zero_warn(f"party {client} is left out ({what}): {schema.one_line(line)}")

    def blame(self, client: int, what: str, line: str) -> None:
        """Leaves a party out that has broken the protocol, and forgets it after `STRIKES` times."""
        self.leave_out(client, what, line)
        self._strikes[client] = self._strikes.get(client, 0) + 1
        if self._strikes[client] >= schema.STRIKES and client in self.peers:
            del self.peers[client]
            rank_zero_warn(
                f"party {client} has broken the protocol {schema.STRIKES} times; it is not asked "
                f"again until the server is started anew"
            )

    @contextmanager
    def naming(self, client: int, what: str) -> Iterator[None]:
        """Turns a `WireError` about an answer into a warning that names the party."""
        try:
            yield
        except WireError as error:
            self.blame(client, what, str(error))

    # ---- checkpoints --------------------------------------------------------------------------

    def saved(self, rounds: int) -> None:
        """Notes that a checkpoint is made after some rounds."""
        self.saves = [save for save in self.saves if save[0] != rounds][-1:]
        self.saves.append((rounds, dict(self.counted)))

    def state_dict(self) -> dict[str, Any]:
        """Returns what a run that continues or is exported needs, as plain values."""
        return {
            "run": self.run,
            "counted": self.counted,
            "saves": self.saves,
            "wire": self.wire,
            "facts": self.facts,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` has returned, but for the parties of that time."""
        self.run = state["run"]
        self.counted = dict(state["counted"])
        self.saves = list(state["saves"])
        self.wire = list(state["wire"])


def _answer(answer: bytes, limit: int = LIMIT) -> dict[str, Any]:
    """Returns the value of an answer; a WireError if it is none."""
    value = unpack(answer, limit)
    if not isinstance(value, dict):
        raise WireError("the answer is not one of pfl")
    return value
