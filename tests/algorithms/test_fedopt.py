"""FedAdagrad, FedAdam and FedYogi against a slow NumPy loop and the optimizers of `torch.optim`."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from pfl.algorithms import FedAdagrad, FedAdam, FedAvg, FedYogi
from tests.algorithms import reference_clup_pd as reference
from tests.algorithms.traced import BATCHES, FULL, RATES, SIZES, START, full, in_cohorts
from tests.problems import Steps

SERVER: dict[str, Any] = dict(server_lr=0.3, tau=0.05)
BETAS = (0.6, 0.7)
METHODS = {
    "Adagrad": partial(FedAdagrad, beta=BETAS[0], **SERVER),
    "Adam": partial(FedAdam, betas=BETAS, **SERVER),
    "Yogi": partial(FedYogi, betas=BETAS, **SERVER),
}


# ---- a second implementation --------------------------------------------------------------------


def adaptive(
    problem,
    x,
    batches,
    rule,
    server_lr,
    tau,
    lr,
    lr_decay=1.0,
    weight_decay=0.0,
    uniform=False,
    corrected=False,
):
    """Algorithm 2, client by client, step by step and value by value; x, m and v of each round.

    Where `uniform`, the mean over S is unweighted. Where `corrected`, v starts at 0, and the bias
    of m and v is corrected, as in `torch.optim.Adam`.
    """
    m, history = np.zeros_like(x), []
    v = np.full_like(x, 0.0 if corrected else tau**2)
    beta_1, beta_2 = BETAS
    for t, cohort in enumerate(batches):
        changes = []
        for i, steps in cohort.items():
            y = x
            for samples in steps:
                gradient = problem.gradient(i, y, samples) + weight_decay * y
                y = y - lr * lr_decay**t * gradient
            changes.append(y - x)
        weights = [1 if uniform else problem.sizes[i] for i in cohort]
        delta = np.average(changes, axis=0, weights=weights)
        for p, square in enumerate(delta**2):
            m[p] = beta_1 * m[p] + (1 - beta_1) * delta[p]
            if rule == "Adagrad":
                v[p] = v[p] + square
            elif rule == "Adam":
                v[p] = beta_2 * v[p] + (1 - beta_2) * square
            elif v[p] > square:  # Yogi moves v towards Δ^2 by a step of (1 - β_2) Δ^2
                v[p] = v[p] - (1 - beta_2) * square
            else:
                v[p] = v[p] + (1 - beta_2) * square
        up, down = m, v
        if corrected:
            up, down = m / (1 - beta_1 ** (t + 1)), v / (1 - beta_2 ** (t + 1))
        x = x + server_lr * up / (np.sqrt(down) + tau)
        history.append({"w": x, "m": m.copy(), "v": v.copy()})
    return history


def assert_rounds(history, expected, *names):
    reference.assert_rounds(history.rounds, expected, *names, atol=1e-12)


@pytest.mark.parametrize("rule", METHODS)
def test_rounds_equal_the_numpy_loop(follow, problem, rule):
    """Partial participation, unequal clients, weight decay, a decayed local rate."""
    history = follow(METHODS[rule], local_steps=4, **FULL)
    expected = adaptive(problem, START, full(4), rule, **SERVER, **RATES)
    assert_rounds(history, expected, "w", "m", "v")


@pytest.mark.parametrize("rule", METHODS)
def test_mini_batches_and_unequal_numbers_of_local_steps(follow, problem, rule):
    steps = Steps()
    history = follow(METHODS[rule], callbacks=[steps], **BATCHES)
    batches = in_cohorts(steps.batches(problem))
    expected = adaptive(problem, START, batches, rule, **SERVER, **RATES)
    assert_rounds(history, expected, "w", "m", "v")


def test_yogis_second_moment_stays_where_it_equals_the_square():
    """v = τ^2 = 1/4 and Δ^2 = 1/4, 1 and 1/9: v - (1 - β_2) Δ^2 sign(v - Δ^2), with sign(0) = 0."""
    method = FedYogi(torch.nn.Linear(2, 1).double(), tau=0.5, betas=(0.9, 0.9))
    actual = method.second_moment(torch.tensor([1 / 4, 1.0, 1 / 9], dtype=torch.float64))
    np.testing.assert_allclose(actual, [1 / 4, 1 / 4 + 0.1, 1 / 4 - 0.1 / 9], rtol=0, atol=1e-15)


def test_the_mean_as_printed_is_an_argument(follow, problem):
    """Algorithm 2 prints 1/|S|: `weighting: uniform`."""
    history = follow(METHODS["Adam"], weighting="uniform", local_steps=4, **FULL)
    expected = adaptive(problem, START, full(4), "Adam", uniform=True, **SERVER, **RATES)
    assert_rounds(history, expected, "w")


# ---- the optimizers of torch --------------------------------------------------------------------


def test_fedadagrad_without_momentum_is_torch_s_adagrad(follow):
    """With sums of squares from τ^2 and ε = τ both steps are η Δ / (sqrt(v) + τ)."""
    adagrad = partial(torch.optim.Adagrad, lr=0.3, initial_accumulator_value=0.05**2, eps=0.05)
    actual = follow(FedAdagrad, **SERVER, **BATCHES)
    expected = follow(FedAvg, server_optimizer=adagrad, **BATCHES)
    np.testing.assert_allclose(actual["w"], expected["w"], rtol=0, atol=1e-12)


def test_fedadam_without_memory_is_torch_s_adam(follow):
    """β_1 = β_2 = 0: nothing is left of the first m and v, and 1 - β^t = 1. Both steps are
    η Δ / (|Δ| + τ)."""
    adam = partial(torch.optim.Adam, lr=0.3, betas=(0.0, 0.0), eps=0.05)
    actual = follow(FedAdam, betas=(0.0, 0.0), **SERVER, **BATCHES)
    expected = follow(FedAvg, server_optimizer=adam, **BATCHES)
    np.testing.assert_allclose(actual["w"], expected["w"], rtol=0, atol=1e-12)


def test_otherwise_torch_s_adam_corrects_the_bias(follow, problem):
    """In the first round, with Δ known from plain FedAvg, torch's step is η Δ / (|Δ| + τ), and
    FedAdam's η (1 - β_1) Δ / (sqrt(β_2 τ^2 + (1 - β_2) Δ^2) + τ). From then on torch's is the
    NumPy loop with v from 0 and both corrections, and no other."""
    adam = partial(torch.optim.Adam, lr=0.3, betas=BETAS, eps=0.05)
    settings = FULL | {"local_steps": 4}
    ours = follow(METHODS["Adam"], **settings)["w"]
    torch_s = follow(FedAvg, server_optimizer=adam, **settings)["w"]
    plain = follow(FedAvg, **settings)["w"]
    delta, (beta_1, beta_2), (eta, tau) = plain[0] - START, BETAS, SERVER.values()
    np.testing.assert_allclose(
        torch_s[0], START + eta * delta / (np.abs(delta) + tau), rtol=0, atol=1e-12
    )
    root = np.sqrt(beta_2 * tau**2 + (1 - beta_2) * delta**2)
    expected = START + eta * (1 - beta_1) * delta / (root + tau)
    np.testing.assert_allclose(ours[0], expected, rtol=0, atol=1e-12)
    corrected = adaptive(problem, START, full(4), "Adam", corrected=True, **SERVER, **RATES)
    np.testing.assert_allclose(torch_s, [row["w"] for row in corrected], rtol=0, atol=1e-12)
    assert np.abs(ours - torch_s).max(1).min() > 0.01


# ---- clients without samples, arguments ---------------------------------------------------------


def test_a_client_without_samples_has_no_weight(watch, problem):
    """It sends x, with the weight 0."""
    algorithm = METHODS["Yogi"](problem.network(START), local_steps=3, **FULL)
    trace = [[0, 2, 4], [1, 4], [3, 4]]
    history = watch(algorithm, reference.with_an_idle_client(problem), 3, trace=trace)
    without = full(3, [[i for i in cohort if i < len(SIZES)] for cohort in trace])
    assert_rounds(history, adaptive(problem, START, without, "Yogi", **SERVER, **RATES), "w", "v")
