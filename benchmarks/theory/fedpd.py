"""What FedPD's paper states (arXiv 2005.11418): Theorems 1 to 3, Claims 2.1, 2.2, D.1 and D.2.

Theorem 3 is the arXiv's, on variance reduction, here and on all pages; the journal's Theorem 3, on
skipped communication, is named as the journal's.
"""

import math


def largest_step(smooth: float) -> float:
    """Returns (√5 - 1)/(4L), below which Theorem 1 allows η."""
    return (math.sqrt(5) - 1) / (4 * smooth)


def c3(p: float, eta: float, smooth: float = 1.0) -> float:
    """Returns C₃, defined after (14)."""
    step = smooth * eta
    return (p * (1 + step) + step) / (1 - step)


def c6(eta: float, smooth: float) -> float:
    """Returns the least C₆ that Appendix F.1.6 allows."""
    return max(((1 + smooth * eta) / eta) ** 2, (1 + 2 * eta) ** 2, (smooth * eta) ** 2)


def c7(eta: float, smooth: float) -> float:
    """Returns C₇ of Appendix F.1.6, with the least C₆."""
    step = smooth * eta
    first = (1 - 2 * step - 4 * step**2) / (2 * eta)
    return 2 * c6(eta, smooth) / min(first, 1 / (2 * eta), (1 + 8 * step) / (2 * smooth))


def c2(eta: float, smooth: float) -> float:
    """Returns the least C₂ that Appendix F.1.6 allows, 4 L² C₇."""
    return 4 * smooth**2 * c7(eta, smooth)


def mended_c2(eta: float, smooth: float) -> float:
    """Returns max(4 L², 2) C₇: (104) leaves 2 |∇ₓLᵢ|² out where 4 L² is smaller than 2."""
    return max(4 * smooth**2, 2) * c7(eta, smooth)


def skipping(p: float, eta: float, smooth: float = 1.0) -> float:
    """Returns C(p), the formula before Table 2, which (14) has but for C₅ (N - 1)/N."""
    step = smooth * eta
    first = (1 - c3(p, eta, smooth) ** (1 / (1 - p))) ** 2
    second = p * (p**2 * (3 + step) ** 2 + 4)
    return eta * first * second / (1 - 2 * step - p * (1 + step)) ** 2


def table_2(p: float, eta: float, smooth: float = 1.0) -> float:
    """Returns the C(p) of Table 2: 12 η p where C₃ is below 1, else 14 η C₃^(2/(1 - p))."""
    if p < (1 - 2 * smooth * eta) / (1 + smooth * eta):
        return 12 * eta * p
    return 14 * eta * c3(p, eta, smooth) ** (2 / (1 - p))


def mean_gap(
    eta: float,
    smooth: float,
    start: float,
    rounds: int,
    *,
    clients: int = 1,
    p: float = 0.0,
    delta: float = 0.0,
    mended: bool = False,
) -> float:
    """Returns the bound of Σ |∇f(x₀)|²/T, r = 0 to T, in Theorem 1, for exact solves (ε₁ = 0).

    Args:
        eta: η.
        smooth: L.
        start: D₀ = f(x⁰) - f*.
        rounds: T.
        clients: N.
        p: The share of skipped rounds.
        delta: δ of Assumption 5.
        mended: With `mended_c2`.
    """
    constant = c2(eta, smooth)
    if mended:
        constant = mended_c2(eta, smooth)
    floor = 0.0
    if p > 0:
        floor = (clients - 1) / clients * 8 * constant * skipping(p, eta, smooth) * delta**2
    return constant * start / rounds + floor


def least_rounds(start: float, smooth: float, clients: int, epsilon: float) -> float:
    """Returns the rounds that Theorem 2, (50), asks of every method for |∇f|² < ε.

    Args:
        start: f(0) - inf f.
        smooth: L.
        clients: N.
        epsilon: ε.
    """
    return start * smooth * clients / (10 * math.pi**2 * epsilon)


def rounds_of_gradient_descent(start: float, smooth: float, epsilon: float) -> float:
    """Returns after how many rounds steps of 1/L have had |∇f|² < ε: more than 2 L (f(x⁰) - f*)/ε.

    It is one local step a round, which Theorem 2 allows: every step lowers f by |∇f|²/(2L).
    """
    return 2 * smooth * start / epsilon


def growth(eta: float, steps: int) -> float:
    """Returns by what FedAvg multiplies the model in Claim 2.2; the clients have ±x²/2."""
    return ((1 + eta) ** steps + (1 - eta) ** steps) / 2


def mean_gap_of_fedavg(
    eta: float, smooth: float, gradient: float, start: float, sizes: list[list[float]]
) -> float:
    """Returns the bound of Σ |∇f(x)|²/T, r = 0 to T, in Claim D.1.

    Args:
        eta: η, of every round's first step.
        smooth: L.
        gradient: G of Assumption 3.
        start: f(x⁰) - f*.
        sizes: The other steps η^(r, q) of the T rounds, r = 0 to T.
    """
    rounds = len(sizes) - 1
    steps = len(sizes[0]) + 1
    first = eta * (1 - smooth * eta)
    total = sum(map(sum, sizes))
    drift = 2 * steps * gradient**2 * eta**2 * total
    return (2 * start + drift) / (first * rounds)


def growth_by_round(steps: list[float]) -> float:
    """Returns λ₂ in the proof of Claim D.2, for the steps of one round."""
    down = math.prod(1 - step for step in steps)
    up = math.prod(1 + step for step in steps)
    return (down + up) / 2


def c12(eta: float, gamma: float, smooth: float, steps: int, period: int, batch: int) -> float:
    """Returns C₁₂ of Theorem 3, (123), which must be positive.

    Args:
        eta: η.
        gamma: γ.
        smooth: L.
        steps: Q.
        period: I.
        batch: B.
    """
    c10 = 1 / (2 * eta) + 1 / gamma - smooth - 6 * eta / gamma**2
    c10 -= 9 * steps**2 * smooth**2 * eta
    c10 -= (1 + 18 * smooth * eta) * smooth * period * steps / (2 * batch)
    square = (1 + smooth * gamma) ** 2 + (smooth * gamma) ** 2
    return c10 - square / (4 * batch * smooth * gamma**2)


def c9(eta: float, gamma: float, smooth: float, steps: int, period: int, batch: int) -> float:
    """Returns the least C₉ of Theorem 3, 4 L²/C₁₁, where `c12` is positive; arguments as there."""
    c13 = 2 * ((eta + gamma) / (eta * gamma)) ** 2
    c13 += 2 * period * (1 + 18 * eta**2) * smooth**2 / batch
    c13 += 3 * smooth * (1 + 9 * smooth * eta) * eta**2 / (2 * batch * gamma**2)
    c13 += 18 * (steps * smooth * eta) ** 2
    c11 = min(c12(eta, gamma, smooth, steps, period, batch) / (steps * c13), 1 / (4 * eta))
    return 4 * smooth**2 / c11


def steps_of_theorem_3(smooth: float, steps: int, period: int, batch: int) -> float:
    """Returns the bound of η in Theorem 3; γ must be above 5 η/(B √L)."""
    return 1 / (3 * (steps + math.sqrt(steps * period / batch)) * smooth)
