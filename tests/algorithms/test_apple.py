"""APPLE against a slow NumPy loop, its penalty, and its bytes."""

import numpy as np
import pytest

from pfl.algorithms import APPLE
from tests.algorithms.traced import ALL, FULL, LOSS, SIZES, START, TRACE, full, in_cohorts
from tests.problems import Steps
from tests.refusal import refused

P0 = np.array(SIZES) / sum(SIZES)
GIVEN = dict(relationship_lr=0.05, penalty=0.7, penalized_rounds=3)


def coefficient(t, scheduler):
    """λ(t) μ, which is 0 from the fourth round on."""
    if t >= 3:
        return 0.0
    return 0.7 * {"cosine": [1.0, 0.75, 0.25], "exponential": [1.0, 0.1, 0.01]}[scheduler][t]


def slow(problem, batches, scheduler, rates=FULL):
    """Algorithm 1, client by client; all w_i after each round, and all p_i at the end."""
    cores, p = np.tile(START, (4, 1)), np.tile(P0, (4, 1))
    w, history = np.tile(START, (4, 1)), []
    for t, cohort in enumerate(batches):
        lr = rates["lr"] * rates["lr_decay"] ** t
        new = cores.copy()
        for i, steps in cohort.items():
            c = cores.copy()
            for own in steps:
                at = sum(p[i, j] * c[j] for j in range(4))
                g = problem.gradient(i, at, own) + rates["weight_decay"] * at
                moves = [g @ c[j] + coefficient(t, scheduler) * (p[i, j] - P0[j]) for j in range(4)]
                c[i] -= lr * p[i, i] * g
                p[i] -= 0.05 * np.array(moves)
            w[i] = sum(p[i, j] * c[j] for j in range(4))
            new[i] = c[i]
        cores = new
        history.append(w.copy())
    return history, p


@pytest.mark.parametrize("scheduler", ["cosine", "exponential"])
def test_rounds_equal_the_numpy_loop(follow, problem, scheduler):
    """exponential: 0.001^(r / 3) falls to a tenth in each round."""
    history = follow(APPLE, scheduler=scheduler, local_steps=3, **GIVEN, **FULL)
    expected, p = slow(problem, full(3), scheduler)
    np.testing.assert_allclose(history["w_i"], expected, rtol=0, atol=1e-12)
    assert np.abs(p - P0).max() > 0.05


@pytest.mark.parametrize("engine", ["sequential", "vmap"])
def test_mini_batches(watch, problem, engine):
    steps = Steps()
    arguments = {**FULL, "batch_size": 2, "local_epochs": 2}
    method = APPLE(problem.network(START), scheduler="cosine", engine=engine, **GIVEN, **arguments)
    history = watch(method, problem, len(TRACE), trace=TRACE, callbacks=[steps])
    expected, p = slow(problem, in_cohorts(steps.batches(problem)), "cosine")
    np.testing.assert_allclose(history["w_i"], expected, rtol=0, atol=1e-12)
    change = method.client_rows("change", np.arange(4))
    np.testing.assert_allclose(change, p - P0, rtol=0, atol=1e-12)


def test_clients_have_rates_of_their_own(watch, problem):
    """c_i moves by -η r_i p_ii g_i with the factor r_i of the client; p_i has the rate of all."""
    method = APPLE(problem.network(START), penalty=0.0, lr=0.1, batch_size=None, loss=LOSS)
    watch(method, problem, 1, trace=[ALL], by_client={"1": {"rate": 0.5}, "3": {"rate": 2.0}})
    cores = method.client_rows("core", np.arange(4)).numpy()
    change = method.client_rows("change", np.arange(4)).numpy()
    for i, rate in enumerate([1.0, 0.5, 1.0, 2.0]):
        g = problem.gradient(i, START)
        np.testing.assert_allclose(cores[i], START - 0.1 * rate * P0[i] * g, rtol=0, atol=1e-13)
        np.testing.assert_allclose(change[i], -0.001 * (g @ START), rtol=0, atol=1e-13)


def test_with_fixed_relationships_the_common_mixture_follows_all_gradients(watch, problem):
    """With p_i = p_0 all clients mix alike, so that after a round of one step by everyone
    sum_j p_0,j c_j has moved by -η sum_j p_0,j^2 g_j."""
    method = APPLE(problem.network(START), relationship_lr=0.0, lr=0.1, batch_size=None, loss=LOSS)
    watch(method, problem, 1, trace=[ALL])
    cores = method.client_rows("core", np.arange(4)).numpy()
    moves = sum(P0[j] ** 2 * problem.gradient(j, START) for j in range(4))
    np.testing.assert_allclose(P0 @ cores, START - 0.1 * moves, rtol=0, atol=1e-13)


def test_a_round_sends_all_core_models_and_one_back(follow, problem):
    """Numbers of 8 bytes: down 4 models of 8 values and 4 shares, up one model."""
    history = follow(APPLE, local_steps=1, **FULL)
    visits = np.array([[i in cohort for i in range(4)] for cohort in TRACE]).cumsum(0)
    assert np.array_equal(history["down"], 8 * (4 * 8 + 4) * visits)
    assert np.array_equal(history["up"], 8 * 8 * visits)


def test_refusals(problem):
    with refused("model.penalty: -1"):
        APPLE(problem.network(), penalty=-1)
    with refused("model.scheduler: 'linear'"):
        APPLE(problem.network(), scheduler="linear")
