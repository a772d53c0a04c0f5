"""FedDyn against a slow NumPy loop, its fixed point, and the methods that it is the same as."""

from functools import partial

import numpy as np
import pytest
import torch

from pfl.algorithms import FedDyn, FedPD, FedSLR
from tests.algorithms import reference_clup_pd as reference
from tests.algorithms.traced import ALL, BATCHES, FULL, LOSS, RATES, START, TRACE, full, in_cohorts
from tests.problems import History, Steps, least_squares, matrix_problem, scalar_problem

ALPHA = 0.7


# ---- a second implementation --------------------------------------------------------------------


def feddyn(problem, theta, batches, alpha, lr, lr_decay=1.0, weight_decay=0.0):
    """Algorithm 1, client by client and step by step; θ, h and all g_i after each round.

    `batches[t][i]` has the samples of each local step that client i takes in round t.
    """
    m = problem.num_clients
    h, g, history = np.zeros_like(theta), np.zeros((m, len(theta))), []
    for t, cohort in enumerate(batches):
        models = {}
        for i, steps in cohort.items():
            v = theta.copy()
            for samples in steps:
                gradient = problem.gradient(i, v, samples) + weight_decay * v
                v = v - lr * lr_decay**t * (gradient - g[i] + alpha * (v - theta))
            models[i] = v
        for i, v in models.items():
            g[i] = g[i] - alpha * (v - theta)
        h = h - alpha / m * sum(v - theta for v in models.values())
        theta = np.mean(list(models.values()), axis=0) - h / alpha
        history.append({"w": theta, "h": h, "g": g.copy()})
    return history


def assert_rounds(history, expected):
    reference.assert_rounds(history.rounds, expected, "w", "h", "g", atol=1e-12)


def test_rounds_equal_the_numpy_loop(follow, problem):
    """Partial participation, unequal clients, weight decay, a decayed rate."""
    history = follow(FedDyn, alpha=ALPHA, local_steps=4, **FULL)
    assert_rounds(history, feddyn(problem, START, full(4), ALPHA, **RATES))


@pytest.mark.parametrize("engine", ["sequential", "vmap"])
def test_mini_batches_and_unequal_numbers_of_local_steps(follow, problem, engine):
    steps = Steps()
    history = follow(FedDyn, callbacks=[steps], alpha=ALPHA, engine=engine, **BATCHES)
    batches = in_cohorts(steps.batches(problem))
    assert_rounds(history, feddyn(problem, START, batches, ALPHA, **RATES))


# ---- where it ends ------------------------------------------------------------------------------


def test_the_limit_is_the_minimum_for_any_numbers_of_local_steps(watch):
    """f_i(w) = a_i/2 (w - A_i)^2, and every mini-batch has the full gradient.

    At a fixed point g_i stays, so that θ_i = θ. K_i steps from θ along the directions
    r_i, (1 - η (a_i + α)) r_i, ... with r_i = f_i'(θ) - g_i end at θ only if r_i = 0, so that
    g_i = f_i'(θ). And θ = mean θ_i - h / α says h = 0, where h = mean g_i = mean f_i'(θ):
    θ = sum a_i A_i / sum a_i, whatever the K_i are. FedAvg ends elsewhere (test_scaffold.py)."""
    optima, a, steps = np.array([0.0, 1.0, 4.0]), np.array([4.0, 1.0, 0.5]), np.array([6, 2, 4])
    problem = scalar_problem(optima, a, steps // 2)
    algorithm = FedDyn(
        problem.network(5.0), alpha=2.0, lr=0.15, batch_size=2, local_epochs=2, loss=LOSS
    )
    history = watch(algorithm, problem, 50)
    last, minimum = history.rounds[-1], (a @ optima) / a.sum()
    assert last["w"].item() == pytest.approx(minimum, abs=1e-9)
    assert last["h"].item() == pytest.approx(0.0, abs=1e-9)
    np.testing.assert_allclose(last["g"][:, 0], a * (minimum - optima), rtol=0, atol=1e-9)


def test_the_limit_is_the_optimum_of_unlike_hessians_under_sampling(watch):
    """At the optimum, which the normal equations give, nobody moves who knows its gradient there.
    So the limit is the same whoever takes part, and gradients that differ cancel."""
    problem = least_squares((30, 12, 20), d=2, seed=6)
    algorithm = FedDyn(
        problem.network(0.5), alpha=1.0, lr=0.3, local_steps=4, batch_size=None, loss=LOSS
    )
    history = watch(algorithm, problem, 80, clients_per_round=2)
    last, optimum = history.rounds[-1], reference.minimizer(problem)
    np.testing.assert_allclose(last["w"], optimum, rtol=0, atol=1e-7)
    gradients = [problem.gradient(i, optimum) for i in range(3)]
    np.testing.assert_allclose(last["g"], gradients, rtol=0, atol=1e-6)
    assert np.abs(gradients).min(1).max() > 0.1


# ---- identities ---------------------------------------------------------------------------------


@pytest.mark.parametrize("trace", [[ALL] * 6, TRACE], ids=["everyone", "some"])
@pytest.mark.parametrize("state_dtype", [None, "bfloat16"])
def test_h_is_the_mean_of_all_g(watch, problem, trace, state_dtype):
    """Both start at 0, and h changes by the mean, over all clients, of the changes of the g_i. In
    16 bits these are the changes of what is stored."""
    algorithm = FedDyn(problem.network(START), alpha=ALPHA, batch_size=2, loss=LOSS, **RATES)
    history = watch(algorithm, problem, 6, trace=trace, state_dtype=state_dtype)
    np.testing.assert_allclose(history["h"], history["g"].mean(1), rtol=0, atol=1e-13)
    assert np.abs(history["h"]).min(1).max() > 1e-3
    if state_dtype is not None:
        rounded = torch.from_numpy(history["g"]).bfloat16().double().numpy()
        np.testing.assert_array_equal(history["g"], rounded)
    # What the server needs for the rounded g_i is not counted: P values up, 8 bytes each.
    np.testing.assert_array_equal(
        history["up"][-1], [8 * 8 * sum(i in c for c in trace) for i in ALL]
    )


@pytest.mark.parametrize("optimizer", [None, partial(torch.optim.SGD, momentum=0.5)])
def test_it_is_phase_one_of_fedslr_without_penalty(follow, optimizer):
    """η_g = 1/α and λ = 0: both take the same local steps from θ^t, however few, with γ_i = g_i, on
    the same mini-batches. The server's steps are the same, too: θ = mean θ_i - η_g mean γ_i."""
    settings = BATCHES | {"optimizer": optimizer}
    dyn = follow(FedDyn, alpha=ALPHA, **settings)
    slr = follow(FedSLR, proximal_step=1 / ALPHA, low_rank_penalty=0.0, **settings)
    np.testing.assert_allclose(dyn["w"], slr["w"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(dyn["g"], slr["gamma"], rtol=0, atol=1e-12)
    assert np.abs(dyn["g"]).max() > 0.1


@pytest.mark.parametrize("eta", [0.2, 3.0])
def test_with_exact_solves_it_is_fedpd_and_phase_one_of_fedslr(fit, eta):
    """α = 1/η, p = 0, Oracle I, all clients and a common start: θ is x_0, and g_i = γ_i = -λ_i.
    FedPD starts its local steps elsewhere, so that the problems must be solved exactly."""
    rng = np.random.default_rng(8)
    problem = matrix_problem(rng.normal(size=(4, 3, 2)), curvatures=[1.0, 2.0, 1.5, 1.2])
    start = rng.normal(size=6)
    # Curvatures are from 1 to 2, so a step of 1 / (1.5 + 1/η) leaves at most 0.5 / 1.8 of the
    # distance to the local solution, and 20 of them 1e-11.
    settings = dict(lr=1 / (1.5 + 1 / eta), local_steps=20, batch_size=None, loss=LOSS)
    dyn, dual, slr = History(), History(), History()
    for history, algorithm in (
        (dyn, FedDyn(problem.network(start), alpha=1 / eta, **settings)),
        (dual, FedPD(problem.network(start), proximal_step=eta, **settings)),
        (slr, FedSLR(problem.network(start), proximal_step=eta, low_rank_penalty=0.0, **settings)),
    ):
        fit(algorithm, problem, 6, callbacks=[history])
    for other, multipliers in ((dual, -dual["lam"]), (slr, slr["gamma"])):
        np.testing.assert_allclose(dyn["w"], other["w"], rtol=0, atol=1e-9)
        np.testing.assert_allclose(dyn["g"], multipliers, rtol=0, atol=1e-8)
    assert np.abs(np.diff(dyn["w"], axis=0)).max() > 0.05


def test_states_in_sixteen_bits_leave_what_is_sent(watch, problem):
    """One full step: θ_i = θ - η ∇f_i(θ), and θ <- mean θ_i - h / α with the h that is kept."""
    algorithm = FedDyn(problem.network(START), alpha=ALPHA, local_steps=1, **FULL)
    history = watch(algorithm, problem, 1, state_dtype="bfloat16")
    decay = RATES.get("weight_decay", 0.0)
    sent = [START - RATES["lr"] * (problem.gradient(i, START) + decay * START) for i in ALL]
    expected = np.mean(sent, axis=0) - history["h"][0] / ALPHA
    np.testing.assert_allclose(history["w"][0], expected, rtol=0, atol=1e-12)


# ---- clients without samples, arguments ---------------------------------------------------------


def test_a_client_without_samples_sends_what_it_received(watch, problem):
    """It counts in S with θ_i = θ^t, and in m; its g_i stays 0."""
    trace = [[0, 2, 4], [*ALL, 4], [1, 4]]
    algorithm = FedDyn(problem.network(START), alpha=ALPHA, local_steps=3, **FULL)
    data = reference.with_an_idle_client(problem)
    history = watch(algorithm, data, 3, trace=trace)
    problem.num_clients = len(ALL) + 1
    batches = [{i: [None] * 3 if i != 4 else [] for i in cohort} for cohort in trace]
    assert_rounds(history, feddyn(problem, START, batches, ALPHA, **RATES))
