"""FedCLUP's bounds beside exact expectations and exact linear recursions of scalar clients."""

import numpy as np
import pytest

from benchmarks.theory import fedclup
from benchmarks.theory.fedclup import Constants, Envelope

# ---- the statistical error ----------------------------------------------------------------------


def exact_error(curvatures, true, penalty, samples, variance):
    """The largest E|w̃ᵢ - wᵢ*|² where ℓ(w, z) = hᵢ (w - z)²/2 and z has the mean wᵢ*.

    The solution of Problem (2) is linear in the clients' means z̄ᵢ: (hᵢ + λ) wᵢ - λ mean w = hᵢ z̄ᵢ.
    So the error is the square of a bias and the sum of the squared weights times the variance: a
    mean of squares, as in the theorem.
    """
    h = np.array(curvatures, float)
    system = np.diag(h + penalty) - penalty / len(h)
    weights = np.linalg.solve(system, np.diag(h))
    bias = weights @ true - true
    return (bias**2 + np.square(weights).sum(1) * variance / samples).max()


def constants(curvatures, true, samples, variance):
    h = np.array(curvatures, float)
    far = np.abs(true - true.mean()).max()
    noise = (h**2).max() * variance
    return Constants(h.max(), h.min(), noise, far, samples, len(h))


PROBLEMS = [
    (curvatures, spread, samples)
    for curvatures in ([1, 1, 1], [1, 2, 3, 4])
    for spread in (0, 0.05, 0.3, 2)
    for samples in (2, 10, 400)
]
PENALTIES = np.geomspace(1e-3, 1e5, 33)


@pytest.mark.parametrize(("curvatures", "spread", "samples"), PROBLEMS)
def test_theorem_1_holds_where_its_proof_does(curvatures, spread, samples):
    """The second branch for every λ, the first for g(λ) ≤ 1/(8L²), which (52) needs."""
    true = spread * np.linspace(-1, 1, len(curvatures))
    c = constants(curvatures, true, samples, 0.7)
    for penalty in PENALTIES:
        error = exact_error(curvatures, true, penalty, samples, 0.7)
        assert error <= fedclup.error_of_each(c, penalty)
        if fedclup.coupling(c, penalty) <= 1 / (8 * c.smooth**2):
            for power in (1, 2):
                assert error <= fedclup.error_of_all(c, penalty, power)


def test_theorem_1_has_a_pole():
    """L = μ = 1, λ = 15.9: 4L²g = 16 (1/16.9 + 1/16.9²) = 1.0028 is above 1, so that
    g/(1 - 4L²g) is about -90 and the bound of a mean of squares is negative."""
    c = Constants(smooth=1, convex=1, noise=1, heterogeneity=0.1, samples=10, clients=5)
    assert 4 * fedclup.coupling(c, 15.9) == pytest.approx(16 * (1 / 16.9 + 1 / 16.9**2))
    assert fedclup.statistical_error(c, 15.9) < -15


@pytest.mark.parametrize("power", [1, 2])
def test_q1_is_not_monotone(power):
    """It changes its sign at the pole, from below: the statement says that it rises for every λ."""
    c = Constants(smooth=1, convex=1, noise=1, heterogeneity=0.1, samples=10, clients=5)
    values = [1 / fedclup.inverse_q1(c, penalty, power) for penalty in (1, 15.9, 20, 100)]
    assert values[0] > 0 > values[1]
    assert 0 < values[2] < values[3]


def test_the_note_on_q1():
    """(52) put into (68) is (69) with ρ²/n in all three places of q₁. With ρ²/n² in two of them, as
    (70) has it, the bound is smaller for n > 1: a misprint."""
    c = Constants(smooth=3, convex=1, noise=2, heterogeneity=0.2, samples=7, clients=4)
    penalty = 900.0
    through = fedclup.error_through_the_global_model(c, penalty)
    assert through == pytest.approx(fedclup.error_of_all(c, penalty, 1), rel=1e-12)
    assert through > fedclup.error_of_all(c, penalty, 2) * (1 + 1e-6)


@pytest.mark.parametrize(("curvatures", "spread", "samples"), PROBLEMS)
def test_corollary_1_holds_at_its_penalties(curvatures, spread, samples):
    """λ from its bound on, upwards for R ≤ n^(-1/2) and downwards for larger R."""
    true = spread * np.linspace(-1, 1, len(curvatures))
    c = constants(curvatures, true, samples, 0.7)
    limit = fedclup.minimax_penalty(c)
    factors = np.array([1, 3, 30, 1000])
    penalties = limit * factors
    if c.heterogeneity > samples**-0.5:
        penalties = limit / factors
    for penalty in penalties:
        error = exact_error(curvatures, true, penalty, samples, 0.7)
        assert error <= fedclup.minimax_error(c)


def test_the_constants_of_corollary_1():
    """ρ = 2, μ = L = 1: C₂ = max(4 (1 + √3)², 32) = 32, C₃ = 768, C₄ = 4 (1 + √133)² > 198."""
    c = Constants(smooth=1, convex=1, noise=4, heterogeneity=1, samples=10, clients=3)
    third, fourth = fedclup.minimax_constants(c)
    assert third == pytest.approx(768)
    assert fourth == pytest.approx(4 * (1 + 133**0.5) ** 2)


# ---- the rounds ---------------------------------------------------------------------------------


def recursion(curvatures, penalty, server, local, steps, noise=0.0, one_batch=False):
    """One round of FedCLUP as a matrix of (w_g, w₁, ..., w_m), and the covariance that it adds.

    Clients have hᵢ w²/2. Local steps shrink w - λ/(hᵢ + λ) w_g by sᵢ = 1 - η (hᵢ + λ) each. `noise`
    is the variance of a gradient, drawn at every step or, as Algorithm 2 has it, once a round.
    """
    h = np.array(curvatures, float)
    m = len(h)
    pull = penalty / (h + penalty)
    shrink = 1 - local * (h + penalty)
    matrix = np.zeros((m + 1, m + 1))
    matrix[1:, 0] = pull * (1 - shrink**steps)
    matrix[1:, 1:] = np.diag(shrink**steps)
    mean = server * penalty * np.full(m, 1 / m)
    matrix[0] = mean @ matrix[1:]
    matrix[0, 0] += 1 - server * penalty
    powers = shrink[:, None] ** np.arange(steps)
    sizes = np.square(powers).sum(1)
    if one_batch:
        sizes = powers.sum(1) ** 2
    spread = np.zeros((m + 1, m))
    spread[0] = mean
    spread[1:] = np.eye(m)
    added = spread @ np.diag(local**2 * noise * sizes) @ spread.T
    return matrix, added


def stationary(matrix, added):
    """The covariance C with C = M C Mᵀ + A."""
    size = len(matrix)
    system = np.eye(size**2) - np.kron(matrix, matrix)
    return np.linalg.solve(system, added.ravel()).reshape(size, size)


SPECTRA = [[1], [1, 1], [1, 4], [1, 2, 10]]


@pytest.mark.parametrize("curvatures", SPECTRA)
@pytest.mark.parametrize("penalty", [0.05, 0.5, 5])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_the_rate_of_theorem_2_holds(curvatures, penalty, share):
    """The squared spectral radius of a round, also with γ near 1/L_g, where condition (120) of the
    proof, which the statement does not have, fails."""
    e = Envelope(max(curvatures), min(curvatures), penalty)
    server = share / e.global_smooth
    for local in (1 / e.local_smooth, 0.3 / e.local_smooth):
        steps = fedclup.local_steps(e, server, local)
        matrix, _ = recursion(curvatures, penalty, server, local, steps)
        radius = np.abs(np.linalg.eigvals(matrix)).max()
        assert radius**2 <= fedclup.rate(e, server) + 1e-12


@pytest.mark.parametrize("curvatures", SPECTRA)
@pytest.mark.parametrize("penalty", [0.05, 0.5, 5, 50])
def test_the_rate_of_corollary_2_holds(curvatures, penalty):
    e = Envelope(max(curvatures), min(curvatures), penalty)
    server = 1 / (2 * e.global_smooth)
    steps = fedclup.steps_of_corollary_2(e)
    assert steps >= fedclup.local_steps(e, server, 1 / e.local_smooth)  # (134) is sufficient
    matrix, _ = recursion(curvatures, penalty, server, 1 / e.local_smooth, steps)
    bound = fedclup.rate_with_the_papers_steps(e)
    assert np.abs(np.linalg.eigvals(matrix)).max() ** 2 <= bound
    state = np.ones(len(curvatures) + 1)
    first = matrix @ state
    for _ in range(30):
        second = matrix @ first
        assert second[0] ** 2 <= bound * first[0] ** 2
        first = second


@pytest.mark.parametrize("curvatures", SPECTRA)
@pytest.mark.parametrize("penalty", [0.05, 0.5, 5])
@pytest.mark.parametrize("local", [1, 0.1])
def test_the_ball_of_theorem_3_holds_with_new_batches(curvatures, penalty, local):
    """The stationary variance of w_g with a batch for every local step."""
    e = Envelope(max(curvatures), min(curvatures), penalty)
    for share in (0.1, 0.5, 0.9):
        server = share / e.global_smooth
        size = local / e.local_smooth
        steps = fedclup.local_steps(e, server, size)
        matrix, added = recursion(curvatures, penalty, server, size, steps, noise=1.0)
        variance = stationary(matrix, added)[0, 0]
        assert 0 < variance <= fedclup.ball(e, server, size, 1 / len(curvatures))


def test_the_ball_of_theorem_3_fails_with_one_batch_a_round():
    """Algorithm 2 draws a client's batch before its local steps. One client, h = λ = 1, γ = 1, so
    γ L_g = 1/2: a local solve then ends at the batch's own solution however small η is, while the
    ball shrinks with η. σ² is what Assumption 4 asks for: the mean square of the first step's
    gradient, which is the largest."""
    e = Envelope(1, 1, 1)
    local = 0.0005
    steps = fedclup.local_steps(e, 1, local)
    matrix, added = recursion([1], 1, 1, local, steps, noise=1.0, one_batch=True)
    c = stationary(matrix, added)
    # w₁ - w_g/2 is the distance from the local solution, and 2 the curvature of the local problem.
    start = c[1, 1] - c[0, 1] + c[0, 0] / 4
    noise = 1 + 4 * start
    assert c[0, 0] > 10 * fedclup.ball(e, 1, local, noise)


def test_corollary_3_holds_from_a_common_start():
    """Without noise and differences its O[...] vanishes as n grows."""
    for curvatures in SPECTRA:
        e = Envelope(max(curvatures), min(curvatures), 0.5)
        server = 1 / (2 * e.global_smooth)
        steps = fedclup.steps_of_corollary_2(e)
        matrix, _ = recursion(curvatures, 0.5, server, 1 / e.local_smooth, steps)
        state = np.ones(len(curvatures) + 1)
        for rounds in range(1, 20):
            state = matrix @ state
            bound = fedclup.optimization_error(e, 1, rounds)
            assert np.square(state[1:]).max() <= bound


def test_corollary_3_forgets_the_start_of_the_global_model():
    """h = λ = 1: local models at their optimum 0, the global one at 1. The bound is 0, and a round
    later the local model is prox(1) = 1/2."""
    e = Envelope(1, 1, 1)
    matrix, _ = recursion([1], 1, 1, 1 / e.local_smooth, 1)
    model = (matrix @ [1, 0])[1]
    assert model == pytest.approx(0.5)
    assert model**2 > fedclup.optimization_error(e, 0, 1)


def test_corollary_4_lost_a_factor():
    """κ = 1: its rate is 0, so that one round were enough. From the common start 1 the local model
    of h = λ = 1 is 1/2 after a round, and 1/4 after two."""
    e = Envelope(1, 1, 1)
    matrix, _ = recursion([1], 1, 1, 1 / e.local_smooth, 1)
    state = np.ones(2)
    for rounds in (1, 2):
        state = matrix @ state
        assert state[1] == pytest.approx(0.5**rounds)
        assert fedclup.optimization_error_of_corollary_4(e, 1, rounds) == 0
        assert state[1] ** 2 <= fedclup.optimization_error(e, 1, rounds)
