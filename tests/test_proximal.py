"""Proximal operators: closed forms, optimality conditions, brute force."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pfl.parameters import ParameterSpace
from pfl.proximal import nuclear_norm_prox, singular_value_threshold, soft_threshold

SHAPES = [(1, 1), (1, 5), (5, 1), (4, 4), (6, 3), (3, 6)]


def matrices(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def nuclear(x):
    return torch.linalg.svdvals(x).sum(-1)


# ---- soft thresholding ---------------------------------------------------------------------------


def test_soft_threshold_by_hand():
    x = torch.tensor([-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.25, 3.0])
    expected = [-2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.25, 2.0]
    assert soft_threshold(x, 1.0).tolist() == expected
    assert soft_threshold(x.view(2, 2, 2), 1.0).flatten().tolist() == expected
    assert torch.equal(soft_threshold(x, 0.0), x)
    assert not soft_threshold(x, 3.0).any()


def test_soft_threshold_satisfies_the_optimality_condition():
    """0 in z - x + t d|z|: z - x = -t sign(z) where z != 0, |z - x| <= t where z = 0."""
    x, t = matrices(0, 2000), 0.7
    z = soft_threshold(x, t)
    zero = z == 0
    assert 500 < zero.sum() < 1500  # P(|x| <= 0.7) = 0.52
    torch.testing.assert_close((z - x)[~zero], -t * z[~zero].sign())
    assert (x[zero].abs() <= t).all()


def test_soft_threshold_is_the_minimizer_on_a_grid():
    """z -> t |z| + (z - x)^2 / 2 on a grid of step h: the best grid point is within h of Prox."""
    h, t = 1e-3, 0.4
    grid = torch.arange(-2, 2, h, dtype=torch.float64)
    for x in (-1.3, -0.41, -0.2, 0.0, 0.39, 0.9):
        best = grid[(t * grid.abs() + (grid - x) ** 2 / 2).argmin()]
        assert abs(best - soft_threshold(torch.tensor(x, dtype=torch.float64), t)) <= h


# ---- singular value thresholding -----------------------------------------------------------------


def test_singular_values_by_hand():
    x = torch.diag(torch.tensor([3.0, -1.0, 0.25]))
    z, rank = singular_value_threshold(x, 0.5)
    torch.testing.assert_close(z, torch.diag(torch.tensor([2.5, -0.5, 0.0])))
    assert rank == 2
    # [[1, 1], [1, 1]] has singular values 2 and 0: 2 - t times (1/2) of the matrix of ones.
    z, rank = singular_value_threshold(torch.ones(2, 2), 0.5)
    torch.testing.assert_close(z, torch.full((2, 2), 0.75))
    assert rank == 1
    z, rank = singular_value_threshold(torch.ones(2, 2), 2.5)
    assert not z.any()
    assert rank == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_shrink_and_directions_stay(shape):
    x, t = matrices(1, 5, *shape), 0.8
    z, rank = singular_value_threshold(x, t)
    s = torch.linalg.svdvals(x)
    torch.testing.assert_close(torch.linalg.svdvals(z), (s - t).clamp_min(0), atol=1e-10, rtol=0)
    assert torch.equal(rank, (s > t).sum(-1))
    assert rank.dtype == torch.int64
    assert torch.equal(rank, torch.linalg.matrix_rank(z, atol=1e-9, rtol=0))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("t", [0.1, 1.0, 2.0])
def test_the_residual_is_a_subgradient_of_the_nuclear_norm(shape, t):
    """G = (x - z) / t is in d|z|_*: spectral norm at most 1, and <G, z> = |z|_* (its dual norm)."""
    x = matrices(2, 10, *shape)
    z, _ = singular_value_threshold(x, t)
    g = (x - z) / t
    assert torch.linalg.matrix_norm(g, ord=2).max() <= 1 + 1e-10
    torch.testing.assert_close((g * z).sum((-2, -1)), nuclear(z), atol=1e-10, rtol=1e-10)


def test_no_nearby_matrix_is_better():
    """Brute force: the objective is 1-strongly convex, so F(y) >= F(z) + |y - z|^2 / 2."""
    t = 0.6
    for seed in range(5):
        x = matrices(seed, 2, 2)
        z, _ = singular_value_threshold(x, t)
        y = z + torch.cat([matrices(9, 2000, 2, 2) * r for r in (1e-3, 0.1, 1.0)])

        def objective(m, x=x):
            return t * nuclear(m) + (m - x).square().sum((-2, -1)) / 2

        gain = objective(y) - objective(z) - (y - z).square().sum((-2, -1)) / 2
        assert gain.min() >= -1e-12


def test_the_minimizer_in_two_dimensions_by_a_grid():
    """A 1 x 2 matrix has one singular value, its length: the best grid point is within a step."""
    x, t, h = torch.tensor([[0.9, -0.4]], dtype=torch.float64), 0.3, 2e-3
    axis = torch.arange(-1, 1, h, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    value = t * grid.norm(dim=1) + (grid - x).square().sum(1) / 2
    z, rank = singular_value_threshold(x, t)
    assert rank == 1
    assert (grid[value.argmin()] - z[0]).abs().max() <= h
    length = math.hypot(0.9, 0.4)  # x shrinks towards 0 by t
    torch.testing.assert_close(z, x * (length - t) / length)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 10**6),
    distance=st.sampled_from([1e-4, 0.1, 3.0]),
    t=st.floats(0, 3),
)
def test_proximal_operators_are_nonexpansive(shape, seed, distance, t):
    x = matrices(seed, *shape)
    y = x + distance * matrices(seed + 1, *shape)
    for prox in (soft_threshold, lambda m, t: singular_value_threshold(m, t)[0]):
        assert (prox(x, t) - prox(y, t)).norm() <= (x - y).norm() * (1 + 1e-9)


def test_a_batch_of_matrices_is_each_alone():
    x = matrices(3, 2, 3, 4, 5)
    z, rank = singular_value_threshold(x, 1.0)
    assert z.shape == x.shape
    assert rank.shape == (2, 3)
    for a in range(2):
        for b in range(3):
            one, r = singular_value_threshold(x[a, b], 1.0)
            torch.testing.assert_close(z[a, b], one)
            assert rank[a, b] == r


def test_threshold_zero_changes_nothing_and_gives_the_numerical_rank():
    left, right = matrices(4, 7, 2), matrices(5, 2, 5)
    x = torch.stack([left @ right, matrices(6, 7, 5), torch.zeros(7, 5, dtype=torch.float64)])
    z, rank = singular_value_threshold(x, 0.0)
    assert torch.equal(z, x)
    assert rank.tolist() == [2, 5, 0]
    # What is above max(m, n) eps s_1 = 6.7e-16 counts, as in NumPy; what is below is rounding.
    z, rank = singular_value_threshold(torch.diag(torch.tensor([1, 1e-12, 1e-17]).double()), 0.0)
    assert rank == np.linalg.matrix_rank(z.numpy()) == 2


def test_a_matrix_that_is_not_finite_gives_nan_and_its_neighbours_their_values():
    x = matrices(4, 3, 2, 3)
    expected, _ = singular_value_threshold(x[[0, 2]], 0.5)
    x[1, 0, 2] = torch.inf
    z, _ = singular_value_threshold(x, 0.5)
    assert z[1].isnan().all()
    torch.testing.assert_close(z[[0, 2]], expected)


# ---- whole models --------------------------------------------------------------------------------


def convolutional():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, (2, 4)), nn.Flatten(), nn.Linear(12, 5)).double()


@pytest.mark.parametrize("batch", [(), (3,)])
def test_low_rank_acts_on_every_matrix_and_on_nothing_else(batch):
    module = convolutional()
    space = ParameterSpace(module)
    w = matrices(7, *batch, space.size)
    before = w.clone()
    z, ranks = nuclear_norm_prox(space, w, 0.9)
    assert torch.equal(w, before)
    assert ranks.shape == (*batch, 2)
    given, got = space.split(w), space.split(z)
    for name in ("0.bias", "2.bias"):
        assert torch.equal(got[name], given[name])
    # Linear: as it is. Convolution o x i x d1 x d2: the (o d1) x (i d2) view, here by einsum-like
    # reordering of the axes (the definition itself is tested with Layer).
    linear, rank = singular_value_threshold(given["2.weight"], 0.9)
    torch.testing.assert_close(got["2.weight"], linear)
    assert torch.equal(ranks[..., 1], rank)
    view = given["0.weight"].movedim(-2, -3).reshape(*batch, 3 * 2, 2 * 4)
    conv, rank = singular_value_threshold(view, 0.9)
    conv = conv.reshape(*batch, 3, 2, 2, 4).movedim(-3, -2)
    torch.testing.assert_close(got["0.weight"], conv)
    assert torch.equal(ranks[..., 0], rank)
    # Other views of the same tensor have other singular values.
    other, _ = singular_value_threshold(given["0.weight"].reshape(*batch, 3, 16), 0.9)
    assert not torch.allclose(got["0.weight"].reshape(*batch, 3, 16), other)


def test_low_rank_with_threshold_zero():
    space = ParameterSpace(convolutional())
    w = matrices(8, 2, space.size)
    z, ranks = nuclear_norm_prox(space, w, 0.0)
    assert torch.equal(z, w)
    assert ranks.tolist() == [[6, 5], [6, 5]]  # min(3 * 2, 2 * 4) and min(5, 12)


def test_low_rank_of_a_model_without_matrices():
    module = nn.GroupNorm(1, 4)
    space = ParameterSpace(module)
    w = matrices(9, 3, space.size)
    z, ranks = nuclear_norm_prox(space, w, 1.0)
    assert torch.equal(z, w)
    assert ranks.shape == (3, 0)
    assert ranks.dtype == torch.int64
