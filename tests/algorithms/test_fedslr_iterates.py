"""FedSLR round by round: against a NumPy Algorithm 2, against FedDyn, and what is sent."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from models import MLP, HalfSquaredError
from pfl.algorithms import FedSLR
from tests.algorithms import reference
from tests.problems import kernel_problem, least_squares, matrix_problem

FULL = dict(batch_size=None, loss=HalfSquaredError())
EVERYONE = [[0, 1, 2, 3]] * 5
SAMPLED = [[0, 1], [1, 2, 3], [2], [0, 3], [1]]
COMPONENTS = [
    ("low_rank", "sparse"),
    ("sparse", "low_rank"),
    ("low_rank", "low_rank"),
    ("sparse", "sparse"),
]


@pytest.fixture(scope="module")
def problem():
    """Clients of unequal size, a 4 x 5 matrix and 4 biases."""
    return least_squares((12, 9, 15, 7), d=5, o=4, bias=True, seed=1)


@pytest.fixture(scope="module")
def start(problem):
    return np.random.default_rng(5).normal(size=problem.size)


SETTINGS = dict(eta_g=0.2, lam=2.0, mu=0.9, lr=0.06, steps=3, personal_steps=2)
OTHER = SETTINGS | dict(eta_g=3.0, lam=0.15)
BOTH_STEPS = pytest.mark.parametrize(
    "settings", [SETTINGS, OTHER], ids=["small step", "large step"]
)


def fedslr(network, *, eta_g, lam, mu, lr, steps, personal_steps, components=None, **kwargs):
    """The method, with the paper's symbols."""
    if components is not None:
        kwargs["global_component"], kwargs["personal_component"] = components
    return FedSLR(
        network,
        proximal_step=eta_g,
        low_rank_penalty=lam,
        sparse_penalty=mu,
        lr=lr,
        local_steps=steps,
        personal_epochs=personal_steps,  # a full gradient is one step an epoch
        **FULL,
        **kwargs,
    )


@pytest.mark.parametrize("memory_efficient", [True, False], ids=["Alg. 3", "Alg. 1/2"])
@pytest.mark.parametrize("trace", [EVERYONE, SAMPLED], ids=["full", "sampled"])
@BOTH_STEPS
def test_every_iterate_equals_numpy(watch, problem, start, settings, trace, memory_efficient):
    settings = settings | dict(lr_decay=0.9, weight_decay=0.05)
    algorithm = fedslr(problem.network(start), memory_efficient=memory_efficient, **settings)
    history = watch(algorithm, problem, 5, trace=trace)
    expected = reference.fedslr(problem, start, trace, **settings)
    for name in ("w", "gamma", "p"):
        rows = [row[name] for row in expected]
        np.testing.assert_allclose(history[name], rows, rtol=0, atol=1e-11, err_msg=name)
    np.testing.assert_array_equal(history["ranks"], [row["ranks"] for row in expected])
    mean = [row["gamma"].mean(0) for row in expected]
    np.testing.assert_allclose(history["gamma_mean"], mean, rtol=0, atol=1e-11)
    # A client sends P values of 8 bytes a round; γ_i, which the server can compute, costs nothing.
    rounds = np.bincount(np.concatenate(trace), minlength=4)
    np.testing.assert_array_equal(history["up"][-1], 8 * problem.size * rounds)
    # Both thresholds do something, and neither takes everything.
    assert any(0 < r < 4 for r in history["ranks"][:, 0])
    assert 0 < np.count_nonzero(history["p"][-1]) < history["p"][-1].size


@pytest.mark.parametrize("components", COMPONENTS, ids="+".join)
def test_every_iterate_of_the_ablations_equals_numpy(watch, problem, start, components):
    settings = SETTINGS | dict(components=components)
    history = watch(fedslr(problem.network(start), **settings), problem, 5, trace=SAMPLED)
    expected = reference.fedslr(problem, start, SAMPLED, **settings)
    for name in ("w", "gamma", "p"):
        rows = [row[name] for row in expected]
        np.testing.assert_allclose(history[name], rows, rtol=0, atol=1e-11, err_msg=name)


def test_a_personal_component_that_starts_at_the_initial_matrices_equals_numpy(
    watch, problem, start
):
    """As in the paper's code: the 1-D tensors start at 0, and clients that never train keep p_i."""
    settings = SETTINGS | dict(personal_start="initial")
    history = watch(fedslr(problem.network(start), **settings), problem, 2, trace=SAMPLED[:2])
    expected = reference.fedslr(problem, start, SAMPLED[:2], **settings)
    np.testing.assert_allclose(history["p"], [row["p"] for row in expected], rtol=0, atol=1e-11)
    np.testing.assert_array_equal(history["p"][0, 3], start * (np.arange(len(start)) < 4 * 5))


# ---- communication ------------------------------------------------------------------------------


def test_a_sparse_component_costs_its_values():
    """Beside the initial model, which is dense: 64 * 8 + 8 + 8 * 10 + 10 = 610 values."""
    algorithm = FedSLR(MLP(64, (8,)))
    p = torch.zeros(2, 610)
    p[0, :3], p[1, 5] = 1.0, -2.0
    clients: Any = SimpleNamespace(state={"p": p})
    assert algorithm.parameters_personalized(clients, p).tolist() == [613, 611]


def test_bytes_of_factors_biases_and_the_dense_beginning(watch):
    """A 6 x 5 layer with 6 biases. Round 1 goes down densely, 36 floats, although w_0 is 0.

    One exact step with η_g = 1 and γ = 0 gives w_i = A_i / 2 and γ_i = -A_i / 2. After round 1
    (clients 0 and 1, rank 2) the server sees A / 2 + A / 4, so rank 2: 2 (6 + 5) + 6 = 28 floats.
    Then client 2 or 3 takes part, whose rank is 4: factors would be 44 + 6, so 36 again.
    """
    rng = np.random.default_rng(3)
    u, v = (np.linalg.qr(rng.normal(size=(n, n)))[0] for n in (6, 5))

    def spectrum(*s):
        return u[:, :5] @ np.diag([*s, *[0.0] * (5 - len(s))]) @ v.T

    optima = [spectrum(5, 4), spectrum(5, 4), spectrum(5, 4, 3, 2), spectrum(5, 4, 3, 2)]
    problem = matrix_problem(optima, biases=[np.ones(6)] * 4)
    trace, floats = [[0, 1], [0, 2, 3], [2, 3], [1, 3]], [36, 28, 36, 36]
    algorithm = fedslr(
        problem.network(0.0), eta_g=1.0, lam=0.5, mu=0.0, lr=0.5, steps=1, personal_steps=1
    )
    history = watch(algorithm, problem, 4, trace=trace)
    assert history["ranks"][:3, 0].tolist() == [2, 4, 4]
    sent = np.zeros((4, 4), np.int64)
    for t, cohort in enumerate(trace):
        sent[t:, cohort] += 8 * floats[t]
    np.testing.assert_array_equal(history["down"], sent)
    took_part = np.cumsum([[i in cohort for i in range(4)] for cohort in trace], axis=0)
    np.testing.assert_array_equal(history["up"], 8 * 36 * took_part)
    assert algorithm.parameters_global() == reference.factor_floats(
        history["w"][-1], problem.shapes
    )


def test_a_kernel_is_sent_as_factors_of_its_matrix(watch):
    """A 3 x 2 x 2 x 3 kernel is a 6 x 6 matrix: rank 1 costs 12 of 36 floats."""
    matrix = np.outer(np.arange(1.0, 7.0), np.linspace(-1.0, 2.0, 6))
    kernel = reference.matrix_to_kernel(matrix, (3, 2, 2, 3))
    assert np.linalg.matrix_rank(kernel.reshape(3, 12)) > 1
    problem = kernel_problem([kernel, 2 * kernel])
    algorithm = fedslr(
        problem.network(0.0), eta_g=1.0, lam=0.1, mu=0.0, lr=0.5, steps=1, personal_steps=1
    )
    history = watch(algorithm, problem, 2)
    np.testing.assert_array_equal(history["ranks"], [[1], [1]])
    np.testing.assert_array_equal(
        np.diff(history["down"], axis=0, prepend=0), [[288, 288], [96, 96]]
    )
    assert algorithm.parameters_global() == 12


def test_a_sparse_model_is_sent_sparse(watch):
    """S+LR. Of 8 x 8 weights 3 are not 0: 3 values of 8 bytes, and their places in the cheaper of
    3 indices of 4 bytes (12) or 64 bits (8). The full beginning goes densely, without places."""
    optimum = np.zeros((8, 8))
    optimum[[0, 3, 5], [1, 3, 7]] = 4.0, -3.0, 2.0
    problem = matrix_problem([optimum])
    arguments = dict(eta_g=1.0, lam=0.1, mu=0.0, lr=0.5, steps=1, personal_steps=1)
    algorithm = fedslr(problem.network(1e-3), components=("sparse", "low_rank"), **arguments)
    history = watch(algorithm, problem, 2)
    assert np.count_nonzero(history["w"][0]) == 3
    np.testing.assert_array_equal(history["down"][:, 0], [512, 512 + 3 * 8 + 8])
    np.testing.assert_array_equal(history["up"][:, 0], [512, 1024])
    assert algorithm.parameters_global() == 3
