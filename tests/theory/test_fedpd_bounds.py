"""FedPD's bounds beside scalar clients with exact local solves, and FedAvg's beside its steps."""

import math

import numpy as np
import pytest

from benchmarks.theory import fedpd

# ---- Theorem 1 ----------------------------------------------------------------------------------


def quadratic_gaps(curvatures, optima, eta, rounds, start):
    """|∇f(x₀)|² of the rounds 0 to T of FedPD with exact local solves, and f(x⁰) - f*."""
    h = np.array(curvatures, float)
    a = np.array(optima, float)
    x = start
    dual = np.zeros(len(h))
    gaps = []
    for _ in range(rounds + 1):
        gaps.append((h * (x - a)).mean() ** 2)
        local = (h * a + x / eta - dual) / (h + 1 / eta)
        dual = dual + (local - x) / eta
        x = (local + eta * dual).mean()
    return np.array(gaps), gaps[0] / (2 * h.mean())


@pytest.mark.parametrize(
    ("curvatures", "mended"), [([1], False), ([1, 3], False), ([-0.5, 2], False), ([0.02], True)]
)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_case_1_of_theorem_1_holds(curvatures, mended, share):
    """With the paper's constants for L ≥ 1, with max(4 L², 2) for a small L."""
    smooth = np.abs(curvatures).max()
    eta = share * fedpd.largest_step(smooth)
    gaps, start = quadratic_gaps(curvatures, [2] * len(curvatures), eta, 60, -1)
    for rounds in range(1, 61):
        bound = fedpd.mean_gap(eta, smooth, start, rounds, mended=mended)
        assert gaps[: rounds + 1].sum() / rounds <= bound


def test_theorem_1_fails_for_a_small_curvature():
    """One client with 0.02 w²/2, η = 0.5: 4 L² is 0.0016 in (104), where |∇ₓL|² has the weight 2.
    C₇ = 2 · 2.02²/0.9796 and D₀ = |∇f(x⁰)|²/0.04, so that C₂ D₀ is a third of |∇f(x⁰)|², which is
    the first of the sum's terms alone."""
    gaps, start = quadratic_gaps([0.02], [0], 0.5, 1, 1)
    assert fedpd.largest_step(0.02) > 0.5
    assert gaps[0] == pytest.approx(0.02**2)
    bound = 4 * 0.02**2 * 2 * 2.02**2 / 0.9796 * start
    assert fedpd.mean_gap(0.5, 0.02, start, 1) == pytest.approx(bound)
    assert gaps[0] > 2.9 * bound


def bounded_gaps(optima, smooth, eta, coins):
    """As above for L log cosh(x - aᵢ), whose gradients differ by at most 2 L; `coins`: all talk."""
    a = np.array(optima, float)
    anchor = np.zeros(len(a))
    local = np.zeros(len(a))
    dual = np.zeros(len(a))
    gaps = []
    for talks in coins:
        gaps.append((smooth * np.tanh(anchor.mean() - a)).mean() ** 2)
        for _ in range(30):
            # Newton's method: the local problem's curvature lies between 1/η and 1/η + L.
            slope = smooth * np.tanh(local - a) + dual + (local - anchor) / eta
            local = local - slope / (smooth / np.cosh(local - a) ** 2 + 1 / eta)
        assert np.abs(slope).max() < 1e-9
        dual = dual + (local - anchor) / eta
        anchor = local + eta * dual
        if talks:
            anchor = np.full(len(a), anchor.mean())
    return np.array(gaps)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_case_2_of_theorem_1_holds(p):
    """The mean of 6 sequences of coins, of gradients that differ by at most δ from their mean."""
    optima = [-1.0, 0.5, 3.0]
    eta = fedpd.largest_step(1) / 2
    rng = np.random.default_rng(0)
    total = np.mean([bounded_gaps(optima, 1, eta, rng.random(41) >= p) for _ in range(6)], axis=0)
    grid = np.linspace(-20, 20, 4001)[:, None]
    slopes = np.tanh(grid - optima)
    delta = np.abs(slopes - slopes.mean(1, keepdims=True)).max()
    start = np.log(np.cosh(optima)).mean()  # f(0); f ≥ 0
    bound = fedpd.mean_gap(eta, 1, start, 40, clients=3, p=p, delta=delta)
    assert total.sum() / 40 <= bound


def test_table_2_is_right_within_a_factor_of_2_below_p_046():
    """C(p) over Table 2's forms at its η. As p → 0, C₃ → Lη/(1 - Lη) and the ratio goes to
    4 (1 - C₃)²/(12 (1 - 2Lη)²) = 1/(3 (1 - Lη)²). The others were worked out from the print by
    another hand, to two digits."""
    eta = fedpd.largest_step(1) / 2
    least = fedpd.skipping(1e-9, eta) / fedpd.table_2(1e-9, eta)
    assert least == pytest.approx(1 / (3 * (1 - eta) ** 2), rel=1e-6)
    linear = {0.01: 0.47, 0.1: 0.53, 0.3: 0.95, 0.5: 2.6, 0.59: 5.1}
    logarithmic = {0.6: 2.8, 0.7: 4.0, 0.8: 5.4, 0.9: 6.0}
    for p, ratio in (linear | logarithmic).items():
        found = fedpd.skipping(p, eta) / fedpd.table_2(p, eta)
        assert found == pytest.approx(ratio, rel=0.02)
    for p in np.linspace(0.01, 0.99, 99):
        ratio = fedpd.skipping(p, eta) / fedpd.table_2(p, eta)
        assert (0.4 < ratio < 2) == (p < 0.46)


# ---- Theorem 2 and Claims 2.1, 2.2 --------------------------------------------------------------


def chain_slope(x, agents):
    """∇g(x) of (24) with the 1/N that (21) and (22) give all terms but the first."""
    before = np.append(1.0, x[:-1])
    weights = np.full(len(x), 1 / agents)
    weights[0] = 1.0

    def psi(w):
        return np.where(w > 0, 1 - np.exp(-np.square(w)), 0.0)

    def psi_slope(w):
        return np.where(w > 0, 2 * w * np.exp(-np.square(w)), 0.0)

    def phi(w):
        return 4 * np.arctan(w) + 2 * np.pi

    def phi_slope(w):
        return 4 / (1 + np.square(w))

    own = -psi(-before) * phi_slope(-x) - psi(before) * phi_slope(x)
    next_one = -psi_slope(-before) * phi(-x) - psi_slope(before) * phi(x)
    slope = weights * own
    slope[:-1] += (weights * next_one)[1:]
    return slope


def test_theorem_2_fails_on_its_own_chain():
    """N = T = 6, ε = 1, L = 1: f = 2π g(x/(π√2)), so that |∇f|² = 2 |∇g|². One local step of all
    agents leads from 0 to x₁ = 100: ∂g/∂x₁ is the same for all, the other slopes are 0 there. What
    remains is ∂g/∂x₂ = -Ψ(100) Φ'(0)/6 = -2/3, and 2 · 4/9 < 1. (50) asks for more than 6 rounds.
    """
    first = chain_slope(np.zeros(7), 6)
    assert np.count_nonzero(first) == 1
    slope = chain_slope(np.array([100.0, 0, 0, 0, 0, 0, 0]), 6)
    assert 2 * (slope @ slope) == pytest.approx(8 / 9, rel=1e-6)
    # f(0) - inf f: all x → ∞ take Ψ(1) Φ from 2π to 4π, and Ψ Φ/6 from 0 to 4π/6 for six terms.
    start = 2 * np.pi * ((1 - np.exp(-1)) * 2 * np.pi + 4 * np.pi)
    assert fedpd.least_rounds(start, 1, 6, 1) > 6


@pytest.mark.parametrize("start", [1, 1000])
@pytest.mark.parametrize("epsilon", [1e-2, 1e-5])
def test_theorem_2_fails_for_200_agents_on_every_problem(start, epsilon):
    """2 L (f(0) - inf f)/ε rounds are enough for one step a round; (50) has N/(10π²) for the 2,
    more for N > 20π² = 197.4."""
    enough = fedpd.rounds_of_gradient_descent(start, 3, epsilon)
    assert fedpd.least_rounds(start, 3, 197, epsilon) < enough
    assert fedpd.least_rounds(start, 3, 200, epsilon) > enough + 1


@pytest.mark.parametrize("eta", [1e-3, 0.3, 1, 5])
@pytest.mark.parametrize("steps", [2, 3, 7])
def test_claim_2_2(eta, steps):
    """The model grows for every η > 0 and Q > 1: only even powers of η are left, all positive."""
    even = range(2, steps + 1, 2)
    expected = 1 + sum(math.comb(steps, k) * eta**k for k in even)
    assert fedpd.growth(eta, steps) == pytest.approx(expected)
    assert fedpd.growth(eta, steps) > 1
    assert fedpd.growth(eta, 1) == pytest.approx(1)


# ---- Claims D.1 and D.2 -------------------------------------------------------------------------


def fedavg_gaps(slopes, start, eta, sizes):
    """|∇f(x)|² of the rounds 0 to T, each of a first step η and the others of `sizes`."""
    x = start
    gaps = []
    for others in sizes:
        gaps.append(np.mean(slopes(np.full(2, x))) ** 2)
        local = np.full(2, x)
        for size in [eta, *others]:
            local = local - size * slopes(local)
        x = local.mean()
    return np.array(gaps)


@pytest.mark.parametrize("eta", [0.1, 0.5, 0.9])
def test_claim_d1_holds_for_a_curvature_of_1(eta):
    """log cosh(x - 2) and log cosh(x + 1), with L = G = 1, and steps that fall like 1/√r."""
    optima = np.array([2.0, -1.0])
    most = min(0.25, eta / 3)
    sizes = [[most / (r + 1) ** 0.5] * 2 for r in range(201)]
    gaps = fedavg_gaps(lambda x: np.tanh(x - optima), 6.0, eta, sizes)
    start = np.log(np.cosh(6.0 - optima)).mean()  # f ≥ 0
    for rounds in (1, 10, 200):
        bound = fedpd.mean_gap_of_fedavg(eta, 1, 1, start, sizes[: rounds + 1])
        assert gaps[: rounds + 1].sum() / rounds <= bound


def test_claim_d1_lost_a_curvature():
    """(60) has no L² for the L² of (62). A Huber loss with the slope 40 x within ±1, and -x/2:
    η = 0.001, second steps of η/2 up to round 1000, to fall to 0 afterwards. FedAvg rests where
    η (y - 1/2) + η/2 (0.96 y - 1/2) = 0 for y = 40 x, at y = 0.75/1.48, and |∇f|² = (y - 1/2)²/4.
    """

    def slopes(x):
        return np.array([np.clip(40 * x[0], -1, 1), -0.5])

    eta = 0.001
    y = 0.75 / 1.48
    sizes = [[eta / 2]] * 1001
    gaps = fedavg_gaps(slopes, y / 40, eta, sizes)
    gap = (y - 0.5) ** 2 / 4
    np.testing.assert_allclose(gaps, gap, rtol=1e-9)
    bound = fedpd.mean_gap_of_fedavg(eta, 40, 1, gap / 40, sizes)  # f'' = 20
    assert gaps.sum() / 1000 > 4 * bound


@pytest.mark.parametrize("steps", [2, 3])
def test_claim_d2(steps):
    """±x²/2 with the first step 1/2 and the others 1/√r, from where they are at most η/Q: a round
    multiplies the model by more than 1 + a/2, for its second step a, and these add up to ∞."""
    model = 1.0
    first = 2 * math.ceil(4 * steps**2 / steps)
    for k in range(first, 600):
        others = [1 / math.sqrt(k * steps + q) for q in range(2, steps + 1)]
        assert max(others) <= min(1 / (2 * (steps - 1)), 0.5 / steps)
        factor = fedpd.growth_by_round([0.5, *others])
        assert factor >= 1 + others[0] / 2 - 1e-12
        model *= factor
    assert model > 1e4


# ---- Theorem 3, on variance reduction -----------------------------------------------------------


def reduced_gaps(curvatures, optima, eta, gamma, rounds, start):
    """|∇f(x₀)|² of FedPD-VR with Q = I = B = 1 on one sample a client: a step with its gradient."""
    h = np.array(curvatures, float)
    a = np.array(optima, float)
    x = start
    local = np.full(len(h), start)
    dual = np.zeros(len(h))
    gaps = []
    for _ in range(rounds + 1):
        gaps.append((h * (x - a)).mean() ** 2)
        slope = h * (local - a)
        local = (eta * local + gamma * x - eta * gamma * (slope + dual)) / (eta + gamma)
        dual = dual + (local - x) / eta
        x = (local + eta * dual).mean()
    return np.array(gaps), gaps[0] / (2 * h.mean())


@pytest.mark.parametrize("eta", [0.02, 0.1])
@pytest.mark.parametrize("gamma", [1, 100])
def test_theorem_3_holds_where_its_constants_are_positive(eta, gamma):
    assert eta < fedpd.steps_of_theorem_3(1, 1, 1, 1)
    assert fedpd.c12(eta, gamma, 1, 1, 1, 1) > 0
    gaps, start = reduced_gaps([1, 0.3], [2, -1], eta, gamma, 100, 4)
    for rounds in (1, 10, 100):
        bound = fedpd.c9(eta, gamma, 1, 1, 1, 1) / rounds * start
        assert gaps[: rounds + 1].sum() / rounds <= bound


@pytest.mark.parametrize("gamma", [0.1, 1, 100, 1e6])
def test_theorem_3_allows_steps_whose_constant_is_negative(gamma):
    """Q = I = B = 1, L = 1, η = 0.16 < 1/6: 1/(2η) is 3.1, and what is taken off without 1/γ and
    6η/γ² is 1 + 9 · 0.16 + 3.88/2 = 4.4. With the paper's Q = 2, I = 100, B = 1 half the largest
    step has 48 - 1 - 0.4 - 118."""
    eta = 0.16
    assert eta < fedpd.steps_of_theorem_3(1, 1, 1, 1)
    if gamma > 5 * eta:
        assert fedpd.c12(eta, gamma, 1, 1, 1, 1) < 0
    eta = fedpd.steps_of_theorem_3(1, 2, 100, 1) / 2
    assert gamma > 5 * eta
    assert fedpd.c12(eta, gamma, 1, 2, 100, 1) < 0


def test_theorem_3_fails_for_a_small_curvature():
    """0.02 w²/2, η = 2, γ = 100 > 10/√0.02: C₉ D₀ is less than |∇f(x⁰)|², the first term alone."""
    assert fedpd.steps_of_theorem_3(0.02, 1, 1, 1) > 2
    assert 10 / 0.02**0.5 < 100
    assert fedpd.c12(2, 100, 0.02, 1, 1, 1) > 0
    gaps, start = reduced_gaps([0.02], [0], 2, 100, 1, 1)
    assert gaps[0] > 3 * fedpd.c9(2, 100, 0.02, 1, 1, 1) * start
