"""Rules that deal the samples of a data set to clients: IID, by quantity, by a given client id.

The rules that skew the labels are in ``label_skew``.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from datamodules.drawn import Drawn, Subsets
from datamodules.errors import ConfigError, check_whole
from datamodules.partition import IndexArrays, Ragged


class Partitioner(ABC):
    """A rule that says which samples every client holds.

    A rule of one's own implements ``owners``, which gives every sample to at most one client, or
    ``assign`` where clients share samples; what a constructor stores under an argument's name
    appears in ``repr`` and so in the record of a run.
    """

    def assign(
        self, targets: np.ndarray, num_clients: int, rng: np.random.Generator
    ) -> IndexArrays:
        """Deal the samples to the clients.

        Args:
            targets: The targets of the N samples to deal, [N] or [N, ...].
            num_clients: M.
            rng: The only source of randomness.

        Returns:
            For each client the positions of its samples in ``targets``, ascending.

        Raises:
            ConfigError: There are more clients than samples, or the rule cannot be met.
        """
        if not 1 <= num_clients <= len(targets):
            raise ConfigError(
                f"num_clients={num_clients} must be between 1 and the number of samples, "
                f"{len(targets)}"
            )
        return Ragged.from_owners(self.owners(targets, num_clients, rng), num_clients)

    def owners(self, targets: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return the client of every sample, integers [N]; -1 for a sample nobody gets."""
        raise NotImplementedError(f"{type(self).__name__} must implement owners, or assign")

    @abstractmethod
    def describe(self) -> str:
        """Say in words what the rule does, for the record of a run."""

    def __repr__(self) -> str:
        """Return the call that builds this rule."""
        arguments = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if k[0] != "_")
        return f"{type(self).__name__}({arguments})"


class IID(Partitioner):
    """Samples are dealt uniformly at random; the clients' sizes differ by at most one."""

    def owners(self, targets: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return the client of every sample."""
        owners = even_owners(len(targets), num_clients)
        rng.shuffle(owners)
        return owners

    def describe(self) -> str:
        """Say in words what the rule does."""
        return "samples dealt uniformly at random (IID)"


class LogNormal(Partitioner):
    """Quantity skew: sizes proportional to log-normal draws, samples dealt uniformly at random.

    Every client's share of the samples is proportional to ``exp(sigma z)``, z standard normal;
    clients whose share would be below ``min_size`` get ``min_size``. All samples are used. FedDyn
    (Acar et al. 2021) and FedLab skew quantities this way.

    Args:
        sigma: Spread of the logarithm of the sizes; 0 gives equal sizes.
        min_size: The least number of samples of a client.

    Raises:
        ConfigError: An argument is out of range, or (when dealing) there are fewer samples than
            ``num_clients * min_size``.
    """

    def __init__(self, sigma: float, min_size: int = 10) -> None:
        if not (0 <= sigma < np.inf):
            raise ConfigError(f"sigma={sigma} of LogNormal must be a finite number of at least 0")
        self.sigma = sigma
        self.min_size = check_whole("min_size", min_size, owner="LogNormal")

    def owners(self, targets: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return the client of every sample."""
        check_min_size(self, len(targets) // num_clients, num_clients, self.min_size)
        normal = rng.standard_normal(num_clients)
        with np.errstate(over="ignore"):  # relative to the largest, nothing else overflows
            weights = np.exp(self.sigma * (normal - normal.max()))
        raised = np.zeros(num_clients, bool)  # clients that are lifted to min_size
        while True:
            free = np.where(raised, 0, weights)
            shares = free / free.sum() * (len(targets) - self.min_size * raised.sum())
            low = ~raised & (shares < self.min_size)
            # All free clients below min_size can only be rounding, as their mean is not.
            if not low.any() or (raised | low).all():
                break
            raised |= low
        sizes = np.full(num_clients, self.min_size)
        if spare := len(targets) - int(sizes.sum()):
            sizes += apportion(np.maximum(shares - self.min_size, 0), spare)
        return rng.permutation(np.repeat(np.arange(num_clients), sizes))

    def describe(self) -> str:
        """Say in words what the rule does."""
        return (
            f"client sizes proportional to log-normal draws (sigma={self.sigma}), at least "
            f"{self.min_size}, samples dealt uniformly at random"
        )


class Natural(Partitioner):
    """Samples belong to the clients they came from, by a given client id of each sample.

    The clients are numbered in the ascending order of their ids. With fewer clients than ids the
    ids with the most samples are kept (among equals, the lower ids), still in ascending order;
    with more clients than ids there is an error. ``num_clients=None`` takes one client per id.

    Args:
        client_ids: One id (number or text) per sample; None takes the ids that come with the
            data set. Ids may cover the training samples only; official test samples, which then
            have no owner, are not dealt.

    Raises:
        ConfigError: When dealing: there are no ids, some are missing, their number does not fit, or
            there are more clients than ids.
    """

    def __init__(self, client_ids: Sequence[int | str] | np.ndarray | None = None) -> None:
        self._client_ids = None if client_ids is None else np.asarray(client_ids)

    def ids(self) -> np.ndarray:
        """Return the client id of every sample, [N]."""
        if self._client_ids is None:
            raise ConfigError("partition=Natural() needs client_ids, but the data set gives none")
        if self._client_ids.ndim != 1:
            raise ConfigError(
                f"client_ids of shape {self._client_ids.shape} must be one id per sample"
            )
        if self._client_ids.dtype.kind in "fO":  # an array of objects may be text, as pandas has it
            given = self._client_ids.tolist()
            lacking = sum(name is None or name != name for name in given)
            if lacking or len({isinstance(name, str) for name in given}) > 1:
                raise ConfigError(
                    f"client_ids hold None or NaN for {lacking} of {len(given)} samples; all must "
                    "be numbers, or all text"
                )
        return self._client_ids

    def with_ids(self, client_ids: np.ndarray | None) -> "Natural":
        """Return this rule with its own ids if it has any, else with those of the data set."""
        return self if self._client_ids is not None else Natural(client_ids)

    def count(self) -> int:
        """Return the number of different ids."""
        return len(np.unique(self.ids()))

    def owners(self, targets: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return the client of every sample."""
        if len(self.ids()) != len(targets):
            raise ConfigError(
                f"client_ids has {len(self.ids())} entries for {len(targets)} samples"
            )
        names, owners = np.unique(self.ids(), return_inverse=True)
        if num_clients > len(names):
            raise ConfigError(
                f"num_clients={num_clients} is more than the {len(names)} different client_ids "
                "of the data"
            )
        largest = np.argsort(-np.bincount(owners), kind="stable")[:num_clients]
        number = np.full(len(names), -1)
        number[np.sort(largest)] = np.arange(num_clients)
        return number[owners]

    def describe(self) -> str:
        """Say in words what the rule does."""
        return "samples held by the clients they came from (natural)"


class Sampled(Partitioner):
    """Every client holds its own random samples of one data set that all clients share.

    Each client's samples are drawn uniformly without replacement from all samples that are dealt,
    independently of the other clients. Clients so hold samples in common, and there may be any
    number of them: a population larger than the data set has none but shared samples to hold.
    With ``SplitOwn`` a client never trains on its own test samples, but others do; pooled over
    all clients, training and test sets overlap.

    Args:
        size: The number of samples of a client.

    Raises:
        ConfigError: ``size`` is out of range, or (when dealing) more than the number of samples.
    """

    def __init__(self, size: int = 30) -> None:
        self.size = check_whole("size", size, owner="Sampled")

    def assign(self, targets: np.ndarray, num_clients: int, rng: np.random.Generator) -> Drawn:
        """Say what every client's samples are drawn from; see ``Partitioner.assign``.

        Returns:
            Arrays that are computed when asked for, which takes no memory for a million clients.
        """
        total = len(targets)
        if self.size > total:
            raise ConfigError(
                f"size={self.size} of Sampled is more than the number of samples, {total}"
            )
        return Subsets(int(rng.integers(1 << 63)), num_clients, self.size, total)

    def describe(self) -> str:
        """Say in words what the rule does."""
        return f"each with {self.size} samples drawn from one data set that all clients share"


def even_owners(num_samples: int, num_clients: int) -> np.ndarray:
    """Return int32 [N] in which every client appears N/M times, give or take one."""
    clients = np.arange(num_clients, dtype=np.int32)
    return np.tile(clients, -(-num_samples // num_clients))[:num_samples]


def apportion(weights: np.ndarray, total: int | np.ndarray) -> np.ndarray:
    """Split ``total`` into whole numbers proportional to ``weights`` by rounding their running sum.

    Every part is within one of its exact share, and the parts add up to ``total``.

    Args:
        weights: Numbers of at least 0, [..., M], with a positive sum along the last axis.
        total: What to split; a number or an array that broadcasts to [..., 1].

    Returns:
        int64 [..., M].
    """
    running = np.cumsum(weights, axis=-1)
    edges = np.floor(running / running[..., -1:] * total + 0.5).astype(np.int64)
    return np.diff(edges, axis=-1, prepend=0)


def check_min_size(rule: Partitioner, mean_size: int, num_clients: int, min_size: int) -> None:
    """Raise ConfigError if clients hold fewer samples on average than each of them should."""
    if mean_size < min_size:
        raise ConfigError(
            f"min_size={min_size} of {type(rule).__name__} is more than the {mean_size} samples "
            f"that each of num_clients={num_clients} can have; use fewer clients or a lower "
            "min_size"
        )
