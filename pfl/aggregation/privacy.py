"""Client-level differential privacy: clip every client's messages together, sum, add noise.

    for each client:  x = all of its messages joined, minus what is public of them (reference)
                      x <- x min(1, C / |x|)                         # norm at most C, weight 1
    server:           mean = (sum x + z C N(0, I)) / expected cohort + reference

(McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR
2018, with a flat clip over all messages.) The divisor is a constant: a divisor that counts the
clients that arrived, or weights by their samples, would let one client move the mean further than
C. Whatever the server makes of the mean is free.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from pfl.aggregation.accountant import Accountant
from pfl.aggregation.joined import Values, clipped_sums
from pfl.datamodules.ranges import Checked, Count, NonNegative, Positive, ProperShare
from pfl.errors import ConfigError
from pfl.randomness import DrawKey

BELOW = "below"  # among the sums: how many clients' norms were below the clip
LARGE_DELTA = 0.01
"""Above this δ an ε says little: with about this probability a run may reveal more than ε."""


@dataclass(frozen=True)
class AdaptiveClip(Checked):
    """A clip that follows a quantile of the clients' norms (Andrew et al., NeurIPS 2021).

    After every round C <- C exp(-η_C (b - γ)), where b is the share of clients whose norm is at
    most C, with noise of its own. The noise of the messages is raised such that both together
    reveal what `noise_multiplier` says: z_messages = (z^-2 - (2 σ_b)^-2)^(-1/2), their Theorem 1.
    σ_b, the noise on the number of clients below the clip, is a twentieth of the expected cohort,
    as in the paper, but at least the noise multiplier.

    Args:
        quantile: γ, the share of clients whose norms are to lie below the clip.
        rate: η_C.
    """

    argument_group: ClassVar[str] = "loop.privacy.adaptive"
    quantile: ProperShare = 0.5
    rate: Positive = 0.2


@dataclass(frozen=True)
class Privacy(Checked):
    """Client-level differential privacy of everything that the server and other clients receive.

    It takes a method whose server uses means of messages only, whatever the method.

    Args:
        clip: C, the largest norm of what one client adds to a round; with `adaptive` the first one.
        noise_multiplier: z; the noise on the sum has the standard deviation z C in every value.
            None: the smallest one with which the run's last round ends within `epsilon`.
        epsilon: The budget ε. With `noise_multiplier` the run ends before it is passed.
        delta: δ; None: M^-1.1 for the M clients that train, which is too large for a few clients
            (0.14 for six).
        adaptive: A clip that follows the clients' norms; None: it stays.
        bands: b. 1: the noise of every round is independent. More: banded matrix factorization, in
            which the noise of a round takes back a part of that of the rounds before, so that sums
            over rounds have less of it (Choquette-Choo et al., NeurIPS 2023). It needs cohorts in
            which a client waits at least b rounds for its next turn.
        reproducible: Draw noise and cohorts from the run's seed, for tests and studies. Whoever
            knows the configuration can then subtract the noise: nothing is private, and ε counts
            as infinite. False: they come from a secret key (`pfl.randomness.Secret`), which is kept
            beside the checkpoints.

    Raises:
        ConfigError: A value is impossible, or neither noise nor a budget is given.

    Example:
        >>> Privacy(clip=1.0, epsilon=8.0).epsilon
        8.0
    """

    argument_group: ClassVar[str] = "loop.privacy"
    clip: Positive
    noise_multiplier: NonNegative | None = None
    epsilon: Positive | None = None
    delta: ProperShare | None = None
    adaptive: AdaptiveClip | None = None
    bands: Count = 1
    reproducible: bool = False

    def __post_init__(self) -> None:
        name = "loop.privacy"
        if self.bands > 1 and self.adaptive is not None:
            raise ConfigError(
                f"{name}.bands: {self.bands}; noise over rounds needs a clip that stays"
            )
        if self.noise_multiplier is None and self.epsilon is None:
            raise ConfigError(f"{name}: give noise_multiplier, or epsilon, from which it follows")


@dataclass(frozen=True)
class SamplePrivacy(Checked):
    """Sample-level differential privacy of everything that a client sends or keeps (DP-SGD).

    Every gradient of a local step is that of a Poisson sample of the client's own samples, whose
    gradients are clipped one by one, with noise. A client whose samples are people, such as a
    hospital, protects each of them, also against the server. ε is each client's own: it follows
    from its number of samples and of local steps.

    Args:
        clip: C, the largest norm of the gradient of one sample.
        noise_multiplier: z; the noise on the sum over a mini-batch has the standard deviation z C.
        delta: δ; None: n^-1.1 for a client with n samples.
        reproducible: As of `Privacy`.

    Raises:
        ConfigError: A value is impossible.
    """

    argument_group: ClassVar[str] = "loop.sample_privacy"
    clip: Positive
    noise_multiplier: NonNegative
    delta: ProperShare | None = None
    reproducible: bool = False

    def epsilons(self, sizes: np.ndarray, counts: np.ndarray, batch_size: int | None) -> np.ndarray:
        """Returns the ε of each client, [C]; 0 before its first gradient.

        With `reproducible` it is infinite after that.

        Args:
            sizes: Number of training samples of each client, int64 [C].
            counts: Number of gradients that each client has taken, [C]; NaN where it is not known,
                and then ε is NaN.
            batch_size: The expected size of a mini-batch; None: all samples.
        """
        known = ~np.isnan(counts)
        if not known.all():
            epsilons = np.full(len(counts), np.nan)
            if known.any():
                epsilons[known] = self.epsilons(sizes[known], counts[known], batch_size)
            return epsilons
        if self.reproducible:
            return np.where((sizes > 0) & (counts > 0), np.inf, 0.0)
        pairs, places = np.unique(np.stack([sizes, counts]), axis=1, return_inverse=True)
        found = []
        for size, count in pairs.T.astype(int).tolist():
            delta = self.delta_of(size)
            batch = size if batch_size is None else min(batch_size, size)
            accountant = Accountant(self.noise_multiplier, delta, "bernoulli", batch, max(size, 1))
            found.append(accountant.epsilon(count if size else 0))
        return np.array(found)[places.reshape(-1)]

    def delta_of(self, size: int) -> float:
        """Returns δ of a client with `size` training samples."""
        return self.delta or max(size, 2) ** -1.1

    def doubt(self, sizes: np.ndarray) -> str:
        """Returns in words that δ of the smallest client is too large; nothing if it is not.

        Args:
            sizes: Number of training samples of each client, int64 [C]; 1 also stands for a number
                that a party does not tell, and says nothing here.
        """
        known = sizes[sizes > 1]
        if self.reproducible or not known.size:
            return ""
        smallest = int(known.min())
        delta = self.delta_of(smallest)
        if delta <= LARGE_DELTA:
            return ""
        return (
            f"loop.sample_privacy.delta: {delta:.2g} for a client of {smallest} samples is "
            f"{too_large('loop.sample_privacy.delta', smallest)}"
        )


def too_large(key: str, members: int) -> str:
    """Returns in words what a δ above `LARGE_DELTA` means, and what to give under a key."""
    return (
        f"so large that epsilon says little (give {key} a value far below 1 / {members}, such as "
        f"1e-5)"
    )


def band(bands: int) -> np.ndarray:
    """Returns the first column of C, a banded Toeplitz matrix of norm 1, float64 [bands].

    They are the first coefficients of the square root of the matrix of prefix sums (Fichtenberger,
    Henzinger, Upadhyay 2022), 1, 1/2, 3/8, ..., scaled such that a client that takes part once in
    every b rounds counts as often as it takes part.

    Example:
        >>> band(2)  # 1 and 1/2, over the root of 1 + 1/4
        array([0.89442719, 0.4472136 ])
    """
    steps = np.arange(1, bands)
    column = np.cumprod(np.concatenate([[1.0], (2 * steps - 1) / (2 * steps)]))
    return column / np.linalg.norm(column)


class PrivateMean:
    """Privacy in one run: clips groups of clients, and releases the mean with noise.

    Args:
        privacy: The arguments.
        accountant: The sampling of the run; its noise is that of `privacy`, if that has any.
        draws: Where the noise comes from.
        rounds: The number of rounds of the run; None if it is not known.

    Attributes:
        accountant: The ε of the run by rounds.
        clip: C of the next round.
        cohort: The expected number of clients in a round, by which sums are divided.
        salts: Digests of the sums of rounds, by round, on which their noise depends as well; None:
            on nothing but key and round. A server of real parties that goes on from a checkpoint
            repeats rounds, in which others may answer: with the same noise the difference of the
            two means would be a party's message without noise.

    Raises:
        ConfigError: The noise for `epsilon` cannot be found.
    """

    def __init__(
        self, privacy: Privacy, accountant: Accountant, draws: DrawKey, rounds: int | None
    ) -> None:
        self.privacy = privacy
        self.accountant = accountant
        self.draws = draws
        self.cohort = accountant.cohort
        if privacy.noise_multiplier is None:
            if rounds is None:
                raise ConfigError(
                    "loop.privacy.epsilon: the noise that it allows depends on the number of "
                    "rounds; give trainer.max_epochs, or noise_multiplier"
                )
            assert privacy.epsilon is not None
            self.accountant = accountant.calibrate(privacy.epsilon, rounds)
        self.clip = privacy.clip
        self.coefficients = band(privacy.bands)
        self.salts: dict[int, int] | None = None
        self._noise: list[np.ndarray] = []  # the noise of the last rounds and of the next one
        self._next = 0
        self.count_noise = self._count_noise()

    def draw_from(self, draws: DrawKey) -> None:
        """Draws the noise of the rounds to come from another key."""
        self.draws = draws
        self._noise = []
        self._next = 0

    @property
    def noise_multiplier(self) -> float:
        """z: the noise of a round over the clip, for the messages and the count together."""
        return self.accountant.noise_multiplier

    def _count_noise(self) -> float:
        """Returns σ_b, the noise on the number of clients below the clip; 0 without `adaptive`."""
        z = self.noise_multiplier
        if self.privacy.adaptive is None or z == 0:
            return 0.0
        return max(self.cohort / 20, z)

    @property
    def message_noise(self) -> float:
        """The noise on the messages over the clip; z, or more with an adaptive clip."""
        if not self.count_noise:
            return self.noise_multiplier
        return (self.noise_multiplier**-2 - (2 * self.count_noise) ** -2) ** -0.5

    def sums(self, messages: Values, references: Values) -> dict[str, Tensor]:
        """Returns `clipped_sums` of C clients, and with `adaptive` how many are below the clip."""
        sums, norms = clipped_sums(messages, references, self.clip)
        if self.privacy.adaptive is not None and sums:
            # Half a client is taken off each indicator, so that its sensitivity is 1/2.
            sums[BELOW] = ((norms <= self.clip).double() - 0.5).sum().reshape(1)
        return sums

    def release(
        self, sums: dict[str, Tensor], references: Values, round_index: int
    ) -> dict[str, Tensor]:
        """Returns the means by name: sums with noise over the expected cohort, plus references.

        The noise is a function of (key, round), the same on every process; with `salts` of the sums
        as well. With `adaptive` the clip of the next round is set.

        Args:
            sums: The sums over all clients of the round, in the same order in every process.
            references: As in `clipped_sums`.
            round_index: The round, from 0.
        """
        if self.salts is not None:
            self.salts[round_index] = _digest(sums)
        rng = self._generator(round_index)
        deviation = self.message_noise * self.clip
        below = sums.pop(BELOW, None)
        means = {}
        widths = [total.numel() for total in sums.values()]
        drawn = torch.from_numpy(self.noise(round_index, sum(widths), rng)).split(widths)
        for (name, total), noise in zip(sums.items(), drawn, strict=True):
            mean = torch.add(total, noise.to(total), alpha=deviation).div_(self.cohort)
            means[name] = mean.add_(references[name]) if name in references else mean
        if below is not None and (adaptive := self.privacy.adaptive) is not None:
            noisy = float(below) + self.count_noise * rng.standard_normal()
            share = noisy / self.cohort + 0.5
            self.clip *= math.exp(-adaptive.rate * (share - adaptive.quantile))
        return means

    def _generator(self, round_index: int) -> np.random.Generator:
        """Returns the generator of the noise of a round."""
        keys = [round_index]
        if self.salts is not None and round_index in self.salts:
            keys.append(self.salts[round_index])
        return self.draws.generator("privacy", *keys)

    def noise(self, round_index: int, width: int, rng: np.random.Generator) -> np.ndarray:
        """Returns the noise of a round over its deviation, float64 [width].

        With bands it is row t of C^-1 Z for the rows Z of independent noise and the banded Toeplitz
        matrix C of `coefficients`: x_t = (z_t - sum_j c_j x_(t-j)) / c_0. After a resume the rounds
        before are computed again.
        """
        if self.privacy.bands == 1:
            return rng.standard_normal(width)
        if self._next > round_index:
            self._noise = []
            self._next = 0
        for index in range(self._next, round_index + 1):
            own = rng if index == round_index else self._generator(index)
            row = own.standard_normal(width)
            for c, before in zip(self.coefficients[1:], reversed(self._noise), strict=False):
                row -= c * before
            self._noise = [*self._noise, row / self.coefficients[0]][1 - self.privacy.bands :]
        self._next = round_index + 1
        return self._noise[-1]

    def facts(self, rounds: int) -> dict[str, float]:
        """Returns the numbers of a round's row: ε after `rounds` rounds, and the clip."""
        epsilon = math.inf
        if not self.privacy.reproducible:
            epsilon = self.accountant.epsilon(rounds)
        return {"privacy/epsilon": epsilon, "privacy/clip": self.clip}

    def doubt(self) -> str:
        """Returns in words that δ is too large for ε to say much; nothing if it is not."""
        if self.privacy.reproducible or self.accountant.delta <= LARGE_DELTA:
            return ""
        return too_large("loop.privacy.delta", self.accountant.population)

    def describe(self) -> str:
        """Returns in words what is private against whom, and what is not."""
        if self.privacy.reproducible:
            return (
                f"reproducible: the noise follows from the seed, and nothing is private; noise "
                f"multiplier {self.noise_multiplier:.4g}"
            )
        delta = f"delta {self.accountant.delta:.2g}"
        if self.doubt():
            delta += f", which is {self.doubt()}"
        return (
            f"{delta}, {self.accountant.describe()}, noise multiplier "
            f"{self.noise_multiplier:.4g}; protects a client against the other clients and all who "
            f"see the global model, not against the server; scores, losses and tables are not "
            f"private"
        )


def _digest(sums: Values) -> int:
    """Returns a number of 64 bits that differs where the sums differ."""
    found = hashlib.blake2b(digest_size=8)
    for total in sums.values():
        found.update(total.cpu().numpy().tobytes())
    return int.from_bytes(found.digest(), "little")
