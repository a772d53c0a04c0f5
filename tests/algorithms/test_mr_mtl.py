"""MR-MTL: the iterates by hand, and the methods that it equals at its ends."""

import numpy as np
import torch

from models import HalfSquaredError
from pfl.algorithms import MRMTL, FedCLUP, LocalTrain
from tests.algorithms import reference_clup_pd as reference
from tests.algorithms.methods import BATCHES, small_network, small_world
from tests.problems import least_squares, scalar_problem


def test_iterates_equal_numpy(watch):
    """w_i <- w_i - η (g_i(w_i) + λ (w_i - w)) from the client's own last w_i; w <- mean_S w_i."""
    problem, lr, penalty, trace = least_squares([5, 2, 4]), 0.05, 0.7, [[0, 1], [1, 2], [0, 2]]
    method = MRMTL(
        problem.network(0.3), penalty=penalty, lr=lr, local_steps=3, batch_size=None,
        loss=HalfSquaredError(),
    )  # fmt: skip
    models = watch(method, problem, 3, trace=trace)
    w, own = np.full(problem.size, 0.3), np.full((3, problem.size), 0.3)
    for cohort, row in zip(trace, models.rounds, strict=True):
        for i in cohort:
            for _ in range(3):
                own[i] -= lr * (problem.gradient(i, own[i]) + penalty * (own[i] - w))
        w = own[cohort].mean(0)
        np.testing.assert_allclose(row["w"], w, rtol=0, atol=1e-14)
        np.testing.assert_allclose(row["w_i"], own, rtol=0, atol=1e-14)


def test_it_is_fedclup_with_the_inverse_penalty_as_its_step(fit):
    arguments = dict(loss=HalfSquaredError(), penalty=0.3, **BATCHES)
    one = fit(MRMTL(small_network(), **arguments), small_world(), 3, clients_per_round=2)
    clup = FedCLUP(small_network(), server_step="inverse_penalty", **arguments)
    fit(clup, small_world(), 3, clients_per_round=2)
    torch.testing.assert_close(one.global_model, clup.global_model, rtol=0, atol=1e-14)


def test_without_a_penalty_every_client_is_alone(fit):
    alone = fit(LocalTrain(small_network(), loss=HalfSquaredError(), **BATCHES), small_world(), 3)
    free = MRMTL(small_network(), penalty=0.0, loss=HalfSquaredError(), **BATCHES)
    fit(free, small_world(), 3)
    rows = [method.client_rows("w", np.arange(4)) for method in (alone, free)]
    assert torch.equal(*rows)


def test_a_client_without_samples_has_no_say(watch):
    """Its f_i is 0, so that w_i = w minimizes its part: the common beginning does not pull. On
    (w_i - A_i)^2 / 2 the solution is w = mean A_i, w_i = (A_i + λ w) / (1 + λ) of the others."""
    problem = scalar_problem([-1.0, 2.0, 5.0])
    data = reference.with_an_idle_client(problem)
    method = MRMTL(
        problem.network(9.0), penalty=1.5, lr=0.25, local_steps=3, batch_size=None,
        loss=HalfSquaredError(),
    )  # fmt: skip
    models = watch(method, data, 60)
    own = [(a + 1.5 * 2.0) / 2.5 for a in (-1.0, 2.0, 5.0)]
    np.testing.assert_allclose(models["w"][-1], [2.0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(models["w_i"][-1][:, 0], [*own, 2.0], rtol=0, atol=1e-5)
