"""FedAdagrad, FedAdam and FedYogi against a slow NumPy loop and the optimizers of `torch.optim`."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from pfl.algorithms import FedAdagrad, FedAdam, FedAvg, FedYogi
from tests.algorithms import reference_clup_pd as reference
from tests.algorithms.traced import (
    BATCHES,
    FULL,
    RATES,
    SIZES,
    START,
    TRACE,
    full,
    furthest,
    in_cohorts,
)
from tests.problems import History, Steps

SERVER: dict[str, Any] = dict(server_lr=0.3, tau=0.05)
BETAS = (0.6, 0.7)
METHODS = {
    "Adagrad": partial(FedAdagrad, beta=BETAS[0], **SERVER),
    "Adam": partial(FedAdam, betas=BETAS, **SERVER),
    "Yogi": partial(FedYogi, betas=BETAS, **SERVER),
}


# ---- a second implementation --------------------------------------------------------------------


def adaptive(
    problem, x, batches, rule, server_lr, tau, lr, lr_decay=1.0, weight_decay=0.0, slip=None
):
    """Algorithm 2, client by client, step by step and value by value; x, m and v of each round.

    Slips: "uniform", the mean over S is unweighted; "v from 0"; "bias", m and v are corrected, and
    v starts at 0, as in `torch.optim.Adam`; "inside", τ under the root; "no momentum"; "squares", v
    takes the mean of the clients' squares.
    """
    m, history = np.zeros_like(x), []
    v = np.zeros_like(x) if slip in ("v from 0", "bias") else np.full_like(x, tau**2)
    beta_1, beta_2 = (0.0 if slip == "no momentum" else BETAS[0]), BETAS[1]
    for t, cohort in enumerate(batches):
        changes = []
        for i, steps in cohort.items():
            y = x
            for samples in steps:
                gradient = problem.gradient(i, y, samples) + weight_decay * y
                y = y - lr * lr_decay**t * gradient
            changes.append(y - x)
        weights = [1 if slip == "uniform" else problem.sizes[i] for i in cohort]
        delta = np.average(changes, axis=0, weights=weights)
        squares = delta**2
        if slip == "squares":
            squares = np.average(np.square(changes), axis=0, weights=weights)
        for p, square in enumerate(squares):
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
        if slip == "bias":
            up, down = m / (1 - beta_1 ** (t + 1)), v / (1 - beta_2 ** (t + 1))
        divisor = np.sqrt(down + tau) if slip == "inside" else np.sqrt(down) + tau
        x = x + server_lr * up / divisor
        history.append({"w": x, "m": m.copy(), "v": v.copy()})
    return history


def assert_rounds(history, expected, *names):
    reference.assert_rounds(history.rounds, expected, *names, atol=1e-12)


@pytest.mark.parametrize("rule", METHODS)
def test_rounds_equal_the_numpy_loop(fit, problem, rule):
    """Partial participation, unequal clients, weight decay, a decayed local rate."""
    history = History()
    algorithm = METHODS[rule](problem.network(START), local_steps=4, **FULL)
    fit(algorithm, problem, len(TRACE), callbacks=[history], trace=TRACE)
    expected = adaptive(problem, START, full(4), rule, **SERVER, **RATES)
    assert_rounds(history, expected, "w", "m", "v")


@pytest.mark.parametrize("rule", METHODS)
def test_mini_batches_and_unequal_numbers_of_local_steps(fit, problem, rule):
    history, steps = History(), Steps()
    algorithm = METHODS[rule](problem.network(START), **BATCHES)
    fit(algorithm, problem, len(TRACE), callbacks=[history, steps], trace=TRACE)
    batches = in_cohorts(reference.batches_of(problem, steps))
    expected = adaptive(problem, START, batches, rule, **SERVER, **RATES)
    assert_rounds(history, expected, "w", "m", "v")


def test_the_mean_as_printed_is_an_argument(fit, problem):
    """Algorithm 2 prints 1/|S|: `weighting: uniform`."""
    history = History()
    algorithm = METHODS["Adam"](problem.network(START), weighting="uniform", local_steps=4, **FULL)
    fit(algorithm, problem, len(TRACE), callbacks=[history], trace=TRACE)
    expected = adaptive(problem, START, full(4), "Adam", slip="uniform", **SERVER, **RATES)
    assert_rounds(history, expected, "w")


SLIPS = ["uniform", "v from 0", "bias", "inside", "no momentum", "squares"]


@pytest.mark.parametrize("slip", SLIPS)
@pytest.mark.parametrize("rule", METHODS)
def test_a_wrong_formula_would_show(problem, rule, slip):
    """The cases above are sharp: each misreading moves some model by more than 0.01, as does each
    of the other two rules."""
    loop = partial(adaptive, problem, START, full(4), **SERVER, **RATES)
    right = loop(rule)
    assert furthest(right, loop(rule, slip=slip)) > 0.01
    assert all(furthest(right, loop(other)) > 0.01 for other in METHODS.keys() - {rule})


# ---- the optimizers of torch --------------------------------------------------------------------


def runs(fit, problem, *algorithms):
    """The global models of two methods after each round, [rounds, P]."""
    histories = []
    for algorithm in algorithms:
        histories.append(History())
        fit(algorithm, problem, len(TRACE), callbacks=[histories[-1]], trace=TRACE)
    return [history["w"] for history in histories]


def test_fedadagrad_without_momentum_is_torch_s_adagrad(fit, problem):
    """With sums of squares from τ^2 and ε = τ both steps are η Δ / (sqrt(v) + τ)."""
    adagrad = partial(torch.optim.Adagrad, lr=0.3, initial_accumulator_value=0.05**2, eps=0.05)
    actual, expected = runs(
        fit,
        problem,
        FedAdagrad(problem.network(START), **SERVER, **BATCHES),
        FedAvg(problem.network(START), server_optimizer=adagrad, **BATCHES),
    )
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)


def test_fedadam_without_memory_is_torch_s_adam(fit, problem):
    """β_1 = β_2 = 0: nothing is left of the first m and v, and 1 - β^t = 1. Both steps are
    η Δ / (|Δ| + τ)."""
    adam = partial(torch.optim.Adam, lr=0.3, betas=(0.0, 0.0), eps=0.05)
    actual, expected = runs(
        fit,
        problem,
        FedAdam(problem.network(START), betas=(0.0, 0.0), **SERVER, **BATCHES),
        FedAvg(problem.network(START), server_optimizer=adam, **BATCHES),
    )
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)


def test_otherwise_torch_s_adam_corrects_the_bias(fit, problem):
    """In the first round, with Δ known from plain FedAvg, torch's step is η Δ / (|Δ| + τ), and
    FedAdam's η (1 - β_1) Δ / (sqrt(β_2 τ^2 + (1 - β_2) Δ^2) + τ). From then on torch's is the
    NumPy loop with v from 0 and both corrections, and no other."""
    adam = partial(torch.optim.Adam, lr=0.3, betas=BETAS, eps=0.05)
    settings = FULL | {"local_steps": 4}
    ours, torch_s, plain = runs(
        fit,
        problem,
        METHODS["Adam"](problem.network(START), **settings),
        FedAvg(problem.network(START), server_optimizer=adam, **settings),
        FedAvg(problem.network(START), **settings),
    )
    delta, (beta_1, beta_2), (eta, tau) = plain[0] - START, BETAS, SERVER.values()
    np.testing.assert_allclose(
        torch_s[0], START + eta * delta / (np.abs(delta) + tau), rtol=0, atol=1e-12
    )
    root = np.sqrt(beta_2 * tau**2 + (1 - beta_2) * delta**2)
    expected = START + eta * (1 - beta_1) * delta / (root + tau)
    np.testing.assert_allclose(ours[0], expected, rtol=0, atol=1e-12)
    corrected = adaptive(problem, START, full(4), "Adam", slip="bias", **SERVER, **RATES)
    np.testing.assert_allclose(torch_s, [row["w"] for row in corrected], rtol=0, atol=1e-12)
    assert np.abs(ours - torch_s).max(1).min() > 0.01


# ---- clients without samples, arguments ---------------------------------------------------------


def test_a_client_without_samples_has_no_weight(fit, problem):
    """It sends x, with the weight 0."""
    history = History()
    algorithm = METHODS["Yogi"](problem.network(START), local_steps=3, **FULL)
    trace = [[0, 2, 4], [1, 4], [3, 4]]
    fit(algorithm, reference.with_an_idle_client(problem), 3, callbacks=[history], trace=trace)
    without = full(3, [[i for i in cohort if i < len(SIZES)] for cohort in trace])
    assert_rounds(history, adaptive(problem, START, without, "Yogi", **SERVER, **RATES), "w", "v")
