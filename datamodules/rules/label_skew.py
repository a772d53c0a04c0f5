"""Partition rules with label skew: the label distributions of the clients differ."""

from abc import abstractmethod
from typing import Literal

import numpy as np
from numpy.random import Generator

from ..errors import ConfigError, require_value
from ..partitions.index_arrays import stable_argsort
from ..ranges import Count, Positive
from .partitioner import Partitioner, apportion, check_least, even_owners


class CountsByClass(Partitioner):
    """The base of rules that choose only how many samples of each class every client gets."""

    @abstractmethod
    def counts(self, available: np.ndarray, num_clients: int, rng: Generator) -> np.ndarray:
        """Returns how many of the `available` samples [K] of each class M clients get, [K, M]."""

    def owners(self, targets: np.ndarray, num_clients: int, rng: Generator) -> np.ndarray:
        labels = class_labels(self, targets)
        available = np.bincount(labels)
        counts = self.counts(available, num_clients, rng)
        clients = np.append(np.arange(num_clients), -1).astype(np.int32)  # -1: nobody
        per_class = np.column_stack([counts, available - counts.sum(1)]).ravel()
        owners = np.empty(len(labels), np.int32)
        owners[sorted_by_label(labels, rng)] = np.repeat(np.tile(clients, len(counts)), per_class)
        return owners


class Dirichlet(CountsByClass):
    """Label skew drawn from a Dirichlet distribution, in either convention of the field.

    `over="clients"`: for each class, the shares of the M clients are drawn from Dir_M(α, ..., α).
    Both labels and sizes become unequal. Draws are repeated until every client has `min_size`
    samples. Used by Yurochkin et al. 2019 (PFNM), Li et al. 2022 (NIID-Bench), PFLlib and Flower,
    whose code (in Flower an option) also gives no further classes to a client that holds the mean
    size N/M; `size_cap=True` does the same, with the classes in random order.

    `over="labels"`: each client draws a distribution of the K labels from Dir_K(α π), where π are
    the shares of the labels in all samples and sum to one, and draws samples from this
    distribution without replacement. All clients draw at the same time: if a label is drawn more
    often than it has samples, a random choice of these draws is kept, and the others are repeated
    among the labels that are left. Sizes differ by at most one. Used by Hsu et al. 2019 and
    TensorFlow Federated. The codes of FedDyn (Acar et al. 2021), FedSLR and FedLab draw from
    Dir_K(α', ..., α'): with K equally frequent classes that is α = K α' here, e.g.
    `Dirichlet(1.0, over="labels")` for their 0.1 on CIFAR-10.

    Args:
        alpha: Concentration α; a small value gives strong label skew, a large one is near IID.
        over: What the drawn distributions are over.
        min_size: The smallest number of samples of a client.
        equal_sizes: Whether every client gets exactly N // M samples; the remainder is not used.
            With `over="clients"` the surplus of a client that is full goes to the other clients, in
            proportion to their shares, and classes are assigned in random order.
        size_cap: With `over="clients"`: whether a client that holds N/M samples gets none of the
            following classes.
        max_retries: The number of draws after which an unreached `min_size` is an error; a small
            `alpha` may need more.

    Example:
        >>> from pfl.datamodules import DigitsDataModule
        >>> data = DigitsDataModule(num_clients=5, partition=Dirichlet(alpha=0.1))
        >>> data.label_counts().shape
        (5, 10)
    """

    def __init__(
        self,
        alpha: Positive,
        over: Literal["clients", "labels"] = "clients",
        min_size: Count = 10,
        equal_sizes: bool = False,
        size_cap: bool = False,
        max_retries: Count = 1000,
    ) -> None:
        expected = "False with over='labels' or equal_sizes=True, which make sizes equal anyway"
        holds = not size_cap or (over == "clients" and not equal_sizes)
        require_value("Dirichlet.size_cap", size_cap, holds, expected)
        self.alpha = alpha
        self.over = over
        self.min_size = int(min_size)
        self.equal_sizes = equal_sizes
        self.size_cap = size_cap
        self.max_retries = int(max_retries)

    def counts(self, available: np.ndarray, num_clients: int, rng: Generator) -> np.ndarray:
        check_least(self, "min_size", available.sum(), num_clients)
        if self.over == "labels":
            return self._by_client(available, num_clients, rng)
        for _ in range(self.max_retries):
            counts = self._by_class(available, num_clients, rng)
            if counts.sum(0).min() >= self.min_size:
                return counts
        raise ConfigError(
            f"Dirichlet.min_size: {self.min_size}; not reached with alpha={self.alpha} and "
            f"num_clients={num_clients} in max_retries={self.max_retries} draws; use a larger "
            "alpha, fewer clients, a lower min_size, size_cap=True or equal_sizes=True"
        )

    def _by_class(self, available: np.ndarray, num_clients: int, rng: Generator) -> np.ndarray:
        """Returns the number of samples of each class and client, [K, M], for `over="clients"`."""
        shares = rng.dirichlet(np.full(num_clients, self.alpha), size=len(available))
        if not self.equal_sizes and not self.size_cap:
            return apportion(shares, available[:, None])
        counts = np.zeros(shares.shape, np.int64)
        held = np.zeros(num_clients, np.int64)
        mean = available.sum() / num_clients
        for label in rng.permutation(len(available)):
            if self.size_cap:
                open_shares = _usable(shares[label], held < mean)
                counts[label] = apportion(open_shares, available[label])
            else:
                counts[label] = _fill(shares[label], available[label], int(mean) - held)
            held += counts[label]
        return counts

    def _by_client(self, available: np.ndarray, num_clients: int, rng: Generator) -> np.ndarray:
        """Returns the number of samples of each class and client, [K, M], for `over="labels"`."""
        total = available.sum()
        shares = rng.dirichlet(self.alpha * available / total, size=num_clients)
        missing = np.full(num_clients, total // num_clients)
        if not self.equal_sizes:
            missing[: total % num_clients] += 1
        left = available.copy()
        counts = np.zeros_like(shares, np.int64)  # [M, K]
        # Every pass uses up a label or gives every client all missing samples: at most K passes.
        while missing.any():
            clients = np.flatnonzero(missing)
            usable = _usable(shares[clients], left > 0)
            usable /= usable.sum(1, keepdims=True)
            drawn = rng.multinomial(missing[clients], usable)
            for label in np.flatnonzero(drawn.sum(0) > left):
                requests = np.zeros_like(missing)
                requests[clients] = drawn[:, label]
                granted = rng.multivariate_hypergeometric(requests, left[label])
                drawn[:, label] = granted[clients]
            counts[clients] += drawn
            missing[clients] -= drawn.sum(1)
            left -= drawn.sum(0)
        return counts.T

    def describe(self) -> str:
        what = "class proportions over the clients"
        if self.over == "labels":
            what = "label distribution of each client"
        equal = self.equal_sizes or self.over == "labels"
        extra = ", equal sizes" if equal else f", at least {self.min_size} samples each"
        capped = ", capped at the mean size" if self.size_cap else ""
        return f"{what} drawn from a Dirichlet distribution (alpha={self.alpha}{extra}{capped})"


class ClassesPerClient(CountsByClass):
    """Pathological label skew: every client holds samples of exactly `classes` classes, k.

    The classes of a client are drawn at random such that the numbers of clients per class differ by
    at most one (a class with fewer samples than that has as many clients as samples). Every class
    is assigned to some client if M k >= K; the samples of a class without clients are not used. The
    samples of a class are divided among its clients into parts that differ by at most one sample.
    Used, in variants, by NIID-Bench (`#C=k`) and PFLlib (`pat`).

    Example:
        >>> from pfl.datamodules import DigitsDataModule
        >>> data = DigitsDataModule(num_clients=5, partition=ClassesPerClient(2))
        >>> (data.label_counts() > 0).sum(1)
        array([2, 2, 2, 2, 2])
    """

    words = "{classes} classes per client (pathological)"

    def __init__(self, classes: Count = 2) -> None:
        self.classes = int(classes)

    def counts(self, available: np.ndarray, num_clients: int, rng: Generator) -> np.ndarray:
        key = "ClassesPerClient.classes"
        classes = self.classes
        check_classes(key, classes, len(available))
        most = np.minimum(available, num_clients)
        expected = (
            f"at most {most.sum() // num_clients} with num_clients={num_clients}, as the data "
            f"allow only {most.sum()} pairs of a client and a class"
        )
        require_value(key, classes, classes * num_clients <= most.sum(), expected)
        holders = self._holders(most, num_clients, rng)
        counts = np.zeros(holders.shape, np.int64)
        for label, row in enumerate(holders):
            who = rng.permutation(np.flatnonzero(row))
            if len(who):
                counts[label, who] = np.bincount(even_owners(available[label], len(who)))
        return counts

    def _holders(self, most: np.ndarray, num_clients: int, rng: Generator) -> np.ndarray:
        """Draws which client holds which class, bool [K, M]."""
        pairs = self.classes * num_clients
        # Every class gets `level` clients, or as many as it has samples, and some one more.
        totals = np.minimum(most[:, None], np.arange(num_clients + 1)).sum(0)
        level = int(np.searchsorted(totals, pairs, side="right")) - 1
        places = np.minimum(most, level)
        more = rng.permutation(np.flatnonzero(most > level))
        places[more[: pairs - places.sum()]] += 1
        # If every client takes the k classes with the most places left, all places are filled
        # (Gale-Ryser), as no class has more places than clients. Ties are broken at random.
        holders = np.zeros((len(most), num_clients), bool)
        for client in rng.permutation(num_clients):
            chosen = np.argsort(-(places + rng.random(len(most))))[: self.classes]
            holders[chosen, client] = True
            places[chosen] -= 1
        return holders


class Shards(Partitioner):
    """Pathological label skew of McMahan et al. 2017 (FedAvg).

    Samples are sorted by label and cut into M s shards, whose sizes differ by at most one; every
    client gets s (`shards_per_client`) random shards. A client therefore has about s labels: a
    shard that is no longer than the rarest class contains at most two.

    Example:
        >>> from pfl.datamodules import DigitsDataModule
        >>> data = DigitsDataModule(num_clients=5, partition=Shards(shards_per_client=2))
        >>> bool(((data.label_counts() > 0).sum(1) <= 4).all())
        True
    """

    words = "{shards_per_client} shards of samples sorted by label per client"

    def __init__(self, shards_per_client: Count = 2) -> None:
        self.shards_per_client = int(shards_per_client)

    def owners(self, targets: np.ndarray, num_clients: int, rng: Generator) -> np.ndarray:
        labels = class_labels(self, targets)
        each = self.shards_per_client
        most = len(labels) // num_clients
        shards = num_clients * each
        expected = f"at most {most} with num_clients={num_clients} and {len(labels)} samples"
        require_value("Shards.shards_per_client", each, shards <= len(labels), expected)
        client_of_shard = rng.permutation(even_owners(shards, num_clients))
        owners = np.empty(len(labels), np.int64)
        shard = np.sort(even_owners(len(labels), shards))
        owners[sorted_by_label(labels, rng)] = client_of_shard[shard]
        return owners


def check_classes(key: str, classes: int, known: int) -> None:
    """Raises a ConfigError if an argument exceeds the number of classes."""
    expected = f"at most {known}, the number of classes in the data"
    require_value(key, classes, classes <= known, expected)


def class_labels(rule: Partitioner, targets: np.ndarray) -> np.ndarray:
    """Returns the classes of all samples, numbered 0, 1, ..., K-1 without gaps, [N]."""
    expected = (
        "IID, LogNormal, Natural or Sampled, unless every sample has one integer label (targets "
        f"are {targets.dtype} of shape {targets.shape})"
    )
    require_value("partition", rule, targets.ndim == 1 and targets.dtype.kind in "iub", expected)
    if targets.dtype.kind != "i" or targets.min() < 0 or targets.max() >= len(targets):
        return np.unique(targets, return_inverse=True)[1]
    present = np.bincount(targets) > 0  # without sorting
    if len(present) > 1 << 16:
        return (np.cumsum(present) - 1)[targets]
    if present.all():
        return targets.astype(np.uint16)
    return (np.cumsum(present) - 1).astype(np.uint16)[targets]


def sorted_by_label(labels: np.ndarray, rng: Generator) -> np.ndarray:
    """Returns a permutation that sorts samples by label, in random order within a label."""
    shuffled = rng.permutation(len(labels))
    return shuffled[stable_argsort(labels[shuffled])]


def _usable(shares: np.ndarray, usable: np.ndarray) -> np.ndarray:
    """Returns shares [..., M] that are 0 for unusable clients or labels.

    Where all usable shares are 0, all usable entries get the same share.
    """
    masked = np.where(usable, shares, 0.0)
    return np.where(masked.sum(-1, keepdims=True) > 0, masked, usable.astype(float))


def _fill(shares: np.ndarray, amount: int, room: np.ndarray) -> np.ndarray:
    """Splits `amount` by `shares` [M] among clients that have `room` [M], until all are full.

    The surplus of a full client goes to the other clients, in proportion to their shares.
    """
    taken = np.zeros_like(room)
    left = min(int(amount), int(room.sum()))
    while left:
        offered = apportion(_usable(shares, taken < room), left)
        given = np.minimum(offered, room - taken)
        taken += given
        left -= int(given.sum())
    return taken
