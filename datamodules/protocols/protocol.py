"""Test protocols: which samples each client is trained, validated and tested on."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import numpy as np

from ..errors import require_value
from ..partitions.index_arrays import IndexArrays, Ragged
from ..partitions.partition import Partition
from ..ranges import BelowOne, Checked, Count, as_int
from .order import order_of, split_in_order
from .splits import split_off


class Pool(NamedTuple):
    """The samples of a data set: the training samples, followed by the official test samples."""

    labels: np.ndarray | None  # int64 [num_samples]; None if the targets are not classes
    num_train: int
    num_samples: int
    columns: Mapping[str, np.ndarray] | None = None  # values of the samples, by name


class Protocol(Checked, ABC):
    """A test protocol: the choice of every client's training, validation and test samples.

    Validation samples always come from the client's own samples and never overlap with its
    training or test samples.

    All protocols round in the same way. A share s of n samples is s n rounded to the nearest whole
    number (halves are rounded up), and at least one if s > 0. If no training sample would be left,
    first the validation set and then the test set is made smaller, so that a client with one sample
    only trains. Where targets are classes, the samples are stratified: the share of each class in a
    split is proportional to its share in the client's samples, by Sainte-Laguë's method.

    Attributes:
        words: What a client is tested on, with the names of attributes in braces.
        needs_official_test: Whether the protocol needs an official test set.
        assigns_official_test: Whether the partition rule assigns the official test samples, too.

    Example:
        >>> from pfl.datamodules import SharedTest
        >>> SharedTest(validation=0.2).describe()
        'every client is tested on the whole official test set, validated on 20% of its own'
    """

    words: ClassVar[str]
    needs_official_test = True
    assigns_official_test = False

    def __init__(self, validation: BelowOne = 0.1) -> None:
        self.validation = validation

    @abstractmethod
    def split(self, owned: IndexArrays, pool: Pool, rng: np.random.Generator) -> Partition:
        """Splits the samples that each client owns and chooses its test set; draws from `rng` only.

        Raises:
            ConfigError: The data lack something that the protocol needs.
        """

    def describe(self) -> str:
        """Describes the protocol in words, for the record of a run."""
        also = ", without validation"
        if self.validation:
            also = f", validated on {_percent(self.validation)} of its own"
        return self._tested() + also

    def _tested(self) -> str:
        """Returns in words what a client is tested on."""
        return self.words.format_map(vars(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"


class SplitOwn(Protocol):
    """A protocol that tests each client on a share of its own samples, which it does not train on.

    If the data set has an official test set, its samples are assigned to the clients together with
    the training samples and every client splits the union, as in PFLlib.

    Args:
        test: The share of the test samples.
        validation: The share of the validation samples.
        order: A column by which each client's samples are split in order, such as their time: the
            last are for testing, those before them for validation, and the first for training. A
            split at random of a series tests on times between those that were trained on. The
            column holds numbers, or dates written as 2024-01-31 or 2024-01-31T18:30; rows with
            equal values keep the order of the file. None splits at random, by class.

    Example:
        >>> from pfl.datamodules import DigitsDataModule
        >>> data = DigitsDataModule(num_clients=1, protocol=SplitOwn(test=0.5, validation=0.25))
        >>> [len(arrays[0]) for arrays in data.partition.splits.values()]
        [449, 449, 899]
    """

    words = "each client is tested on {test} of its own samples"
    needs_official_test = False
    assigns_official_test = True

    def __init__(
        self, test: BelowOne = 0.2, validation: BelowOne = 0.1, order: str | None = None
    ) -> None:
        self.test = test
        super().__init__(validation)
        self.order = order
        key = "SplitOwn.test + SplitOwn.validation"
        total = test + validation
        require_value(key, total, total < 1, "below 1, as the rest is for training")

    def split(self, owned: IndexArrays, pool: Pool, rng: np.random.Generator) -> Partition:
        shares = (self.test, self.validation)
        if self.order is None:
            test, val, train = split_off(owned, pool.labels, shares, rng)
        else:
            needed = int(owned.flat.max(initial=-1)) + 1
            order = order_of(self.order, pool.columns, needed)
            test, val, train = split_in_order(owned, order, shares)
        return Partition(train, val, test)

    def _tested(self) -> str:
        return self.words.format(test=_percent(self.test))

    def describe(self) -> str:
        if self.order is None:
            return super().describe()
        return f"{super().describe()}, the last by {self.order}"

    def __repr__(self) -> str:
        given = {key: value for key, value in vars(self).items() if value is not None}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in given.items())})"


class MatchLabels(Protocol):
    """A protocol that draws official test samples for each client in its training label ratio.

    This is the protocol of FedSLR (appendix B.1). A client with shares p of the training labels
    gets `samples` p test samples, rounded by largest remainders (of equal remainders, the lower
    label first), without replacement. Clients may share test samples. If the official test set has
    too few samples of a class, the client gets all of them and its test set is smaller; other
    classes do not fill the gap, as that would distort the ratio.

    Args:
        samples: Test samples per client; None takes the most that keep the ratio (classes missing
            from the official test set are ignored).

    Example:
        >>> from pfl.datamodules import ClassesPerClient, DigitsDataModule
        >>> data = DigitsDataModule(4, ClassesPerClient(2), MatchLabels(samples=20))
        >>> (data.label_counts("test") > 0).sum(1).tolist(), data.partition.test.sizes.tolist()
        ([2, 2, 2, 2], [20, 20, 20, 20])
    """

    words = (
        "each client is tested on {samples} samples of the official test set with its training "
        "label ratio"
    )

    def __init__(self, samples: Count | None = 100, validation: BelowOne = 0.1) -> None:
        self.samples = as_int(samples)
        super().__init__(validation)

    def split(self, owned: IndexArrays, pool: Pool, rng: np.random.Generator) -> Partition:
        labels = pool.labels
        num_train = pool.num_train
        expected = "SplitOwn or SharedTest, unless every sample has one integer label"
        require_value("protocol", self, labels is not None, expected)
        assert labels is not None
        val, train = split_off(owned, labels, (self.validation,), rng)
        available = np.bincount(labels[num_train:], minlength=int(labels.max()) + 1)
        client, label, number = self._test_counts(train, labels, available)
        # The test samples of each class are put on a circle in random order. Every client takes
        # consecutive samples from a random start: a uniform draw without replacement.
        circles = num_train + rng.permutation(pool.num_samples - num_train)
        circles = circles[np.argsort(labels[circles], kind="stable")]
        first = (np.cumsum(available) - available)[label]
        start = rng.integers(0, np.maximum(available[label], 1))
        step = np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number)
        place = (np.repeat(start, number) + step) % np.repeat(available[label], number)
        drawn = circles[np.repeat(first, number) + place]
        holder = np.repeat(client, number)
        sizes = np.bincount(holder, minlength=len(owned))
        return Partition(train, val, Ragged.from_sizes(drawn[np.lexsort((drawn, holder))], sizes))

    def _test_counts(
        self, train: IndexArrays, labels: np.ndarray, available: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns client, label and number of test samples for every pair of these, int64 [pairs].

        Shares are fractions of whole numbers, so that ties are the same on every platform.
        """
        both = train.owners * len(available) + labels[train.flat]
        pair, count = np.unique(both, return_counts=True)
        client, label = np.divmod(pair, len(available))
        total = train.sizes[client]
        if self.samples is None:
            most = available[label] * total // count
            most[available[label] == 0] = np.iinfo(np.int64).max
            size = np.full(len(train), np.iinfo(np.int64).max)
            np.minimum.at(size, client, most)
            size[size == np.iinfo(np.int64).max] = 0
        else:
            size = np.full(len(train), self.samples)
        number, remainder = np.divmod(size[client] * count, total)
        missing = size - np.bincount(client, number, minlength=len(train)).astype(np.int64)
        by_remainder = np.lexsort((label, -remainder, client))
        first = np.searchsorted(client, np.arange(len(train)))
        number[by_remainder] += np.arange(len(pair)) - first[client] < missing[client]
        return client, label, np.minimum(number, available[label])

    def describe(self) -> str:
        return super().describe().replace("None samples", "as many samples as possible")


class SharedTest(Protocol):
    """A protocol that tests every client on the whole official test set, as FedCLUP's table does.

    Example:
        >>> from pfl.datamodules import DigitsDataModule
        >>> DigitsDataModule(num_clients=3, protocol=SharedTest()).partition.test.sizes
        array([355, 355, 355])
    """

    words = "every client is tested on the whole official test set"

    def split(self, owned: IndexArrays, pool: Pool, rng: np.random.Generator) -> Partition:
        val, train = split_off(owned, pool.labels, (self.validation,), rng)
        test = np.arange(pool.num_train, pool.num_samples)
        return Partition(train, val, Ragged.shared(test, len(owned)))


class OfficialSplit(Protocol):
    """A protocol that tests each client on the official test samples that it owns.

    The partition rule assigns the official test samples, too. With `Natural` and ids of training
    and test samples this is the split that the data set gives to each client, as LEAF's. A client
    with test samples only, such as a new hospital, never trains: `loop.unseen` with its number
    makes it a newcomer, whose scores are reported apart from those of the others.

    Example:
        >>> from pfl.datamodules import ArrayDataModule, Natural
        >>> x, y = np.zeros((6, 2)), np.zeros(6, int)
        >>> data = ArrayDataModule(x[:4], y[:4], x[4:], y[4:], np.array([7, 7, 8, 8, 7, 7]),
        ...                        partition=Natural(), protocol=OfficialSplit(validation=0.0))
        >>> data.partition.train[0], data.partition.test[0], data.partition.test[1]
        (array([0, 1]), array([4, 5]), array([], dtype=int64))
    """

    words = "each client is tested on its own samples of the official test set"
    assigns_official_test = True

    def split(self, owned: IndexArrays, pool: Pool, rng: np.random.Generator) -> Partition:
        is_test = owned.flat >= pool.num_train
        given = owned.select(~is_test)
        val, train = split_off(given, pool.labels, (self.validation,), rng)
        return Partition(train, val, owned.select(is_test))


def _percent(share: float) -> str:
    """Returns a share in percent, with as many digits as it needs: 0.125 is 12.5%."""
    return f"{100 * share:.6g}%"
