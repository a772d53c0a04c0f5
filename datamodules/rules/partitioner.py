"""Partition rules without label skew: IID, by quantity, and shared samples."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.random import Generator

from ..errors import ConfigError, error_line, require_value
from ..partitions.index_arrays import IndexArrays, Ragged
from ..partitions.lazy import Drawn, Subsets
from ..ranges import Checked, Count, NonNegative

Columns = Mapping[str, np.ndarray]


class Partitioner(Checked):
    """A partition rule: which samples every client holds.

    A subclass has `words`, or a method `describe`, and either `owners`, which gives every sample to
    at most one client, or `assign`, which lets clients share samples if `overlaps` is true.
    Attributes that a constructor sets, other than private ones, appear in `repr` and so in the
    record of a run.

    The constructor of a rule raises a ConfigError if an argument is out of range, and `assign` if
    the data do not fit: rules that skew labels need one integer class per sample, others what
    their docstring says.

    Attributes:
        words: The rule in words, with the names of attributes in braces, for the record of a run.
        counts_clients: Whether the rule itself determines the number of clients, so that a data
            module's `num_clients` may be None; the method `count` then returns it.
        overlaps: Whether a sample may belong to several clients, or to one client several times.
            A client may then be tested on what it, or another one, trains on.

    Example:
        >>> class Odd(Partitioner):
        ...     words = "odd samples to client 0, all others to no client"
        ...     def owners(self, targets, num_clients, rng):
        ...         return np.where(np.arange(len(targets)) % 2, 0, -1)
        >>> Odd().assign(np.zeros(5), 1, np.random.default_rng(0))[0]
        array([1, 3])
    """

    words: ClassVar[str]
    counts_clients = False
    overlaps = False

    def bound(self, columns: Columns, num_train: int, num_samples: int) -> "Partitioner":
        """Returns the rule with what it needs of a data set.

        Args:
            columns: Values of the samples by name, such as "client_ids", [num_train] or
                [num_samples] each; the training samples come first.

        Raises:
            ConfigError: The data set lacks what the rule needs.
        """
        return self

    @property
    def id_columns(self) -> tuple[str, ...]:
        """The names of the columns that the rule takes for ids, which a CSV file has as text."""
        return ()

    @property
    def reach(self) -> int | None:
        """The number of samples, from the first, whose values the rule has; None: any number."""
        return None

    def restricted(self, samples: np.ndarray | slice) -> "Partitioner":
        """Returns the rule for some of the samples only, which are numbered anew."""
        return self

    def count(self) -> int | None:
        """Returns the number of clients that the rule determines; None if any is possible."""
        return None

    def client_names(self, owned: IndexArrays) -> list[str] | None:
        """Returns the names of the clients [M] that own these samples; None if they have none."""
        return None

    def assign(self, targets: np.ndarray, num_clients: int, rng: Generator) -> IndexArrays:
        """Returns each client's positions in `targets` ([N] or [N, ...]), ascending.

        All randomness comes from `rng`.

        Raises:
            ConfigError: There are more clients than samples, or the rule cannot be satisfied.
        """
        total = len(targets)
        check_clients(num_clients, total)
        owners = np.asarray(self.owners(targets, num_clients, rng))
        if owners.shape != (total,) or owners.dtype.kind not in "iu":
            given = f"{owners.dtype} {list(owners.shape)}"
        else:
            given = f"clients from {owners.min()} to {owners.max()}"
            if owners.min() >= -1 and owners.max() < num_clients:
                return Ragged.from_owners(owners, num_clients)
        raise ConfigError(
            f"{type(self).__name__}.owners: {given}; it must be integers [{total}]: the client of "
            f"each sample, from 0 to {num_clients - 1}, or -1 for nobody"
        )

    def owners(self, targets: np.ndarray, num_clients: int, rng: Generator) -> np.ndarray:
        """Returns the client of every sample, integers [N]; -1 for a sample without a client."""
        raise NotImplementedError(f"{type(self).__name__} must implement owners or assign")

    def describe(self) -> str:
        """Describes the rule in words, for the record of a run."""
        if not hasattr(self, "words"):
            raise ConfigError(
                f"{type(self).__name__}: it has no words; a rule needs the class attribute words, "
                f"the rule in words, or a method describe"
            )
        try:
            return self.words.format_map(vars(self))
        except (LookupError, AttributeError) as error:
            raise ConfigError(
                f"{type(self).__name__}.words: {self.words!r}; it must be text, with attributes "
                f"of the rule in braces: {error_line(error)}"
            ) from error

    def __repr__(self) -> str:
        arguments = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if k[0] != "_")
        return f"{type(self).__name__}({arguments})"


class IID(Partitioner):
    """Samples assigned uniformly at random; the sizes of the clients differ by at most one.

    Example:
        >>> from pfl.datamodules import DigitsDataModule
        >>> DigitsDataModule(num_clients=4, partition=IID()).client_sizes
        array([315, 314, 314, 314])
    """

    words = "samples assigned uniformly at random (IID)"

    def owners(self, targets: np.ndarray, num_clients: int, rng: Generator) -> np.ndarray:
        owners = even_owners(len(targets), num_clients)
        rng.shuffle(owners)
        return owners


class LogNormal(Partitioner):
    """Quantity skew: log-normal client sizes, samples assigned uniformly at random.

    The number of samples of a client is proportional to `exp(sigma z)` with z standard normal.
    Clients that would get fewer than `min_size` samples get `min_size`. All samples are used.
    FedDyn (Acar et al. 2021) and FedLab skew quantities in this way.

    Args:
        sigma: Standard deviation of the logarithm of the sizes; 0 gives equal sizes.
        min_size: The smallest number of samples of a client, at most the mean number.

    Example:
        >>> from pfl.datamodules import DigitsDataModule
        >>> sizes = DigitsDataModule(num_clients=4, partition=LogNormal(sigma=1.0)).client_sizes
        >>> bool(sizes.max() > 2 * sizes.min())
        True
    """

    words = (
        "client sizes proportional to log-normal draws (sigma={sigma}), at least {min_size}, "
        "samples assigned uniformly at random"
    )

    def __init__(self, sigma: NonNegative, min_size: Count = 10) -> None:
        self.sigma = sigma
        self.min_size = int(min_size)

    def owners(self, targets: np.ndarray, num_clients: int, rng: Generator) -> np.ndarray:
        check_least(self, "min_size", len(targets), num_clients)
        normal = rng.standard_normal(num_clients)
        with np.errstate(over="ignore"):  # only sigma * (a negative number) can overflow: exp is 0
            weights = np.exp(self.sigma * (normal - normal.max()))
        raised = np.zeros(num_clients, bool)  # clients whose size is raised to min_size
        while True:
            free = np.where(raised, 0, weights)
            shares = free / free.sum() * (len(targets) - self.min_size * raised.sum())
            low = ~raised & (shares < self.min_size)
            # All remaining clients can be below min_size only through rounding: their mean is not.
            if not low.any() or (raised | low).all():
                break
            raised |= low
        sizes = np.full(num_clients, self.min_size)
        if spare := len(targets) - int(sizes.sum()):
            sizes += apportion(np.maximum(shares - self.min_size, 0), spare)
        return rng.permutation(np.repeat(np.arange(num_clients), sizes))


class Sampled(Partitioner):
    """Random samples for each client, from one data set that all clients share.

    The samples of each client are drawn uniformly without replacement from all samples,
    independently of the other clients. Clients therefore share samples, and the number of clients
    may exceed the number of samples. With the protocol `SplitOwn` a client never trains on its own
    test samples, but other clients may; the union of all training sets and the union of all test
    sets overlap.

    Args:
        size: The number of samples of a client, at most the number of all samples.

    Example:
        >>> from pfl.datamodules import DigitsDataModule
        >>> data = DigitsDataModule(num_clients=1_000_000, partition=Sampled(size=30))
        >>> data.client_sizes[:3]
        array([21, 21, 21])
    """

    words = "each with {size} samples drawn from one data set that all clients share"
    overlaps = True

    def __init__(self, size: Count = 30) -> None:
        self.size = int(size)

    def assign(self, targets: np.ndarray, num_clients: int, rng: Generator) -> Drawn:
        total = len(targets)
        expected = f"at most {total}, the number of samples"
        require_value("Sampled.size", self.size, self.size <= total, expected)
        # Index arrays that are computed on access take no memory.
        return Subsets(int(rng.integers(1 << 63)), num_clients, self.size, total)


def even_owners(num_samples: int, num_clients: int) -> np.ndarray:
    """Returns int32 [N] in which every client appears N // M or N // M + 1 times."""
    clients = np.arange(num_clients, dtype=np.int32)
    return np.tile(clients, -(-num_samples // num_clients))[:num_samples]


def apportion(weights: np.ndarray, total: int | np.ndarray) -> np.ndarray:
    """Splits `total` into whole numbers proportional to `weights` by rounding cumulative sums.

    Every part differs from its exact share by less than one, and the parts add up to `total`.

    Args:
        weights: Numbers of at least 0, [..., M], with a positive sum along the last axis.
        total: Whole numbers that broadcast to [..., 1].

    Returns:
        int64 [..., M].
    """
    running = np.cumsum(weights, axis=-1)
    edges = np.floor(running / running[..., -1:] * total + 0.5).astype(np.int64)
    return np.diff(edges, axis=-1, prepend=0)


def check_clients(num_clients: int, total: int) -> None:
    """Raises a ConfigError unless each client can have a sample."""
    expected = f"from 1 to {total}, the number of samples"
    require_value("num_clients", num_clients, 1 <= num_clients <= total, expected)


def check_least(rule: Partitioner, name: str, total: int, num_clients: int) -> None:
    """Raises a ConfigError if the argument of this name exceeds the mean samples per client."""
    mean = total // num_clients
    least = getattr(rule, name)
    expected = f"at most {mean}, the mean number of samples with num_clients={num_clients}"
    require_value(f"{type(rule).__name__}.{name}", least, least <= mean, expected)


def check_owned(key: str, owned: object, num_clients: int, total: int) -> None:
    """Refuses what a rule must not return: arrays of other clients, or of other samples.

    Drawn arrays are computed for the clients that are asked for, and are not looked through.
    """
    expected = "IndexArrays, such as Ragged.from_owners(owners, num_clients)"
    require_value(key, type(owned).__name__, isinstance(owned, IndexArrays), expected)
    assert isinstance(owned, IndexArrays)
    given = f"arrays of {len(owned)} clients"
    require_value(key, given, len(owned) == num_clients, f"arrays of {num_clients} clients")
    if not isinstance(owned, Ragged) or owned.is_shared:
        return
    flat = owned.flat
    is_whole = flat.dtype.kind in "iu"
    require_value(key, f"indices of {flat.dtype}", is_whole, "whole numbers")
    if not len(flat):
        return
    given = f"samples from {flat.min()} to {flat.max()}"
    holds = flat.min() >= 0 and flat.max() < total
    require_value(key, given, holds, f"from 0 to {total - 1}")


def check_apart(key: str, owned: IndexArrays, total: int) -> None:
    """Refuses a sample of two clients, or twice of one, by a rule without `overlaps`."""
    counts = np.bincount(owned.flat, minlength=total)
    several = np.flatnonzero(counts > 1)
    if not len(several):
        return
    sample = int(several[0])
    first, second = owned.owners[owned.flat == sample][:2].tolist()
    given = f"clients {first} and {second} both have the sample {sample}"
    if first == second:
        given = f"client {first} has the sample {sample} several times"
    raise ConfigError(
        f"{key}: {given}; each sample must be of one client, once, unless the rule says overlaps "
        f"= True"
    )
