"""The problem LeastSquares: its samples, and its solutions by linear algebra."""

import math

import numpy as np
import pytest
import torch

from datamodules import LeastSquares


@pytest.mark.parametrize(("n", "d", "condition"), [(50, 10, 10.0), (4, 4, 1e4), (6, 1, 1.0)])
def test_the_hessian_of_every_client_has_the_chosen_eigenvalues(n, d, condition):
    dm = LeastSquares(5, n, d, condition)
    x = dm.train_arrays()[0]
    expected = condition ** -np.linspace(1, 0, d)
    directions = []
    for k in range(5):
        values, vectors = np.linalg.eigh(x[k].T @ x[k] / n)
        np.testing.assert_allclose(values, expected, rtol=1e-9)
        directions.append(vectors[:, 0])
    assert (dm.smoothness, dm.strong_convexity) == (1.0, 1 / condition)
    cosines = np.abs(np.array(directions) @ np.array(directions).T)[~np.eye(5, dtype=bool)]
    assert d == 1 or cosines.max() < 0.9999


def test_true_models_lie_on_a_sphere():
    common = LeastSquares(4, heterogeneity=0.0).true_models
    assert torch.equal(common, common[:1].expand(4, -1))
    assert common[0].norm().item() == pytest.approx(1.0)
    dm = LeastSquares(4, heterogeneity=3.0)
    np.testing.assert_allclose((dm.true_models - common).norm(dim=1), 3.0)
    assert dm.heterogeneity == 3.0


def test_targets_are_those_of_the_true_models_plus_noise():
    quiet, loud = LeastSquares(2, 5000, 3, noise=0.0), LeastSquares(2, 5000, 3, noise=2.0)
    x, y = quiet.train_arrays()
    np.testing.assert_allclose(y, np.einsum("mnd,md->mn", x, quiet.true_models), atol=1e-12)
    noise = loud.train_arrays()[1] - y
    assert abs(noise.std() / 2 - 1) < 5 / np.sqrt(2 * noise.size)
    assert abs(noise.mean()) < 5 * 2 / np.sqrt(noise.size)
    # Without noise every client alone finds its true model.
    torch.testing.assert_close(quiet.solve(0.0)[1], quiet.true_models, rtol=0, atol=1e-10)


@pytest.mark.parametrize("penalty", [1e-8, 0.1, 1.0, 50.0, 1e6])
def test_the_solution_satisfies_the_normal_equations_of_all_unknowns(penalty):
    """The unknowns are (w, w_1, ..., w_M)."""
    m, n, d = 4, 9, 3
    dm = LeastSquares(m, n, d, condition=100.0)
    x, y = dm.train_arrays()
    # As rows of one least-squares problem: (X_i w_i - y_i) / n^1/2 and λ^1/2 (w_i - w).
    rows, right = [], []
    for k in range(m):
        block = np.zeros((n, (m + 1) * d))
        block[:, (k + 1) * d : (k + 2) * d] = x[k] / np.sqrt(n)
        tie = np.zeros((d, (m + 1) * d))
        tie[:, :d], tie[:, (k + 1) * d : (k + 2) * d] = -np.eye(d), np.eye(d)
        rows += [block, np.sqrt(penalty) * tie]
        right += [y[k] / np.sqrt(n), np.zeros(d)]
    expected = np.linalg.lstsq(np.concatenate(rows), np.concatenate(right), rcond=None)[0].reshape(
        m + 1, d
    )
    w, own = dm.solve(penalty)
    np.testing.assert_allclose(w, expected[0], rtol=1e-7)
    np.testing.assert_allclose(own, expected[1:], rtol=1e-7)
    # The optimality conditions, to full accuracy.
    gradients = np.einsum("mnd,mn->md", x, np.einsum("mnd,md->mn", x, own) - y) / n
    np.testing.assert_allclose(gradients, penalty * (w - own), atol=1e-15 * max(10, 10 * penalty))
    np.testing.assert_allclose(own.mean(0), w, atol=1e-12)


def test_solutions_for_penalties_inf_and_0_are_one_model_and_each_client_alone():
    dm = LeastSquares(4, 9, 3)
    x, y = dm.train_arrays()
    w, own = dm.solve(math.inf)
    expected = np.linalg.lstsq(x.reshape(-1, 3), y.ravel(), rcond=None)[0]
    np.testing.assert_allclose(own, np.tile(expected, (4, 1)), rtol=1e-10)
    np.testing.assert_allclose(w, expected, rtol=1e-10)
    w, own = dm.solve(0.0)
    alone = np.stack([np.linalg.lstsq(x[k], y[k], rcond=None)[0] for k in range(4)])
    np.testing.assert_allclose(own, alone, rtol=1e-10)
    np.testing.assert_allclose(w, alone.mean(0), rtol=1e-10)
