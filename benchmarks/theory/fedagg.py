"""What FedAgg's paper states (arXiv 2303.15799): Theorems 1 to 5 and Propositions 1 to 5.

Names follow the paper: L epochs, N clients, β smoothness, P the largest norm of a client's gradient
on the path, δ_l and δ_h the smallest and the largest learning rate.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Constants:
    """What the bounds (22) to (26) need.

    Args:
        epochs: L.
        clients: N.
        smooth: β of Assumption 1.
        gradient: P of Assumption 2.
        lowest: δ_l, the smallest learning rate.
        highest: δ_h, the largest learning rate.
    """

    epochs: int
    clients: int
    smooth: float
    gradient: float
    lowest: float
    highest: float

    def descent(self) -> float:
        """Returns L δ_l - β L² δ_h², which (25) and (26) need above 0."""
        return self.epochs * self.lowest - self.smooth * self.epochs**2 * self.highest**2

    def noise(self) -> float:
        """Returns what (24) adds in a round: L² P² β δ_l δ_h + β² L⁴ N P² δ_h⁴."""
        first = self.epochs**2 * self.gradient**2 * self.smooth * self.lowest * self.highest
        fourth = self.smooth**2 * self.epochs**4 * self.clients
        return first + fourth * self.gradient**2 * self.highest**4


def products(slopes: np.ndarray) -> np.ndarray:
    """Returns φ₁ᵣ'φ₁ₛ (L - max(r, s)) for all pairs of epochs; `slopes`: φ₁, a row an epoch."""
    epochs = len(slopes)
    index = np.arange(epochs)
    return slopes @ slopes.T * (epochs - np.maximum.outer(index, index))


def rates(alpha: float, slopes: np.ndarray, start: np.ndarray, means: np.ndarray) -> np.ndarray:
    """Returns the rates of a round that solve (15) of Theorem 1 together.

    Args:
        alpha: The weight α of the rates in the cost.
        slopes: φ₁ of the epochs 0 to L - 1.
        start: w at the first epoch.
        means: φ₂ of the epochs 1 to L.
    """
    weight = (1 - alpha) / alpha
    later = np.cumsum((start - means)[::-1], axis=0)[::-1]
    system = np.eye(len(slopes)) + weight * products(slopes)
    return np.linalg.solve(system, weight * (slopes * later).sum(1))


def rate_by_15(
    alpha: float, slopes: np.ndarray, model: np.ndarray, means: np.ndarray, rates: np.ndarray
) -> float:
    """Returns the right side of (15) for the first of the epochs given; it has all rates itself.

    Args:
        alpha: The weight α of the rates in the cost.
        slopes: φ₁ of this epoch and the later ones.
        model: w at this epoch.
        means: φ₂ of the later epochs up to L.
        rates: The rates of this epoch and the later ones.
    """
    left = np.arange(len(slopes), 0, -1)
    total = len(slopes) * model - means.sum(0) - (left * rates) @ slopes
    return float((1 - alpha) / alpha * slopes[0] @ total)


def next_rates(alpha: float, slopes: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """Returns the rates after one iteration of Algorithm 1 at a constant φ₁, whose fixed point
    Theorem 2 and Proposition 2 are about: φ₂ is the path that `rates` lead along."""
    weighted = (1 - alpha) / alpha * products(slopes)
    return np.linalg.solve(np.eye(len(slopes)) + weighted, weighted @ rates)


def last_rate(alpha: float, slope: float, distance: float) -> float:
    """Returns the rate of the last epoch, (27), of one weight.

    Args:
        alpha: The weight α of the rates in the cost.
        slope: The mean gradient φ₁.
        distance: w - φ₂, from the mean model after the last epoch.
    """
    weight = (1 - alpha) / alpha
    return weight * slope * distance / (1 + weight * slope**2)


def last_rate_bound(alpha: float, gradient: float, model: float) -> float:
    """Returns δ of (39), which Proposition 3 has as an upper bound of `last_rate`, and below 1.

    Args:
        alpha: The weight α of the rates in the cost.
        gradient: P.
        model: U, which bounds |w - φ₂|; the paper does not define it.
    """
    weight = (1 - alpha) / alpha
    return weight * gradient * model / (1 + weight * gradient**2)


def drift(constants: Constants) -> float:
    """Returns the bound of |w_il - w̄| in Proposition 4: L P δ_h."""
    return constants.epochs * constants.gradient * constants.highest


def gap_of_convex(constants: Constants, convex: float, start: float, rounds: int) -> float:
    """Returns the bound of |w̄ - w*|² in Theorem 3, (22).

    Args:
        constants: L, N, β, P and the rates.
        convex: ψ of Assumption 3.
        start: |w̄⁰ - w*|².
        rounds: T.
    """
    factor = 1 - constants.highest * constants.epochs * convex / constants.clients
    square = (constants.gradient * constants.epochs * constants.highest) ** 2
    noise = square * (constants.smooth * constants.epochs * constants.highest + 1)
    return sum(factor**k for k in range(rounds)) * noise + factor**rounds * start


def gap_of_others(constants: Constants, slope: float, start: float, rounds: int) -> float:
    """Returns the bound of |w̄ - w*|² in Theorem 3, (23), which the paper has for any loss.

    Args:
        constants: L, N, β, P and the rates.
        slope: |g|, the one subgradient of Assumption 4.
        start: |w̄⁰ - w*|².
        rounds: T.
    """
    step = constants.highest * constants.epochs
    square = (constants.gradient * step) ** 2
    noise = square * (constants.smooth * step + 1)
    first = rounds * (rounds - 1) * constants.gradient * step**2 * slope / constants.clients
    factor = 1 + 2 * step * rounds * slope / constants.clients
    return first + rounds * noise + factor * start


def change_of_a_round(constants: Constants, squared_gradient: float) -> float:
    """Returns the bound of F(w̄ᵗ⁺¹) - F(w̄ᵗ) in Proposition 5, (24); `squared_gradient`: |∇F|²."""
    return constants.noise() - constants.descent() * squared_gradient


def gap_of_loss(
    constants: Constants, polyak: float, start: float, rounds: int, first: int = 1
) -> float:
    """Returns the bound of F(w̄) - F* in Theorem 4, (25).

    Args:
        constants: L, N, β, P and the rates.
        polyak: μ of the inequality of Polyak and Łojasiewicz, (8).
        start: F(w̄⁰) - F*.
        rounds: T.
        first: Where the sum begins: 1 in print, 0 where (24) is iterated.
    """
    factor = 1 - 2 * polyak * constants.descent()
    total = sum(factor**k for k in range(first, rounds))
    return total * constants.noise() + factor**rounds * start


def mean_squared_gradient(constants: Constants, start: float, rounds: int) -> float:
    """Returns the bound of the mean |∇F(w̄)|² of T rounds in Theorem 5, (26).

    Args:
        constants: L, N, β, P and the rates.
        start: F(w̄⁰) - F*.
        rounds: T.
    """
    step = constants.smooth * constants.epochs * constants.highest**2
    third = constants.smooth * constants.epochs**2 * constants.clients * constants.highest**3
    noise = constants.gradient**2 * constants.epochs * constants.smooth * constants.highest
    floor = noise * (constants.lowest + third) / (constants.lowest - step)
    return start / (rounds * constants.descent()) + floor
