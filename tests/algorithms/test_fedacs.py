"""FedACS against NumPy: who collaborates with whom, every iterate, its ends, what is recorded."""

import numpy as np
import pytest
import torch

from datamodules import SplitOwn
from models import HalfSquaredError
from pfl.algorithms import FedACS
from tests.algorithms import reference_agg_acs as reference
from tests.algorithms.reference_agg_acs import table
from tests.problems import least_squares, owned

FULL = dict(batch_size=None, loss=HalfSquaredError())
QUANTILES = [0.0, 0.25, 0.5, 0.75, 0.9, 1.0]  # with 7 clients nothing is left from 6/7 on
SIZES = (4, 3, 6, 5, 4, 3, 5)
EVERYONE = [list(range(7))] * 4
SAMPLED = [[0, 2, 3, 6], [1, 2, 5], [0, 1, 4, 5, 6], [3], [0, 2, 4, 5]]


def assert_follows(history, algorithm, expected, atol=1e-11):
    """Models, weights and numbers of partners of all rounds."""
    for t, row in enumerate(expected):
        # No cosine is so near the threshold that rounding decides.
        assert row["near"] > 1e-6
        np.testing.assert_allclose(history["w_i"][t], row["w"], rtol=0, atol=atol)
    actual = table(algorithm)
    assert list(actual) == [t for t, row in enumerate(expected) if row["weights"]]
    for t, weights in actual.items():
        nonzero = {pair: value for pair, value in expected[t]["weights"].items() if value}
        assert weights.keys() == nonzero.keys()
        values = [weights[pair] for pair in nonzero]
        np.testing.assert_allclose(values, list(nonzero.values()), rtol=0, atol=atol)
        for client in {client for client, _ in weights}:
            total = sum(value for (i, _), value in weights.items() if i == client)
            assert total == pytest.approx(1.0, abs=1e-12)
        logged = algorithm.trainer.recorder.rows[t]["collaborators"]
        assert logged == pytest.approx(expected[t]["collaborators"], abs=1e-12)


@pytest.fixture(scope="module")
def problem():
    return least_squares(SIZES, bias=True)


def scattered(seed=0, n=7, size=8):
    """Models in all directions, and of all lengths: cosines of both signs."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, size)) * rng.uniform(0.2, 3.0, size=(n, 1))


SETTINGS = dict(lr=0.1, steps=2)
START = np.linspace(-1.0, 1.0, 8)


def fedacs(network, *, lr, steps, **kwargs):
    """The method, with the reference's names."""
    return FedACS(network, lr=lr, local_steps=steps, **FULL, **kwargs)


# ---- weights and iterates -----------------------------------------------------------------------


@pytest.mark.parametrize("trace", [EVERYONE, SAMPLED], ids=["full", "sampled"])
@pytest.mark.parametrize("quantile", [None, *QUANTILES])
def test_every_round_equals_numpy(watch, problem, quantile, trace):
    """From models in all directions, so that the first weights are of every kind."""
    start, settings = scattered(), SETTINGS | dict(quantile=quantile)
    algorithm = fedacs(problem.network(0.5), **settings)
    history = watch(algorithm, problem, len(trace), trace=trace, start=start)
    expected = reference.fedacs(problem, start[0], trace, start=start, **settings)
    assert_follows(history, algorithm, expected)
    np.testing.assert_array_equal(algorithm.global_model, 0.5)  # there is no global model


@pytest.mark.parametrize(("quantile", "weight"), [(0.0, 0.0), (None, 1 / (1 + 2**0.5))])
def test_without_a_threshold_the_least_similar_pair_collaborates(watch, quantile, weight):
    """cos((1, 0), (1, 1)) = 1 / 2^1/2: with itself at 1, the partner's weight is 1 / (1 + 2^1/2).
    The quantile 0 is the pair's own similarity, which is not above itself."""
    start = np.array([[1.0, 0.0], [1.0, 1.0]])
    problem = least_squares((2, 2), d=2, o=1)
    algorithm = fedacs(problem.network(0.0), quantile=quantile, **SETTINGS)
    watch(algorithm, problem, 1, start=start)
    actual = [table(algorithm)[0].get(pair, 0.0) for pair in ((0, 1), (1, 0))]
    assert actual == pytest.approx([weight] * 2, abs=1e-11)


@pytest.mark.parametrize("quantile", [0.25, 0.7, 0.9])
@pytest.mark.parametrize("n", [2, 3, 13, 24])
def test_weights_of_random_models(watch, n, quantile):
    """One round of populations of several sizes: as the threshold often is a pair's cosine itself,
    the two halves of the matrix must be equal to the last bit."""
    problem = least_squares([2] * n, d=5, o=3)
    start = scattered(n, n, problem.size)
    settings = SETTINGS | dict(quantile=quantile)
    algorithm = fedacs(problem.network(), **settings)
    history = watch(algorithm, problem, 1, start=start)
    expected = reference.fedacs(problem, start[0], [range(n)], start=start, **settings)
    assert_follows(history, algorithm, expected)


@pytest.mark.parametrize("quantile", [0.3, 0.6])
def test_from_the_common_beginning(watch, problem, quantile):
    """Learning rate and weight decay as in local SGD; in the first round all models are equal."""
    settings = SETTINGS | dict(quantile=quantile, lr_decay=0.7, weight_decay=0.2)
    algorithm = fedacs(problem.network(START), **settings)
    trace = [[0, 1, 2, 3], *SAMPLED]
    history = watch(algorithm, problem, 6, trace=trace)
    expected = reference.fedacs(problem, START, trace, **settings)
    assert_follows(history, algorithm, expected)


# ---- what the server has ------------------------------------------------------------------------

SOME = [[0, 2, 3], [1, 2], [0, 4, 5], [3, 5], [1, 4], [0, 2, 5], [3, 4]]  # never 6


@pytest.mark.parametrize("quantile", [0.0, 0.25, 0.5, 0.9])
def test_known_all_uses_the_last_upload_of_everyone(watch, problem, quantile):
    """Clients upload at the beginning of their rounds. So of a client that stays
    away the server knows the model before its last training, and of a client that never took part
    it knows nothing."""
    settings = SETTINGS | dict(quantile=quantile, candidates="all")
    algorithm = fedacs(problem.network(START), **settings)
    history = watch(algorithm, problem, len(SOME), trace=SOME)
    assert_follows(history, algorithm, reference.fedacs(problem, START, SOME, **settings))


def test_with_everyone_there_both_are_one(watch, problem):
    models = []
    for candidates in ("participants", "all"):
        algorithm = fedacs(problem.network(), candidates=candidates, quantile=0.3, **SETTINGS)
        models.append(watch(algorithm, problem, 4, start=scattered()))
    np.testing.assert_allclose(models[0]["w_i"], models[1]["w_i"], rtol=0, atol=1e-12)


# ---- ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["64-true", "32-true"])
@pytest.mark.parametrize("quantile", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("n", [2, 13])
def test_equal_models_do_not_collaborate(fit, n, quantile, precision):
    """Round 0: every cosine is 1, the threshold is 1, and nothing is strictly greater, whatever the
    rounding of the cosines."""
    problem = least_squares([3] * n, d=7, o=5, bias=True)
    start = np.random.default_rng(n).normal(size=problem.size)
    algorithm = FedACS(problem.network(start).float(), quantile=quantile, **FULL)
    fit(algorithm, problem, 1, precision=precision)
    assert algorithm.trainer.recorder.rows[0]["collaborators"] == 0
    assert table(algorithm)[0] == {(i, i): 1.0 for i in range(n)}


@pytest.mark.parametrize("quantile", [0.0, 0.5])
def test_models_of_one_direction_do_not_collaborate(watch, problem, quantile):
    """Cosines are 1 whatever the lengths: again the threshold is 1. Each client stays with its own
    length; rounding alone would make some of these cosines larger than others."""
    lengths = np.random.default_rng(0).uniform(0.1, 10.0, size=(7, 1))
    start = lengths * np.random.default_rng(1).normal(size=8)
    cosines = [a @ b / (np.linalg.norm(a) * np.linalg.norm(b)) for a in start for b in start]
    assert len(set(cosines)) > 1
    algorithm = fedacs(problem.network(), quantile=quantile, **SETTINGS)
    watch(algorithm, problem, 1, start=start)
    assert table(algorithm)[0] == {(i, i): 1.0 for i in range(7)}


@pytest.mark.parametrize("zeros", [[2], [0, 4, 6], list(range(7))], ids=["one", "some", "all"])
@pytest.mark.parametrize("quantile", QUANTILES)
def test_a_model_of_zeros_stays_with_itself(watch, problem, quantile, zeros):
    """It has no direction: nobody takes it, it takes nobody, and nothing is NaN."""
    start, settings = scattered(), SETTINGS | dict(quantile=quantile)
    start[zeros] = 0.0
    algorithm = fedacs(problem.network(), **settings)
    history = watch(algorithm, problem, 1, start=start)
    models = history["w_i"][0]
    assert np.isfinite(models).all()
    weights = table(algorithm)[0]
    for i in zeros:
        assert {pair for pair in weights if i in pair} == {(i, i)}
        v = np.zeros(8)
        for _ in range(2):
            v = v - 0.1 * problem.gradient(i, v)
        np.testing.assert_allclose(models[i], v, rtol=0, atol=1e-12)
    if len(zeros) < 7:
        expected = reference.fedacs(problem, start[0], [range(7)], start=start, **settings)
        assert_follows(history, algorithm, expected)


# ---- what is sent, and evaluated ----------------------------------------------------------------


def test_personalized_models_are_evaluated_after_the_round(watch):
    """Everyone at the newest w_i, also who did not take part; there is no global model."""
    rng = np.random.default_rng(1)
    inputs, targets = rng.normal(size=(60, 3)), rng.normal(size=(60, 2))
    data = owned(
        np.repeat(np.arange(4), [20, 10, 18, 12]),
        torch.from_numpy(inputs),
        torch.from_numpy(targets),
        protocol=SplitOwn(test=0.3, validation=0.2),
    )
    algorithm = FedACS(
        torch.nn.Linear(3, 2).double(), quantile=0.2, lr=0.1, batch_size=4, loss=HalfSquaredError()
    )
    history = watch(algorithm, data, 3, trace=[[0, 1, 2], [1, 2, 3], [0, 2]])
    for t, row in enumerate(algorithm.trainer.recorder.rows):
        for split in ("val", "test"):
            losses = []
            for i, w in enumerate(history["w_i"][t]):
                samples = getattr(data.partition, split)[i]
                outputs = inputs[samples] @ w[:6].reshape(2, 3).T + w[6:]
                losses.append(0.5 * ((outputs - targets[samples]) ** 2).sum(1).mean())
            assert row[f"{split}/personalized/loss"] == pytest.approx(np.mean(losses), rel=1e-9)
        assert not any("global" in name for name in row)
    assert algorithm.personalization_penalty is None or algorithm.personalization_penalty != np.inf
