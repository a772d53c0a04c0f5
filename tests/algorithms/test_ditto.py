"""Ditto against a slow NumPy loop, and against the methods that its two models follow."""

import numpy as np
import pytest
import torch

from pfl.algorithms import Ditto, FedAvg, LocalTrain
from tests.algorithms import reference_clup_pd as reference
from tests.algorithms.traced import (
    ALL,
    BATCH_COUNTS,
    BATCHES,
    FULL,
    RATES,
    START,
    TRACE,
    full,
    in_cohorts,
)
from tests.problems import Steps

PENALTY = 0.7


# ---- a second implementation --------------------------------------------------------------------


def ditto(problem, w, batches, personal, penalty, lr, lr_decay=1.0, weight_decay=0.0):
    """Algorithm 1, client by client and step by step; w and all v_i after each round.

    `batches[t][i]` and `personal[t][i]` have the samples of each local step of w_i and of v_i in
    round t.
    """
    v, history = np.tile(w, (problem.num_clients, 1)), []

    def descend(i, model, steps, rate, weight, w):
        for samples in steps:
            gradient = problem.gradient(i, model, samples) + weight_decay * model
            model = model - rate * (gradient + weight * (model - w))
        return model

    for t, cohort in enumerate(batches):
        rate = lr * lr_decay**t
        sent = {i: descend(i, w, steps, rate, 0.0, w) for i, steps in cohort.items()}
        for i, steps in personal[t].items():
            v[i] = descend(i, v[i], steps, rate, penalty, w)
        weights = [problem.sizes[i] for i in cohort]
        w = np.average(list(sent.values()), axis=0, weights=weights)
        history.append({"w": w, "v": v.copy()})
    return history


def assert_rounds(history, expected):
    reference.assert_rounds(history.rounds, expected, "w", "v", atol=1e-12)


def test_rounds_equal_the_numpy_loop(follow, problem):
    """Partial participation, unequal clients, weight decay, a decayed rate; an epoch of full
    gradients is a step."""
    history = follow(Ditto, penalty=PENALTY, personal_epochs=3, local_steps=4, **FULL)
    assert_rounds(history, ditto(problem, START, full(4), full(3), PENALTY, **RATES))


@pytest.mark.parametrize("engine", ["sequential", "vmap"])
def test_mini_batches_and_unequal_numbers_of_local_steps(follow, problem, engine):
    """v_i takes three epochs of its own, half as many steps again as w_i, on other mini-batches."""
    steps = Steps()
    settings = BATCHES | {"penalty": PENALTY, "personal_epochs": 3, "engine": engine}
    history = follow(Ditto, callbacks=[steps], **settings)
    seen = steps.batches(problem)
    batches = in_cohorts(
        [[own[:n] for own, n in zip(row, BATCH_COUNTS, strict=True)] for row in seen]
    )
    personal = in_cohorts(
        [[own[n:] for own, n in zip(row, BATCH_COUNTS, strict=True)] for row in seen],
        counts=[12, 3, 9, 6],
    )
    assert not np.array_equal(np.concatenate(batches[0][0][:4]), np.concatenate(personal[0][0][:4]))
    assert_rounds(history, ditto(problem, START, batches, personal, PENALTY, **RATES))


# ---- identities ---------------------------------------------------------------------------------


def test_the_global_model_is_that_of_fedavg(follow):
    """Bit for bit: what clients keep and how they train it does not matter for what they send."""
    history = follow(Ditto, penalty=PENALTY, personal_epochs=2, **BATCHES)
    plain = follow(FedAvg, **BATCHES)
    for name in ("w", "up", "down"):
        np.testing.assert_array_equal(history[name], plain[name])


def test_without_penalty_every_client_is_alone(watch, problem):
    """v_i is `LocalTrain`'s model: full gradients have no order of samples."""
    algorithm = Ditto(problem.network(START), penalty=0.0, personal_epochs=2, **FULL)
    history = watch(algorithm, problem, len(TRACE), trace=TRACE)
    local = LocalTrain(problem.network(START), local_epochs=2, **FULL)
    alone = watch(local, problem, len(TRACE), trace=TRACE)
    np.testing.assert_allclose(history["v"], alone["w_i"], rtol=0, atol=1e-13)


def test_a_penalty_of_one_over_the_rate_forgets_v(watch, problem):
    """λ = 1/η: a step is v <- v - η g(v) - (v - w) = w - η g(v)."""
    algorithm = Ditto(
        problem.network(START), penalty=10.0, lr=0.1, batch_size=None, loss=FULL["loss"]
    )
    history = watch(algorithm, problem, 3)
    received = [START, *history["w"][:-1]]
    before = [np.tile(START, (4, 1)), *history["v"][:-1]]
    for w, v, new in zip(received, before, history["v"], strict=True):
        expected = [w - 0.1 * problem.gradient(i, v[i]) for i in ALL]
        np.testing.assert_allclose(new, expected, rtol=0, atol=1e-12)


# ---- clients without training, counts, arguments ------------------------------------------------


def test_clients_without_samples_or_rounds_keep_the_initial_model(fit, problem):
    """Client 4 has no samples, and client 1 never takes part. Both have the initial v_i; a newcomer
    would receive w."""
    algorithm = Ditto(problem.network(START), penalty=PENALTY, **FULL)
    data = reference.with_an_idle_client(problem)
    fit(algorithm, data, 2, trace=[[0, 2, 4], [0, 3, 4]])
    models = torch.cat([algorithm.personalized(c) for c in algorithm.iter_clients()])
    ids = np.concatenate([clients.ids for clients in algorithm.iter_clients()])
    stayed = (models == torch.from_numpy(START)).all(1).numpy()
    assert set(ids[stayed]) == {1, 4}
    newcomers = next(algorithm.iter_clients())
    assert torch.equal(algorithm.newcomer(newcomers)[0], algorithm.global_model)
    assert not torch.isclose(algorithm.global_model, torch.from_numpy(START)).any()
