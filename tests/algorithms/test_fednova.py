"""FedNova against a slow NumPy loop, its fixed point, and FedAvg and FedProx where it is these."""

from functools import partial

import numpy as np
import pytest
import torch

from pfl.algorithms import FedAvg, FedNova, FedProx
from tests.algorithms.traced import (
    ALL,
    BATCH_COUNTS,
    BATCHES,
    FULL,
    LOSS,
    RATES,
    SIZES,
    START,
    TRACE,
    furthest,
    in_cohorts,
)
from tests.problems import History, Steps, batches_of_clients, scalar_problem


def fednova(problem, x, batches, mu=0.0, weighting="samples", slip=None):
    """x after each round, client by client and step by step, with the coefficients one by one.

    `batches[t][i]` has the samples of each local step. Slips: "FedAvg", nothing is normalized;
    "steps", τ = sum p_i τ_i; "mean", τ is the plain mean of |a_i|_1; "plain", d_i = (v - x) / τ_i;
    "initial rate", |a_i|_1 with it.
    """
    history = []
    for t, cohort in enumerate(batches):
        rate = RATES["lr"] * RATES["lr_decay"] ** t
        moves, norms = [], []
        for i, steps in cohort.items():
            v = x.copy()
            for samples in steps:
                g = problem.gradient(i, v, samples) + RATES["weight_decay"] * v
                v = v - rate * (g + mu * (v - x))
            shrink = 1 - (RATES["lr"] if slip == "initial rate" else rate) * mu
            norms.append(sum(shrink**k for k in range(len(steps))))
            moves.append((v - x) / (len(steps) if slip == "plain" else norms[-1]))
        p = np.array([problem.sizes[i] if weighting == "samples" else 1 for i in cohort])
        p = p / p.sum()
        if slip == "FedAvg":
            moves, tau = [d * norm for d, norm in zip(moves, norms, strict=True)], 1.0
        elif slip == "mean":
            tau = np.mean(norms)
        else:
            tau = p @ ([len(steps) for steps in cohort.values()] if slip == "steps" else norms)
        x = x + tau * (p @ np.array(moves))
        history.append({"w": x})
    return history


@pytest.mark.parametrize("mu", [0.0, 2.0])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("engine", ["sequential", "vmap"])
def test_rounds_equal_the_numpy_loop(fit, problem, mu, weighting, engine):
    """Clients take 8, 2, 6 and 4 steps."""
    history, steps = History(), Steps()
    algorithm = FedNova(
        problem.network(START), proximal_weight=mu, weighting=weighting, engine=engine, **BATCHES
    )
    fit(algorithm, problem, len(TRACE), callbacks=[history, steps], trace=TRACE)
    batches = in_cohorts([batches_of_clients(problem, calls) for calls in steps.rounds])
    assert [len(batches[0][i]) for i in ALL] == BATCH_COUNTS
    assert furthest(history.rounds, fednova(problem, START, batches, mu, weighting)) < 1e-12


def test_stragglers_count_the_steps_that_they_took(fit, problem):
    """Half of 8, 2, 6 and 4 steps in the rounds in which they are slow."""
    slow = [[0, 2], [1], [], [0, 3], [], ALL]
    history, steps = History(), Steps()
    fit(
        FedNova(problem.network(START), proximal_weight=2.0, **BATCHES),
        problem,
        len(TRACE),
        callbacks=[history, steps],
        trace=TRACE,
        stragglers=slow,
    )
    batches = in_cohorts([batches_of_clients(problem, calls) for calls in steps.rounds])
    assert [len(batches[0][i]) for i in ALL] == [4, 2, 3, 4]
    assert furthest(history.rounds, fednova(problem, START, batches, 2.0)) < 1e-12


@pytest.mark.parametrize("slip", ["FedAvg", "steps", "mean", "plain", "initial rate"])
def test_a_wrong_formula_would_show(problem, slip):
    batches = [{i: [None] * (2 * i + 1) for i in cohort} for cohort in TRACE]
    right, wrong = (fednova(problem, START, batches, 2.0, slip=s) for s in (None, slip))
    assert furthest(right, wrong) > 0.01


# ---- identities and the fixed point -------------------------------------------------------------


@pytest.mark.parametrize(
    ("mu", "plain"), [(0.0, FedAvg), (0.5, partial(FedProx, proximal_weight=0.5))]
)
@pytest.mark.parametrize("server", [None, partial(torch.optim.SGD, lr=0.7, momentum=0.6)])
def test_equal_numbers_of_steps_are_fedavg_or_fedprox(fit, problem, mu, plain, server):
    """|a_i|_1 is the same for all, and cancels; also with momentum at the server."""
    histories = History(), History()
    kinds = (partial(FedNova, proximal_weight=mu), plain)
    for kind, history in zip(kinds, histories, strict=True):
        algorithm = kind(problem.network(START), local_steps=3, server_optimizer=server, **FULL)
        fit(algorithm, problem, len(TRACE), callbacks=[history], trace=TRACE)
    assert furthest(*(history.rounds for history in histories)) < 1e-13


OPTIMA, CURVATURES = np.array([0.0, 1.0, 4.0]), np.array([4.0, 1.0, 0.5])
STEPS = np.array([6, 2, 4])


@pytest.mark.parametrize(("kind", "normalized"), [(FedNova, True), (FedAvg, False)])
def test_the_fixed_point_for_unequal_numbers_of_steps(fit, kind, normalized):
    """f_i(w) = a_i/2 (w - A_i)^2 with mini-batches that are all alike; two epochs of batches of two
    are STEPS steps, in all n_i of them. τ_i steps move a client by s_i (A_i - w), with
    s_i = 1 - (1 - η a_i)^τ_i, and sum n_i s_i / τ_i (A_i - w) = 0 for FedNova, without τ_i for
    FedAvg. For η -> 0 s_i / τ_i is η a_i: the minimum of sum n_i f_i."""
    problem = scalar_problem(OPTIMA, CURVATURES, STEPS // 2)
    assert (problem.sizes == STEPS).all()
    algorithm = kind(problem.network(5.0), lr=0.1, batch_size=2, local_epochs=2, loss=LOSS)
    fit(algorithm, problem, 150)
    weights = STEPS * (1 - (1 - 0.1 * CURVATURES) ** STEPS) / (STEPS if normalized else 1)
    limit = (weights * OPTIMA).sum() / weights.sum()
    assert algorithm.global_model.item() == pytest.approx(limit, abs=1e-9)


# ---- bytes and arguments ------------------------------------------------------------------------


def test_the_sum_of_coefficients_is_sent(fit, problem):
    algorithm = fit(FedNova(problem.network(START), **BATCHES), problem, 1)
    assert algorithm.bytes_down == 8 * len(START) * len(SIZES)
    assert algorithm.bytes_up == 8 * (len(START) + 1) * len(SIZES)
