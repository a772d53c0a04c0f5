"""Test protocols: which samples each client is trained, validated and tested on."""

from abc import ABC, abstractmethod

import numpy as np

from datamodules.errors import ConfigError
from datamodules.partition import IndexArrays, Partition, Ragged
from datamodules.splits import split_off


class Protocol(ABC):
    """A choice of every client's training, validation and test samples.

    Validation samples always come from the client's own samples and never overlap with its
    training or test samples.

    Every protocol rounds in the same way: a share s of n samples is the nearest whole number to
    s n (halves up), and at least one if s > 0; if that leaves no training sample, first the
    validation and then the test set gives way. So a client with one sample only trains, and one
    with two has no validation set if it has a test set of its own. Where targets are classes the
    samples are stratified: each class's part of a split is proportional to its part of the
    client's samples, by Sainte-Laguë's method.

    Args:
        validation: Share of the client's own samples for its validation set, from 0 to below 1.
    """

    needs_official_test = True

    def __init__(self, validation: float = 0.1) -> None:
        self.validation = _check_share("validation", validation, self)

    def pool_size(self, num_train: int, num_samples: int) -> int:
        """Return how many samples are dealt to clients, counted from the first sample."""
        return num_train

    @abstractmethod
    def split(
        self,
        owned: IndexArrays,
        labels: np.ndarray | None,
        num_train: int,
        num_samples: int,
        rng: np.random.Generator,
    ) -> Partition:
        """Split every client's samples and give it a test set.

        Args:
            owned: The samples dealt to each client.
            labels: The class of all samples, int64 [num_samples]; None if targets are no classes.
            num_train: How many of all samples are training samples; the others are official test
                samples.
            num_samples: How many samples there are in all.
            rng: The only source of randomness.

        Raises:
            ConfigError: The protocol needs something that the data do not have.
        """

    @abstractmethod
    def describe(self) -> str:
        """Say in words what is evaluated on what, for the record of a run."""

    def __repr__(self) -> str:
        """Return the call that builds this protocol."""
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"


class SplitOwn(Protocol):
    """Each client is tested on its own data, which nobody trains on.

    If the data set has an official test set, its samples are dealt to the clients together with
    the training samples and every client splits the union, as PFLlib does.

    Args:
        test: Share of a client's samples for its test set, from 0 to below 1.
        validation: Share of a client's samples for its validation set, from 0 to below 1.

    Raises:
        ConfigError: A share is out of range, or the two leave nothing to train on.
    """

    needs_official_test = False

    def __init__(self, test: float = 0.2, validation: float = 0.1) -> None:
        self.test = _check_share("test", test, self)
        super().__init__(validation)
        if test + validation >= 1:
            raise ConfigError(
                f"test={test} and validation={validation} of SplitOwn leave nothing to train on; "
                "their sum must be below 1"
            )

    def pool_size(self, num_train: int, num_samples: int) -> int:
        """Return how many samples are dealt to clients: all."""
        return num_samples

    def split(
        self,
        owned: IndexArrays,
        labels: np.ndarray | None,
        num_train: int,
        num_samples: int,
        rng: np.random.Generator,
    ) -> Partition:
        """Split every client's samples into test, validation and training."""
        test, val, train = split_off(owned, labels, (self.test, self.validation), rng)
        return Partition(train, val, test)

    def describe(self) -> str:
        """Say in words what is evaluated on what."""
        return f"each client is tested on {self.test:.0%} of its own samples" + _also(self)


class MatchLabels(Protocol):
    """Each client's test set is drawn from the official one with its training label ratio.

    This is the protocol of FedSLR (appendix B.1). A client with training label shares p gets
    ``samples`` p test samples, rounded by largest remainders (equal remainders: the lower label
    first), without replacement. Different clients may share test samples. If the official test
    set has too few samples of a class the client gets all of them and its test set is smaller;
    other classes do not fill the gap, as that would bend the ratio.

    Args:
        samples: Test samples per client; None takes the most that keep the ratio (classes which
            the official test set lacks are ignored).
        validation: Share of a client's samples for its validation set, from 0 to below 1.

    Raises:
        ConfigError: An argument is out of range, or there is no official test set or the targets
            are no classes.
    """

    def __init__(self, samples: int | None = 100, validation: float = 0.1) -> None:
        if samples is not None and (not isinstance(samples, int | np.integer) or samples < 1):
            raise ConfigError(
                f"samples={samples!r} of MatchLabels must be a whole number of at least 1, or null"
            )
        self.samples = samples
        super().__init__(validation)

    def split(
        self,
        owned: IndexArrays,
        labels: np.ndarray | None,
        num_train: int,
        num_samples: int,
        rng: np.random.Generator,
    ) -> Partition:
        """Split off the validation sets and draw the test sets."""
        if labels is None:
            raise ConfigError(
                "protocol=MatchLabels needs one integer label per sample; use SplitOwn or "
                "SharedTest for other targets"
            )
        val, train = split_off(owned, labels, (self.validation,), rng)
        available = np.bincount(labels[num_train:], minlength=int(labels.max()) + 1)
        client, label, wanted = self._wanted(train, labels, available)
        # Every client takes a stretch of one random circle of each class's test samples, from a
        # random start: for each client a uniform draw without replacement.
        circles = num_train + rng.permutation(num_samples - num_train)
        circles = circles[np.argsort(labels[circles], kind="stable")]
        first = (np.cumsum(available) - available)[label]
        start = rng.integers(0, np.maximum(available[label], 1))
        step = np.arange(wanted.sum()) - np.repeat(np.cumsum(wanted) - wanted, wanted)
        place = (np.repeat(start, wanted) + step) % np.repeat(available[label], wanted)
        drawn = circles[np.repeat(first, wanted) + place]
        holder = np.repeat(client, wanted)
        order = np.lexsort((drawn, holder))
        return Partition(
            train, val, Ragged.from_sizes(drawn[order], np.bincount(holder, minlength=len(owned)))
        )

    def _wanted(
        self, train: IndexArrays, labels: np.ndarray, available: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return client, label and number of test samples of every label that a client trains on.

        The three are int64 [pairs], sorted by client and label. Shares are kept as fractions of
        whole numbers, so that ties are the same on every platform.
        """
        pair, count = np.unique(
            train.owners * len(available) + labels[train.flat], return_counts=True
        )
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
        wanted, remainder = np.divmod(size[client] * count, total)
        missing = size - np.bincount(client, wanted, minlength=len(train)).astype(np.int64)
        by_remainder = np.lexsort((label, -remainder, client))
        first = np.searchsorted(client, np.arange(len(train)))
        wanted[by_remainder] += np.arange(len(pair)) - first[client] < missing[client]
        return client, label, np.minimum(wanted, available[label])

    def describe(self) -> str:
        """Say in words what is evaluated on what."""
        number = (
            "as many samples as possible" if self.samples is None else f"{self.samples} samples"
        )
        return (
            f"each client is tested on {number} of the official test set with its training label "
            "ratio" + _also(self)
        )


class SharedTest(Protocol):
    """Every client is tested on the same, whole official test set (as in FedCLUP's table).

    Args:
        validation: Share of a client's samples for its validation set, from 0 to below 1.

    Raises:
        ConfigError: The share is out of range, or there is no official test set.
    """

    def split(
        self,
        owned: IndexArrays,
        labels: np.ndarray | None,
        num_train: int,
        num_samples: int,
        rng: np.random.Generator,
    ) -> Partition:
        """Split off the validation sets; the test set is stored once."""
        val, train = split_off(owned, labels, (self.validation,), rng)
        return Partition(train, val, Ragged.shared(np.arange(num_train, num_samples), len(owned)))

    def describe(self) -> str:
        """Say in words what is evaluated on what."""
        return "every client is tested on the whole official test set" + _also(self)


def _check_share(key: str, value: float, protocol: Protocol) -> float:
    if not 0 <= value < 1:
        raise ConfigError(
            f"{key}={value!r} of {type(protocol).__name__} must be at least 0 and below 1"
        )
    return value


def _also(protocol: Protocol) -> str:
    """Say in words what share is used for validation."""
    if not protocol.validation:
        return ", without validation"
    return f", validated on {protocol.validation:.0%} of its own"
