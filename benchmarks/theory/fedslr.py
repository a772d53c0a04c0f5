"""What FedSLR's paper states (TMLR 2023): Theorems 1 to 3.

Names follow the paper: L smoothness, η_g the global and η_l the local step, θ and c the exponent
and the constant of the property of Kurdyka and Łojasiewicz, r the potential function's residual.
"""

import math

import numpy as np


def stationarity(model: np.ndarray, slope: np.ndarray, penalty: float) -> float:
    """Returns dist(0, mean ∇fᵢ(w) + λ ∂|w|), which Theorem 1 says is 0 at a cluster point, (9).

    Args:
        model: w, numbers or 1 x 1 matrices, whose nuclear norm is the absolute value.
        slope: mean ∇fᵢ(w).
        penalty: λ.
    """
    inside = np.maximum(np.abs(slope) - penalty, 0)
    return float(np.linalg.norm(np.where(model == 0, inside, slope + penalty * np.sign(model))))


def c1(step: float, smooth: float) -> float:
    """Returns C₁ of Theorem 2 with the step η_g, as printed."""
    return 4 * (step * smooth**2 + step**2 * smooth**4 + 1 / step + smooth**2)


def mended_c1(step: float, smooth: float) -> float:
    """Returns 4 (1/η_g² + 2 L² + η_g² L⁴), to which (70) leads with a squared step."""
    return 4 * (1 / step**2 + 2 * smooth**2 + step**2 * smooth**4)


def c2(step: float, smooth: float) -> float:
    """Returns C₂ of Theorem 2, as printed; Lemma 3's descent is by its negative."""
    return smooth**2 * step + smooth / 2 - 1 / (2 * step)


def c3(step: float, smooth: float) -> float:
    """Returns C₃ of Theorem 2."""
    return smooth + step * smooth + 1 / step + 1


def c4(step: float, smooth: float, constant: float, theta: float = 0.5) -> float:
    """Returns C₄ of Theorem 2 with C₂'s sign mended; `constant`: c, `theta`: θ."""
    return -c2(step, smooth) / (c3(step, smooth) * constant * (1 - theta)) ** 2


def linear_distance(
    step: float, smooth: float, constant: float, residual: float, rounds: int
) -> float:
    """Returns the bound of dist(0, ∇f(w) + ∂R(w)) in Theorem 2, (12), with C₁ and C₂ mended.

    Args:
        step: η_g, below 1/(2L).
        smooth: L.
        constant: c, for θ = 1/2.
        residual: r at the round t₀.
        rounds: T - t₀.
    """
    ratio = mended_c1(step, smooth) * residual / -c2(step, smooth)
    return math.sqrt(ratio * (1 - c4(step, smooth, constant)) ** rounds)


def printed_exponent(theta: float) -> float:
    """Returns the power of 1/T in (13)."""
    return 4 * theta - 2


def mended_exponent(theta: float) -> float:
    """Returns the power of 1/T that follows from r_t - r_(t+1) ≥ C₄ r_t^(2θ)."""
    return 1 / (4 * theta - 2)


def mean_squared_mapping(
    step: float,
    smooth: float,
    start: float,
    rounds: int,
    epochs: int,
    variance: float = 0.0,
    moved: float = 0.0,
) -> float:
    """Returns the bound of the mean |G|² in Theorem 3, (14).

    Args:
        step: η_l, below 2/(L + 1).
        smooth: L.
        start: φ(ŵ*, p₀) - φ(ŵ*, p*).
        rounds: T.
        epochs: K, the local steps.
        variance: σ² of Assumption 5.
        moved: What C₇ has beside L², which is 0 where w starts at ŵ*; its N is not defined in
            print, where M clients take part.
    """
    c6 = 1 / (step - (smooth + 1) / 2 * step**2)
    c7 = moved + smooth**2
    return c6 * (2 * start / (rounds * epochs) + c7 / rounds + (2 / c6 + 1) * variance)
