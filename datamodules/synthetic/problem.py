"""Synthetic problems with known constants and, where possible, known solutions."""

from abc import abstractmethod
from functools import cached_property
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from ..base import FederatedDataModule
from ..errors import require_value
from ..partitions.index_arrays import IndexArrays
from ..partitions.partition import Partition
from ..protocols.protocol import Pool, Protocol
from ..randomness import generator
from ..ranges import Count, CountOrZero, NonNegative, Range
from ..rules.sample_values import Natural
from ..samples.loaded import Loaded
from ..samples.samples import TensorSamples
from .newton import coupled_step


class TheoryProblem(FederatedDataModule):
    """The base class of synthetic problems, in which client i of M has an objective f_i.

    A subclass implements `draw` and `rule`, and overrides the attributes and methods below for
    which it has an answer. All numbers are float64. The samples of a client depend on the seed and
    the number of the client only: more clients, or more samples of later splits, leave the existing
    samples unchanged. `samples` are the numbers of training, validation and test samples of every
    client; the other arguments are those of `FederatedDataModule`.

    Example:
        >>> from pfl.datamodules import LeastSquares
        >>> problem = LeastSquares(num_clients=4, features=3, condition=100.0)
        >>> isinstance(problem, TheoryProblem), problem.smoothness, problem.strong_convexity
        (True, 1.0, 0.01)
    """

    def __init__(
        self,
        num_clients: int,
        samples: tuple[int, int, int],
        batch_size: int | None = 32,
        seed: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__(num_clients, Natural(), InOrder(*samples), batch_size, seed, num_workers)
        self._sizes = samples

    @abstractmethod
    def draw(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """Draws a client's inputs [n, d] and targets [n]: training, validation, then test."""

    def load(self) -> Loaded:
        inputs, targets = zip(*map(self.draw, range(self.num_clients)), strict=True)
        owners = np.repeat(np.arange(self.num_clients), sum(self._sizes))
        samples = TensorSamples(
            torch.from_numpy(np.concatenate(inputs)), torch.from_numpy(np.concatenate(targets))
        )
        return Loaded(samples, client_ids=owners)

    @property
    def true_models(self) -> Tensor | None:
        """The models that generated the data, float64 [M, P]; None if there are none."""
        return None

    @property
    def smoothness(self) -> float | None:
        """An upper bound L of the eigenvalues of every Hessian; None if unknown."""
        return None

    @property
    def strong_convexity(self) -> float | None:
        """A positive lower bound μ of the eigenvalues of every Hessian; None if there is none."""
        return None

    @property
    def heterogeneity(self) -> float | None:
        """An upper bound R of the distances of all true models from some point, or None."""
        return None

    def solve(self, penalty: float) -> tuple[Tensor, Tensor] | None:
        """Minimizes mean_i [f_i(w_i) + λ/2 |w_i - w|^2] over w and all w_i.

        For λ = inf all w_i are equal; for 0 each w_i minimizes f_i, and w is the mean of all w_i.

        Returns:
            w [P] and w_i [M, P], float64; None if the solution is unknown or not finite.
        """
        return None

    def identified(self, models: Tensor) -> Tensor:
        """Returns the part of models [..., P] on which the objectives depend; here all of it."""
        return models

    def describe(self) -> str:
        protocol = self.protocol.describe()
        return f"{self.num_clients} clients, {self.rule()}; {protocol}; seed {self.seed}."

    @abstractmethod
    def rule(self) -> str:
        """Describes in words how the samples are generated."""

    def train_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the training inputs [M, n, d] and targets [M, n] of all clients."""
        indices = self.partition.train.flat.reshape(self.num_clients, -1)
        inputs, targets = self.samples.gather(torch.from_numpy(indices))
        return inputs.numpy(), targets.numpy()


class InOrder(Protocol):
    """A protocol that splits each client's samples by number, in their order.

    It suits samples that are drawn independently from the client's own distribution.
    """

    needs_official_test = False

    def __init__(self, train: CountOrZero, validation: CountOrZero, test: CountOrZero) -> None:
        super().__init__(validation=0.0)  # the base class accepts a share, not a count
        self.train = train
        self.validation = validation
        self.test = test

    def split(self, owned: IndexArrays, pool: Pool, rng: np.random.Generator) -> Partition:
        ends = np.cumsum([self.train, self.validation, self.test])
        part = np.searchsorted(ends, np.arange(len(owned.flat)) % ends[-1], side="right")
        train, val, test = (owned.select(part == number) for number in range(3))
        return Partition(train, val, test)

    def describe(self) -> str:
        return (
            f"each client draws {self.train} training, {self.validation} validation and "
            f"{self.test} test samples"
        )


class LeastSquares(TheoryProblem):
    """Linear regression with a given condition number, f_i(w) = 1/(2n) |X_i w - y_i|^2.

    X_i = sqrt(n) Q_i diag(s)^(1/2) V_i' with random orthonormal Q_i [n, d] and V_i [d, d]: the
    Hessian X_i'X_i/n of every client has exactly the eigenvalues s, a geometric sequence from
    μ = 1/κ to L = 1, with eigenvectors of its own. y_i = X_i w_i* + noise N(0, I) with true models
    w_i* = w_0 + R u_i, |w_0| = 1, and u_i uniform on the unit sphere. This is the setting of
    Figures 7 and 8 of FedCLUP (Yu, He, Sun, Xue, Li, ICML 2025).

    Inputs are float64 [N, d], targets float64 [N]. The network is `LinearRegression(d)` with the
    loss `HalfSquaredError`; the default loss for such targets lacks the factor 1/2.

    Args:
        samples_per_client: n, at least d.
        features: d, which is also the number of weights P.
        condition: κ = L/μ, at least 1.
        heterogeneity: R, the distance of every true model from w_0.
        noise: Standard deviation of the noise in the targets.

    Example:
        >>> problem = LeastSquares(num_clients=4, features=3, condition=100.0)
        >>> common, personal = problem.solve(penalty=0.1)
        >>> problem.strong_convexity, common.shape, personal.shape
        (0.01, torch.Size([3]), torch.Size([4, 3]))
    """

    def __init__(
        self,
        num_clients: int = 10,
        samples_per_client: Count = 50,
        features: Count = 10,
        condition: Annotated[float, Range(least=1)] = 10.0,
        heterogeneity: NonNegative = 1.0,
        noise: NonNegative = 1.0,
        **kwargs: Any,
    ) -> None:
        name = type(self).__name__
        require_value(
            f"{name}.samples_per_client",
            samples_per_client,
            samples_per_client >= features,
            f"at least {features}, the number of features",
        )
        holds = features > 1 or condition == 1
        require_value(
            f"{name}.condition", condition, holds, "1, as features=1 gives one eigenvalue"
        )
        super().__init__(num_clients, (samples_per_client, 0, 0), **kwargs)
        self.features = features
        self.condition = float(condition)
        self.noise = float(noise)
        self._radius = float(heterogeneity)

    def draw(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        rng = generator(self.seed, "least squares", client)
        n = self._sizes[0]
        d = self.features
        spectrum = np.geomspace(1 / self.condition, 1.0, d)
        left = _orthonormal(rng, n, d)
        right = _orthonormal(rng, d, d)
        inputs = np.sqrt(n) * (left * np.sqrt(spectrum)) @ right.T
        model = self.true_models[client].numpy()
        return inputs, inputs @ model + self.noise * rng.normal(size=n)

    @cached_property
    def true_models(self) -> Tensor:
        common = _unit(generator(self.seed, "least squares w_0"), self.features)
        rngs = [generator(self.seed, "least squares u", k) for k in range(self.num_clients)]
        own = np.stack([_unit(rng, self.features) for rng in rngs])
        return torch.from_numpy(common + self._radius * own)

    @property
    def smoothness(self) -> float:
        return 1.0

    @property
    def strong_convexity(self) -> float:
        return 1 / self.condition

    @property
    def heterogeneity(self) -> float:
        return self._radius

    def solve(self, penalty: float) -> tuple[Tensor, Tensor]:
        require_value("solve.penalty", penalty, penalty >= 0, "at least 0")
        x, y = self.train_arrays()
        hessians = np.einsum("mnd,mne->mde", x, x) / x.shape[1]
        gradients = -np.einsum("mnd,mn->md", x, y) / x.shape[1]  # at 0
        # All f_i are quadratic, so one Newton step from 0 gives the solution.
        common, own, _ = coupled_step(hessians, gradients, np.zeros_like(gradients), penalty)
        return torch.from_numpy(common), torch.from_numpy(common + own)

    def rule(self) -> str:
        return (
            f"least squares in {self.features} dimensions with condition number "
            f"{self.condition:g}, true models at distance {self._radius:g} from a common "
            f"one, noise {self.noise:g}"
        )


def _orthonormal(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Draws orthonormal columns, [rows, columns], uniformly at random."""
    q, r = np.linalg.qr(rng.normal(size=(rows, columns)))
    return q * np.sign(np.diag(r))  # uniform only if the signs are not LAPACK's choice


def _unit(rng: np.random.Generator, size: int) -> np.ndarray:
    """Draws a point of the unit sphere, [size], uniformly at random."""
    vector = rng.normal(size=size)
    return vector / np.linalg.norm(vector)
