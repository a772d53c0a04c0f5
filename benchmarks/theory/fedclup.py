"""What FedCLUP's paper states (ICML 2025): Theorems 1 to 3 and Corollaries 1 to 4.

Names follow the paper: n samples of each of m clients, N = mn; L smoothness and μ strong convexity
of the loss; ρ² bounds E|∇ℓ(w*, z)|²; R bounds the distance of a true model from their mean; λ ties
local models to the global one.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """What Theorem 1 and Corollary 1 need.

    Args:
        smooth: L.
        convex: μ.
        noise: ρ².
        heterogeneity: R.
        samples: n, of a client.
        clients: m.
    """

    smooth: float
    convex: float
    noise: float
    heterogeneity: float
    samples: int
    clients: int

    @property
    def total(self) -> int:
        """N, the samples of all clients."""
        return self.samples * self.clients

    @property
    def condition(self) -> float:
        """κ = L/μ."""
        return self.smooth / self.convex


def coupling(c: Constants, penalty: float) -> float:
    """Returns g(λ), defined before (51)."""
    tied = c.convex + penalty
    return 4 / c.convex * (1 / tied + c.smooth / tied**2)


def inverse_q1(c: Constants, penalty: float, power: int = 2) -> float:
    """Returns 1/q₁(λ) of (70).

    Args:
        c: L, μ, ρ², R, n and m.
        penalty: λ.
        power: Of n under ρ² in two of three places: 2 in print, 1 where (52) goes into (68).
    """
    tied = (c.convex + penalty) ** 2
    spread = 4 * c.smooth**2 * c.heterogeneity**2
    local = spread + 2 * c.noise / c.samples
    printed = spread + 2 * c.noise / c.samples**power
    g = coupling(c, penalty)
    far = g / (1 - 4 * c.smooth**2 * g)
    both = 8 * c.noise / (c.convex**2 * c.total)
    both += 8 * c.smooth**2 * c.heterogeneity**2 / c.convex**2
    second = 48 * c.smooth**2 / tied * (far * printed + 2 * both)
    return 12 / tied * local + second + 3 * far * printed


def error_of_all(c: Constants, penalty: float, power: int = 2) -> float:
    """Returns the first branch of Theorem 1, (8), for large λ; `power` as in `inverse_q1`."""
    first = 48 * c.noise / (c.convex**2 * c.total)
    second = (48 * c.condition**2 + 3) * c.heterogeneity**2
    return first + second + inverse_q1(c, penalty, power)


def error_of_each(c: Constants, penalty: float) -> float:
    """Returns the second branch of Theorem 1, (8), for small λ."""
    first = 4 * c.noise / (c.convex**2 * c.samples)
    square = c.heterogeneity**2
    slope = 4 * c.noise / (c.convex**3 * c.samples) + 4 * square / c.convex
    return first + slope * penalty + 8 * square * penalty**2 / c.convex**2


def statistical_error(c: Constants, penalty: float, power: int = 2) -> float:
    """Returns the bound of E|w̃ᵢ - wᵢ*|² in Theorem 1, (8), as printed for every λ."""
    return min(error_of_all(c, penalty, power), error_of_each(c, penalty))


def error_of_the_global_model(c: Constants, penalty: float) -> float:
    """Returns U₀², the bound of E|w̃_g - w_g*|² in (52), which needs g(λ) ≤ 1/(8L²)."""
    g = coupling(c, penalty)
    far = g / (1 - 4 * c.smooth**2 * g)
    local = 4 * c.smooth**2 * c.heterogeneity**2 + 2 * c.noise / c.samples
    both = 16 * c.noise / (c.convex**2 * c.total)
    return far * local + both + 16 * c.condition**2 * c.heterogeneity**2


def error_through_the_global_model(c: Constants, penalty: float) -> float:
    """Returns the bound (68), from which (69) and (70) are read off."""
    tied = (c.convex + penalty) ** 2
    local = 4 * c.smooth**2 * c.heterogeneity**2 + 2 * c.noise / c.samples
    factor = 48 * c.smooth**2 / tied + 3
    through = factor * error_of_the_global_model(c, penalty)
    return 12 / tied * local + through + 3 * c.heterogeneity**2


def minimax_constants(c: Constants) -> tuple[float, float]:
    """Returns C₃ and C₄ of Corollary 1, (80) and (91)."""
    scale = math.sqrt(c.noise) / c.convex
    second = max(((1 + math.sqrt(3)) * scale) ** 2, 32 * c.condition**2)
    third = 192 * c.noise / c.convex**2
    fourth = max((scale * (1 + math.sqrt(4 * second + 5))) ** 2, 198 * c.condition**2)
    return third, fourth


def minimax_error(c: Constants) -> float:
    """Returns the bound of E|w̃ᵢ - wᵢ*|² in Corollary 1, (9), at a λ that it allows."""
    third, fourth = minimax_constants(c)
    return third / c.total + fourth * min(c.heterogeneity**2, 1 / c.samples)


def minimax_penalty(c: Constants) -> float:
    """Returns λ of Corollary 1: the least for R ≤ n^(-1/2), else the largest that it allows."""
    square = c.heterogeneity**2
    if square > 1 / c.samples:
        return c.noise / (c.samples * c.convex * square)
    spread = c.smooth**2 * square
    ratio = (2 * spread + c.noise / c.samples) / (spread + c.noise / c.total)
    least = max(2 * c.condition, 5) * c.convex * ratio
    return max(64 * c.condition**2 * c.smooth, least) - c.convex


@dataclass(frozen=True)
class Envelope:
    """Lemma 1: constants of the clients' Moreau envelopes and of their local problems.

    Args:
        smooth: L.
        convex: μ.
        penalty: λ.
    """

    smooth: float
    convex: float
    penalty: float

    @property
    def global_smooth(self) -> float:
        """L_g."""
        return self.penalty * self.smooth / (self.penalty + self.smooth)

    @property
    def global_convex(self) -> float:
        """μ_g."""
        return self.penalty * self.convex / (self.penalty + self.convex)

    @property
    def local_smooth(self) -> float:
        """L_ℓ."""
        return self.penalty + self.smooth

    @property
    def local_convex(self) -> float:
        """μ_ℓ."""
        return self.penalty + self.convex

    @property
    def proximal(self) -> float:
        """L_w, the Lipschitz constant of the local solutions."""
        return self.penalty / (self.penalty + self.convex)


def local_steps(e: Envelope, server: float, local: float) -> int:
    """Returns the least K of Theorem 2, (14), and of Theorem 3, (143).

    Args:
        e: L, μ and λ.
        server: γ.
        local: η.
    """
    factor = 2 + 64 * (e.proximal * e.penalty / e.global_convex) ** 2
    goal = (1 - server * e.global_smooth) ** 4
    shrink = 1 - local * e.local_convex
    if shrink <= 0:
        return 1
    return max(1, math.ceil(math.log(goal / factor) / math.log(shrink)))


def rate(e: Envelope, server: float) -> float:
    """Returns the rate of Theorem 2, of squared distances, with the server's step γ."""
    step = server * e.global_convex
    return 1 - step / 2 - step**2 / 2


def rate_with_the_papers_steps(e: Envelope) -> float:
    """Returns the rate of Corollary 2, whose γ is (λ + L)/(2λL)."""
    return 1 - (e.penalty + e.smooth) / (4 * e.smooth / e.convex * (e.penalty + e.convex))


def steps_of_corollary_2(e: Envelope) -> int:
    """Returns K of (134)."""
    condition = e.smooth / e.convex
    share = (e.penalty + e.smooth) / (e.penalty + e.convex)
    return math.ceil(2 + share * math.log(1056 * condition**2))


def ball(e: Envelope, server: float, local: float, noise: float) -> float:
    """Returns the squared radius that Theorem 3 leaves.

    Args:
        e: L, μ and λ.
        server: γ.
        local: η.
        noise: σ²/(Bm), of the mean of all clients' mini-batches.
    """
    least = min(server * e.global_convex / 2, e.local_convex * local)
    return 8 / least * (e.penalty * local / e.global_convex) ** 2 * noise


def optimization_error(e: Envelope, start: float, rounds: int) -> float:
    """Returns the first term of Corollary 3, (15); the constants of its O[...] are not given.

    Args:
        e: L, μ and λ.
        start: E|w₀ᵢ - w̃ᵢ|², of the local models alone.
        rounds: T.
    """
    return 2 * rate_with_the_papers_steps(e) ** rounds * start


def optimization_error_of_corollary_4(e: Envelope, start: float, rounds: int) -> float:
    """Returns the first term of Corollary 4, (157), which has no factors 4 and 2."""
    condition = e.smooth / e.convex
    factor = 1 - 1 / condition
    factor -= (e.smooth - e.convex) / (condition * (e.penalty + e.convex))
    return factor**rounds * start
