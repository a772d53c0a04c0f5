"""Flower's partition rules, drawn without the package `flwr-datasets`.

The module `flower_bridge` has that package's partitioners as rules, and the other way round.
"""

from typing import Literal

import numpy as np
from typing_extensions import override

from datamodules.errors import ConfigError, check_whole, require
from datamodules.rules.conventions import dirichlet_counts
from datamodules.rules.label_skew import assign_counts, class_labels, sorted_by_label
from datamodules.rules.partitioner import Partitioner


class FlowerDirichlet(Partitioner):
    """Flower's `DirichletPartitioner` with one number α.

    For each class, in ascending order, shares of the M clients are drawn from Dir_M(α, ..., α).
    With `self_balancing`, clients that hold more than N/M samples get none, and the other shares
    are divided by their sum. Class sizes times cumulated shares, rounded down, cut the class; the
    last client gets what is left. All is drawn again, up to ten times, until every client has
    `min_partition_size` samples. From equal generators it draws Flower's label counts.

    Args:
        alpha: Concentration α.
        min_partition_size: The smallest number of samples of a client.
        self_balancing: Whether clients above the mean size get none of the following classes.

    Raises:
        ConfigError: An argument is out of range, or (when samples are assigned) the targets are no
            classes or `min_partition_size` is not reached.

    Example:
        >>> from datamodules import DigitsDataModule
        >>> data = DigitsDataModule(num_clients=5, partition=FlowerDirichlet(0.5))
        >>> data.left_out()["samples_unused"]
        0
    """

    def __init__(
        self, alpha: float, min_partition_size: int = 10, self_balancing: bool = False
    ) -> None:
        require("FlowerDirichlet.alpha", alpha, 0 < alpha < np.inf, "positive and finite")
        self.alpha = alpha
        key = "FlowerDirichlet.min_partition_size"
        self.min_partition_size = check_whole(key, min_partition_size, 0)
        self.self_balancing = self_balancing

    @override
    def owners(self, targets: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        labels = class_labels(self, targets)
        available = np.bincount(labels)
        full = len(labels) / num_clients if self.self_balancing else np.inf
        for _ in range(11):
            counts = dirichlet_counts(available, num_clients, self.alpha, full, True, rng)
            if counts is not None and counts.sum(0).min() >= self.min_partition_size:
                return assign_counts(labels, counts, rng)
        raise ConfigError(
            f"FlowerDirichlet.min_partition_size: {self.min_partition_size}; with "
            f"alpha={self.alpha} and num_clients={num_clients} it must be lower, as 11 draws did "
            "not reach it"
        )

    @override
    def describe(self) -> str:
        balanced = ", self-balancing" if self.self_balancing else ""
        return f"class proportions over the clients as in Flower (alpha={self.alpha}{balanced})"


class FlowerPathological(Partitioner):
    """Flower's `PathologicalPartitioner`: clients with c classes.

    The classes of client i are c different random ones ("random"); i mod K and random ones
    ("first-deterministic"); or i, i + 1, ..., i + c - 1 mod K ("deterministic"). The samples of a
    class are divided among its clients into parts that differ by at most one, with the larger ones
    first. Classes without clients are not used. `ClassesPerClient` draws classes such that all have
    equally many clients, and uses all.

    Args:
        num_classes_per_partition: c.
        class_assignment_mode: "random", "deterministic" or "first-deterministic".

    Raises:
        ConfigError: An argument is out of range, or (when samples are assigned) the targets are no
            classes, or a class has fewer samples than clients.

    Example:
        >>> from datamodules import DigitsDataModule
        >>> rule = FlowerPathological(2, "deterministic")
        >>> np.flatnonzero(DigitsDataModule(num_clients=5, partition=rule).label_counts()[3])
        array([3, 4])
    """

    def __init__(
        self,
        num_classes_per_partition: int = 2,
        class_assignment_mode: Literal["random", "deterministic", "first-deterministic"] = "random",
    ) -> None:
        key = "FlowerPathological.num_classes_per_partition"
        self.num_classes_per_partition = check_whole(key, num_classes_per_partition)
        mode = class_assignment_mode
        modes = ("random", "deterministic", "first-deterministic")
        expected = "'random', 'deterministic' or 'first-deterministic'"
        require("FlowerPathological.class_assignment_mode", mode, mode in modes, expected)
        self.class_assignment_mode = mode

    @override
    def owners(self, targets: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        labels = class_labels(self, targets)
        available = np.bincount(labels)
        most, key = len(available), "FlowerPathological.num_classes_per_partition"
        number, expected = self.num_classes_per_partition, f"at most {most}, the number of classes"
        require(key, number, number <= most, expected)
        holders = np.zeros((most, num_clients), bool)
        for client in range(num_clients):
            holders[self._classes(client, most, rng), client] = True
        counts = np.zeros(holders.shape, np.int64)
        for label, row in enumerate(holders):
            who = np.flatnonzero(row)
            if len(who):
                enough = f"fewer, as class number {label} has {available[label]} samples for "
                enough += f"{len(who)} clients"
                require("num_clients", num_clients, len(who) <= available[label], enough)
                share, rest = divmod(int(available[label]), len(who))
                counts[label, who] = share + (np.arange(len(who)) < rest)
        return assign_counts(labels, counts, rng)

    def _classes(self, client: int, most: int, rng: np.random.Generator) -> list[int]:
        """Returns the classes of a client."""
        number = self.num_classes_per_partition
        if self.class_assignment_mode == "deterministic":
            return [(client + i) % most for i in range(number)]
        if self.class_assignment_mode == "random":
            return rng.choice(most, number, replace=False).tolist()
        classes = [client % most]
        while len(classes) < number:
            label = int(rng.choice(most, 1)[0])
            if label not in classes:
                classes.append(label)
        return classes

    @override
    def describe(self) -> str:
        return (
            f"{self.num_classes_per_partition} classes per client as in Flower "
            f"({self.class_assignment_mode})"
        )


class FlowerShards(Partitioner):
    """Flower's `ShardPartitioner`: samples sorted by label and cut into shards of one size.

    A shard has `shard_size` samples, by default the number of samples divided by that of the shards
    to give, rounded down. Every client gets `num_shards_per_partition` random ones; without this
    argument all shards are dealt, and the first clients get one more if they do not come out even.
    Samples behind the last full shard, and shards that are not given, are not used. `Shards(s)`
    cuts shards that differ by at most one sample, and uses all.

    Args:
        num_shards_per_partition: Shards per client; None deals all.
        shard_size: Samples per shard; None only with `num_shards_per_partition`.
        keep_incomplete_shard: Whether the samples behind the last full shard are a shard, too,
            where one of the other arguments is None.

    Raises:
        ConfigError: An argument is out of range or missing, or (when samples are assigned) the
            targets are no classes, or there are too few shards.

    Example:
        >>> from datamodules import DigitsDataModule
        >>> data = DigitsDataModule(num_clients=5, partition=FlowerShards(2))
        >>> data.left_out()["samples_unused"]  # 10 shards of 179 of the 1,797 samples
        7
    """

    def __init__(
        self,
        num_shards_per_partition: int | None = None,
        shard_size: int | None = None,
        keep_incomplete_shard: bool = False,
    ) -> None:
        shards, key = num_shards_per_partition, "FlowerShards.num_shards_per_partition"
        self.num_shards_per_partition = None if shards is None else check_whole(key, shards)
        key = "FlowerShards.shard_size"
        self.shard_size = None if shard_size is None else check_whole(key, shard_size)
        given = shards is not None or shard_size is not None
        require(key, None, given, "given, or num_shards_per_partition")
        self.keep_incomplete_shard = keep_incomplete_shard

    @override
    def owners(self, targets: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        labels = class_labels(self, targets)
        each, size, total = self.num_shards_per_partition, self.shard_size, len(labels)
        keep = self.keep_incomplete_shard and (each is None or size is None)
        if size is None:
            assert each is not None
            size = total // (num_clients * each)
            expected = f"at most {total // num_clients} with num_clients={num_clients}"
            require("FlowerShards.num_shards_per_partition", each, size > 0, expected)
        usable = -(-total // size) if keep else total // size
        per_client = np.full(num_clients, usable // num_clients if each is None else each)
        if each is None:
            per_client[: usable % num_clients] += 1
        expected = f"such that there are {max(per_client.sum(), num_clients)} shards or more, not "
        expected += f"{usable}, with num_clients={num_clients}"
        enough = num_clients <= usable and per_client.sum() <= usable
        require("FlowerShards.shard_size", size, enough, expected)
        shards = rng.permutation(usable)[: per_client.sum()]
        client_of_shard = np.full(-(-total // size), -1)
        client_of_shard[shards] = np.repeat(np.arange(num_clients), per_client)
        owners = np.empty(total, np.int64)
        owners[sorted_by_label(labels, rng)] = np.repeat(client_of_shard, size)[:total]
        return owners

    @override
    def describe(self) -> str:
        return f"shards of samples sorted by label as in Flower, {self!r}"
