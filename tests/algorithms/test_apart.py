"""Every method with its server and each client in a process of its own, bit for bit.

A client has nothing but its own samples, its own states and what it has received, as messages of
the wire. Client 1 trains in the second round, and its message is lost; client 2 is slow in the
third.
"""

import pytest

from pfl import FederatedLoop
from pfl.algorithms import GlobalTrain
from pfl.method.party import Party
from tests.algorithms.apart import Processes, differing_apart, make, stages, train_apart
from tests.algorithms.methods import BATCHES, METHODS, SIZES, small_network, small_world
from tests.problems import quiet
from tests.refusal import refused

ASYNCHRONOUS = ("FedBuff", "FedAsync")  # which parties are refused
FEDERATED = {
    name: method
    for name, method in METHODS.items()
    if not method.pooled and name not in ASYNCHRONOUS
}
ROUNDS = 4


@pytest.fixture(scope="module")
def parties():
    parties = Processes(len(SIZES))
    yield parties
    parties.close()


def participation(method):
    if method.everyone:
        return {}
    return {
        "trace": [[0, 1], [1, 2, 3], [0, 2], [1, 3]],
        "dropout": [[], [1], [], []],
        "stragglers": [[], [], [2], []],
    }


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", FEDERATED)
@pytest.mark.parametrize("normalized", [False, True], ids=["", "running statistics"])
def test_apart_is_the_simulation_bit_for_bit(fit, tmp_path, parties, name, normalized):
    method, settings = METHODS[name], dict(BATCHES)
    if normalized and name.startswith("FedPD") and "skip" in name:
        settings["buffers"] = "local"
    loop = participation(method)
    expected = make(name, settings, normalized)
    fit(
        expected,
        small_world(classes=method.classes),
        ROUNDS,
        evaluate=("test",),
        clients_at_once=1,
        **loop,
    )
    run = dict(name=name, settings=settings, normalized=normalized, rounds=ROUNDS, loop=loop)
    parties.join(run)
    settings = dict(enable_checkpointing=False, precision="64-true")
    trainer = quiet(tmp_path / "apart", ROUNDS, **settings)
    actual, server = train_apart(parties, run, trainer, evaluate=("test",))

    states = parties.states(server.parties, not expected.store.names)
    assert differing_apart(expected, actual, states) == set()


COMPRESSED = {
    "FedAvg": ["TopK", {"share": 0.3}],
    "SCAFFOLD, option I": ["RandomK", {"share": 0.3, "messages": ["y", "c"]}],
    "FedProx": ["QSGD", {"levels": 3}],
    "FedPer": ["SignEF", {}],
    "Ditto": ["PowerSGD", {"rank": 1}],
}


@pytest.mark.processes
@pytest.mark.parametrize(
    "name, normalized", [("Ditto", True), *((name, False) for name in COMPRESSED)]
)
def test_payloads_apart_are_those_of_the_simulation(fit, tmp_path, parties, name, normalized):
    """Iterates, memories and bytes are the same, where only payloads travel."""
    settings = dict(BATCHES)
    loop = participation(METHODS[name])
    run = dict(name=name, settings=settings, normalized=normalized, rounds=ROUNDS, loop=loop)
    run["stages"] = [COMPRESSED[name]]
    expected = make(name, settings, normalized)
    given = dict(evaluate=("test",), clients_at_once=1, stages=stages(run))
    fit(expected, small_world(), ROUNDS, **given, **loop)
    plain = make(name, settings, normalized)
    fit(plain, small_world(), ROUNDS, evaluate=(), **loop)
    assert 0 < expected.progress.bytes_up < plain.progress.bytes_up
    parties.join(run)
    trainer = quiet(tmp_path / "apart", ROUNDS, enable_checkpointing=False, precision="64-true")
    actual, server = train_apart(parties, run, trainer, evaluate=("test",))

    states = parties.states(server.parties, not expected.store.names)
    assert differing_apart(expected, actual, states) == set()


def test_pooled_training_is_refused():
    with refused("model: GlobalTrain trains one model on the samples of all clients"):
        Party(GlobalTrain(small_network()), FederatedLoop(small_world()), client=0)
