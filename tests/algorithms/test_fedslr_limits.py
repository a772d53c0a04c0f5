"""Where FedSLR ends, on f_i(w) = (a_i / 2) |w - A_i|^2: closed forms of both phases."""

import numpy as np
import pytest
import torch

from models import HalfSquaredError
from pfl.algorithms import FedSLR
from tests.algorithms import reference
from tests.problems import History, kernel_problem, matrix_problem, scalar_problem

FULL = dict(batch_size=None, loss=HalfSquaredError())
LOW_RANK, SPARSE = "low_rank", "sparse"


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


OPTIMA = [2.0 * normal(i, 6, 4) + normal(9, 6, 4) for i in range(5)]
MEAN = np.mean(OPTIMA, axis=0)


def step(eta_g, share=1.0, a=1.0):
    """A learning rate: 1 / (a + 1 / η_g), which solves Phase I in one step, times a share."""
    return share / (a + 1 / eta_g)


@pytest.mark.slow
@pytest.mark.parametrize("memory_efficient", [True, False])
@pytest.mark.parametrize(
    ("steps", "share"), [(1, 1.0), (6, 0.7), (2, 0.4)], ids=["exact", "many steps", "few steps"]
)
@pytest.mark.parametrize(("eta_g", "rounds"), [(0.2, 120), (1.0, 70), (3.0, 90)])
def test_the_global_limit_is_that_of_the_penalized_mean(
    watch, eta_g, rounds, steps, share, memory_efficient
):
    """mean f_i = |W - mean A_i|^2 / 2 + const, so the minimum with λ |W|_* is SVT_λ(mean A_i):
    for every η_g (Algorithm 2 as printed would make it depend on η_g), and with inexact solves."""
    problem = matrix_problem(OPTIMA, copies=[1, 2, 1, 1, 3])  # sizes must not weigh
    lam = float(np.linalg.svd(MEAN)[1][1:3].mean())  # leaves rank 2
    algorithm = FedSLR(
        problem.network(0.3),
        proximal_step=eta_g,
        low_rank_penalty=lam,
        lr=step(eta_g, share),
        local_steps=steps,
        memory_efficient=memory_efficient,
        **FULL,
    )
    history = watch(algorithm, problem, rounds)
    w = history["w"][-1]
    np.testing.assert_allclose(w.reshape(6, 4), reference.svt(MEAN, lam), rtol=0, atol=1e-5)
    assert history["ranks"][-1].tolist() == [2]
    # At the fixed point every client is at w, and its dual is its own gradient there.
    for i in range(5):
        np.testing.assert_allclose(
            history["gamma"][-1, i], w - OPTIMA[i].ravel(), rtol=0, atol=1e-4
        )


def test_the_limit_of_clients_with_curvatures_of_their_own(fit):
    """mean f_i = (mean a_i / 2) |W - B|^2 + const with B = sum a_i A_i / sum a_i, so the limit is
    SVT_{λ / mean a_i}(B): not what averaging local optima gives."""
    a = np.array([0.5, 1.0, 2.0, 1.0, 0.5])
    problem = matrix_problem(OPTIMA, curvatures=a)
    algorithm = FedSLR(
        problem.network(0.0), proximal_step=1.0, low_rank_penalty=1.5, lr=0.3, local_steps=5, **FULL
    )
    fit(algorithm, problem, 80)
    centre = np.einsum("c,cij->ij", a, np.array(OPTIMA)) / a.sum()
    expected = reference.svt(centre, 1.5 / a.mean())
    np.testing.assert_allclose(algorithm.global_model.view(6, 4), expected, rtol=0, atol=1e-6)


def test_the_limit_for_a_convolution_kernel(fit):
    """The nuclear norm is that of the (o d1) x (i d2) matrix, here (3 * 2) x (2 * 3)."""
    shape = (3, 2, 2, 3)
    optima = [normal(20 + i, *shape) + normal(19, *shape) for i in range(4)]
    problem = kernel_problem(optima)
    algorithm = FedSLR(
        problem.network(0.0), proximal_step=1.0, low_rank_penalty=1.0, lr=0.5, local_steps=1, **FULL
    )
    fit(algorithm, problem, 70)
    mean = np.mean(optima, axis=0)
    matrix = reference.svt(reference.kernel_to_matrix(mean), 1.0)
    expected = reference.matrix_to_kernel(matrix, shape)
    flat = reference.svt(mean.reshape(3, 12), 1.0).reshape(shape)
    assert np.abs(expected - flat).max() > 0.1  # other layouts have other limits
    assert np.linalg.matrix_rank(matrix) < 6
    np.testing.assert_allclose(algorithm.global_model.view(shape), expected, rtol=0, atol=1e-6)


def test_biases_have_no_nuclear_norm(fit):
    """The biases' part of f_i is |b - c_i|^2 / 2: its limit is mean c_i whatever λ is."""
    biases = [normal(30 + i, 6) for i in range(5)]
    problem = matrix_problem(OPTIMA, biases=biases)
    arguments = dict(proximal_step=1.0, low_rank_penalty=50.0, lr=0.5, local_steps=1)
    algorithm = FedSLR(problem.network(0.0), **arguments, **FULL)
    fit(algorithm, problem, 60)
    w = algorithm.global_model.numpy()
    np.testing.assert_array_equal(w[:24], 0.0)  # 50 is above every singular value
    np.testing.assert_allclose(w[24:], np.mean(biases, axis=0), rtol=0, atol=1e-9)
    assert algorithm.parameters_global() == 6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_limit_with_states_in_sixteen_bits(fit, dtype):
    """f_i = a_i/2 (w - b_i)^2 with the minimum 3 w / 2 - 5/2 + λ = 0 of mean f_i + λ |w|: w = 4/3.

    Algorithm 3 has the rounds of Algorithm 2, which takes the mean of the stored γ_i anew. At their
    end |w - w_i| / η_g, which is the error of γ_i over 1 + a_i η_g, is at most half a unit of γ_i
    in the last place. Phase I then gives |3/2 w - 2| <= mean a_i η_g units_i / 2."""
    a, b, lam, eta_g = np.array([1.0, 2.0]), np.array([3.0, 1.0]), 0.5, 1.0
    problem = scalar_problem(b, curvatures=a)
    histories = [History(), History()]
    for memory_efficient, history in zip([True, False], histories, strict=True):
        arguments = dict(proximal_step=eta_g, low_rank_penalty=lam, lr=0.3, local_steps=20)
        algorithm = FedSLR(
            problem.network(0.0), memory_efficient=memory_efficient, **arguments, **FULL
        )
        fit(algorithm, problem, 60, callbacks=[history], state_dtype=dtype)
        # One value of 8 bytes a round: what depends on how states are stored costs nothing.
        assert history["up"][-1].tolist() == [8 * 60] * 2
    actual, expected = (history["w"] for history in histories)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)
    # γ_1 ends at -5/3, γ_2 at 2/3: in [1, 2) and in [1/2, 1), where a unit is eps and eps / 2.
    units = torch.finfo(getattr(torch, dtype)).eps * np.array([1.0, 0.5])
    bound = np.mean(a * eta_g * units / 2) / 1.5
    assert abs(actual[-1, 0] - 4 / 3) <= bound


# ---- Phase II -----------------------------------------------------------------------------------


@pytest.mark.parametrize("eta_g", [0.2, 3.0])
def test_phase_two_ends_at_the_soft_threshold(watch, eta_g):
    """argmin (a/2) |w + p - A|^2 + μ |p|_1 = S_{μ / a}(A - w): with w as it was received, and a
    threshold that does not know η_g. Who is not sampled keeps what it had."""
    a = np.array([1.0, 2.0, 0.8, 1.0, 1.5])
    problem, mu, start = matrix_problem(OPTIMA, curvatures=a), 1.1, 0.5
    arguments = dict(proximal_step=eta_g, low_rank_penalty=0.1, sparse_penalty=mu, lr=0.15)
    algorithm = FedSLR(
        problem.network(start), local_steps=2, personal_epochs=200, **arguments, **FULL
    )
    history = watch(algorithm, problem, 2, trace=[[0, 1], [1, 2]])
    w_0, w_1 = np.full(24, start), history["w"][0]
    assert np.abs(w_1 - w_0).max() > 0.1

    def limit(i, w):
        return reference.soft(OPTIMA[i].ravel() - w, mu / a[i])

    zero = np.zeros(24)
    first = [limit(0, w_0), limit(1, w_0), zero, zero, zero]
    second = [limit(0, w_0), limit(1, w_1), limit(2, w_1), zero, zero]
    np.testing.assert_allclose(history["p"][0], first, rtol=0, atol=1e-10)
    np.testing.assert_allclose(history["p"][1], second, rtol=0, atol=1e-10)
    for i in range(2):  # exact zeros where the closed form has them
        np.testing.assert_array_equal(history["p"][0][i] == 0, first[i] == 0)


def test_phase_two_continues_from_the_last_visit(fit):
    """μ = 0, and λ so large that w stays 0. Then every visit of K steps leaves (1 - η a)^K of the
    distance between p and A: after T visits, (1 - η a)^{K T} of it."""
    optimum, a, lr, steps = OPTIMA[0], 0.7, 0.2, 3
    problem = matrix_problem([optimum, optimum], curvatures=a)
    arguments = dict(low_rank_penalty=1e3, sparse_penalty=0.0, proximal_step=1.0, lr=lr)
    algorithm = FedSLR(
        problem.network(0.0), local_steps=1, personal_epochs=steps, **arguments, **FULL
    )
    fit(algorithm, problem, 4, trace=[[0], [1], [0, 1], [0]])
    np.testing.assert_array_equal(algorithm.global_model, 0.0)
    p = algorithm.store.read("p", np.arange(2)).numpy()
    for row, visits in zip(p, (3, 2), strict=True):
        left = (1 - lr * a) ** (steps * visits)
        np.testing.assert_allclose(row, (1 - left) * optimum.ravel(), rtol=0, atol=1e-12)


# ---- ablations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("personal", [LOW_RANK, SPARSE])
@pytest.mark.parametrize("component", [LOW_RANK, SPARSE])
def test_limits_of_the_components(fit, component, personal):
    """w ends at Prox_λ(mean A_i) and p_i at Prox_μ(A_i - w), each prox being SVT or soft threshold.
    Biases (optima c_i): SVT leaves them alone, the soft threshold takes them along."""
    biases = [normal(40 + i, 6) for i in range(5)]
    problem, lam, mu = matrix_problem(OPTIMA, biases=biases), 0.7, 0.9
    algorithm = FedSLR(
        problem.network(0.2),
        proximal_step=1.0,
        low_rank_penalty=lam,
        sparse_penalty=mu,
        lr=0.5,
        local_steps=1,
        personal_epochs=3,
        global_component=component,
        personal_component=personal,
        **FULL,
    )
    fit(algorithm, problem, 60)

    def prox(kind, matrix, bias, threshold):
        if kind == LOW_RANK:
            return reference.svt(matrix, threshold), bias
        return reference.soft(matrix, threshold), reference.soft(bias, threshold)

    w, b = prox(component, MEAN, np.mean(biases, axis=0), lam)
    np.testing.assert_allclose(
        algorithm.global_model, np.concatenate([w.ravel(), b]), rtol=0, atol=1e-8
    )
    p = algorithm.store.read("p", np.arange(5)).numpy()
    for i in range(5):
        matrix, bias = prox(personal, OPTIMA[i] - w, biases[i] - b, mu)
        np.testing.assert_allclose(p[i], np.concatenate([matrix.ravel(), bias]), rtol=0, atol=1e-8)


# ---- weight decay -------------------------------------------------------------------------------


def test_weight_decay_acts_on_the_model_and_on_the_component(watch):
    """Phase I minimizes f_i + (wd/2) |v|^2, so the limit is argmin of
    (a/2) |W - mean A|^2 + (wd/2) |W|^2 + λ |W|_* = SVT_{λ / (a + wd)}(a mean A / (a + wd)).
    Phase II has (wd/2) |p|^2, not |w + p|^2: p_i = S_{μ / (a + wd)}(a (A_i - w) / (a + wd))."""
    a, wd, lam, mu = 1.0, 0.5, 0.8, 0.6
    problem = matrix_problem(OPTIMA, curvatures=a)
    algorithm = FedSLR(
        problem.network(0.2),
        proximal_step=1.0,
        low_rank_penalty=lam,
        sparse_penalty=mu,
        weight_decay=wd,
        lr=1 / (a + wd + 1.0),
        local_steps=1,
        personal_epochs=5,
        **FULL,
    )
    history = watch(algorithm, problem, 60)
    w = reference.svt(a * MEAN / (a + wd), lam / (a + wd))
    np.testing.assert_allclose(history["w"][-1].reshape(6, 4), w, rtol=0, atol=1e-8)
    for i in range(5):
        p = reference.soft(a * (OPTIMA[i] - w) / (a + wd), mu / (a + wd))
        np.testing.assert_allclose(history["p"][-1, i].reshape(6, 4), p, rtol=0, atol=1e-8)
        # The dual is the gradient of what Phase I minimizes: decay included.
        dual = a * (w - OPTIMA[i]) + wd * w
        np.testing.assert_allclose(history["gamma"][-1, i].reshape(6, 4), dual, rtol=0, atol=1e-7)
