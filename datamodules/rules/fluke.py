"""Partition rules as the code of fluke draws them; see the module `conventions`."""

import numpy as np
from numpy.random import Generator

from ..errors import check_whole, require
from .conventions import draw_classes
from .label_skew import assign_counts, class_labels
from .partitioner import Partitioner


class FlukeDirichlet(Partitioner):
    """fluke's distribution "dir" with `balanced=False`.

    Every client first gets m samples of each class. Of each class, the other samples are divided
    among the M clients by a multinomial draw, with shares drawn from Dir_M(β, ..., β). A client
    thus has samples of every class.

    Args:
        beta: Concentration β.
        min_ex_class: m.

    Example:
        >>> from datamodules import DigitsDataModule, SplitOwn
        >>> rule = FlukeDirichlet(0.1, min_ex_class=4)
        >>> data = DigitsDataModule(5, rule, SplitOwn(test=0.0, validation=0.0))
        >>> bool((data.label_counts() >= 4).all())
        True
    """

    def __init__(self, beta: float = 0.1, min_ex_class: int = 2) -> None:
        require("FlukeDirichlet.beta", beta, 0 < beta < np.inf, "positive and finite")
        self.beta = beta
        self.min_ex_class = check_whole("FlukeDirichlet.min_ex_class", min_ex_class, 0)

    def owners(self, targets: np.ndarray, num_clients: int, rng: Generator) -> np.ndarray:
        labels = class_labels(self, targets)
        available = np.bincount(labels)
        most, least = available.min() // num_clients, self.min_ex_class
        expected = f"at most {most} with num_clients={num_clients}, as the rarest class has "
        expected += f"{available.min()} samples"
        require("FlukeDirichlet.min_ex_class", least, least <= most, expected)
        shares = rng.dirichlet(np.full(num_clients, self.beta), size=len(available))
        counts = least + rng.multinomial(available - least * num_clients, shares)
        return assign_counts(labels, counts, rng)

    def describe(self) -> str:
        return (
            f"{self.min_ex_class} samples of each class for each client, all others by class "
            f"proportions drawn from a Dirichlet distribution (fluke, beta={self.beta})"
        )


class FlukeClasses(Partitioner):
    """fluke's distribution "lbl_qnt": c random classes per client, random numbers of samples.

    Every client draws c different classes, all equally likely. As long as there are classes that no
    client has, each of them replaces a random class of a random client. Every sample then goes to
    one of the clients of its class, all equally likely.

    Args:
        class_per_client: c.

    Example:
        >>> from datamodules import DigitsDataModule
        >>> data = DigitsDataModule(num_clients=10, partition=FlukeClasses(3))
        >>> bool(((data.label_counts() > 0).sum(1) <= 3).all())
        True
    """

    def __init__(self, class_per_client: int = 2) -> None:
        self.class_per_client = check_whole("FlukeClasses.class_per_client", class_per_client)

    def owners(self, targets: np.ndarray, num_clients: int, rng: Generator) -> np.ndarray:
        labels, classes = class_labels(self, targets), self.class_per_client
        known = int(labels.max()) + 1
        key, least = "FlukeClasses.class_per_client", -(-known // num_clients)
        expected = f"at least {least} with num_clients={num_clients}, as there are {known} classes"
        require(key, classes, classes >= least, expected)
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

    def describe(self) -> str:
        return f"{self.class_per_client} random classes per client as in fluke"


class FlukeQuantity(Partitioner):
    """fluke's distribution "qnt": quantities by a power law, labels IID.

    Every client first gets `min_quantity` samples. Each other sample goes to the client
    floor(M u^(1/α)) with u uniform in [0, 1), so that client i expects the share
    ((i + 1) / M)^α - (i / M)^α of them.

    Args:
        alpha: α; 1 gives equal expected sizes, larger numbers more to the last clients.
        min_quantity: The smallest number of samples of a client.

    Example:
        >>> from datamodules import DigitsDataModule
        >>> sizes = DigitsDataModule(num_clients=5, partition=FlukeQuantity()).client_sizes
        >>> bool(sizes[4] > sizes[:4].sum())
        True
    """

    def __init__(self, alpha: float = 4.0, min_quantity: int = 2) -> None:
        require("FlukeQuantity.alpha", alpha, 0 < alpha < np.inf, "positive and finite")
        self.alpha = alpha
        self.min_quantity = check_whole("FlukeQuantity.min_quantity", min_quantity)

    def owners(self, targets: np.ndarray, num_clients: int, rng: Generator) -> np.ndarray:
        key, least, most = "FlukeQuantity.min_quantity", self.min_quantity, len(targets)
        most //= num_clients
        expected = f"at most {most}, the mean number of samples with num_clients={num_clients}"
        require(key, least, least <= most, expected)
        others = len(targets) - least * num_clients
        drawn = np.floor(rng.random(others) ** (1 / self.alpha) * num_clients).astype(np.int64)
        first = np.repeat(np.arange(num_clients), least)
        return rng.permutation(np.concatenate([first, np.minimum(drawn, num_clients - 1)]))

    def describe(self) -> str:
        return (
            f"client sizes by a power law as in fluke (alpha={self.alpha}), at least "
            f"{self.min_quantity}, samples assigned uniformly at random"
        )
