"""Synthetic problems whose constants, and where possible solutions, are known."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from datamodules.base import FederatedDataModule, Loaded
from datamodules.errors import ConfigError, check_whole
from datamodules.partition import IndexArrays, Partition
from datamodules.partitioners import Natural
from datamodules.protocols import Protocol
from datamodules.randomness import generator
from datamodules.samples import TensorSamples
from datamodules.theory_newton import coupled_step


class TheoryProblem(FederatedDataModule):
    """Clients that draw samples of their own, and what is known of their objectives f_i.

    A subclass implements ``draw`` and those of the attributes and methods below that it knows.
    Everything is float64. What client k draws depends on the seed and on k only: more clients, or
    more samples of other splits, change nothing for those that are there already.

    Args:
        num_clients: M.
        samples: Training, validation and test samples of every client.
        batch_size: Samples per batch of the loaders; None loads everything as one batch.
        seed: Of all that is drawn; None is 0.
        num_workers: Worker processes of the loaders.

    Attributes:
        true_models: The models that the data were made with, float64 [M, P], or None.
        smoothness: L, an upper bound of the eigenvalues of every f_i's Hessian, or None.
        strong_convexity: μ, a lower bound of them, if there is a positive one; else None.
        heterogeneity: R, a distance from one point that no true model exceeds, or None.
    """

    def __init__(
        self,
        num_clients: int,
        samples: tuple[int, int, int],
        batch_size: int | None,
        seed: int | None,
        num_workers: int,
    ) -> None:
        super().__init__(num_clients, Natural(), InOrder(*samples), batch_size, seed, num_workers)
        self._sizes = samples

    @abstractmethod
    def draw(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the client's inputs [n, d] and targets [n]: training, validation, then test."""

    def load(self) -> Loaded:
        """Draw the samples of every client."""
        inputs, targets = zip(*map(self.draw, range(self.num_clients)), strict=True)
        owners = np.repeat(np.arange(self.num_clients), sum(self._sizes))
        samples = TensorSamples(
            torch.from_numpy(np.concatenate(inputs)), torch.from_numpy(np.concatenate(targets))
        )
        return Loaded(samples, client_ids=owners)

    @property
    def true_models(self) -> Tensor | None:
        """See the class."""
        return None

    @property
    def smoothness(self) -> float | None:
        """See the class."""
        return None

    @property
    def strong_convexity(self) -> float | None:
        """See the class."""
        return None

    @property
    def heterogeneity(self) -> float | None:
        """See the class."""
        return None

    def solve(self, penalty: float) -> tuple[Tensor, Tensor] | None:
        """Solve min over w and all w_i of mean_i [f_i(w_i) + penalty/2 |w_i - w|^2].

        Args:
            penalty: λ; inf is one model for everyone, 0 is every client alone (and w their mean).

        Returns:
            w [P] and w_i [M, P], float64; None where the solution is unknown or not finite.
        """
        return None

    def identified(self, models: Tensor) -> Tensor:
        """Return the part of models [..., P] that the objectives can tell; here all of it."""
        return models

    def describe(self) -> str:
        """Say in words what the problem is and what is evaluated, for the record of a run."""
        protocol = self.protocol.describe()
        return f"{self.num_clients} clients, {self.rule()}; {protocol}; seed {self.seed}."

    @abstractmethod
    def rule(self) -> str:
        """Say in words how the samples are made."""

    def train_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the training inputs [M, n, d] and targets [M, n]; every client has n."""
        indices = self.partition.train.flat.reshape(self.num_clients, -1)
        inputs, targets = self.samples.gather(torch.from_numpy(indices))
        return inputs.numpy(), targets.numpy()


class InOrder(Protocol):
    """Every client's first samples are for training, the next for validation, the last for test.

    For samples drawn one after another from the client's own distribution.

    Args:
        train: Training samples of every client.
        validation: Validation samples of every client.
        test: Test samples of every client.
    """

    needs_official_test = False

    def __init__(self, train: int, validation: int, test: int) -> None:
        super().__init__(validation=0.0)  # the base class has shares, here are counts
        self.train, self.validation, self.test = train, validation, test

    def split(
        self,
        owned: IndexArrays,
        labels: np.ndarray | None,
        num_train: int,
        num_samples: int,
        rng: np.random.Generator,
    ) -> Partition:
        """Cut every client's stretch of samples into three."""
        ends = np.cumsum([self.train, self.validation, self.test])
        part = np.searchsorted(ends, np.arange(len(owned.flat)) % ends[-1], side="right")
        train, val, test = (owned.select(part == number) for number in range(3))
        return Partition(train, val, test)

    def describe(self) -> str:
        """Say in words what is evaluated on what."""
        return (
            f"each client draws {self.train} training, {self.validation} validation and "
            f"{self.test} test samples"
        )


class LeastSquares(TheoryProblem):
    """Linear regression with a chosen condition number, f_i(w) = 1/(2n) |X_i w - y_i|^2.

    X_i = sqrt(n) Q_i diag(s)^(1/2) V_i' with random orthonormal Q_i [n, d] and V_i [d, d]: every
    client's Hessian X_i'X_i/n has exactly the eigenvalues s, in equal ratios from μ = 1/κ to
    L = 1, along directions of its own. y_i = X_i w_i* + noise N(0, I) with w_i* = w_0 + R u_i,
    |w_0| = 1, and u_i uniform on the unit sphere. The setting of FedCLUP's Figures 7 and 8 (Yu, He,
    Sun, Xue, Li, ICML 2025).

    Inputs are float64 [N, d], targets float64 [N]. Train ``LinearRegression(d)`` with the loss
    ``HalfSquaredError``: the default loss for such targets lacks the factor 1/2.

    Args:
        num_clients: M.
        samples_per_client: n, at least d.
        features: d, the number of weights P too.
        condition: κ = L/μ, at least 1.
        heterogeneity: R, the distance of every true model from w_0.
        noise: Standard deviation of the targets around X_i w_i*.
        batch_size: Samples per batch of the loaders; None loads everything as one batch.
        seed: Of all that is drawn; None is 0.
        num_workers: Worker processes of the loaders.

    Raises:
        ConfigError: An argument is out of range.
    """

    def __init__(
        self,
        num_clients: int = 10,
        samples_per_client: int = 50,
        features: int = 10,
        condition: float = 10.0,
        heterogeneity: float = 1.0,
        noise: float = 1.0,
        batch_size: int | None = 32,
        seed: int | None = None,
        num_workers: int = 0,
    ) -> None:
        name = type(self).__name__
        check_whole("features", features, owner=name)
        check_whole("samples_per_client", samples_per_client, features, name)
        check_number(name, 1, condition=condition)
        check_number(name, 0, heterogeneity=heterogeneity, noise=noise)
        if features == 1 and condition != 1:
            raise ConfigError(
                f"condition={condition!r} of {name} must be 1 where features=1: "
                "there is one eigenvalue"
            )
        super().__init__(num_clients, (samples_per_client, 0, 0), batch_size, seed, num_workers)
        self.features, self.condition, self.noise = features, float(condition), float(noise)
        self._radius = float(heterogeneity)

    def draw(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the client's inputs and targets."""
        rng = generator(self.seed, "least squares", client)
        n, d = self._sizes[0], self.features
        spectrum = np.geomspace(1 / self.condition, 1.0, d)
        left, right = _orthonormal(rng, n, d), _orthonormal(rng, d, d)
        inputs = np.sqrt(n) * (left * np.sqrt(spectrum)) @ right.T
        model = self.true_models[client].numpy()
        return inputs, inputs @ model + self.noise * rng.normal(size=n)

    @cached_property
    def true_models(self) -> Tensor:
        """w_i*, [M, d]."""
        common = _unit(generator(self.seed, "least squares w_0"), self.features)
        rngs = [generator(self.seed, "least squares u", k) for k in range(self.num_clients)]
        own = np.stack([_unit(rng, self.features) for rng in rngs])
        return torch.from_numpy(common + self._radius * own)

    @property
    def smoothness(self) -> float:
        """L."""
        return 1.0

    @property
    def strong_convexity(self) -> float:
        """μ."""
        return 1 / self.condition

    @property
    def heterogeneity(self) -> float:
        """R."""
        return self._radius

    def solve(self, penalty: float) -> tuple[Tensor, Tensor]:
        """Solve by elimination of the w_i; see the base class."""
        check_number("solve", 0, penalty=penalty)
        x, y = self.train_arrays()
        hessians = np.einsum("mnd,mne->mde", x, x) / x.shape[1]
        gradients = -np.einsum("mnd,mn->md", x, y) / x.shape[1]  # at 0
        # f is quadratic: one Newton step from 0 is the solution.
        common, own, _ = coupled_step(hessians, gradients, np.zeros_like(gradients), penalty)
        return torch.from_numpy(common), torch.from_numpy(common + own)

    def rule(self) -> str:
        """Say in words how the samples are made."""
        return (
            f"least squares in {self.features} dimensions with condition number "
            f"{self.condition:g}, true models at distance {self._radius:g} from a common "
            f"one, noise {self.noise:g}"
        )


def check_number(owner: str, least: float, **values: float) -> None:
    """Raise ConfigError unless every value is a number of at least ``least``."""
    for key, value in values.items():
        if not value >= least:
            raise ConfigError(f"{key}={value!r} of {owner} must be a number of at least {least}")


def check_choice(owner: str, choices: tuple[str, ...], **values: str) -> None:
    """Raise ConfigError unless every value is one of ``choices``."""
    for key, value in values.items():
        if value not in choices:
            raise ConfigError(f"{key}={value!r} of {owner} must be {' or '.join(choices)}")


def _orthonormal(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Return random orthonormal columns, from the uniform distribution."""
    q, r = np.linalg.qr(rng.normal(size=(rows, columns)))
    return q * np.sign(np.diag(r))  # else the signs would be LAPACK's choice


def _unit(rng: np.random.Generator, size: int) -> np.ndarray:
    """Return a point of the unit sphere, uniformly."""
    vector = rng.normal(size=size)
    return vector / np.linalg.norm(vector)
