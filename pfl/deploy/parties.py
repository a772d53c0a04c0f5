"""The parties of a server, on the other ends of a `Channel`: who is there, what they are asked."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from pfl.clients import Clients
from pfl.deploy import schema
from pfl.deploy.channel import Channel
from pfl.deploy.data import NAMES, unlike
from pfl.deploy.wire import LIMIT, WireError, pack, unpack
from pfl.deploy.worker import difference, digest
from pfl.errors import ConfigError

HELLO = 60.0  # seconds that a new party has to say who it is


class Parties:
    """The parties of a run, from the server's side: who is connected, and what they have answered.

    Args:
        channel: Carries the messages.
        agreed: What server and parties must have in common: plain values by name.
        count: The number of parties, M.
        timeout: The seconds after which a party without an answer is left out of a round.
        enough: The number of parties that the run waits for before it begins; None: all.

    Attributes:
        facts: What each party has told of its samples, by client.
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
    ) -> None:
        if enough is None:
            enough = count
        self.channel = channel
        self.agreed = agreed
        self.count = count
        self.timeout = timeout
        self.enough = enough
        self.run = uuid.uuid4().hex
        self.facts: dict[int, dict[str, Any]] = {}
        self.peers: dict[int, int] = {}
        self.counted: dict[int, int] = {}
        self.saves: list[tuple[int, dict[int, int]]] = []  # `counted` at the last two checkpoints
        self.saving = False  # whether there are checkpoints
        self.wire = [0, 0]
        self.classes: int | None = None
        self._refused: dict[int, str] = {}  # the reason, by peer
        self._silent: set[str] = set()

    def meet(self) -> None:
        """Asks peers that are new who they are, and forgets parties that are gone."""
        here = self.channel.peers()
        self.peers = {client: peer for client, peer in self.peers.items() if peer in here}
        self._refused = {peer: line for peer, line in self._refused.items() if peer in here}
        hello = pack({"do": "hello", "agreed": self.agreed})
        new = here - set(self.peers.values()) - self._refused.keys()
        answers = self.channel.ask(dict.fromkeys(new, hello), min(HELLO, self.timeout))
        self._silent = {answer for answer in answers.values() if isinstance(answer, str)}
        for peer, answer in answers.items():
            if isinstance(answer, str):
                continue  # it may be about to begin
            try:
                facts = schema.read_facts(_answer(answer), self.count)
                client = facts["client"]
                if client in self.peers:
                    raise WireError(f"client {client} is there twice")
                self._compare(client, facts)
                known = self.facts.setdefault(client, facts)
                if (line := difference(facts, known)) is not None:
                    raise WireError(f"client {client} has come back with other samples: {line}")
                self.peers[client] = peer
            except WireError as error:
                self._refused[peer] = f"a party is refused: {error}"
                rank_zero_warn(self._refused[peer])

    def _compare(self, client: int, facts: dict[str, Any]) -> None:
        """Refuses a party whose samples mean something else than those of the run.

        The names of classes and columns, and the transforms, are those of the run's file if it has
        them; all else is that of the party that came first.
        """
        first = next(iter(self.facts), None)
        if first is not None:
            others = self.facts[first]
            for key in ("input", "target"):
                if facts[key] != others[key]:
                    this = " ".join(map(str, facts[key]))
                    other = " ".join(map(str, others[key]))
                    raise WireError(
                        f"{key}: a sample of party {client} is {this}, and one of party {first} "
                        f"is {other}; all parties must have the same"
                    )
        for key in NAMES:
            names = self.agreed.get(f"data.{key}")
            whose = "the run"
            if names is None and first is not None:
                names = self.facts[first].get(key)
                whose = f"party {first}"
            elif names is None:
                continue
            line = unlike(key, facts.get(key), f"party {client}", names, whose)
            if line is not None:
                raise WireError(line)

    def wait(self, enough: int) -> None:
        """Waits until so many parties are there.

        Raises:
            ConfigError: They do not come, or one of them does not fit.
        """
        end = time.monotonic() + self.timeout
        while len(self.peers) < enough:
            self.meet()
            if len(self.peers) >= enough:
                return
            if time.monotonic() > end or (self._refused and not self.counted):
                here = f"{len(self.peers)} of {enough} parties are there"
                raise ConfigError("; ".join([here, *self._refused.values(), *self._silent]))
            time.sleep(0.1)

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
        answers = self.channel.ask(messages, self.timeout)
        values = {}
        for client, peer in here.items():
            answer = answers.get(peer, f"no answer within {self.timeout:g} s")
            if what in ("first", "train"):
                self.wire[0] += len(messages[peer])
                if isinstance(answer, bytes):
                    self.wire[1] += len(answer)
            with self.naming(client, what):
                values[client] = _answer(answer, limit)
        return values

    @contextmanager
    def naming(self, client: int, what: str) -> Iterator[None]:
        """Turns a `WireError` about an answer into a warning that names the party."""
        try:
            yield
        except WireError as error:
            rank_zero_warn(f"party {client} is left out ({what}): {error}")

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


def _answer(answer: bytes | str, limit: int = LIMIT) -> dict[str, Any]:
    """Returns the value of an answer; a WireError if there is none, or it is a refusal."""
    if isinstance(answer, str):
        raise WireError(answer)
    value = unpack(answer, limit)
    if not isinstance(value, dict):
        raise WireError("the answer is not one of pfl")
    if "refused" in value:
        raise WireError(str(value["refused"])[:500])
    return value
