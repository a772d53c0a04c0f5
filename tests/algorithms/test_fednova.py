"""FedNova against a slow NumPy loop, its fixed point, and FedAvg and FedProx where it is these."""

from functools import partial

import numpy as np
import pytest
import torch

from pfl.algorithms import FedAvg, FedNova, FedProx
from tests.algorithms.traced import ALL, BATCHES, FULL, LOSS, RATES, START, furthest, in_cohorts
from tests.problems import Steps, scalar_problem


def fednova(problem, x, batches, mu=0.0, weighting="samples"):
    """x after each round, client by client and step by step, with the coefficients one by one.

    `batches[t][i]` has the samples of each local step.
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
            norms.append(sum((1 - rate * mu) ** k for k in range(len(steps))))
            moves.append((v - x) / norms[-1])
        p = np.array([problem.sizes[i] if weighting == "samples" else 1 for i in cohort])
        p = p / p.sum()
        x = x + (p @ norms) * (p @ np.array(moves))
        history.append({"w": x})
    return history


@pytest.mark.parametrize("mu", [0.0, 2.0])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("engine", ["sequential", "vmap"])
def test_rounds_equal_the_numpy_loop(follow, problem, mu, weighting, engine):
    """Clients take 8, 2, 6 and 4 steps."""
    steps = Steps()
    arguments = dict(callbacks=[steps], proximal_weight=mu, weighting=weighting, engine=engine)
    history = follow(FedNova, **arguments, **BATCHES)
    batches = in_cohorts(steps.batches(problem))
    assert furthest(history.rounds, fednova(problem, START, batches, mu, weighting)) < 1e-12


def test_stragglers_count_the_steps_that_they_took(follow, problem):
    """Half of 8, 2, 6 and 4 steps in the rounds in which they are slow."""
    slow = [[0, 2], [1], [], [0, 3], [], ALL]
    steps, loop = Steps(), {"stragglers": slow}
    history = follow(FedNova, callbacks=[steps], loop=loop, proximal_weight=2.0, **BATCHES)
    batches = in_cohorts(steps.batches(problem), counts=[4, 2, 3, 4])
    assert furthest(history.rounds, fednova(problem, START, batches, 2.0)) < 1e-12


# ---- identities and the fixed point -------------------------------------------------------------


@pytest.mark.parametrize(
    ("mu", "plain"), [(0.0, FedAvg), (0.5, partial(FedProx, proximal_weight=0.5))]
)
@pytest.mark.parametrize("server", [None, partial(torch.optim.SGD, lr=0.7, momentum=0.6)])
def test_equal_numbers_of_steps_are_fedavg_or_fedprox(follow, mu, plain, server):
    """|a_i|_1 is the same for all, and cancels; also with momentum at the server."""
    settings = dict(local_steps=3, server_optimizer=server, **FULL)
    nova = follow(FedNova, proximal_weight=mu, **settings)
    assert furthest(nova.rounds, follow(plain, **settings).rounds) < 1e-13


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
