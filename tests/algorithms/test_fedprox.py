"""FedProx against FedAvg, NumPy and closed forms."""

import numpy as np
import pytest

from models import HalfSquaredError
from pfl.algorithms import FedProx
from tests.algorithms import reference
from tests.problems import least_squares, scalar_problem

FULL = dict(batch_size=None, loss=HalfSquaredError())
START = np.linspace(-1.0, 1.0, 8)


def test_rounds_equal_the_numpy_loop(watch):
    problem = least_squares((7, 2, 5, 3), bias=True)
    trace, settings = [[0, 1, 2, 3], [1, 2], [0, 3]], dict(lr=0.2, lr_decay=0.9, weight_decay=0.1)
    algorithm = FedProx(
        problem.network(START), proximal_weight=0.7, local_steps=4, **settings, **FULL
    )
    history = watch(algorithm, problem, 3, trace=trace)
    expected = reference.fedavg(problem, START, trace, steps=4, mu=0.7, **settings)
    np.testing.assert_allclose(history["w"], expected, rtol=0, atol=1e-12)


def test_fedprox_ends_where_its_closed_form_says(fit):
    """f_i = a_i/2 (v - A_i)^2. The local objective has curvature a_i + μ and its minimum at
    v* = w + a_i (A_i - w) / (a_i + μ), so K steps from w end at w + c_i a_i (A_i - w) / (a_i + μ)
    with c_i = 1 - (1 - η (a_i + μ))^K. At the fixed point the weighted sum of these moves is 0."""
    optima, a, copies = np.array([0.0, 1.0, 3.0]), np.array([4.0, 1.0, 0.5]), np.array([1, 2, 1])
    problem = scalar_problem(optima, a, copies)
    mu, lr, steps = 2.0, 0.1, 3
    algorithm = FedProx(problem.network(5.0), proximal_weight=mu, lr=lr, local_steps=steps, **FULL)
    fit(algorithm, problem, 80)
    weight = copies * (1 - (1 - lr * (a + mu)) ** steps) * a / (a + mu)
    limit = (weight * optima).sum() / weight.sum()
    assert float(algorithm.global_model) == pytest.approx(limit, abs=1e-9)


def test_a_strong_pull_holds_clients_back(fit):
    """With η = 1 / (a + μ) the first step is exact: v - w = a (A - w) / (a + μ)."""
    problem = scalar_problem([2.0], curvatures=[1.0])
    mu = 1e6
    algorithm = FedProx(
        problem.network(0.0), proximal_weight=mu, lr=1 / (1 + mu), local_steps=50, **FULL
    )
    fit(algorithm, problem, 1)
    assert float(algorithm.global_model) == pytest.approx(2.0 / (1 + mu), rel=1e-9)
