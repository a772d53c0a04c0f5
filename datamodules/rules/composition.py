"""Partition rules made of two rules, of given sizes, and of given label distributions."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.random import Generator

from ..errors import ConfigError, check_whole, require_value
from ..partitions.index_arrays import IndexArrays, Ragged
from ..ranges import Count, as_int
from .label_skew import CountsByClass
from .partitioner import Columns, Partitioner, even_owners


class Within(Partitioner):
    """A rule of two levels: one rule makes groups, another divides each group among its clients.

    The clients are numbered group by group. The numbers of clients per group differ by at most one,
    with the larger ones first. `Within(Natural("domain"), Dirichlet(0.3))` gives each domain an
    equal number of clients and skews labels within each domain.

    Args:
        outer: The rule that makes the groups.
        inner: The rule that divides the samples of a group.
        groups: The number of groups; None if `outer` determines it, as `Natural` does.

    Example:
        >>> from pfl.datamodules import DigitsDataModule, Dirichlet, Shards
        >>> rule = Within(Dirichlet(5.0), Shards(2), groups=3)
        >>> DigitsDataModule(num_clients=9, partition=rule).client_sizes.shape
        (9,)
    """

    def __init__(self, outer: Partitioner, inner: Partitioner, groups: Count | None = None) -> None:
        self.outer = outer
        self.inner = inner
        self.groups = as_int(groups)
        known = groups is not None or outer.counts_clients
        require_value("Within.groups", groups, known, f"a whole number with outer={outer!r}")

    @property
    def overlaps(self) -> bool:  # type: ignore[override]
        """Whether one of the two rules has samples that overlap."""
        return self.outer.overlaps or self.inner.overlaps

    def bound(self, columns: Columns, *sizes: int) -> "Within":
        outer = self.outer.bound(columns, *sizes)
        inner = self.inner.bound(columns, *sizes)
        return Within(outer, inner, self.groups)

    @property
    def id_columns(self) -> tuple[str, ...]:
        return (*self.outer.id_columns, *self.inner.id_columns)

    @property
    def reach(self) -> int | None:
        reaches = [r for r in (self.outer.reach, self.inner.reach) if r is not None]
        return min(reaches, default=None)

    def restricted(self, samples: np.ndarray | slice) -> "Within":
        outer = self.outer.restricted(samples)
        inner = self.inner.restricted(samples)
        return Within(outer, inner, self.groups)

    def assign(self, targets: np.ndarray, num_clients: int, rng: Generator) -> IndexArrays:
        number = self.groups
        if number is None:
            number = self.outer.count()
        assert number is not None
        enough = f"at least {number}, the number of groups"
        require_value("num_clients", num_clients, num_clients >= number, enough)
        groups = self.outer.assign(targets, number, rng)
        clients = np.bincount(even_owners(num_clients, number), minlength=number)
        indices = []
        sizes = []
        for group, count in enumerate(clients.tolist()):
            samples = groups[group]
            rule = self.inner.restricted(samples)
            try:
                owned = rule.assign(targets[samples], count, rng)
            except ConfigError as error:
                raise ConfigError(f"Within.inner: in group {group}: {error}") from error
            indices.append(samples[owned.flat])
            sizes.append(np.asarray(owned.sizes))
        return Ragged.from_sizes(np.concatenate(indices), np.concatenate(sizes))

    def describe(self) -> str:
        return f"groups of clients: {self.outer.describe()}; in each group: {self.inner.describe()}"


class Sizes(Partitioner):
    """Clients of given sizes, whose samples are drawn uniformly at random without replacement.

    Samples beyond the sum of the `sizes` are not used.

    Example:
        >>> from pfl.datamodules import DigitsDataModule, SplitOwn
        >>> data = DigitsDataModule(None, Sizes([100, 40, 10]), SplitOwn(0.5, validation=0.0))
        >>> data.client_sizes
        array([50, 20,  5])
    """

    counts_clients = True
    words = "clients of given sizes, samples assigned uniformly at random"

    def __init__(self, sizes: Sequence[int] | np.ndarray) -> None:
        self.sizes = [check_whole("Sizes.sizes", size) for size in sizes]
        require_value("Sizes.sizes", sizes, len(self.sizes) > 0, "a list of at least one size")

    def count(self) -> int:
        return len(self.sizes)

    def owners(self, targets: np.ndarray, num_clients: int, rng: Generator) -> np.ndarray:
        known = len(self.sizes)
        total = sum(self.sizes)
        require_value(
            "num_clients", num_clients, num_clients == known, f"{known} or null, as in sizes"
        )
        enough = f"at most {len(targets)} together, the number of samples"
        require_value("Sizes.sizes", total, total <= len(targets), enough)
        owners = np.repeat([*range(known), -1], [*self.sizes, len(targets) - total])
        return rng.permutation(owners)


class LabelDistribution(CountsByClass):
    """Clients with given label distributions.

    Whole numbers in all rows are numbers of samples. Otherwise rows are shares, which are divided
    by their sum: every client then has the same number n of samples, n times its shares, rounded by
    largest remainders. By default n is the largest whole number for which n Σ_i p_ik is at most the
    number of samples of every class k, or the next smaller one with which rounding fits, too. The
    samples of a class are drawn at random. Samples that the distributions leave over are not used.

    Args:
        distribution: A row for each client and a column for each class of the data, in ascending
            order of the labels: [M, K]; or the path of a `.npy` or `.csv` file (numbers between
            commas, without headings) with such an array.
        size: With shares: n, the number of samples of a client; None for the default above.

    Example:
        >>> from pfl.datamodules import DigitsDataModule, SplitOwn
        >>> table = np.eye(10)[:3] + np.eye(10)[1:4]  # client i has the classes i and i + 1
        >>> rule = LabelDistribution(table, size=40)
        >>> data = DigitsDataModule(None, rule, SplitOwn(0.5, validation=0.0))
        >>> data.label_counts()[0]
        array([10, 10,  0,  0,  0,  0,  0,  0,  0,  0])
    """

    counts_clients = True
    words = "clients with given label distributions"

    def __init__(
        self,
        distribution: Sequence[Sequence[float]] | str | os.PathLike | np.ndarray,
        size: Count | None = None,
    ) -> None:
        key = "LabelDistribution.distribution"
        if isinstance(distribution, str | os.PathLike):
            self.distribution: str | list = os.fspath(distribution)
            table = _read_table(key, Path(distribution).expanduser())
        else:
            try:
                table = np.asarray(distribution, np.float64)
            except ValueError as error:
                raise ConfigError(
                    f"{key}: rows of different lengths; it must be a table"
                ) from error
            self.distribution = table.tolist()
        expected = "numbers of at least 0 in rows of one length, one for each client"
        finite = bool(((table >= 0) & np.isfinite(table)).all())
        holds = table.ndim == 2 and table.size > 0 and finite
        require_value(f"{key}.shape", table.shape, holds, expected)
        empty = np.flatnonzero(table.sum(1) == 0).tolist()
        require_value(
            key, f"rows {empty} of zeros", not empty, "a table whose rows have a positive sum"
        )
        self.size = as_int(size)
        self._table = table
        # Rows that each sum to one could be counts, too, but then of clients with one sample.
        self._counts = bool((table == table.round()).all()) and bool((table.sum(1) > 1).any())
        self._counts = self._counts and size is None

    def count(self) -> int:
        return len(self._table)

    def counts(self, available: np.ndarray, num_clients: int, rng: Generator) -> np.ndarray:
        key = "LabelDistribution.distribution"
        rows, columns = self._table.shape
        require_value(
            "num_clients", num_clients, num_clients == rows, f"{rows} or null, as in the table"
        )
        expected = f"{len(available)} columns, the number of classes in the data"
        require_value(f"{key}.shape", self._table.shape, columns == len(available), expected)
        counts = self._table.astype(np.int64) if self._counts else self._from_shares(available)
        short = np.flatnonzero(counts.sum(0) > available)
        if len(short):
            label = short[0]
            if self.size:
                key = "LabelDistribution.size"
            found = f"{counts[:, label].sum()} samples of class number {label}"
            require_value(
                key, found, False, f"at most {available[label]}, as many as the data have"
            )
        return counts.T

    def _from_shares(self, available: np.ndarray) -> np.ndarray:
        """Returns the number of samples of each client and class, int64 [M, K]."""
        shares = self._table / self._table.sum(1, keepdims=True)
        if self.size is not None:
            return _round(shares, self.size)
        wanted = shares.sum(0)
        limits = available[wanted > 0] / wanted[wanted > 0]
        size = max(int(limits.min() + 1e-9), 1)
        while size > 1 and (_round(shares, size).sum(0) > available).any():
            size -= 1
        return _round(shares, size)


def _round(shares: np.ndarray, size: int) -> np.ndarray:
    """Returns whole numbers of the sum `size` in each row, by largest remainders, int64 [M, K]."""
    exact = shares * size
    counts = np.floor(exact + 1e-9).astype(np.int64)
    order = np.argsort(-(exact - counts), axis=1, kind="stable")
    rank = np.argsort(order, axis=1)
    return counts + (rank < size - counts.sum(1, keepdims=True))


def _read_table(key: str, path: Path) -> np.ndarray:
    try:
        if path.suffix == ".npy":
            return np.load(path, allow_pickle=False).astype(np.float64)
        return np.loadtxt(path, delimiter=",", ndmin=2)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{key}: {str(path)!r}; it must be a .npy file, or a .csv file of numbers only"
        ) from error
