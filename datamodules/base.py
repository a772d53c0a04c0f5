"""The data module that every federated data set derives from."""

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader

from datamodules.errors import ConfigError, check_whole
from datamodules.loaders import ClientDataModule, ShuffleSampler, make_loader
from datamodules.partition import IndexArrays, Partition
from datamodules.partitioners import IID, Natural, Partitioner
from datamodules.protocols import Protocol, SplitOwn
from datamodules.randomness import generator
from datamodules.samples import Samples, TensorSamples, check_finite, concatenate

T = TypeVar("T")


class Loaded(NamedTuple):
    """What a data set consists of.

    Attributes:
        train: The training samples.
        test: The official test samples, or None if the data set has none.
        client_ids: For ``Natural``: the client of each training sample, or of each sample
            (training, then test), numbers or text [N]; or None.
    """

    train: Samples
    test: Samples | None = None
    client_ids: np.ndarray | None = None


class FederatedDataModule(LightningDataModule, ABC):
    """A data set whose samples are owned by clients.

    A subclass implements ``load``, and ``prepare_data`` if its data must be downloaded first
    (it should do nothing when they are there already)::

        class MyData(FederatedDataModule):
            def load(self):
                return Loaded(TensorSamples(x, y), TensorSamples(test_x, test_y))

        dm = MyData(num_clients=20, partition=Dirichlet(0.1), protocol=SplitOwn())
        trainer.fit(model, datamodule=dm.client(3))  # one client
        trainer.fit(model, datamodule=dm)  # all clients' data, pooled

    Where it has arguments of its own, those of this class go on as ``**kwargs``, from which the
    command line also knows their types::

        def __init__(self, noise: float = 0.1, **kwargs):
            super().__init__(**kwargs)

    Data are loaded and dealt when first needed. What is drawn depends on ``seed`` only.

    Args:
        num_clients: M; None takes one client per id with ``partition=Natural()``.
        partition: The rule that deals samples to clients; None is ``IID()``.
        protocol: What every client is tested on; None is ``SplitOwn()``.
        batch_size: Samples per batch of the loaders; None loads everything as one batch.
        seed: Seed of the partition and of the order of training samples, at least 0; None is 0.
        num_workers: Worker processes of the loaders; 0 is fastest for data in memory.

    Attributes:
        partitioner: The rule given as ``partition``.
        protocol: The protocol.
        batch_size: As given.
        seed: As given, or 0.

    Raises:
        ConfigError: An argument is out of range, or (when the data are loaded) does not fit them,
            or data in memory hold NaN or infinite values.
    """

    def __init__(
        self,
        num_clients: int | None = None,
        partition: Partitioner | None = None,
        protocol: Protocol | None = None,
        batch_size: int | None = 32,
        seed: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.partitioner = _check_type(
            "partition", IID() if partition is None else partition, Partitioner, "IID()"
        )
        self.protocol = _check_type(
            "protocol", SplitOwn() if protocol is None else protocol, Protocol, "SplitOwn()"
        )
        if num_clients is None and not isinstance(self.partitioner, Natural):
            raise ConfigError(
                f"num_clients=None needs partition=Natural(), not {self.partitioner!r}; give a "
                "number of clients"
            )
        self._num_clients: int | None = None
        if num_clients is not None:
            self._num_clients = check_whole("num_clients", num_clients, 1)
        # A method's settings have these names as well.
        name = type(self).__name__
        self.batch_size = batch_size
        if batch_size is not None:
            self.batch_size = check_whole("batch_size", batch_size, 1, name)
        self.seed = 0 if seed is None else check_whole("seed", seed, 0, name)
        self.num_workers = check_whole("num_workers", num_workers, 0)
        self._samples: Samples | None = None
        self._partition: Partition | None = None

    @abstractmethod
    def load(self) -> Loaded:
        """Return the samples of the data set. Called once."""

    def setup(self, stage: str | None = None) -> None:
        """Load the data and deal them to the clients; does nothing when called again."""
        if self._partition is not None:
            return
        loaded = self.load()
        self._check_loaded(loaded)
        num_train = len(loaded.train)
        samples = loaded.train
        if loaded.test is not None and len(loaded.test):
            samples = concatenate(loaded.train, loaded.test)
        self._samples = samples
        targets = _host_targets(samples)
        labels = targets if targets.dtype.kind == "i" and targets.ndim == 1 else None
        rule, pool = self._bind_ids(
            loaded, num_train, self.protocol.pool_size(num_train, len(samples))
        )
        if self._num_clients is None and isinstance(rule, Natural):
            self._num_clients = rule.count()
        assert self._num_clients is not None
        owned = rule.assign(targets[:pool], self._num_clients, generator(self.seed, "partition"))
        split_rng = generator(self.seed, "protocol")
        self._partition = self.protocol.split(owned, labels, num_train, len(samples), split_rng)

    def _check_loaded(self, loaded: Loaded) -> None:
        """Check what ``load`` returned, which users write."""
        name = type(self).__name__
        if not isinstance(loaded, Loaded):
            raise ConfigError(
                f"load() of {name} returned {type(loaded).__name__}; it must return "
                "datamodules.Loaded(train, test)"
            )
        for prefix, samples in {"": loaded.train, "test_": loaded.test}.items():
            if prefix and samples is None:  # no official test set
                continue
            if not isinstance(samples, Samples):
                raise ConfigError(
                    f"load() of {name} returned a Loaded of {type(samples).__name__}; it must hold "
                    "TensorSamples(inputs, targets), or DatasetSamples(dataset, targets)"
                )
            if isinstance(samples, TensorSamples):
                check_finite(f"{prefix}inputs", samples.inputs)
                check_finite(f"{prefix}targets", samples.targets)
        has_test = loaded.test is not None and len(loaded.test) > 0
        if self.protocol.needs_official_test and not has_test:
            raise ConfigError(
                f"protocol={self.protocol!r} needs an official test set, but "
                f"{name} has none; use SplitOwn"
            )

    def _bind_ids(self, loaded: Loaded, num_train: int, pool: int) -> tuple[Partitioner, int]:
        """Return the rule, with client ids if it needs them, and how many samples are dealt."""
        rule = self.partitioner
        if not isinstance(rule, Natural):
            return rule, pool
        ids = rule.with_ids(loaded.client_ids).ids()
        num_samples = num_train + (0 if loaded.test is None else len(loaded.test))
        if len(ids) not in (num_train, num_samples):
            raise ConfigError(
                f"client_ids has {len(ids)} entries; give one for each of the {num_train} training "
                f"samples or of all {num_samples} samples"
            )
        return Natural(ids[:pool]), min(pool, len(ids))

    def _ready(self) -> None:
        """Prepare the data, for use without a Trainer."""
        if self._partition is None:
            self.prepare_data()
            self.setup()

    @property
    def samples(self) -> Samples:
        """All samples in one index space: training, then official test samples."""
        self._ready()
        assert self._samples is not None
        return self._samples

    @property
    def partition(self) -> Partition:
        """The clients' index arrays."""
        self._ready()
        assert self._partition is not None
        return self._partition

    @property
    def num_clients(self) -> int:
        """M, the number of clients."""
        return self._num_clients if self._num_clients is not None else len(self.partition)

    @property
    def client_sizes(self) -> np.ndarray:
        """The number of training samples of each client, int64 [M]."""
        return self.partition.train.sizes

    @cached_property
    def _targets(self) -> np.ndarray:
        return _host_targets(self.samples)

    @cached_property
    def num_classes(self) -> int | None:
        """K, one more than the highest integer target; None for regression."""
        targets = self.samples.targets
        if targets is None or targets.is_floating_point():
            return None
        return int(targets.max()) + 1

    @property
    def has_labels(self) -> bool:
        """Whether every sample has one integer target, its class: what ``label_counts`` counts."""
        targets = self.samples.targets
        return targets is not None and not targets.is_floating_point() and targets.ndim == 1

    @property
    def input_shape(self) -> torch.Size:
        """Shape of one input, without a batch axis."""
        return self.samples.input_shape

    def label_counts(
        self, split: Literal["train", "val", "test"] = "train", clients: slice = slice(None)
    ) -> np.ndarray:
        """Return how many samples of each class every client has, int64 [M, K].

        Args:
            split: Which of the client's samples.
            clients: A stretch of clients to count for instead of all M.

        Raises:
            ConfigError: The targets are not one class per sample, or there is no such split.
        """
        if split not in ("train", "val", "test"):
            raise ConfigError(f"split={split!r} must be 'train', 'val' or 'test'")
        targets, classes = self._targets, self.num_classes
        if classes is None or not self.has_labels:
            raise ConfigError(
                f"label_counts needs one integer label per sample, but the targets are "
                f"{targets.dtype} of shape {targets.shape}"
            )
        arrays: IndexArrays = getattr(self.partition, split)
        counts = np.empty((len(arrays.sizes[clients]), classes), np.int64)
        if arrays.is_shared:
            counts[:] = np.bincount(targets[arrays[0]], minlength=classes)
            return counts
        first = clients.indices(len(arrays))[0]
        for some in arrays.blocks(clients):
            block = counts[some.start - first : some.stop - first]
            rows = np.repeat(np.arange(len(block)), arrays.sizes[some])
            cells = rows * classes + targets[arrays.of(some)]
            block[:] = np.bincount(cells, minlength=block.size).reshape(block.shape)
        return counts

    def client(self, client: int) -> ClientDataModule:
        """Return the data of one client as a data module for plain Lightning use.

        Raises:
            ConfigError: There is no such client.
        """
        if not 0 <= client < self.num_clients:
            raise ConfigError(f"client={client} must be between 0 and {self.num_clients - 1}")
        parts = self.partition
        return ClientDataModule(
            self.samples,
            parts.train[client],
            parts.val[client],
            parts.test[client],
            self.batch_size,
            self.num_workers,
            self.seed,
            client,
        )

    def train_dataloader(self) -> DataLoader:
        """Return all clients' training samples, shuffled anew in every epoch."""
        indices = _pooled(self.partition.train)
        sampler = ShuffleSampler(len(indices), self.seed, "pooled order")
        return make_loader(self.samples, indices, self.batch_size, self.num_workers, sampler)

    def val_dataloader(self) -> DataLoader:
        """Return all clients' validation samples."""
        indices = _pooled(self.partition.val)
        return make_loader(self.samples, indices, self.batch_size, self.num_workers)

    def test_dataloader(self) -> DataLoader:
        """Return all clients' test samples; one that several clients share comes once."""
        indices = _pooled(self.partition.test)
        return make_loader(self.samples, indices, self.batch_size, self.num_workers)

    def describe(self) -> str:
        """Say in words how samples are dealt and what is evaluated, for the record of a run."""
        rule, protocol = self.partitioner.describe(), self.protocol.describe()
        return f"{self.num_clients} clients, {rule}; {protocol}; seed {self.seed}."


def _host_targets(samples: Samples) -> np.ndarray:
    """Return the targets as an array; NaN [N] where regression targets are only streamed."""
    if samples.targets is None:
        return np.full(len(samples), np.nan, np.float32)
    targets = samples.targets.cpu().numpy()
    if targets.dtype.kind == "i" and targets.ndim == 1 and targets.min() < 0:
        raise ConfigError(f"targets hold {targets.min()}; class labels must be 0 or more")
    return targets


def _pooled(arrays: IndexArrays) -> np.ndarray:
    """Return every sample that some client holds, once, ascending."""
    return np.unique(arrays[0] if arrays.is_shared else arrays.flat)


def _check_type(key: str, value: T, kind: type, example: str) -> T:
    if not isinstance(value, kind):
        raise ConfigError(
            f"{key}={value!r} must be an object of a {kind.__name__} class, such as {key}={example}"
        )
    return value
