"""A party's lasting worker: it answers the server's messages, and keeps the party's states."""

from __future__ import annotations

import hashlib
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl import files
from pfl.communication import Message
from pfl.deploy.wire import LIMIT, WireError, pack, unpack
from pfl.errors import ConfigError
from pfl.method.party import Party, Task
from pfl.stages.private import GRADIENTS


class StateFiles:
    """The states of one client in one run, a file for each round after which they may be needed.

    A file is NumPy's `.npz` with an array [1, width] for each state. The client's states are in
    the file of the last round whose message the server has counted. States of later rounds are
    pending; earlier files remain for a server that begins again from its checkpoint.

    Args:
        folder: The folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, index: int) -> Path:
        return self.folder / f"round-{index}.npz"

    def _rounds(self) -> list[int]:
        return [int(path.stem.removeprefix("round-")) for path in self.folder.glob("round-*.npz")]

    def save(self, index: int, states: Mapping[str, Tensor]) -> None:
        """Writes the states after a round; they are pending."""
        if states:
            self.folder.mkdir(parents=True, exist_ok=True)
            with files.replaced(self._path(index)) as file:
                np.savez(file, **{name: rows.cpu().numpy() for name, rows in states.items()})  # type: ignore[arg-type]

    def load(self, counted: int | None, keep: int | None, stateless: bool) -> dict[str, Tensor]:
        """Returns the states after the last round that the server has counted; none before that.

        Pending states of other rounds are forgotten, and so are those before the round `keep`. The
        number of private gradients stays: someone may have seen a message that was lost.

        Raises:
            ConfigError: The states are not there.
        """
        spent = torch.zeros(1, 1)
        rounds = self._rounds()
        for index in rounds:
            if counted is None or index > counted:
                spent = torch.maximum(spent, self.read(index).get(GRADIENTS, spent))
        states: dict[str, Tensor] = {}
        if counted is not None and not stateless:
            states = self.read(counted)
        if spent.any():
            states[GRADIENTS] = torch.maximum(spent, states.get(GRADIENTS, spent))
            self.save(-1 if counted is None else counted, states)
        for index in rounds:
            pending = counted is None or index > counted
            if (pending and index >= 0) or (keep is not None and index < min(keep, counted or 0)):
                self._path(index).unlink()
        return states

    def read(self, index: int) -> dict[str, Tensor]:
        """Returns the states after a round; a ConfigError if they are not there."""
        if not self._path(index).is_file():
            raise ConfigError(
                f"folder: {self.folder} has no states of round {index + 1}, which the server has "
                f"counted; give the folder that was used then"
            )
        with np.load(self._path(index), allow_pickle=False) as stored:
            return {name: torch.from_numpy(stored[name]) for name in stored.files}


class Worker:
    """Answers the messages of a server for one client.

    Args:
        client: The client's number.
        agreed: What server and party must have in common: plain values by name.
        facts: What the server is told of the samples (`OwnSamples.facts`).
        build: Returns the party for a new run, given the number of classes in the federation.
        folder: Where states are kept, in a folder for each run.
        sizes: Whether the server is told the numbers of samples.
        limit: The most bytes that a message of the server may have.
    """

    def __init__(
        self,
        client: int,
        agreed: dict[str, Any],
        facts: dict[str, Any],
        build: Callable[[int | None], Party],
        folder: Path,
        sizes: bool = True,
        limit: int = LIMIT,
    ) -> None:
        self.client, self.agreed, self.facts, self.build = client, agreed, facts, build
        self.folder, self.sizes, self.limit = folder, sizes, limit
        self._run: str | None = None
        self._party: Party
        self._files: StateFiles

    def serve(self, address: Path) -> None:
        """Answers the messages that come to a socket file, one after another, for ever."""
        address.unlink(missing_ok=True)
        with connection.Listener(str(address), "AF_UNIX", backlog=16) as listener:
            address.chmod(0o600)
            while True:
                with listener.accept() as sender:
                    try:
                        sender.send_bytes(self.answer(sender.recv_bytes(self.limit)))
                    except (EOFError, OSError):
                        continue  # who asked has gone

    def answer(self, message: bytes) -> bytes:
        """Returns the answer to a message of the server; a refusal is one line."""
        doing = {"hello": self._hello, "first": self._first, "train": self._train}
        doing |= {"evaluate": self._evaluate, "finish": self._finish}
        try:
            request = unpack(message, self.limit)
            if not isinstance(request, dict) or request.get("do") not in doing:
                raise WireError("the message has no task of pfl")
            return pack(doing[request["do"]](request))
        except ConfigError as error:
            line = str(error)
        except Exception as error:  # its text may have something of the samples
            traceback.print_exc()
            line = f"{type(error).__name__} at the party, whose log says more"
        print(f"party {self.client}: refused: {line}", file=sys.stderr, flush=True)
        return pack({"refused": line})

    # ---- tasks --------------------------------------------------------------------------------

    def _hello(self, request: dict[str, Any]) -> dict[str, Any]:
        if (line := difference(request["agreed"], self.agreed)) is not None:
            raise ConfigError(line)
        return {"client": self.client, "hides": not self.sizes, **self.facts}

    def _first(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"messages": _messages(self._begin(request).first_upload(_task(request)))}

    def _train(self, request: dict[str, Any]) -> dict[str, Any]:
        party, task = self._begin(request), _task(request)
        messages, log = party.train(task)
        states = party.pending()
        for name, rows in states.items():  # NaN among statistics: nothing was trained yet
            if name != "personal_buffers" and not rows.isfinite().all():
                raise ConfigError(f"model.lr: the client state {name} is no longer finite")
        self._files.save(task.round, states)
        losses = {}
        for name, logged in log.losses.items():
            values = torch.cat([loss for loss, _ in logged]).cpu().numpy()
            counts = [count for _, counts in logged for count in counts]
            if counts and not self.sizes:  # steps and their samples tell the number of samples
                values, counts = np.average(values, weights=counts, keepdims=True), [1]
            losses[name] = [values, counts]
        taken = log.gradients if self.sizes else len(losses)
        answer: dict[str, Any] = {"messages": _messages(messages), "losses": losses, "taken": taken}
        answer["tables"] = log.tables
        if GRADIENTS in states:
            answer["gradients"] = float(states[GRADIENTS])
        return answer

    def _evaluate(self, request: dict[str, Any]) -> dict[str, Any]:
        party, task, model = self._begin(request), _task(request), request["model"]
        if isinstance(model, np.ndarray):
            model = torch.from_numpy(model)
        elif model is not None:
            model = task.received["w"]
        evaluation = party.evaluate(task, request["splits"], model, request["parameters"])
        scores: list[Any] = [
            [split, kind, {name: float(values[self.client]) for name, values in numbers.items()}]
            for (split, kind), numbers in evaluation.scores.items()
        ]
        for _, _, numbers in [] if self.sizes else scores:
            numbers["count"] = min(1.0, numbers["count"])
        return {"scores": scores, "numbers": evaluation.numbers.tolist()}

    def _finish(self, request: dict[str, Any]) -> dict[str, Any]:
        self._begin(request)
        return {}

    def _begin(self, request: dict[str, Any]) -> Party:
        """Returns the party with the states that the server has counted."""
        if request["agreed"] != digest(self.agreed):
            raise ConfigError("the server has not asked whether party and server agree")
        if request["run"] != self._run:
            if not request["run"].isalnum():
                raise WireError(f"{request['run']!r} is not the name of a run")
            self._party = self.build(request["classes"])
            self._files = StateFiles(self.folder / request["run"] / f"client-{self.client}")
            self._run = request["run"]
        stateless = not self._party.method.store.names
        counted, keep = request["task"]["counted"], request["keep"]
        self._party.restore(self._files.load(counted, keep, stateless))
        return self._party


def _task(request: dict[str, Any]) -> Task:
    """Returns the task of a request, whose messages must be finite."""
    plain = request["task"]
    received = {name: torch.from_numpy(values) for name, values in plain["received"].items()}
    for name, values in received.items():
        if not values.isfinite().all():
            raise WireError(f"the server's message {name!r} is not finite")
    return Task(plain["round"], received, frozenset(plain["personal"]), None, plain["work"])


def _messages(messages: Mapping[str, Message]) -> dict[str, Any]:
    """Returns messages as arrays and plain values, which are all that the server lacks.

    Where a message has a payload, its parts travel in place of the values.
    """
    sent = {}
    for name, message in messages.items():
        values: Any = message.values.cpu().numpy()
        if message.payload is not None:
            values = {part: array.cpu().numpy() for part, array in message.payload.items()}
        sent[name] = [values, int(torch.as_tensor(message.nbytes).sum())]
    return sent


def digest(agreed: Mapping[str, Any]) -> str:
    """Returns a short name of what server and party have in common."""
    return hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()[:16]


def difference(theirs: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
    """Returns in one line the first value in which server and party differ; None if they agree."""
    for key in [*own, *theirs]:
        if (one := own.get(key, "missing")) != (other := theirs.get(key, "missing")):
            return f"{key}: {one} at the party and {other} at the server; both must have the same"
    return None
