"""A party's lasting worker: it answers the server's messages, and keeps the party's states."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import re
import socket
import stat
import struct
import sys
import threading
import time
import traceback
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl import files
from pfl.communication import Message
from pfl.deploy import schema
from pfl.deploy.link import Link
from pfl.deploy.overview import other_versions
from pfl.deploy.policy import Policy
from pfl.deploy.wire import LIMIT, WireError, pack, unpack
from pfl.errors import ConfigError
from pfl.method.exported import has_own_models
from pfl.method.party import Party, Task
from pfl.randomness import KEY_BYTES, Secret
from pfl.rounds.checkpoint_io import KEY_FILE, read_key, write_key
from pfl.stages.private import GRADIENTS

ABOUT = "_about"
RECEIVED = "received.bin"
STATE_FILE = re.compile(r"round-(-1|[0-9]{1,10})\.npz")


PATIENCE = 60.0  # seconds that a connection may be silent
CONNECTIONS = 32  # that may be open without a whole message


class StateFiles:
    """The states of one client in one run, a file for each round after which they may be needed.

    A file is NumPy's `.npz` with an array [1, width] for each state, and `ABOUT`: the run, the
    client, the round and a checksum. The client's states are in the file of the last round whose
    message the server has counted. States of later rounds are pending; earlier files remain for a
    server that begins again from its checkpoint.

    Args:
        folder: The folder of the files, `<run>/client-<k>`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, index: int) -> Path:
        return self.folder / f"round-{index}.npz"

    def _rounds(self) -> list[int]:
        rounds = []
        for path in sorted(self.folder.glob("round-*.npz")):
            found = STATE_FILE.fullmatch(path.name)
            if found is None:
                raise ConfigError(f"folder: {path} is no file of pfl node; move it away")
            rounds.append(int(found[1]))
        return rounds

    def _about(self, index: int, rows: Mapping[str, np.ndarray]) -> str:
        """Returns what a file tells of itself."""
        content = pack({name: rows[name] for name in sorted(rows)})
        about = {
            "run": self.folder.parent.name,
            "client": self.folder.name,
            "round": index,
            "checksum": hashlib.sha256(content).hexdigest(),
        }
        return json.dumps(about)

    def save(self, index: int, states: Mapping[str, Tensor]) -> None:
        """Writes the states after a round; they are pending."""
        if states:
            private_folder(self.folder)
            with files.replaced(self._path(index)) as file:
                os.fchmod(file.fileno(), 0o600)  # whatever the user's umask is
                rows: dict[str, Any] = {name: x.cpu().numpy() for name, x in states.items()}
                rows[ABOUT] = np.array(self._about(index, rows))
                np.savez(file, **rows)

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

    def save_received(self, request: Mapping[str, Any]) -> None:
        """Writes what the client has received last, from which its own model follows."""
        private_folder(self.folder)
        told = {key: request[key] for key in ("task", "classes")}
        content = pack([self.folder.parent.name, self.folder.name, told])
        with files.replaced(self.folder / RECEIVED) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(hashlib.sha256(content).digest() + content)

    def received(self) -> dict[str, Any]:
        """Returns what `save_received` has written last: `task` and `classes` of a request."""
        path = self.folder / RECEIVED
        with files.reading(path):
            stored = path.read_bytes()
        size = hashlib.sha256().digest_size
        try:
            run, client, told = unpack(stored[size:])
            task = told["task"]
            holds = hashlib.sha256(stored[size:]).digest() == stored[:size]
            holds = holds and (run, client) == (self.folder.parent.name, self.folder.name)
        except (WireError, *files.DAMAGE) as error:
            raise ConfigError(f"folder: {path} is damaged") from error
        if not holds or not isinstance(task, dict):
            raise ConfigError(f"folder: {path} is damaged, or of another party or run")
        return dict(told)

    def trained(self) -> int:
        """Returns how many times the client has trained in the run, by the file `trained.json`."""
        path = self.folder / "trained.json"
        with files.reading(path):
            return int(files.read_json(path).get("trained", 0))

    def note_trained(self, count: int) -> None:
        """Writes how many times the client has trained in the run."""
        private_folder(self.folder)
        path = self.folder / "trained.json"
        files.write_json(path, {"trained": count})
        path.chmod(0o600)

    def read(self, index: int) -> dict[str, Tensor]:
        """Returns the states after a round.

        Raises:
            ConfigError: There is no file, or it is not what was written for this round.
        """
        path = self._path(index)
        if not path.is_file():
            raise ConfigError(
                f"folder: {self.folder} has no states of round {index + 1}, which the server has "
                f"counted; give the folder that was used then"
            )
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                rows = {name: stored[name] for name in stored.files}
            told = json.loads(str(rows.pop(ABOUT)))
            own = json.loads(self._about(index, rows))
        except (*files.DAMAGE, EOFError, zipfile.BadZipFile, zlib.error, WireError) as error:
            raise ConfigError(
                f"folder: {path} is damaged, or no file of states; give back the file that pfl "
                f"node has written"
            ) from error
        if told != own:
            key = next((key for key in own if told.get(key) != own[key]), "checksum")
            raise ConfigError(
                f"folder: {path} has another {key} than was written for it: it was changed or "
                f"renamed, or is of another party; give back the file that pfl node has written"
            )
        return {name: torch.from_numpy(values) for name, values in rows.items()}


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


def _only_one(folder: Path, client: int) -> AbstractContextManager[None]:
    """Holds the lock of a party; a ConfigError if another process has it."""
    private_folder(folder)
    taken = f"folder: another pfl node works for party {client} in {folder}; end it first"
    return files.locked(folder / f"{client}.lock", taken, mode=0o600)


def _in_background(function: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=function, args=arguments, daemon=True).start()


def _accept(
    incoming: connection.Listener, inbox: queue.Queue, limit: int, closing: threading.Event
) -> None:
    """Takes connections; beyond `CONNECTIONS` that have sent nothing yet, one is closed at once."""
    free = threading.Semaphore(CONNECTIONS)
    while True:
        try:
            sender = incoming.accept()
        except OSError:
            if closing.is_set():
                return
            time.sleep(0.1)  # who has connected is gone, or there are too many files
            continue
        if not free.acquire(blocking=False):
            sender.close()
            continue
        _in_background(_receive, sender, inbox, limit, free)


def _receive(
    sender: connection.Connection, inbox: queue.Queue, limit: int, free: threading.Semaphore
) -> None:
    """Puts one message of a connection into the inbox."""
    try:
        with socket.socket(fileno=os.dup(sender.fileno())) as end:
            seconds = struct.pack("ll", int(PATIENCE), int(PATIENCE % 1 * 1e6))
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        inbox.put((sender, sender.recv_bytes(limit)))
    except (EOFError, OSError):
        sender.close()  # it has gone, or says nothing, or too much
    finally:
        free.release()


def _send(sender: connection.Connection, answer: bytes) -> None:
    with sender, suppress(OSError):  # who asked may have gone
        sender.send_bytes(answer)


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
        policy: What the party does for a server.

    Attributes:
        overview: Returns all of `overview_of` the samples, for the party's own eyes.
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
        policy: Policy | None = None,
    ) -> None:
        if policy is None:
            policy = Policy()
        self.policy = policy
        self.client = client
        self.agreed = agreed
        self.facts = facts
        self.build = build
        self.folder = folder
        self.sizes = sizes
        self.limit = limit
        self.overview: Callable[[], dict[str, Any]] = dict
        self._run: str | None = None
        self._party: Party
        self._files: StateFiles
        self._secret: Secret | None = None

    def serve(self, address: Path, ready: Callable[[], None] = lambda: None) -> None:
        """Answers the messages that come to a socket file, one after another, for ever.

        Several can connect at once. One that sends nothing, or half a message, is closed after
        `PATIENCE` seconds and holds up nobody.

        Args:
            address: The socket file. A socket that an ended worker has left there is replaced.
            ready: Called once messages can come.

        Raises:
            ConfigError: There can be no socket file at this path, or another process works for
                this party.
        """
        inbox: queue.Queue[tuple[connection.Connection, bytes]] = queue.Queue()
        with _only_one(self.folder, self.client), listener(address) as incoming:
            closing = threading.Event()
            _in_background(_accept, incoming, inbox, self.limit, closing)
            try:
                ready()
                while True:
                    sender, message = inbox.get()
                    _in_background(_send, sender, self.answer(message))
            finally:
                closing.set()

    def serve_link(self, link: Link, ready: Callable[[], None]) -> None:
        """Answers the messages that a SuperLink has for this party, for ever.

        Args:
            link: Where the SuperLink is.
            ready: Called when messages can come.

        Raises:
            ConfigError: Another process works for the party, or there is no Flower.
        """
        with _only_one(self.folder, self.client):
            link.serve(self.answer, ready, self.folder / f"{self.client}.in-hand")

    def check_link(self, link: Link, ready: Callable[[], None], seconds: float) -> list[str] | None:
        """Compares what server and party must have in common, once a server asks; trains nothing.

        Args:
            link: Where the SuperLink is.
            ready: Called when messages can come.
            seconds: How long a server may take to ask.

        Returns:
            A line for each value that differs; None if no server has asked.
        """
        found: list[list[str]] = []
        end = time.monotonic() + seconds

        def compare(message: bytes) -> bytes:
            try:
                request = schema.read_request(unpack(message, self.limit), digest(self.agreed))
            except WireError as error:
                return pack({"refused": str(error)})
            if request["do"] == "hello":
                found.append(differences(request["agreed"], self.agreed))
                own = self.facts.get("versions", {})
                for line in other_versions(request["versions"], own):
                    print(f"the server has {line}", flush=True)
            return pack({"refused": f"party {self.client} only compares (pfl node --check)"})

        def is_over() -> bool:
            return bool(found) or time.monotonic() > end

        with _only_one(self.folder, self.client):
            in_hand = self.folder / f"{self.client}.in-hand"
            link.serve(compare, ready, in_hand, is_over)
        return next(iter(found), None)

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
        messages = self._begin(request).first_upload(read_task(request))
        self.policy.check_names("messages", messages)
        return {"messages": _messages(messages)}

    def _train(self, request: dict[str, Any]) -> dict[str, Any]:
        party = self._begin(request)
        task = read_task(request)
        trained = 0
        if self.policy.rounds is not None:  # else nobody asks, and no file is read
            trained = self._files.trained()
        self.policy.check_training(task.work, trained)
        if self.policy.rounds is not None:
            self._files.note_trained(trained + 1)
        messages, log = party.train(task)
        self.policy.check_log(messages, log.tables)
        states = party.pending()
        for name, rows in states.items():  # NaN among statistics: nothing was trained yet
            if name != "personal_buffers" and not rows.isfinite().all():
                raise ConfigError(f"model.lr: the client state {name} is no longer finite")
        self._files.save(task.round, states)
        losses = {}
        if self.policy.adds_noise:
            log.losses = {}  # they are of the samples, without noise
        for name, logged in log.losses.items():
            values = torch.cat([loss for loss, _ in logged]).cpu().numpy()
            counts = [count for _, counts in logged for count in counts]
            if counts and not self.sizes:  # steps and their samples tell the number of samples
                seen = sum(counts)  # 0: all Poisson samples of the round are empty
                values = np.array([np.dot(values, counts) / max(seen, 1)])
                counts = [min(seen, 1)]
            losses[name] = [values, counts]
        taken = len(losses)
        if self.sizes:
            taken = log.gradients
        answer: dict[str, Any] = {"messages": _messages(messages), "losses": losses, "taken": taken}
        answer["tables"] = log.tables
        if GRADIENTS in states and self.sizes:  # their number tells that of the samples
            answer["gradients"] = float(states[GRADIENTS])
        return answer

    def _evaluate(self, request: dict[str, Any]) -> dict[str, Any]:
        self.policy.check_names("splits", request["splits"])
        party = self._begin(request)
        self.policy.check_names("scores", ["accuracy", "loss", *party.loop.metrics.names])
        task = read_task(request)
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
        lacking = set(party.method.store.names) - states.keys()
        if request["task"]["counted"] is not None and lacking:
            path = self._files.folder
            raise ConfigError(f"folder: {path}: the file of states lacks {min(lacking)!r}")
        party.restore(states)
        if has_own_models(party.method) and request["task"]["received"]:
            self._files.save_received(request)
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


def read_task(request: Mapping[str, Any]) -> Task:
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
    return next(iter(differences(theirs, own)), None)


def differences(theirs: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Returns a line for each value in which server and party differ."""
    lines = []
    for key in dict.fromkeys([*own, *theirs]):
        one = own.get(key, "missing")
        other = theirs.get(key, "missing")
        if one != other:
            lines.append(
                f"{key}: {one} at the party and {other} at the server; both must have the same"
            )
    return lines
