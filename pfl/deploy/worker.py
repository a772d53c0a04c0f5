"""A party's lasting worker: it answers the server's messages, and keeps the party's states."""

from __future__ import annotations

import hashlib
import json
import os
import stat
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
from pfl.deploy import schema
from pfl.deploy.wire import LIMIT, pack, unpack
from pfl.errors import ConfigError
from pfl.method.party import Party, Task
from pfl.randomness import KEY_BYTES, Secret
from pfl.rounds.checkpoint_io import KEY_FILE, read_key, write_key
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
            private_folder(self.folder)
            with files.replaced(self._path(index)) as file:
                os.fchmod(file.fileno(), 0o600)  # whatever the user's umask is
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
            last = -1
            if counted is not None:
                last = counted
            self.save(last, states)
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


def private_folder(folder: Path) -> None:
    """Creates a folder and those above it that do not exist; only their owner can enter (700)."""
    for path in [*reversed(folder.parents), folder]:
        if not path.is_dir():
            path.mkdir(0o700, exist_ok=True)


def listener(address: Path) -> connection.Listener:
    """Returns a listener at a socket file, which only processes of the same user can reach.

    Raises:
        ConfigError: There can be none, or something else than an old socket is at the path.
    """
    if os.path.lexists(address):
        if not stat.S_ISSOCK(address.lstat().st_mode):
            raise ConfigError(f"socket: {address} is there, and is not a socket; give another path")
        try:
            connection.Client(str(address), "AF_UNIX").close()
        except OSError:  # its process has ended
            address.unlink()
        else:
            raise ConfigError(f"socket: another process answers at {address}; end it first")
    try:
        incoming = connection.Listener(str(address), "AF_UNIX", backlog=16)
    except OSError as error:
        raise ConfigError(
            f"socket: there can be no socket {address} ({error.strerror or error}); give a short "
            f"path in a folder that exists, such as /tmp/party-0.sock"
        ) from error
    address.chmod(0o600)
    return incoming


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
        self.client = client
        self.agreed = agreed
        self.facts = facts
        self.build = build
        self.folder = folder
        self.sizes = sizes
        self.limit = limit
        self._run: str | None = None
        self._party: Party
        self._files: StateFiles
        self._secret: Secret | None = None

    def serve(self, address: Path, ready: Callable[[], None] = lambda: None) -> None:
        """Answers the messages that come to a socket file, one after another, for ever.

        Args:
            address: The socket file. A socket that an ended worker has left there is replaced.
            ready: Called once messages can come.

        Raises:
            ConfigError: There can be no socket file at this path.
        """
        with listener(address) as incoming:
            ready()
            while True:
                with incoming.accept() as sender:
                    try:
                        sender.send_bytes(self.answer(sender.recv_bytes(self.limit)))
                    except (EOFError, OSError):
                        continue  # who asked has gone

    def answer(self, message: bytes) -> bytes:
        """Returns the answer to a message of the server; a refusal is one line."""
        doing = {"hello": self._hello, "first": self._first, "train": self._train}
        doing |= {"evaluate": self._evaluate, "finish": self._finish}
        try:
            request = schema.read_request(unpack(message, self.limit), digest(self.agreed))
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
        party = self._begin(request)
        task = _task(request)
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
        taken = len(losses)
        if self.sizes:
            taken = log.gradients
        answer: dict[str, Any] = {"messages": _messages(messages), "losses": losses, "taken": taken}
        answer["tables"] = log.tables
        if GRADIENTS in states:
            answer["gradients"] = float(states[GRADIENTS])
        return answer

    def _evaluate(self, request: dict[str, Any]) -> dict[str, Any]:
        party = self._begin(request)
        task = _task(request)
        model = request["model"]
        if isinstance(model, np.ndarray):
            model = torch.from_numpy(model)
        elif model is not None:
            model = task.received["w"]
        evaluation = party.evaluate(task, request["splits"], model, request["parameters"])
        scores: list[Any] = [
            [split, kind, {name: float(values[self.client]) for name, values in numbers.items()}]
            for (split, kind), numbers in evaluation.scores.items()
        ]
        if not self.sizes:
            for _, _, numbers in scores:
                numbers["count"] = min(1.0, numbers["count"])
        return {"scores": scores, "numbers": evaluation.numbers.tolist()}

    def _finish(self, request: dict[str, Any]) -> dict[str, Any]:
        self._begin(request)
        return {}

    def _begin(self, request: dict[str, Any]) -> Party:
        """Returns the party with the states that the server has counted."""
        if request["run"] != self._run:
            self._party = self.build(request["classes"])
            self._files = StateFiles(self.folder / request["run"] / f"client-{self.client}")
            self._secret = self._own_secret()
            self._run = request["run"]
        party = self._party
        stateless = not party.method.store.names
        states = self._files.load(request["task"]["counted"], request["keep"], stateless)
        party.restore(states)
        if self._secret is not None:
            party.method.take_secret(task_secret(self._secret, request, states))
        return party

    def _own_secret(self) -> Secret | None:
        """Returns the key of this party's noise in the run; None if nothing is drawn from a key."""
        privacy = self._party.loop.sample_privacy
        if privacy is None or privacy.reproducible:
            return None
        path = self._files.folder / KEY_FILE
        if not path.is_file():
            private_folder(path.parent)
            write_key(path, Secret().key)
        return Secret(read_key(path, "folder"))


def task_secret(own: Secret, request: Mapping[str, Any], states: Mapping[str, Tensor]) -> Secret:
    """Returns the key of the noise in one task.

    A task that comes again, from a server that continues from its checkpoint, has the same noise.
    Any other task has noise of its own, so that a server that asks for one round twice, with two
    models, cannot subtract one answer from the other.

    Args:
        own: The party's key in this run.
        request: The server's request.
        states: The client's states before the task.
    """
    rows = {name: value.numpy() for name, value in sorted(states.items()) if name != GRADIENTS}
    content = pack([request["do"], request["task"], rows])
    return Secret(hashlib.blake2b(content, key=own.key, digest_size=KEY_BYTES).digest())


def _task(request: dict[str, Any]) -> Task:
    """Returns the task of a request."""
    plain = request["task"]
    received = {name: torch.from_numpy(values) for name, values in plain["received"].items()}
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
