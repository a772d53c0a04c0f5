"""What FedACS's paper states (arXiv 2312.15148): Theorem 2.1."""

import math


def least_squared_gradient(start: float, smooth: float, bound: float, rounds: int) -> float:
    """Returns the bound of the least |∇F_λ(W)|² of K rounds in Theorem 2.1, (6).

    Its O(1/K) is left out, for which no constant is given: a test is stricter than the theorem.

    Args:
        start: F_λ(W⁰) - F_λ*.
        smooth: L, of the gradients of F and of R.
        bound: B: |∇F| ≤ B and |∇R| ≤ B/λ.
        rounds: K.
    """
    return 6 * (start + 16 * smooth * bound**2) / math.sqrt(rounds)
