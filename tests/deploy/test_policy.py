"""A party does what its own file says, whatever a server asks; it waits for no idle connection."""

import threading
import time
from multiprocessing import connection

import pytest

from pfl.deploy import worker as module
from pfl.deploy.policy import Policy
from pfl.deploy.wire import pack, unpack
from pfl.deploy.worker import Worker
from tests.refusal import refused


def answer(parties, client, request, **changes):
    """The refusal of a party to a request of its run, with some values changed."""
    message = pack({**request, **changes})
    return unpack(parties.channel.workers[client].answer(message)).get("refused")


@pytest.fixture
def greedy(federation):
    """A federation after its run, and the requests of client 1 by task."""
    parties = federation("FedAvg").train()
    requests = {r["do"]: r for client, r, _ in parties.channel.told if client == 1}
    return parties, requests


def test_a_greedy_server_gets_what_the_policy_has(greedy):
    parties, requests = greedy
    worker = parties.channel.workers[1]
    evaluate = requests["evaluate"]
    assert answer(parties, 1, evaluate) is None
    line = "splits: ['train']; they must be val, test or both"
    assert answer(parties, 1, evaluate, splits=["train"]) == line
    cases = [
        (
            Policy(splits=("val",)),
            "policy.splits: the run has 'test', and this party gives ['val']",
        ),
        (
            Policy(scores=("loss",)),
            "policy.scores: the run has 'accuracy', and this party gives ['loss']",
        ),
    ]
    for policy, line in cases:
        worker.policy = policy
        assert answer(parties, 1, evaluate) == line
    worker.policy = Policy(messages=("buffers",))
    line = "policy.messages: the run has 'w', and this party gives ['buffers']"
    assert answer(parties, 1, requests["train"]) == line
    worker.policy = Policy(work=0.5)
    line = "policy.work: the server asks for 1.0; this party does 0.5"
    assert answer(parties, 1, requests["train"]) == line
    for work in (1e4, float("nan"), -1.0, 0.0):
        task = {**requests["train"]["task"], "work": work}
        line = f"work: {work}; it must be above 0 and at most 1"
        assert answer(parties, 1, requests["train"], task=task) == line


def test_a_run_whose_parties_tell_no_scores_ends_well(federation):
    """The method has personalized models, of which nobody tells a size."""
    run = federation("Ditto")
    for worker in run.channel.workers.values():
        worker.policy = Policy(splits=())
    with pytest.warns(match="party . is left out .evaluate.: policy.splits: the run has 'test'"):
        run.train()
    assert run.method.rounds == 4
    assert not [name for name in run.method.row if name.startswith(("test/", "parameters/pers"))]


def test_the_rounds_of_a_run_are_counted_in_a_file(greedy):
    """The same round counts each time that it is asked for, also by a worker that starts again."""
    parties, requests = greedy
    for trained in range(4):
        parties.channel.workers[1] = parties.channel.start(1)
        parties.channel.workers[1].policy = Policy(rounds=3)
        line = answer(parties, 1, requests["train"])
        assert (line is None) == (trained < 3)
    assert line.startswith("policy.rounds: this party has trained 3 times in this run")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"split": ["val"]}, "policy: split: the keys are splits, scores, messages"),
        ({"splits": ["train"]}, "policy.splits: ['train']; it must be some of val and test"),
        ({"scores": "loss"}, "policy.scores: 'loss'; it must be a list of names"),
        ({"messages": [5]}, "policy.messages: [5]; it must be a list of names"),
        ({"work": 2}, "policy.work: 2; it must be above 0 and at most 1"),
        ({"work": True}, "policy.work: True; it must be above 0"),
        ({"rounds": 0}, "policy.rounds: 0; it must be"),
        ([], "policy: []; it must be a mapping with splits"),
    ],
)
def test_a_policy_is_read_strictly(given, line):
    with refused(line):
        Policy.read("policy", given)


# ---- connections --------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a short path
    monkeypatch.setattr(module, "PATIENCE", 0.3)
    worker = Worker(0, {}, {"x": 1}, lambda classes: None, tmp_path / "states")
    ready = threading.Event()
    thread = threading.Thread(target=worker.serve, args=(tmp_path / "0.sock", ready.set))
    thread.daemon = True
    thread.start()
    assert ready.wait(10)
    return tmp_path / "0.sock"


def hello():
    with connection.Client("0.sock", "AF_UNIX") as one:
        one.send_bytes(pack({"do": "hello", "agreed": {}}))
        return unpack(one.recv_bytes())


def test_connections_that_send_nothing_or_half_a_message_stop_nobody(served):
    idle = [connection.Client("0.sock", "AF_UNIX") for _ in range(5)]
    module.os.write(idle[0].fileno(), (100).to_bytes(4, "big") + b"half")
    begin = time.monotonic()
    assert hello()["x"] == 1
    assert time.monotonic() - begin < 5
    for one in idle:  # they are closed after the time that they have
        assert one.poll(10)
        with pytest.raises((EOFError, ConnectionResetError)):
            one.recv_bytes()
        one.close()
    assert hello()["client"] == 0


def test_a_party_has_one_worker(served, tmp_path):
    other = Worker(0, {}, {}, lambda classes: None, tmp_path / "states")
    with refused("folder: another pfl node works for party 0 in", "end it first"):
        other.serve(tmp_path / "other.sock")
