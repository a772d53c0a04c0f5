"""FedACS's Theorem 2.1 beside two scalar clients with bounded gradients."""

import numpy as np
import pytest

from benchmarks.theory import fedacs


def close(models, penalty):
    """λ R and its gradient, R = √(1 + d²) of the difference d; its Hessian is at most 2."""
    d = models[0] - models[1]
    root = np.sqrt(1 + d**2)
    return penalty * root, penalty * np.array([d, -d]) / root


def kernel(models, penalty):
    """The same for R = 1 - exp(-d²), which is not convex; its Hessian is at most 4."""
    d = models[0] - models[1]
    value = np.exp(-(d**2))
    return penalty * (1 - value), 2 * penalty * value * np.array([d, -d])


@pytest.mark.parametrize(("tie", "hessian"), [(close, 2), (kernel, 4)])
@pytest.mark.parametrize("scale", [0.05, 1, 20])
@pytest.mark.parametrize("penalty", [0.1, 1])
def test_theorem_2_1_holds(tie, hessian, scale, penalty):
    """F = s Σ √(1 + (wᵢ - aᵢ)²), α = λ/√K and β = 1/√K. |∇F| ≤ √2 s, λ|∇R| ≤ √2 s λ."""
    optima = np.array([2.0, -1.0])

    def local(models):
        root = np.sqrt(1 + (models - optima) ** 2)
        return scale * root.sum(), scale * (models - optima) / root

    smooth = max(scale, hessian * scale)
    bound = scale * 2**0.5
    for rounds in (1, 10, 300):
        models = np.array([6.0, -3.0])
        start = local(models)[0] + scale * tie(models, penalty)[0] - 2 * scale
        squares = []
        for _ in range(rounds + 1):
            slope = local(models)[1] + scale * tie(models, penalty)[1]
            squares.append(slope @ slope)
            # α ∇R, with λ R = s · `tie`.
            models = models - scale * tie(models, penalty)[1] / rounds**0.5
            models = models - local(models)[1] / rounds**0.5
        assert min(squares) <= fedacs.least_squared_gradient(start, smooth, bound, rounds)
