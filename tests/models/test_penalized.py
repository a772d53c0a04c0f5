"""Losses per sample, and the penalized logistic regression of equation (125) of FedPD."""

import numpy as np
import pytest
import torch
from torch.func import functional_call, grad, vmap

from models import HalfSquaredError, PenalizedCrossEntropy, PenalizedLogisticRegression

ALPHA, BETA = 1.5, 0.2
SAMPLES = torch.randn(7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
CLASSES = torch.tensor([0, 1, 1, 0, 1, 0, 0])
NETWORK = PenalizedLogisticRegression(5, ALPHA, BETA).double()


def equation125(w: np.ndarray) -> float:
    """mean log(1 + exp(-b a'w)) + Σ β α w^2 / (1 + α w^2), b = ±1."""
    a, b = SAMPLES.numpy(), 2 * CLASSES.numpy() - 1
    penalty = (BETA * ALPHA * w**2 / (1 + ALPHA * w**2)).sum()
    return np.log1p(np.exp(-b * (a @ w))).mean() + penalty


def objective(w: torch.Tensor) -> torch.Tensor:
    outputs = functional_call(NETWORK, {"head.weight": w[None]}, (SAMPLES,))
    return PenalizedCrossEntropy()(outputs, CLASSES).mean()


@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0])
def test_the_objective_and_its_gradient_are_those_of_equation_125(scale):
    """The gradient is compared with central differences, of error about h^2 + 1e-16 / h."""
    points = scale * np.random.default_rng(1).normal(size=(4, 5))
    w = torch.from_numpy(points)
    expected = [equation125(point) for point in points]
    np.testing.assert_allclose(vmap(objective)(w), expected, rtol=1e-13)
    h = 1e-5
    slopes = [[equation125(p + e) - equation125(p - e) for e in h * np.eye(5)] for p in points]
    np.testing.assert_allclose(vmap(grad(objective))(w), np.array(slopes) / (2 * h), atol=1e-9)


def test_probabilities_do_not_depend_on_the_penalty():
    network = PenalizedLogisticRegression(5, ALPHA, BETA).double()
    w = torch.arange(5.0, dtype=torch.float64) - 2
    network.load_state_dict({"head.weight": w[None]})
    scores = network(SAMPLES)
    torch.testing.assert_close(scores.softmax(1)[:, 1], (SAMPLES @ w).sigmoid())
    assert torch.equal(scores.argmax(1), (SAMPLES @ w > 0).long())


def test_weights_start_at_zero_and_beta_0_is_logistic_regression():
    network = PenalizedLogisticRegression(5)
    assert [tuple(p.shape) for p in network.parameters()] == [(1, 5)]
    assert not network.head.weight.any()
    plain = PenalizedLogisticRegression(5, beta=0.0).double()
    plain.load_state_dict({"head.weight": torch.ones(1, 5)})
    scores = torch.stack([torch.zeros(7), SAMPLES.sum(1)], 1)
    torch.testing.assert_close(plain(SAMPLES), scores.double())


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_a_penalty_below_zero_is_refused(name):
    with pytest.raises(ValueError, match=rf"\.{name}: -1\.0; it must be at least 0$"):
        PenalizedLogisticRegression(5, **{name: -1.0})


@pytest.mark.parametrize(("outputs", "targets"), [((4, 1), (4,)), ((4, 3), (4, 3)), ((4,), (4,))])
def test_half_squared_error_is_half_the_sum_of_squares_per_sample(outputs, targets):
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(outputs, generator=generator)
    target = torch.randn(targets, generator=generator)
    rows = zip(y.view(4, -1), target.view(4, -1), strict=True)
    expected = [sum((a - b) ** 2 for a, b in zip(f, w, strict=True)) / 2 for f, w in rows]
    torch.testing.assert_close(HalfSquaredError()(y, target), torch.stack(expected))


def test_half_squared_error_refuses_targets_of_another_size():
    with pytest.raises(RuntimeError, match="shape"):
        HalfSquaredError()(torch.zeros(4, 1), torch.zeros(4, 2))
