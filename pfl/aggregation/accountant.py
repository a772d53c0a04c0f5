"""How much of a client's data a run reveals: ε at a given δ, by a library's accountant.

The sum over a round's clients changes by at most C if one client is added or removed, and has
Gaussian noise of standard deviation z C. What that reveals depends on how the cohort was drawn:

* Bernoulli sampling: a Poisson-sampled Gaussian, for the addition or removal of one client.
* A fixed number of clients without replacement: cohorts of equal size differ by the replacement of
  one client, which changes the sum by at most 2 C; the noise counts as z / 2.
* A fixed number of clients, those with more samples more often: no amplification by sampling, since
  the draws depend on the samples. Cohorts with and without a client differ by the replacement of
  one client here, too; the noise counts as z / 2.
* All clients and traces: no amplification by sampling; the Gaussian counts once for every round in
  which a client takes part, at most.

Drop-outs change none of it, since a client that fails adds nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pfl.datamodules.errors import ConfigError, optional_module


@dataclass(frozen=True)
class Accountant:
    """The ε of a run as a function of its rounds, by Rényi differential privacy.

    ε is an upper bound by the composition of Rényi divergences (Mironov 2017) and their conversion
    (Canonne, Kamath, Steinke 2020), as the package dp-accounting computes them.

    Args:
        noise_multiplier: z, the noise's standard deviation over C.
        delta: δ.
        sampling: How cohorts are drawn: "bernoulli", "uniform" (without replacement), "weighted"
            (without replacement, by numbers of samples) or "all"; the last two are without
            amplification.
        cohort: The number of clients in a round, expected for "bernoulli".
        population: M, the number of clients that train.
        uses: For "all": in how many of the rounds 1, ..., R a client takes part at most, int64 [R];
            None: in every round.
        every: For "all": a client takes part in every so manieth round at most.

    Example:
        >>> run = Accountant(1.0, 1e-5, "bernoulli", 10, 1000)
        >>> run.epsilon(100) < run.epsilon(200) < 2.1
        True
    """

    noise_multiplier: float
    delta: float
    sampling: str
    cohort: int
    population: int
    uses: np.ndarray | None = None
    every: int = 1

    def times(self, rounds: int) -> int:
        """Returns how often one round's Gaussian counts after some rounds."""
        if self.uses is not None and rounds:
            rounds = int(self.uses[rounds - 1])
        return -(-rounds // self.every)

    def epsilon(self, rounds: int) -> float:
        """Returns ε after some rounds; infinity without noise."""
        rounds = self.times(rounds)
        if rounds == 0:
            return 0.0
        if self.noise_multiplier == 0:
            return float("inf")
        orders, divergences = self._curve
        from dp_accounting.rdp import compute_epsilon

        return float(compute_epsilon(orders, rounds * divergences, self.delta)[0])

    def rounds_within(self, epsilon: float, limit: int) -> int:
        """Returns the largest number of rounds, at most `limit`, whose ε is at most `epsilon`."""
        low = 0
        high = limit
        while low < high:
            middle = -(-(low + high) // 2)
            low, high = (middle, high) if self.epsilon(middle) <= epsilon else (low, middle - 1)
        return low

    @cached_property
    def _curve(self) -> tuple[np.ndarray, np.ndarray]:
        """The Rényi divergence of one round, by order."""
        rdp = optional_module("loop.privacy", "dp_accounting.rdp", "dp-accounting")
        import dp_accounting as library

        relation = library.NeighboringRelation
        gaussian = library.GaussianDpEvent
        z = self.noise_multiplier
        event = gaussian(z)
        kind = relation.ADD_OR_REMOVE_ONE
        if self.sampling == "bernoulli":
            event = library.PoissonSampledDpEvent(self.cohort / self.population, event)
        elif self.sampling == "uniform":
            sizes = self.population, self.cohort
            event = library.SampledWithoutReplacementDpEvent(*sizes, gaussian(z / 2))
            kind = relation.REPLACE_ONE
        elif self.sampling == "weighted":
            event = gaussian(z / 2)
        accountant = rdp.RdpAccountant(neighboring_relation=kind)
        log = logging.getLogger("absl")
        before = log.disabled
        log.disabled = True  # it warns of each order that it leaves out
        accountant.compose(event)
        log.disabled = before
        return np.asarray(accountant.orders), np.asarray(accountant.rdp)

    def describe(self) -> str:
        """Returns in words what is hidden, and by which sampling."""
        if self.sampling == "bernoulli":
            return "one client more or less, with Bernoulli sampling"
        if self.sampling == "uniform":
            return "one client replaced by another, with samples of fixed size"
        if self.sampling == "weighted":
            return (
                "one client more or less, or replaced by another, with samples of fixed size, "
                "without amplification by sampling"
            )
        return "one client more or less, without amplification by sampling"

    def calibrate(self, epsilon: float, rounds: int) -> Accountant:
        """Returns an accountant with the least noise, to 4 digits, whose ε after `rounds` fits.

        Raises:
            ConfigError: No noise multiplier below a million is enough.
        """
        low = 0.0
        high = 1.0
        while replace(self, noise_multiplier=high).epsilon(rounds) > epsilon:
            low = high
            high = 2 * high
            if high > 1e6:
                raise ConfigError(
                    f"loop.privacy.epsilon: {epsilon}; no noise reaches it in {rounds} rounds with "
                    f"delta {self.delta:g}"
                )
        while high - low > 1e-4 * high:
            middle = (low + high) / 2
            fits = replace(self, noise_multiplier=middle).epsilon(rounds) <= epsilon
            low, high = (low, middle) if fits else (middle, high)
        return replace(self, noise_multiplier=high)


def least_wait(trace: Sequence[Sequence[int]]) -> int:
    """Returns after how many rounds a client of a trace takes part again at least.

    Example:
        >>> least_wait([[0], [1], [0], [1]])
        2
    """
    last: dict[int, int] = {}
    wait = len(trace)
    for number, ids in enumerate(trace):
        for client in ids:
            wait = min(wait, number - last.get(client, -wait))
            last[client] = number
    return wait


def most_uses(trace: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns in how many of the first rounds of a trace one client takes part at most, int64 [R].

    Example:
        >>> most_uses([[0, 1], [2], [1]]).tolist()
        [1, 1, 2]
    """
    counts: dict[int, int] = {}
    uses = np.zeros(len(trace), np.int64)
    for number, ids in enumerate(trace):
        for client in ids:
            counts[client] = counts.get(client, 0) + 1
        uses[number] = max(counts.values(), default=0)
    return uses
