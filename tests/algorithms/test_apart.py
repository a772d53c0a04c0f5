"""Every method with its server and each client in a process of its own, bit for bit.

A client has nothing but its own samples, its own states and what it has received. Client 1 trains
in the second round, and its message is lost; client 2 is slow in the third.
"""

import numpy as np
import pytest
import torch

from pfl import FederatedLoop
from pfl.algorithms import GlobalTrain
from pfl.method.party import Party
from tests.algorithms.apart import Parties, Server, make
from tests.algorithms.methods import (
    BATCHES,
    METHODS,
    SIZES,
    differing,
    everything,
    small_network,
    small_world,
    tables,
)
from tests.refusal import refused

FEDERATED = {name: method for name, method in METHODS.items() if not method.pooled}
ROUNDS = 4


@pytest.fixture(scope="module")
def parties():
    parties = Parties(len(SIZES))
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
def test_apart_is_the_simulation_bit_for_bit(fit, parties, name, normalized):
    method, settings = METHODS[name], dict(BATCHES)
    if normalized and name.startswith("FedPD") and "skip" in name:
        settings["buffers"] = "local"
    loop = participation(method)
    run = {**loop, "evaluate": ("test",), "clients_at_once": 1}
    expected = make(name, settings, normalized)
    fit(expected, small_world(), ROUNDS, **run)
    parties.join(name, settings, normalized, ROUNDS, loop)
    actual = make(name, settings, normalized)
    fit(actual, small_world(), ROUNDS, callbacks=[Server(parties)], **run | {"evaluate": ()})

    rows, states = everything(expected), parties.states()
    known = everything(actual) | {f"client {k}": torch.from_numpy(v) for k, v in states.items()}
    # The simulation's store says who has a row; clients that are apart have their own.
    known |= {k: v for k, v in rows.items() if k.startswith(("seen ", "row test/"))}
    own = {k for k in rows if k.startswith("row parameters/")}
    assert differing(known, rows) <= own
    assert tables(actual) == tables(expected)
    assert expected.evaluation is not None
    scores = {kind: values for (_, kind), values in expected.evaluation.scores.items()}
    remote = parties.scores()
    assert remote.keys() == scores.keys() != set()
    for kind, values in scores.items():
        for number, column in values.items():
            assert np.array_equal(remote[kind][number], column, equal_nan=True), (kind, number)


def test_pooled_training_is_refused():
    with refused("model: GlobalTrain trains one model on the samples of all clients"):
        Party(GlobalTrain(small_network()), FederatedLoop(small_world()), client=0)
