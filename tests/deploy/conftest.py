"""Parties in this process, whose messages are bytes of the wire, and faults on their way."""

import numpy as np
import pytest

from pfl.deploy.channel import Channel
from pfl.deploy.wire import unpack
from pfl.deploy.worker import StateFiles
from tests.algorithms.apart import differing_apart, make, make_worker, train_apart
from tests.algorithms.methods import BATCHES, METHODS, SIZES, small_world
from tests.commands import call
from tests.problems import quiet, run

ROUNDS = 4


class Ended(BaseException):
    """The process of a party, or of the server, ends here."""


class InProcess(Channel):
    """Workers in this process.

    `faults` has what happens to a party by (client, task, round): its process ends "before" the
    task, "within" it, "after" it with the answer, or "later" without it; "late": there is no answer
    in time; or a function that changes the answer. The worker of an ended process is made anew.
    `absent` has the rounds at whose beginning a client cannot be reached. `stranger` is what a
    further peer answers; there is none if it is not set.
    """

    def __init__(self, folder, what, faults, absent):
        self.folder, self.what, self.faults, self.absent = folder, what, faults, absent
        self.workers = {client: self.start(client) for client in range(len(SIZES))}
        self.round, self.told = 0, []
        self.stranger = ...

    def start(self, client):
        return make_worker(client, self.folder / f"party-{client}", self.what)

    def peers(self):
        here = {c for c in self.workers if self.round not in self.absent.get(c, ())}
        return here if self.stranger is ... else here | {len(self.workers)}

    def ask(self, messages, timeout):
        answers = {}
        for client, message in messages.items():
            if client not in self.workers:
                if self.stranger is not None:
                    answers[client] = self.stranger
                continue
            request = unpack(message)
            self.round = request["task"]["round"] if "task" in request else self.round
            key = client, request["do"], self.round
            answer = self.answer(client, message, self.faults.pop(key, None))
            self.told.append((client, request, answer))
            if answer is not None:
                answers[client] = answer
            if request["do"] == "train":
                self.round += 1
        return answers

    def answer(self, client, message, fault):
        ends = "before", "within", "after", "later"
        if fault == "server":
            raise Ended
        with pytest.MonkeyPatch.context() as patch:
            if fault == "within":
                patch.setattr(StateFiles, "save", end)
            try:
                answer = None if fault == "before" else self.workers[client].answer(message)
            except Ended:
                answer = None
        if fault in ends:
            self.workers[client] = self.start(client)
        if callable(fault):
            return fault(answer)
        return "the worker has ended" if fault in ends[:3] else None if fault == "late" else answer


def end(*_):
    raise Ended


@pytest.fixture
def simulate(tmp_path):
    """Trains a method in the simulation."""

    def train(name, normalized=False, **loop):
        method = make(name, dict(BATCHES), normalized)
        loop |= dict(evaluate=("test",), clients_at_once=1)
        data = small_world(classes=METHODS[name].classes)
        return run(method, data, ROUNDS, root=tmp_path / "simulation", **loop)

    return train


class Federation:
    """Four parties, which train in one run after another.

    Args:
        folder: The folder of everything.
        name: The method, in `METHODS`.
        agreed: Further values that server and parties must have in common.
    """

    def __init__(self, folder, name, *, faults=(), absent=(), stages=None, agreed=(), **loop):
        self.folder = folder
        self.what = dict(name=name, settings=dict(BATCHES), normalized=False, stages=stages or [])
        self.what |= dict(rounds=ROUNDS, loop=loop, **dict(agreed))
        self.channel = InProcess(folder, self.what, dict(faults), dict(absent))

    def train(self, *callbacks, ckpt_path=None, **parties):
        settings = dict(enable_checkpointing=bool(callbacks), precision="64-true")
        trainer = quiet(self.folder, ROUNDS, *callbacks, **settings)
        self.method, self.server = train_apart(
            self.channel, self.what, trainer, ("test",), ckpt_path, **parties
        )
        return self

    def differing(self, expected):
        """Names of what is not as in the simulation."""
        states, parties = [], self.server.parties
        for client in range(len(SIZES)):
            files = StateFiles(self.channel.folder / f"party-{client}" / parties.run)
            files.folder /= f"client-{client}"
            counted = parties.counted.get(client)
            rows = files.load(counted, None, not expected.store.names)
            states.append({name: np.asarray(values) for name, values in rows.items()})
        return differing_apart(expected, self.method, states)


@pytest.fixture
def federation(tmp_path):
    """`Federation` in a folder of its own."""
    return lambda name, **kwargs: Federation(tmp_path / "apart", name, **kwargs)


@pytest.fixture
def app(request, tmp_path, monkeypatch):
    """The folder that `pfl deploy` writes with the `WORDS` of a test's module."""
    monkeypatch.chdir(tmp_path)
    status, _, error = call("deploy", *request.module.WORDS, "--out", "app")
    assert status == 0, error
    return tmp_path / "app"
