"""FedSLR's bounds beside scalar clients with exact local solves."""

import numpy as np
import pytest

from benchmarks.theory import fedslr


def soft(values, threshold):
    return np.sign(values) * np.maximum(np.abs(values) - threshold, 0)


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("penalty", [0.0, 0.1, 2.0])
def test_theorem_1_holds_for_clients_that_are_not_convex(share, penalty):
    """cos(w - aᵢ), L = 1, η_g up to 1/2. The local problems are convex: 1/η_g ≥ 2."""
    optima = np.array([0.3, 1.0, -0.4])
    step = share / 2
    model = np.array(1.0)
    local = np.full(3, 1.0)
    dual = np.zeros(3)
    for _ in range(600):
        for _ in range(12):
            slope = -np.sin(local - optima) - dual + (local - model) / step
            local = local - slope / (1 / step - np.cos(local - optima))
        dual = dual + (model - local) / step
        model = soft((local - step * dual).mean(), penalty * step)
    slope = -np.sin(model - optima).mean()
    assert fedslr.stationarity(model, slope, penalty) < 1e-8
    if penalty == 2:
        assert model == 0


@pytest.mark.parametrize("smooth", [0.1, 1, 10])
def test_the_constant_of_theorem_2_is_negative(smooth):
    """L² η_g + L/2 - 1/(2η_g) is 0 at η_g = 1/(2L), and negative below, where it "is positive"."""
    assert fedslr.c2(1 / (2 * smooth), smooth) == pytest.approx(0, abs=1e-12 * smooth)
    for share in (0.01, 0.5, 0.99):
        assert fedslr.c2(share / (2 * smooth), smooth) < 0


@pytest.mark.parametrize("curvature", [0.2, 1])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_theorem_2_holds_with_its_constants_mended(curvature, share):
    """One client with h w²/2, λ = 0, L = 1. The potential is a quadratic form in (w, w₁, γ), whose
    gradient has |Hx|² ≥ 2 m |x'Hx/2| for the least |eigenvalue| m of H: θ = 1/2 with c² = 2/m."""
    step = share / 2
    hessian = np.array(
        [
            [1 / step, -1 / step, 1],
            [-1 / step, curvature + 1 / step, -1],
            [1, -1, 0],
        ]
    )
    constant = (2 / np.abs(np.linalg.eigvalsh(hessian)).min()) ** 0.5
    model = 1.0
    dual = 0.0
    residual = None
    for rounds in range(40):
        local = (dual + model / step) / (curvature + 1 / step)
        dual = dual + (model - local) / step
        model = local - step * dual
        state = np.array([model, local, dual])
        if residual is None:
            residual = state @ hessian @ state / 2
            assert residual > 0
        bound = fedslr.linear_distance(step, 1, constant, residual, rounds)
        assert abs(curvature * model) <= bound


def test_13_falls_too_fast():
    """w⁸/8: θ = 7/8. Its gradient falls like T^(-7/6), where (13) has T^(-3/2); the exponent that
    the proof leads to, 2/3, holds. L = 7 on [-1, 1], η_g = 0.05 < 1/14."""
    step = 0.05
    model = 1.0
    dual = 0.0
    local = 1.0
    slopes = []
    for _ in range(4000):
        for _ in range(3):
            slope = local**7 - dual + (local - model) / step
            local = local - slope / (7 * local**6 + 1 / step)
        dual = dual + (model - local) / step
        model = local - step * dual
        slopes.append(model**7)
    rounds = np.arange(1, 4001)
    printed = slopes * rounds ** fedslr.printed_exponent(7 / 8)
    mended = slopes * rounds ** fedslr.mended_exponent(7 / 8)
    assert fedslr.printed_exponent(7 / 8) == 1.5
    assert (np.diff(printed[100:]) > 0).all()  # no constant C₅ can bound it
    assert (np.diff(mended[100:]) < 0).all()
    fall = np.log(slopes[-1] / slopes[999]) / np.log(4)
    assert fall == pytest.approx(-7 / 6, abs=0.03)


@pytest.mark.parametrize("curvature", [0.3, 1, 4])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("variance", [0.0, 0.5])
def test_theorem_3_holds(curvature, share, variance):
    """h (ŵ + p)²/2 with ŵ = 0 known from the start and μ = 0: G = h p, and E p² is a recursion."""
    step = share * 2 / (curvature + 1)
    square = 4.0
    start = curvature * square / 2
    rounds = 6
    epochs = 5
    total = 0.0
    for t in range(rounds):
        for k in range(epochs):
            if t > 0 and k > 0:
                total += curvature**2 * square
            square = (1 - step * curvature) ** 2 * square + step**2 * variance
    bound = fedslr.mean_squared_mapping(step, curvature, start, rounds, epochs, variance)
    assert total / (rounds * epochs) <= bound


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_theorem_3_holds_with_a_penalty(share):
    """(p - 2)²/2 + |p|, without noise: its minimum is 1, with the value 3/2."""
    step = share
    p = -3.0
    total = 0.0
    for t in range(6):
        for k in range(5):
            new = soft(p - step * (p - 2), step)
            if t > 0 and k > 0:
                total += ((p - new) / step) ** 2
            p = float(new)
    start = 25 / 2 + 3 - 3 / 2
    assert total / 30 <= fedslr.mean_squared_mapping(step, 1, start, 6, 5)
