"""Partition rules as the codes of other projects draw them, under those projects' names.

Each rule follows the released code, with two exceptions that hold for all of them: the numbers come
from the data module's seed, and which samples of a class a client gets is drawn at random, where
some of the codes take them in the order of the file. `docs/partitions.md` compares the rules, and
lists the conventions that equal a rule of this package. `FlowerRule` runs Flower's own code.
"""

from bisect import bisect_left
from collections.abc import Sequence
from math import ceil

import numpy as np
from numpy.random import Generator

from ..errors import ConfigError, require_value
from ..partitions.index_arrays import IndexArrays, Ragged
from ..ranges import Count, CountOrZero, Positive
from .label_skew import CountsByClass, check_classes, class_labels
from .partitioner import Partitioner, check_clients, check_least
from .sample_values import Natural


class FedSLRDirichlet(Partitioner):
    """The label skew of FedSLR's code and of FedDyn's: Dir(α, ..., α) for each client.

    Every client has N // M samples, and client 0 also the remainder N mod M. Each client draws a
    distribution of the K labels from Dir_K(α, ..., α). One sample at a time goes to a random client
    that is not full: its label is drawn from the client's distribution, and the next image of the
    class is taken in random order. When a class has run out, all of its images are there again, and
    the label is drawn anew. Images are therefore repeated, and clients share some of them, or have
    one twice; other images are not used. `Dirichlet(α, over="labels")` repeats no image, and has
    Dir_K(α π) with π the shares of the labels: its α is K times this one.

    A split of a client's own samples (`SplitOwn`, or a validation share) can put two copies of an
    image into different parts: use `MatchLabels(100, validation=0)`, as the paper does. Its α, for
    each class, is 0.1.

    Example:
        >>> from pfl.datamodules import DigitsDataModule, MatchLabels
        >>> data = DigitsDataModule(10, FedSLRDirichlet(0.1), MatchLabels(20, validation=0.0))
        >>> data.client_sizes  # of 1,442 training images
        array([146, 144, 144, 144, 144, 144, 144, 144, 144, 144])
    """

    words = (
        "label distribution of each client drawn from Dir({alpha}, ..., {alpha}), images repeated "
        "where a class runs out (FedSLR, FedDyn)"
    )
    overlaps = True

    def __init__(self, alpha: Positive = 0.1) -> None:
        self.alpha = alpha

    def assign(self, targets: np.ndarray, num_clients: int, rng: Generator) -> IndexArrays:
        labels = class_labels(self, targets)
        total = len(labels)
        check_clients(num_clients, total)
        shuffled = rng.permutation(total)
        classes = [shuffled[labels[shuffled] == k].tolist() for k in range(labels.max() + 1)]
        shares = rng.dirichlet(np.full(len(classes), self.alpha), size=num_clients)
        edges = np.cumsum(shares, axis=1).tolist()
        room = [total // num_clients] * num_clients
        room[0] += total % num_clients
        left = [len(samples) for samples in classes]
        held: list[list[int]] = [[] for _ in range(num_clients)]
        clients = list(range(num_clients))
        while clients:
            place = int(rng.integers(len(clients)))
            client = clients[place]
            while not left[label := min(bisect_left(edges[client], rng.random()), len(left) - 1)]:
                left[label] = len(classes[label])
            left[label] -= 1
            held[client].append(classes[label][left[label]])
            if len(held[client]) == room[client]:
                clients[place] = clients[-1]
                clients.pop()
        samples = np.concatenate([np.sort(own) for own in held])
        return Ragged.from_sizes(samples, np.array(room))


class PFLlibDirichlet(CountsByClass):
    """PFLlib's partition "dir".

    For each class, in ascending order, shares of the M clients are drawn from Dir_M(α, ..., α).
    Clients that hold N/M samples or more get none; the other shares are divided by their sum. Class
    sizes times cumulated shares, rounded down, cut the class; the last client gets what is left.
    All is drawn again until every client has L = min(40, N / (2 M)) samples, rounded down. PFLlib
    merges training and test samples, and splits each client's own at random: `SplitOwn(test=0.25,
    validation=0)`, which is stratified here. `Dirichlet(α, size_cap=True)` differs in the random
    order of the classes, in rounding, and in `min_size`.

    Example:
        >>> from pfl.datamodules import DigitsDataModule
        >>> data = DigitsDataModule(num_clients=5, partition=PFLlibDirichlet(0.1))
        >>> data.left_out()["samples_unused"]
        0
    """

    words = "class proportions over the clients as PFLlib's dir (alpha={alpha})"

    def __init__(self, alpha: Positive = 0.1) -> None:
        self.alpha = alpha

    def counts(self, available: np.ndarray, num_clients: int, rng: Generator) -> np.ndarray:
        least = _least(available, num_clients)
        for _ in range(10_000):
            counts = self._draw(available, num_clients, rng)
            if counts.sum(0).min() >= least:
                return counts
        raise ConfigError(
            f"PFLlibDirichlet.alpha: {self.alpha}; with num_clients={num_clients} it must be "
            f"larger, as 10,000 draws did not give {least} samples to every client"
        )

    def _draw(self, available: np.ndarray, num_clients: int, rng: Generator) -> np.ndarray:
        """Draws the counts [K, M]; all 0 if only full clients have a share of a class above 0."""
        counts = np.zeros((len(available), num_clients), np.int64)
        for label, samples in enumerate(available.tolist()):
            shares = rng.dirichlet(np.full(num_clients, self.alpha))
            shares = shares * (counts.sum(0) < available.sum() / num_clients)
            if not shares.sum():
                return np.zeros_like(counts)
            edges = (np.cumsum(shares / shares.sum()) * samples).astype(np.int64)
            edges[-1] = samples
            counts[label] = np.diff(edges, prepend=0)
        return counts


class PFLlibPathological(CountsByClass):
    """PFLlib's partition "pat": clients with c (`classes`) classes, neighbours with the same ones.

    Every client can take c classes. Class after class, in ascending order, goes to the first
    ceil(M / K c) clients that can still take one. With `balance`, each of them gets n // m samples
    of the n of the class, where m is their number; without, each a whole number that is drawn
    uniformly from max(n / (10 m), L / K), rounded down, to n // m - 1, with L as in
    `PFLlibDirichlet`. The last of them gets the rest. Which classes a client has is not random.

    Example:
        >>> from pfl.datamodules import DigitsDataModule
        >>> data = DigitsDataModule(num_clients=5, partition=PFLlibPathological(4))
        >>> (data.label_counts() > 0).astype(int)[:3]
        array([[1, 1, 1, 1, 0, 0, 0, 0, 0, 0],
               [1, 1, 1, 1, 0, 0, 0, 0, 0, 0],
               [0, 0, 0, 0, 1, 1, 1, 1, 0, 0]])
    """

    def __init__(self, classes: Count = 2, balance: bool = False) -> None:
        self.classes = int(classes)
        self.balance = balance

    def counts(self, available: np.ndarray, num_clients: int, rng: Generator) -> np.ndarray:
        most = len(available)
        least = _least(available, num_clients)
        check_classes("PFLlibPathological.classes", self.classes, most)
        places = np.full(num_clients, self.classes)
        counts = np.zeros((most, num_clients), np.int64)
        for label, samples in enumerate(available.tolist()):
            who = np.flatnonzero(places)[: ceil(num_clients / most * self.classes)]
            if not len(who):
                break
            mean = samples / len(who)
            low = int(max(mean / 10, least / most))
            high = int(mean)
            fits = self.balance or len(who) == 1 or low < high
            expected = f"fewer, as class number {label} has only {samples} samples for {len(who)}"
            require_value("num_clients", num_clients, fits, expected)
            counts[label, who] = high
            if not self.balance and len(who) > 1:
                counts[label, who] = rng.integers(low, high, len(who))
            counts[label, who[-1]] = samples - counts[label, who[:-1]].sum()
            places[who] -= 1
        return counts

    def describe(self) -> str:
        sizes = "random"
        if self.balance:
            sizes = "equal"
        return f"{self.classes} classes per client as PFLlib's pat, shares of a class {sizes}"


def _least(available: np.ndarray, num_clients: int) -> int:
    """Returns L of PFLlib's rules, whose 40 is a batch of 10 over a test share of a quarter."""
    return int(min(40, available.sum() / num_clients / 2))


class FLBenchClasses(CountsByClass):
    """FL-bench's `--classes c`: every client draws c different classes, all equally likely.

    A class of n samples with h clients gives n // h samples to each; the last of them also gets the
    remainder if it is smaller than n // h. Classes that nobody draws, and other remainders, are not
    used. `ClassesPerClient` balances the number of clients per class instead.

    Example:
        >>> from pfl.datamodules import DigitsDataModule
        >>> data = DigitsDataModule(num_clients=5, partition=FLBenchClasses(3))
        >>> (data.label_counts() > 0).sum(1)
        array([3, 3, 3, 3, 3])
    """

    words = "{classes} random classes per client as in FL-bench"

    def __init__(self, classes: Count = 2) -> None:
        self.classes = int(classes)

    def counts(self, available: np.ndarray, num_clients: int, rng: Generator) -> np.ndarray:
        key = "FLBenchClasses.classes"
        holders = draw_classes(key, self.classes, len(available), num_clients, rng)
        counts = np.zeros(holders.shape, np.int64)
        for label, samples in enumerate(available.tolist()):
            who = np.flatnonzero(holders[label])
            if len(who):
                share, rest = divmod(samples, len(who))
                counts[label, who] = share
                if rest < share:
                    counts[label, who[-1]] += rest
        return counts


class LEAF(Natural):
    """LEAF's partition `--sf 1 -k min_samples`: a client for each user with enough samples.

    Users with fewer samples are left out. With fewer clients than users, the users are drawn at
    random, all equally likely, and numbered in ascending order of their ids (`Natural` takes the
    largest instead). LEAF draws users until they have a given share of all samples (`--sf`) and
    cuts the last one; here their number is given. LEAF's split of a user's samples is
    `SplitOwn(test=0.1, validation=0)`; its `--iid` is `IID()`.

    Example:
        >>> from pfl.datamodules import TensorDataModule
        >>> users = ["ann"] * 12 + ["bob"] * 3 + ["eve"] * 15
        >>> data = TensorDataModule(np.zeros((30, 2)), np.zeros(30), partition=LEAF(users))
        >>> data.num_clients, data.left_out()["samples_unused"]
        (2, 3)
    """

    words = "a client for each user with at least {min_samples} samples (LEAF)"

    def __init__(
        self,
        client_ids: Sequence[str | int] | str | np.ndarray | None = None,
        min_samples: Count = 10,
    ) -> None:
        super().__init__(client_ids)
        self.min_samples = int(min_samples)

    def count(self) -> int:
        sizes = np.unique(self.sample_values(), return_counts=True)[1]
        users = int((sizes >= self.min_samples).sum())
        expected = f"at most {sizes.max()}, the number of samples of the largest user"
        require_value("LEAF.min_samples", self.min_samples, users > 0, expected)
        return users

    def owners(self, targets: np.ndarray, num_clients: int, rng: Generator) -> np.ndarray:
        ids = self.sample_values(len(targets))
        users = self.count()
        expected = f"at most {users}, the number of users with {self.min_samples} samples or more"
        require_value("num_clients", num_clients, num_clients <= users, expected)
        names, owners, sizes = np.unique(ids, return_inverse=True, return_counts=True)
        enough = np.flatnonzero(sizes >= self.min_samples)
        number = np.full(len(names), -1)
        number[np.sort(rng.permutation(enough)[:num_clients])] = np.arange(num_clients)
        return number[owners]


class FlukeDirichlet(CountsByClass):
    """fluke's distribution "dir" with `balanced=False`.

    Every client first gets `min_ex_class` samples of each class. Of each class, the other samples
    are divided among the M clients by a multinomial draw, with shares drawn from Dir_M(β, ..., β).
    A client thus has samples of every class.

    Example:
        >>> from pfl.datamodules import DigitsDataModule, SplitOwn
        >>> rule = FlukeDirichlet(0.1, min_ex_class=4)
        >>> data = DigitsDataModule(5, rule, SplitOwn(test=0.0, validation=0.0))
        >>> bool((data.label_counts() >= 4).all())
        True
    """

    words = (
        "{min_ex_class} samples of each class for each client, all others by class proportions "
        "drawn from a Dirichlet distribution (fluke, beta={beta})"
    )

    def __init__(self, beta: Positive = 0.1, min_ex_class: CountOrZero = 2) -> None:
        self.beta = beta
        self.min_ex_class = int(min_ex_class)

    def counts(self, available: np.ndarray, num_clients: int, rng: Generator) -> np.ndarray:
        rarest = available.min()
        least = self.min_ex_class
        most = rarest // num_clients
        cause = f"as the rarest class has {rarest} samples"
        expected = f"at most {most} with num_clients={num_clients}, {cause}"
        require_value("FlukeDirichlet.min_ex_class", least, least <= most, expected)
        shares = rng.dirichlet(np.full(num_clients, self.beta), size=len(available))
        return least + rng.multinomial(available - least * num_clients, shares)


class FlukeClasses(Partitioner):
    """fluke's distribution "lbl_qnt": c random classes per client, random numbers of samples.

    Every client draws c (`class_per_client`) different classes, all equally likely. As long as
    there are classes that no client has, each of them replaces a random class of a random client.
    Every sample then goes to one of the clients of its class, all equally likely.

    Example:
        >>> from pfl.datamodules import DigitsDataModule
        >>> data = DigitsDataModule(num_clients=10, partition=FlukeClasses(3))
        >>> bool(((data.label_counts() > 0).sum(1) <= 3).all())
        True
    """

    words = "{class_per_client} random classes per client as in fluke"

    def __init__(self, class_per_client: Count = 2) -> None:
        self.class_per_client = int(class_per_client)

    def owners(self, targets: np.ndarray, num_clients: int, rng: Generator) -> np.ndarray:
        labels = class_labels(self, targets)
        classes = self.class_per_client
        known = int(labels.max()) + 1
        key = "FlukeClasses.class_per_client"
        least = -(-known // num_clients)
        expected = f"at least {least} with num_clients={num_clients}, as there are {known} classes"
        require_value(key, classes, classes >= least, expected)
        drawn = draw_classes(key, classes, known, num_clients, rng)
        lists = np.stack([rng.permutation(np.flatnonzero(own)) for own in drawn.T])  # [M, c]
        while len(missing := np.setdiff1d(np.arange(known), lists)):
            for label in missing:
                lists[rng.integers(num_clients), rng.integers(classes)] = label
        owners = np.empty(len(labels), np.int64)
        for label in range(known):
            (samples,) = np.nonzero(labels == label)
            who = np.flatnonzero((lists == label).any(1))
            owners[samples] = rng.choice(who, len(samples))
        return owners


class FlukeQuantity(Partitioner):
    """fluke's distribution "qnt": quantities by a power law, labels IID.

    Every client first gets `min_quantity` samples. Each other sample goes to the client
    floor(M u^(1/α)) with u uniform in [0, 1), so that client i expects the share
    ((i + 1) / M)^α - (i / M)^α of them: equal shares for α = 1, larger ones of the last clients for
    larger α.

    Example:
        >>> from pfl.datamodules import DigitsDataModule
        >>> sizes = DigitsDataModule(num_clients=5, partition=FlukeQuantity()).client_sizes
        >>> bool(sizes[4] > sizes[:4].sum())
        True
    """

    words = (
        "client sizes by a power law as in fluke (alpha={alpha}), at least {min_quantity}, samples "
        "assigned uniformly at random"
    )

    def __init__(self, alpha: Positive = 4.0, min_quantity: Count = 2) -> None:
        self.alpha = alpha
        self.min_quantity = int(min_quantity)

    def owners(self, targets: np.ndarray, num_clients: int, rng: Generator) -> np.ndarray:
        least = self.min_quantity
        check_least(self, "min_quantity", len(targets), num_clients)
        others = len(targets) - least * num_clients
        drawn = np.floor(rng.random(others) ** (1 / self.alpha) * num_clients).astype(np.int64)
        first = np.repeat(np.arange(num_clients), least)
        return rng.permutation(np.concatenate([first, np.minimum(drawn, num_clients - 1)]))


def draw_classes(key: str, classes: int, most: int, num_clients: int, rng: Generator) -> np.ndarray:
    """Draws `classes` of `most` classes for each client, all sets equally likely, bool [K, M]."""
    check_classes(key, classes, most)
    order = np.argsort(rng.random((most, num_clients)), axis=0)
    holders = np.zeros((most, num_clients), bool)
    np.put_along_axis(holders, order[:classes], True, axis=0)
    return holders
