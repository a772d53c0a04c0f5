"""LPGD and GPGD, FedSLR's ablations, against NumPy and closed forms."""

import numpy as np
import pytest

from models import HalfSquaredError
from pfl.algorithms import GPGD, LPGD
from tests.algorithms import reference
from tests.problems import kernel_problem, least_squares, matrix_problem

FULL = dict(batch_size=None, loss=HalfSquaredError())
TRACE = [[0, 1, 2, 3], [1, 2], [0, 3], [1]]
LAM = 1.4


@pytest.fixture(scope="module")
def problem():
    """Clients of unequal size, a 4 x 5 matrix and 4 biases."""
    return least_squares((12, 9, 15, 7), d=5, o=4, bias=True, seed=1)


@pytest.fixture(scope="module")
def start(problem):
    return np.random.default_rng(5).normal(size=problem.size)


@pytest.fixture(scope="module")
def optima():
    rng = np.random.default_rng(6)
    common = rng.normal(size=(5, 4))
    return [common + rng.normal(size=(5, 4)) for _ in range(4)]


def test_lpgd_equals_numpy(watch, problem, start):
    """Uniform weights; threshold λ times the decayed learning rate, after every local step."""
    settings = dict(lr=0.15, lr_decay=0.8, weight_decay=0.1)
    algorithm = LPGD(
        problem.network(start), low_rank_penalty=LAM, local_steps=3, **settings, **FULL
    )
    history = watch(algorithm, problem, 4, trace=TRACE)
    expected = reference.fedavg(
        problem,
        start,
        TRACE,
        steps=3,
        weighting="uniform",
        prox=lambda v, lr: reference.layerwise_svt(v, LAM * lr, problem.shapes),
        **settings,
    )
    np.testing.assert_allclose(history["w"], expected, rtol=0, atol=1e-11)


def test_gpgd_equals_numpy(watch, problem, start):
    """Plain local steps; the server's threshold is λ times one decayed learning rate."""
    settings = dict(lr=0.15, lr_decay=0.8, weight_decay=0.1)
    penalty = 12.0  # of which factors become smaller than the matrix
    algorithm = GPGD(
        problem.network(start), low_rank_penalty=penalty, local_steps=3, **settings, **FULL
    )
    history = watch(algorithm, problem, 4, trace=TRACE)
    w, expected, sizes = start, [], []
    for t, cohort in enumerate(TRACE):
        sizes.append(reference.factor_floats(w, problem.shapes) if t else problem.size)
        average = reference.fedavg(
            problem, w, [cohort], lr=0.15 * 0.8**t, steps=3, weighting="uniform", weight_decay=0.1
        )[0]
        w = reference.layerwise_svt(average, penalty * 0.15 * 0.8**t, problem.shapes)
        expected.append(w)
    np.testing.assert_allclose(history["w"], expected, rtol=0, atol=1e-11)
    assert min(sizes) < problem.size
    # Down the factors of what was sent (8 bytes a float), up everything.
    sent = [
        [8 * size * (i in cohort) for i in range(4)]
        for size, cohort in zip(sizes, TRACE, strict=True)
    ]
    np.testing.assert_array_equal(history["down"], np.cumsum(sent, axis=0))
    took_part = np.cumsum([[i in cohort for i in range(4)] for cohort in TRACE], axis=0)
    np.testing.assert_array_equal(history["up"], 8 * 24 * took_part)


@pytest.mark.parametrize("engine", ["sequential", "vmap"])
def test_lpgd_sends_each_client_s_own_factors(watch, engine):
    """One exact step of η = 1 ends at SVT_λ(A_i), whose rank is the number of A_i's singular
    values above λ: 1, 2, 3 and 0 of 4. A 6 x 4 layer takes 24 floats, rank 1 takes 10, rank 2 takes
    20, rank 3 would take 30 (dense is smaller), rank 0 nothing; 6 biases always travel."""
    rng = np.random.default_rng(2)
    u, v = (np.linalg.qr(rng.normal(size=(n, n)))[0] for n in (6, 4))
    spectra = np.array([[3, 0.5, 0, 0], [3, 2, 0.9, 0.1], [4, 3, 2, 0], [0.5, 0.4, 0.3, 0.2]])
    problem = matrix_problem(
        [u[:, :4] @ np.diag(s) @ v.T for s in spectra],
        copies=[1, 3, 2, 1],  # the engine sees clients in another order
        biases=[np.ones(6)] * 4,
    )
    algorithm = LPGD(
        problem.network(0.3), lr=1.0, local_steps=1, low_rank_penalty=1.0, engine=engine, **FULL
    )
    history = watch(algorithm, problem, 1)
    expected = 8 * np.array([10 + 6, 20 + 6, 24 + 6, 0 + 6])
    np.testing.assert_array_equal(history["up"][0], expected)
    np.testing.assert_array_equal(history["down"][0], [8 * 30] * 4)


def test_lpgd_s_limit_is_the_mean_of_the_local_ones(fit, optima):
    """Local minima of |v - A_i|^2 / 2 + λ |v|_* are SVT_λ(A_i): their mean is not SVT_λ(mean)."""
    problem = matrix_problem(optima)
    algorithm = LPGD(problem.network(0.0), low_rank_penalty=LAM, lr=0.6, local_steps=40, **FULL)
    fit(algorithm, problem, 2)
    expected = np.mean([reference.svt(a, LAM) for a in optima], axis=0)
    other = reference.svt(np.mean(optima, axis=0), LAM)
    assert np.abs(expected - other).max() > 0.1
    np.testing.assert_allclose(algorithm.global_model.view(5, 4), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("steps", [1, 4])
def test_gpgd_s_penalty_shrinks_with_the_local_steps(fit, optima, steps):
    """With f_i = |v - A_i|^2 / 2 a round is w <- SVT_{ηλ}((1 - c) w + c mean A_i), where
    c = 1 - (1 - η)^K. It is a proximal step of size c on |w - mean A_i|^2 / 2 + (ηλ/c) |w|_*, so
    its limit is SVT_{ηλ/c}(mean A_i): λ for one step, about λ/K for K."""
    eta = 0.3
    problem = matrix_problem(optima)
    algorithm = GPGD(problem.network(0.0), low_rank_penalty=LAM, lr=eta, local_steps=steps, **FULL)
    fit(algorithm, problem, 70)
    effective = eta * LAM / (1 - (1 - eta) ** steps)
    expected = reference.svt(np.mean(optima, axis=0), effective)
    np.testing.assert_allclose(algorithm.global_model.view(5, 4), expected, rtol=0, atol=1e-8)
    if steps == 1:
        assert effective == pytest.approx(LAM)


@pytest.mark.parametrize("method", [LPGD, GPGD])
def test_kernels_are_thresholded_as_matrices(fit, method):
    """One client, one exact step of η = 1: both end at SVT_λ of the (o d1) x (i d2) matrix."""
    shape = (3, 2, 2, 3)
    kernel = np.random.default_rng(7).normal(size=shape)
    problem = kernel_problem([kernel])
    algorithm = method(problem.network(0.0), low_rank_penalty=LAM, lr=1.0, local_steps=1, **FULL)
    fit(algorithm, problem, 1)
    matrix = reference.svt(reference.kernel_to_matrix(kernel), LAM)
    expected = reference.matrix_to_kernel(matrix, shape)
    np.testing.assert_allclose(algorithm.global_model.view(shape), expected, rtol=0, atol=1e-12)
