"""FedAgg's bounds beside scalar quadratics whose every model is worked out here."""

from dataclasses import dataclass

import numpy as np
import pytest

from benchmarks.theory import fedagg
from benchmarks.theory.fedagg import Constants


@dataclass
class Run:
    """The models of one run, round by round, and the constants of its path."""

    models: np.ndarray
    constants: Constants
    farthest: float  # |w_il - w̄|
    losses: np.ndarray  # F - F*
    slopes: np.ndarray  # ∇F
    optimum: float
    curvature: float  # of F, whose ψ and μ it is


def run(curvatures, optima, rates, epochs, rounds, start, aggregated=False):
    """Clients with hᵢ (w - aᵢ)²/2 of equal weight, which move by their own gradients (Algorithm 2)
    or by the mean of all (14), each with one rate of its own."""
    curvatures = np.array(curvatures, float)
    optima = np.array(optima, float)
    rates = np.array(rates, float)
    models = [float(start)]
    largest = 0.0
    farthest = 0.0
    for _ in range(rounds):
        local = np.full(len(curvatures), models[-1])
        for _ in range(epochs):
            gradients = curvatures * (local - optima)
            largest = max(largest, np.abs(gradients).max())
            if aggregated:
                gradients = np.full(len(rates), gradients.mean())
            local = local - rates * gradients
            farthest = max(farthest, np.abs(local - models[-1]).max())
        models.append(local.mean())
    path = np.array(models)
    curvature = curvatures.mean()
    optimum = (curvatures * optima).sum() / curvatures.sum()
    found = Constants(epochs, len(curvatures), curvatures.max(), largest, rates.min(), rates.max())
    losses = curvature * (path - optimum) ** 2 / 2
    slopes = curvature * (path - optimum)
    return Run(path, found, farthest, losses, slopes, optimum, curvature)


ONE_RATE = [
    ([1], [0], 0.05, 1, 20, 1),
    ([1, 4], [1, -0.25], 0.02, 2, 40, 3),
    ([0.5, 1, 2], [-1, 0, 5], 0.05, 3, 60, -4),
    ([2, 2], [-3, 3], 0.1, 1, 30, 8),
]


@pytest.mark.parametrize(("curvatures", "optima", "rate", "epochs", "rounds", "start"), ONE_RATE)
def test_with_one_rate_the_bounds_hold(curvatures, optima, rate, epochs, rounds, start):
    """(22), (24), (25) and (26), where all rates are equal: what the proofs can show."""
    found = run(curvatures, optima, [rate] * len(curvatures), epochs, rounds, start)
    distances = (found.models - found.optimum) ** 2
    for t in range(1, rounds + 1):
        bound = fedagg.gap_of_convex(found.constants, found.curvature, distances[0], t)
        assert distances[t] <= bound
    assert_losses_bounded(found, rounds)


@pytest.mark.parametrize(("curvatures", "optima", "rate", "epochs", "rounds", "start"), ONE_RATE)
def test_under_14_with_equal_sizes_the_bounds_hold(curvatures, optima, rate, epochs, rounds, start):
    """(24), (25) and (26) with rates from 0.8 to 1 times the rate."""
    rates = rate * np.linspace(0.8, 1, len(curvatures))
    assert_losses_bounded(run(curvatures, optima, rates, epochs, rounds, start, True), rounds)


def assert_losses_bounded(found, rounds):
    constants = found.constants
    assert constants.descent() > 0
    for t in range(1, rounds + 1):
        change = fedagg.change_of_a_round(constants, found.slopes[t - 1] ** 2)
        assert found.losses[t] - found.losses[t - 1] <= change
        bound = fedagg.gap_of_loss(constants, found.curvature, found.losses[0], t, first=0)
        assert found.losses[t] <= bound
        bound = fedagg.mean_squared_gradient(constants, found.losses[0], t)
        assert np.square(found.slopes[:t]).mean() <= bound


@pytest.mark.parametrize("rates", [[0.1, 0.1], [0.02, 0.3]])
def test_clients_stay_within_the_drift(rates):
    """Proposition 4: L steps, each of at most P δ_h."""
    found = run([1, 3], [2, -1], rates, 4, 5, 6)
    assert 0 < found.farthest <= fedagg.drift(found.constants)


def test_theorem_3_contracts_with_the_largest_rate():
    """F = w²/2, one client, one epoch, w⁰ = 1. The first rate is 0.01, the others 0, which the clip
    at [0, 1] allows. The gap stays 0.99²; (22) goes on to contract with δ_h = 0.01."""
    constants = Constants(epochs=1, clients=1, smooth=1, gradient=1, lowest=0, highest=0.01)
    gap = (1 - 0.01) ** 2
    assert gap <= fedagg.gap_of_convex(constants, 1, 1, 1)
    # The sum of the geometric series: 1e-4 · 1.01 (1 - 0.99ᵀ)/0.01 + 0.99ᵀ.
    for rounds in (100, 1000):
        bound = 0.0101 * (1 - 0.99**rounds) + 0.99**rounds
        assert fedagg.gap_of_convex(constants, 1, 1, rounds) == pytest.approx(bound)
        assert gap > bound
    assert bound < 0.0102


def test_theorem_3_says_nothing_with_the_smallest_rate():
    """The same run with δ_l = 0 where the bound contracts: it is the start and grows."""
    constants = Constants(epochs=1, clients=1, smooth=1, gradient=1, lowest=0, highest=0)
    assert fedagg.gap_of_convex(constants, 1, 1, 1000) == 1


def test_assumption_4_forces_affine_losses():
    """(7) for a pair and for the pair exchanged leaves g = (F(w) - F(w'))/(w - w'): the same number
    for all pairs of an affine loss only, and that has no minimum w* unless it is constant."""

    def slopes(loss):
        pairs = [(0, 1), (0, 2), (-1, 3)]
        return {(loss(a) - loss(b)) / (a - b) for a, b in pairs}

    assert slopes(lambda w: 3 * w + 1) == {3}
    assert slopes(lambda w: w**2) == {1, 2}
    assert len(slopes(lambda w: (w**2 - 1) ** 2)) > 1  # a loss that is not convex


def test_of_a_constant_loss_nothing_is_left_in_23():
    """g = 0, P = 0: the bound is the start, whatever T is."""
    constants = Constants(epochs=2, clients=3, smooth=0, gradient=0, lowest=0.1, highest=0.1)
    assert fedagg.gap_of_others(constants, 0, 5, 100) == 5


def test_theorem_4_needs_its_sum_from_0():
    """From the optimum 0 of (w - 1)²/2 and 4 (w + 1/4)²/2 two epochs lead to the models
    1 - (1 - η)² and -(1 - (1 - 4η)²)/4, whose mean is 3η²/2: F - F* = 5/4 · 9η⁴/4, where (25) has
    no noise for T = 1."""
    found = run([1, 4], [1, -0.25], [0.1, 0.1], 2, 1, 0)
    constants = found.constants
    assert constants.descent() > 0
    assert found.losses[1] == pytest.approx(5 / 4 * 9 / 4 * 0.1**4)
    assert fedagg.gap_of_loss(constants, found.curvature, found.losses[0], 1) == 0
    assert found.losses[1] <= fedagg.gap_of_loss(constants, found.curvature, 0, 1, first=0)


def test_proposition_5_fails_where_rates_differ():
    """Losses 2w and -w: their mean w/2 should fall. With the rates 0.1 and 0.5 the models move by
    -0.2 and 0.5: the mean loss rises by 0.075, where (24) has -0.1 · 0.25."""
    constants = Constants(epochs=1, clients=2, smooth=0, gradient=2, lowest=0.1, highest=0.5)
    change = (-0.2 + 0.5) / 2 / 2
    assert change == pytest.approx(0.075)
    assert fedagg.change_of_a_round(constants, 0.25) == pytest.approx(-0.025)
    assert change > fedagg.change_of_a_round(constants, 0.25)


def test_proposition_5_fails_under_14_where_sizes_differ():
    """Losses w and -3w of sizes 9 to 1: F falls by 0.6 for w, and the mean gradient, without sizes,
    is -1. A step of 0.1 goes to 0.1, and F rises by 0.06, where (24) has -0.1 · 0.36."""
    constants = Constants(epochs=1, clients=2, smooth=0, gradient=3, lowest=0.1, highest=0.1)
    slope = 0.9 * 1 - 0.1 * 3
    step = -0.1 * (1 - 3) / 2
    assert slope * step == pytest.approx(0.06)
    assert fedagg.change_of_a_round(constants, slope**2) == pytest.approx(-0.036)


def test_theorems_4_and_5_fail_where_rates_differ():
    """(w + 1)²/2 and (w - 1)²/2 with the rates 0.005 and 0.01 rest where 0.005 (w + 1) =
    0.01 (1 - w), at w = 1/3, while the optimum is 0. Clients see gradients of 4/3 there at most."""
    found = run([1, 1], [-1, 1], [0.005, 0.01], 1, 4000, 1 / 3)
    constants = found.constants
    np.testing.assert_allclose(found.models, 1 / 3, rtol=1e-9)
    assert constants.gradient == pytest.approx(4 / 3)
    assert constants.descent() > 0
    assert fedagg.mean_squared_gradient(constants, found.losses[0], 4000) < 1 / 9
    for first in (0, 1):
        bound = fedagg.gap_of_loss(constants, 1, found.losses[0], 4000, first)
        assert found.losses[-1] > bound


def test_with_a_rate_of_0_theorems_4_and_5_are_empty():
    """δ_l = 0, where the fixed point of Algorithm 1 sends rates: nothing descends."""
    constants = Constants(epochs=3, clients=5, smooth=1, gradient=1, lowest=0, highest=0.1)
    assert constants.descent() < 0


@pytest.mark.parametrize(("distance", "rate"), [(2, 1.8), (-1, -0.9)])
def test_proposition_3_is_not_implied(distance, rate):
    """α = 0.1 and φ₁ = 1: 9 · distance/10, above 1 and below 0."""
    found = fedagg.last_rate(0.1, 1, distance)
    assert found == pytest.approx(rate)
    assert not 0 < found < 1


def test_the_bound_of_39_enlarges_a_denominator():
    """α = 0.1, P = 1, U = 1: (39) has 9/10. A smaller gradient of 1/3 has the rate 3/2."""
    bound = fedagg.last_rate_bound(0.1, gradient=1, model=1)
    assert bound == pytest.approx(0.9)
    assert fedagg.last_rate(0.1, slope=1 / 3, distance=1) == pytest.approx(1.5)


# ---- Theorems 1 and 2, Propositions 1 and 2 ------------------------------------------------------


@pytest.fixture
def terms():
    """α, φ₁, w and φ₂ of three epochs with four weights."""
    rng = np.random.default_rng(3)
    return 0.3, rng.normal(size=(3, 4)), rng.normal(size=4), rng.normal(size=(3, 4))


def test_theorem_1_minimizes_the_cost(terms):
    """Σ α η² + (1 - α)|w - φ₂|² is convex in the rates: its gradient is 0, and every η is (15)."""
    alpha, slopes, start, means = terms
    found = fedagg.rates(alpha, slopes, start, means)

    def models(values):
        return start - np.cumsum(values[:, None] * slopes, axis=0)

    def cost(values):
        return alpha * values @ values + (1 - alpha) * np.square(models(values) - means).sum()

    for i in range(3):
        step = 1e-4 * np.eye(3)[i]
        assert cost(found + step) - cost(found - step) == pytest.approx(0, abs=1e-11)
        model = np.vstack([start, models(found)])[i]
        right = fedagg.rate_by_15(alpha, slopes[i:], model, means[i:], found[i:])
        assert right == pytest.approx(found[i])


def test_proposition_1_holds_in_w_and_phi_2(terms):
    """Rates are linear in w and φ₂ together; φ₁ twice as large gives neither twice nor half."""
    alpha, slopes, start, means = terms
    one = fedagg.rates(alpha, slopes, start, means)
    other = fedagg.rates(alpha, slopes, means[0], 2 * means)
    both = fedagg.rates(alpha, slopes, start + 3 * means[0], means + 6 * means)
    np.testing.assert_allclose(both, one + 3 * other)
    ratio = fedagg.rates(alpha, 2 * slopes, start, means) / one
    assert np.ptp(ratio) > 0.01


def test_theorem_2_and_proposition_2_have_the_rate_0(terms):
    """The iteration is a contraction, to 0, from any rates: a fixed point that does not train."""
    alpha, slopes, _, _ = terms
    np.testing.assert_array_equal(fedagg.next_rates(alpha, slopes, np.zeros(3)), 0)
    values = np.array([0.1, 0.1, 0.1])
    path = -np.cumsum(values[:, None] * slopes, axis=0)
    expected = fedagg.rates(alpha, slopes, np.zeros(4), path)
    np.testing.assert_allclose(fedagg.next_rates(alpha, slopes, values), expected)
    matrix = np.array([fedagg.next_rates(alpha, slopes, row) for row in np.eye(3)]).T
    assert np.abs(np.linalg.eigvals(matrix)).max() < 1
