"""Clients that fail or are slow: what that means for every method."""

import inspect
import re

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from models import HalfSquaredError
from pfl import FederatedLoop
from pfl.algorithms import SCAFFOLD, FedAvg, FedProx, LocalTrain
from pfl.callbacks import LocalBaseline
from tests.algorithms.methods import (
    BATCHES,
    METHODS,
    SIZES,
    differing,
    everything,
    normalized_network,
    small_network,
    small_world,
)
from tests.problems import Steps, least_squares
from tests.refusal import refused

EVERYONE = list(range(len(SIZES)))
FULL = dict(lr=0.2, local_epochs=2, batch_size=None)

# Who is in the cohort, who of these fails, and who is left.
SAMPLED = [[0, 1, 2], [1, 2, 3], [0, 3], [0, 1, 2]]
LOST = [[1], [], [0, 3], [2, 3]]  # client 3 is not in the last cohort
LEFT = [[0, 2], [1, 2, 3], [], [0, 1]]

# The server computes what these clients receive from the last models of the whole cohort.
FROM_THE_COHORT = {
    name
    for name, method in METHODS.items()
    if re.search(r"self\.(kept_rows|mix)\(", inspect.getsource(method.kind.begin_round))
}
# Methods that train on pooled samples have no clients that could fail or be slow.
FEDERATED = {n: m for n, m in METHODS.items() if not getattr(m.kind, "pooled", False)}
# With stateless and stateful clients, several loops, tables, and sparse messages.
SEVERAL = ("FedAvg", "SCAFFOLD, option I", "FedSLR", "FedAgg", "FedACS")
EXACT = {n: m for n, m in FEDERATED.items() if not m.everyone and n not in FROM_THE_COHORT}


def cases(methods):
    return pytest.mark.parametrize("method", methods.values(), ids=methods)


class Booked(pl.Callback):
    """Every round's bytes down and up by client, int64 [rounds, 2, M], and its row of metrics."""

    def __init__(self):
        self.totals, self.rows = [np.zeros((2, len(SIZES)), np.int64)], []

    def on_train_epoch_end(self, trainer, pl_module):
        ledger = pl_module.progress.ledger
        self.totals.append(np.stack([ledger.downlink, ledger.uplink]))
        self.rows.append(dict(pl_module.row))

    @property
    def rounds(self):
        return np.diff(self.totals, axis=0)


# ---- drop-outs -----------------------------------------------------------------------------------

# What the ledger and the counters say of clients that failed, in `everything`.
COUNTED = {
    "ledger downlink",
    "bytes_down",
    "samples_seen",
    "row train/samples",
    "row comm/downlink_bytes",
    "row dropped",
}


@cases(EXACT)
def test_failed_clients_are_as_if_they_had_not_been_in_the_cohort(train_small, method):
    """Bit for bit, but for bytes down and sample gradients; also in a round that no client ends."""
    actual = everything(train_small(method, 4, trace=SAMPLED, dropout=LOST))
    expected = everything(train_small(method, 4, trace=LEFT))
    assert differing(actual, expected) <= COUNTED
    assert {"samples_seen", "row dropped"} <= differing(actual, expected)


@cases({name: METHODS[name] for name in (*SEVERAL, "LocalTrain", "FedRep")})
def test_the_ledger_has_what_failed_clients_received_and_computed(train_small, method):
    """They receive and compute what they would have without failing, and send nothing; FedACS's
    clients send before they train."""
    booked, expected = Booked(), Booked()
    # The first round alone, since what is sent may depend on the models.
    train_small(method, 1, trace=SAMPLED[:1], dropout=LOST[:1], callbacks=[booked])
    train_small(method, 1, trace=SAMPLED[:1], callbacks=[expected])
    (actual,), (wanted,) = booked.rounds, expected.rounds.copy()
    if not method.kind.sends_first:
        wanted[1, LOST[0]] = 0
    np.testing.assert_array_equal(actual, wanted)
    (row,), (other,) = booked.rows, expected.rows
    assert row["train/samples"] == other["train/samples"] > 0
    assert (row["participants"], row["dropped"]) == (2, 1)
    assert "dropped" not in other


@pytest.mark.parametrize(("name", "buffers"), [("FedAvg", "average"), ("FedSLR", "local")])
def test_running_statistics_of_failed_clients_are_those_from_before(train_small, name, buffers):
    """The statistics of the model that is sent, and with FedSLR of the personalized model, too."""
    settings = BATCHES | {"buffers": buffers}
    runs = [
        everything(
            train_small(METHODS[name], 4, settings=settings, network=normalized_network(), **loop)
        )
        for loop in ({"trace": SAMPLED, "dropout": LOST}, {"trace": LEFT})
    ]
    kept = {"FedAvg": "module network.2.running_mean", "FedSLR": "client personal_buffers"}
    assert kept[name] in runs[0]
    assert differing(*runs) <= COUNTED


def test_which_methods_are_special():
    assert {METHODS[name].kind.__name__ for name in FROM_THE_COHORT} == {
        "APPLE",
        "FedACS",
        "FedAMP",
        "FedDistill",
        "FedFomo",
        "FedPAC",
        "HeurFedAMP",
    }
    assert {m.kind.__name__ for m in METHODS.values() if m.kind.sends_first} == {"FedACS"}


@cases({name: METHODS[name] for name in sorted(FROM_THE_COHORT)})
def test_failed_clients_are_partners_of_the_others(train_small, method):
    """In a round in which client 1 fails, the others compute what they would have computed with
    it, and client 1 keeps what it had: only its last model counts, which the server has."""
    before = everything(train_small(method, 1, trace=[EVERYONE]))
    failed = everything(train_small(method, 2, trace=[EVERYONE] * 2, dropout=[[], [1]]))
    whole = everything(train_small(method, 2, trace=[EVERYONE] * 2))
    names = {f"client {name}" for name in method.make(small_network()).client_state_names}
    assert names
    for name in names:
        assert torch.equal(failed[name][1], before[name][1])
        others = [0, 2, 3]
        # To rounding: the weights of three clients' partners are a product of other shapes.
        torch.testing.assert_close(failed[name][others], whole[name][others], rtol=0, atol=1e-12)
        assert not torch.equal(whole[name][1], before[name][1])


def test_failed_clients_in_numpy(watch):
    """FedAvg: the mean of the models that arrive, weighted by samples; (5, 3, 4) samples."""
    problem = least_squares(sizes=(5, 3, 4))
    method = FedAvg(
        problem.network(0.5), lr=0.1, local_steps=2, batch_size=None, loss=HalfSquaredError()
    )
    history = watch(method, problem, 2, dropout=[[2], [0, 1]])
    w = np.full(problem.size, 0.5)
    for number, arrived in enumerate(([0, 1], [2])):
        models = [w.copy() for _ in arrived]
        for k, i in enumerate(arrived):
            for _ in range(2):
                models[k] -= 0.1 * problem.gradient(i, models[k])
        w = np.average(models, axis=0, weights=problem.sizes[arrived])
        np.testing.assert_allclose(history["w"][number], w, rtol=0, atol=1e-12)


@cases({name: m for name, m in METHODS.items() if m.everyone})
def test_methods_that_need_everyone_refuse_drop_outs(train_small, method):
    with refused("loop.dropout: 0.1", method.kind.__name__, "all 4 clients", "use 0"):
        train_small(method, 1, dropout=0.1)
    with refused("loop.dropout: a trace"):
        train_small(method, 1, dropout=[[2]])
    train_small(method, 1, dropout=0)


# ---- stragglers ----------------------------------------------------------------------------------


def loops(kind, epochs):
    """A number of epochs for every loop of a client."""
    own = {name for name in inspect.signature(kind).parameters if name.endswith("_epochs")}
    return dict.fromkeys(["local_epochs", *(own - {"server_epochs"})], epochs)


@cases({n: m for n, m in FEDERATED.items() if not n.startswith(("FedAgg", "L2GD"))})
def test_half_of_the_steps_are_half_of_the_epochs(train_small, method):
    """With full gradients an epoch is a step. FedAgg's rates depend on the number of epochs, and
    L2GD draws its steps."""

    def run(epochs, **loop):
        return train_small(method, 2, settings=FULL | loops(method.kind, epochs), **loop)

    slow = everything(run(4, stragglers=[EVERYONE] * 2, straggler_work=0.5))
    assert differing(slow, everything(run(2))) == set()


STRAGGLERS = [[0, 2], [1]]
WORK = 0.6  # 3 of 5 steps


def trained_in_numpy(problem, client, w, steps, direction):
    v = w.copy()
    for _ in range(steps):
        v -= 0.1 * direction(client, v)
    return v


def steps_taken(number, client):
    return 3 if client in STRAGGLERS[number] else 5


@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_slow_clients_of_fedavg_and_fedprox_in_numpy(watch, weight):
    problem = least_squares(sizes=(5, 3, 4))
    training = dict(lr=0.1, local_steps=5, batch_size=None, loss=HalfSquaredError())
    network = problem.network(0.5)
    kind = FedProx(network, proximal_weight=weight, **training) if weight else None
    method = kind or FedAvg(network, **training)
    history = watch(method, problem, 2, stragglers=STRAGGLERS, straggler_work=WORK)
    w = np.full(problem.size, 0.5)
    for number in range(2):
        models = []
        for i in range(3):

            def direction(i, v, w=w):
                return problem.gradient(i, v) + weight * (v - w)

            models.append(trained_in_numpy(problem, i, w, steps_taken(number, i), direction))
        w = np.average(models, axis=0, weights=problem.sizes)
        np.testing.assert_allclose(history["w"][number], w, rtol=0, atol=1e-12)
    # Sample gradients: each step takes all samples of a client, in two rounds.
    expected = sum(steps_taken(r, i) * problem.sizes[i] for r in range(2) for i in range(3))
    assert method.progress.samples == expected


@pytest.mark.parametrize("option", ["I", "II"])
def test_slow_clients_of_scaffold_in_numpy(watch, option):
    """K of line 12 is the number of steps that a client has taken, 3 or 5. Option I's gradient is
    over all samples, in batches of 2: 3, 2 and 2 of them, of which stragglers take all."""
    problem, lr = least_squares(sizes=(5, 3, 4)), 0.1
    batch_size = 2 if option == "I" else None
    arguments = dict(option=option, lr=lr, local_steps=5, batch_size=batch_size)
    method = SCAFFOLD(problem.network(0.5), loss=HalfSquaredError(), **arguments)
    steps = Steps()
    loop = dict(stragglers=STRAGGLERS, straggler_work=WORK)
    history = watch(method, problem, 2, callbacks=[steps], **loop)
    x, c, c_i = np.full(problem.size, 0.5), np.zeros(problem.size), np.zeros((3, problem.size))
    for number in range(2):
        seen = steps.batches(problem)[number]
        y, new = np.tile(x, (3, 1)), c_i.copy()
        for i in range(3):
            K = steps_taken(number, i)
            passes = -(-problem.sizes[i] // 2) if option == "I" else 0
            assert len(seen[i]) == K + passes
            for samples in seen[i][:K]:
                y[i] -= lr * (problem.gradient(i, y[i], samples) - c_i[i] + c)
            new[i] = problem.gradient(i, x) if passes else c_i[i] - c + (x - y[i]) / (K * lr)
        x, c, c_i = x + (y - x).mean(0), c + (new - c_i).mean(0), new
        np.testing.assert_allclose(history["w"][number], x, rtol=0, atol=1e-12)
        np.testing.assert_allclose(history["c"][number], c, rtol=0, atol=1e-12)
        np.testing.assert_allclose(history["c_i"][number], c_i, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["FedAvg", "FedAgg"])
def test_slow_clients_take_the_first_of_their_batches(fit, name):
    """In each loop; two loops of 3, 2 and 2 batches, of which 2, 1 and 1 are half, rounded up.
    FedAvg's loop has both epochs, and of its 6, 4 and 4 batches 3, 2 and 2 are half."""
    problem, kind = least_squares(sizes=(5, 3, 4)), METHODS[name].kind
    epochs = 2
    taken = []
    for stragglers in ([[]], [[0, 1, 2]]):
        steps = Steps()
        training = dict(lr=0.1, local_epochs=epochs, batch_size=2, loss=HalfSquaredError())
        method = kind(problem.network(0.5), **training)
        fit(method, problem, 1, callbacks=[steps], stragglers=stragglers)
        taken.append(steps.batches(problem)[0])
    for whole, part in zip(*taken, strict=True):
        each = len(whole) // epochs
        kept = range(-(-each // 2)) if name == "FedAgg" else range(each)
        places = [each * e + b for e in range(epochs) for b in kept] if name == "FedAgg" else kept
        for place, samples in zip(places, part, strict=True):
            np.testing.assert_array_equal(samples, whole[place])


# ---- what must not matter ------------------------------------------------------------------------

MIXED = dict(dropout=0.4, stragglers=0.5, straggler_work=0.4, unseen=[1], seed=0)


def only_slow(method):
    return {**MIXED, "dropout": 0.0} if method.everyone else MIXED


def test_the_mixture_below_has_everything():
    """All of it happens to some client in the three rounds: the seed is chosen so."""
    who = FederatedLoop(small_world(), **MIXED).participation
    ids = who.population
    fails = np.stack([who.dropout.mask(0, r, ids) for r in range(3)])
    slow = np.stack([who.work(r, ids) < 1 for r in range(3)])
    for a in (False, True):
        for b in (False, True):
            assert ((fails == a) & (slow == b)).any(), (a, b)


@cases({name: METHODS[name] for name in (*SEVERAL, "APFL", "FedPD, VR")})
def test_engines_and_chunks_agree(train_small, method):
    """In float64 the order of sums is all that may differ; five steps or fewer for each client."""

    def result(engine, at_once):
        loop = only_slow(method)
        settings = BATCHES | dict(engine=engine)
        algorithm = train_small(method, 3, settings=settings, clients_at_once=at_once, **loop)
        assert algorithm.row["participants"] < 3 or method.everyone
        return everything(algorithm)

    expected = result("sequential", 1)
    for engine, at_once in (("sequential", None), ("vmap", 2)):
        actual = result(engine, at_once)
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                actual[name], value, rtol=0, atol=1e-10, equal_nan=True, msg=f"{name} {engine}"
            )


# ---- the local baseline --------------------------------------------------------------------------


def test_the_local_baseline_is_local_training_with_the_same_failures(fit):
    """The local baseline has the scores of `LocalTrain` with the same loop."""
    scores, method = [], None
    for kind in (FedAvg, LocalTrain):
        baseline = LocalBaseline()
        method = kind(small_network(), loss=HalfSquaredError(), **BATCHES)
        fit(method, small_world(), 3, callbacks=[baseline], **MIXED)
        scores.append(baseline.scores["loss"])
    own = method.evaluation.scores["test", "personalized"]["loss"]
    np.testing.assert_allclose(scores[0], own, rtol=0, atol=1e-12)
    np.testing.assert_allclose(scores[1], own, rtol=0, atol=1e-12)
