"""The base class of all federated data modules, and the data module of one client."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from lightning import LightningDataModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from .errors import ConfigError, RowError, is_whole, require_value
from .loaders import SampleDataset, Selection, ShuffleSampler, make_loader, visit_key
from .partitions.index_arrays import IndexArrays
from .partitions.measures import is_owned
from .partitions.partition import Partition
from .protocols.order import order_of
from .protocols.protocol import OfficialSplit, Pool, Protocol, SplitOwn
from .randomness import generator
from .ranges import Checked, Count, CountOrZero, as_int
from .rules.from_file import Given
from .rules.partitioner import IID, Partitioner, check_apart, check_owned
from .samples.loaded import (
    Loaded,
    NewSamples,
    check_loaded,
    host_targets,
    owner_of,
    rule_columns,
    told_scale,
)
from .samples.missing import fill_with_means, mean_of_known
from .samples.samples import Samples, TensorSamples, concatenate
from .transforms.target_scale import TargetScale, scaled_by_client, scales_of_clients
from .transforms.transform import Pipeline, Transform

SplitName = Literal["train", "val", "test"]

_SHOWN = 20  # clients that a line names


class FederatedDataModule(Checked, LightningDataModule, ABC):
    """The base class of data modules whose samples are owned by clients.

    A subclass implements `load`, and `prepare_data` if its data must be downloaded first (with no
    effect if the data are already there). A constructor with further arguments passes the arguments
    of this class on as `**kwargs`, where the command line finds their types.

    Data are loaded and assigned to clients when first used. All random draws depend on `seed` only.

    Args:
        num_clients: The number of clients M; None with a rule that determines it, such as
            `Natural()`, which has one client per id, or `Given(file)`.
        partition: The rule that assigns samples to clients; None is `IID()`.
        protocol: The test protocol; None is `SplitOwn()`, or with `Given(file)` that of the file.
        batch_size: Samples per batch of the loaders; None loads all samples as one batch.
        seed: Seed of the partition and of the order of training samples; None is 0.
        num_workers: Worker processes of the loaders; 0 is fastest for data in memory.
        transforms: What is done to the gathered samples, in order, such as `[Normalize()]`.
        scale_targets: Whether the values of a regression are standardized for training, by their
            mean and standard deviation over the clients' training samples, with four digits, or
            nine of a mean that four would move by a quarter of the deviation; "client": over
            each client's own, as for series of unlike sizes, and the client's samples have these
            values. Metrics, predictions and exported models are in the targets' own unit.

    Attributes:
        partitioner: The partition rule, the argument `partition`.
        rounded_arrays: Names of the given arrays that have lost digits; known after `setup`.
        conversions: In what the samples differ from what was read, a line for each change, such as
            rounded numbers or rows that are left out; known after `setup`.
        feature_names: Names of the columns of the inputs [F], as of a table; known after `setup`,
            and None where the columns have no names.
        category_levels: By column, the levels of the inputs that are categories, as of a table;
            known after `setup`.
        target_scale: The numbers of `scale_targets: true`; known after `setup`, and else None.

    Raises:
        ConfigError: An argument is out of range, or (when the data are loaded) does not fit the
            data, or the data cannot be read or have values that are not finite.

    Example:
        >>> from pfl.datamodules import Loaded, TensorSamples
        >>> class Noise(FederatedDataModule):
        ...     def __init__(self, features: int = 3, **kwargs):
        ...         super().__init__(**kwargs)
        ...         self.features = features
        ...     def load(self):
        ...         inputs = torch.rand(60, self.features)
        ...         return Loaded(TensorSamples(inputs, torch.arange(60) % 2))
        >>> data = Noise(features=4, num_clients=5)
        >>> inputs, targets = next(iter(data.train_dataloader()))  # the samples of all clients
        >>> inputs.shape, len(data.client(3).train)  # one client
        (torch.Size([32, 4]), 9)
    """

    default_rule: ClassVar[type[Partitioner]] = IID  # where `partition` is None
    default_protocol: ClassVar[type[Protocol]] = SplitOwn  # where `protocol` is None
    has_samples: ClassVar[bool] = True  # else they are elsewhere, and their numbers are known here
    tells_scale: ClassVar[bool] = False  # whether the description says what happens to uint8

    def __init__(
        self,
        num_clients: Count | None = None,
        partition: Partitioner | None = None,
        protocol: Protocol | None = None,
        batch_size: Count | None = 32,
        seed: CountOrZero | None = None,
        num_workers: CountOrZero = 0,
        transforms: Sequence[Transform] | None = None,
        scale_targets: bool | Literal["client"] = False,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if partition is None:
            partition = self.default_rule()
        if isinstance(partition, Given):
            protocol = partition.protocol(protocol)
        if protocol is None:
            protocol = self.default_protocol()
        is_rule = isinstance(partition, Partitioner)
        is_protocol = isinstance(protocol, Protocol)
        require_value(f"{name}.partition", partition, is_rule, "a Partitioner, such as IID()")
        require_value(f"{name}.protocol", protocol, is_protocol, "a Protocol, such as SplitOwn()")
        self.partitioner = partition
        self.protocol = protocol
        known = num_clients is not None or partition.counts_clients
        expected = "a whole number, unless partition=Natural() or another rule determines it"
        require_value(f"{name}.num_clients", num_clients, known, expected)
        self._num_clients = as_int(num_clients)
        self.batch_size = as_int(batch_size)
        self.seed = as_int(seed) or 0
        self.num_workers = int(num_workers)
        expected = "a list of Transforms, such as [Normalize()]"
        listed = isinstance(transforms, Iterable) and not isinstance(transforms, str)
        require_value(f"{name}.transforms", transforms, transforms is None or listed, expected)
        changes = list(transforms or ())
        for transform in changes:
            require_value(
                f"{name}.transforms", transform, isinstance(transform, Transform), expected
            )
        self._transforms = Pipeline(changes, self.seed)
        self.scale_targets = scale_targets
        self.target_scale: TargetScale | None = None
        self._client_scales: list[TargetScale] | None = None
        self.rounded_arrays: list[str] = []
        self.conversions: list[str] = []
        self.feature_names: list[str] | None = None
        self.category_levels: dict[str, list[str]] = {}
        self._samples: Samples | None = None
        self._partition: Partition | None = None
        self._client_names: list[str] | None = None
        self._class_names: list[str] | None = None
        self._times: np.ndarray | None = None
        self._missing: np.ndarray | None = None
        self._like: FederatedDataModule | None = None

    @abstractmethod
    def load(self) -> Loaded:
        """Loads the samples of the data set; called once."""

    def read_like(self, other: "FederatedDataModule") -> None:
        """Reads what is to come as another module has read its samples, before `setup`.

        Missing values become what they have become there. A subclass takes over the columns, levels
        and names of classes that its file may lack.
        """
        self._like = other

    def new_samples(self, path: Path) -> NewSamples:
        """Reads samples of the same kind that the run has not seen; their targets may be missing.

        Raises:
            ConfigError: The file is not as the run's, or the data module reads no new samples.
        """
        raise ConfigError(
            f"the run's data are {type(self).__name__}, and new samples are read for those of "
            f"TableDataModule, ArrayDataModule and ImageFolderDataModule"
        )

    def in_file(self, error: RowError) -> RowError:
        """Returns an error about a sample, counted from 1, with its row in the user's file."""
        return error

    def setup(self, stage: str | None = None) -> None:
        if self._partition is not None:
            return
        loaded = self.load()
        name = type(self).__name__
        check_loaded(name, loaded, self.feature_names)
        num_train = len(loaded.train)
        samples = self._all_samples(loaded)
        self._samples = samples
        if loaded.class_names is not None:
            self._class_names = list(loaded.class_names)
        targets = host_targets(samples)
        columns = rule_columns(loaded)
        owned = self._assign(targets, num_train, columns)
        partition = self._split(owned, targets, loaded, columns)
        if isinstance(self.protocol, SplitOwn) and self.protocol.order is not None:
            self._times = order_of(self.protocol.order, columns, num_train)
        self._missing = loaded.missing
        train = loaded.train
        if loaded.missing is not None and loaded.missing.any():
            assert isinstance(samples, TensorSamples)
            self._fill(samples, loaded.missing, partition)
            # With test samples these are a copy, and `loaded.train` still lacks the values.
            train = TensorSamples(samples.inputs[:num_train], samples.targets[:num_train])
        if self.scale_targets == "client":
            self._scale_by_client(samples, partition)
        elif self.scale_targets:
            self._scale_by_all(samples, targets, partition)
        if isinstance(self.protocol, OfficialSplit):
            _warn_of_newcomers(name, partition)
        self._transforms = self._transforms.bound(train, self.num_clients, samples, partition.train)
        about = partition.about
        if not about:  # what is partitioned and how, for `Partition.save`
            about = {
                "data": name,
                "train_samples": num_train,
                "rule": repr(self.partitioner),
                "protocol": repr(self.protocol),
                "seed": self.seed,
                "description": self.describe(),
            }
            if self._client_names is not None:
                about["client_names"] = self._client_names
        self._partition = replace(partition, targets=targets, about=about)

    def _all_samples(self, loaded: Loaded) -> Samples:
        """Returns the training samples, followed by the official test samples."""
        samples = loaded.train
        if loaded.test is not None and len(loaded.test):
            samples = concatenate(loaded.train, loaded.test)
        holds = len(samples) > len(loaded.train) or not self.protocol.needs_official_test
        expected = "SplitOwn, as the data set has no official test set"
        require_value(f"{type(self).__name__}.protocol", self.protocol, holds, expected)
        return samples

    def _assign(
        self, targets: np.ndarray, num_train: int, columns: Mapping[str, np.ndarray]
    ) -> IndexArrays:
        """Returns the samples of each client by the rule, and keeps the clients' names and number.

        The rule assigns the first samples, as many as both the protocol and the rule allow.
        """
        rule = self.partitioner.bound(columns, num_train, len(targets))
        pool = num_train
        if self.protocol.assigns_official_test:
            pool = len(targets)
        self._pool = pool
        if rule.reach is not None:
            pool = min(pool, rule.reach)
            rule = rule.restricted(slice(pool))
        if self._num_clients is None:
            self._num_clients = rule.count()
        assert self._num_clients is not None
        owned = rule.assign(targets[:pool], self._num_clients, generator(self.seed, "partition"))
        key = f"{type(self.partitioner).__name__}.assign"
        check_owned(key, owned, self._num_clients, pool)
        if not rule.overlaps:
            check_apart(key, owned, pool)
        self._client_names = names = rule.client_names(owned)
        fits = isinstance(names, list) and len({*names}) == self._num_clients
        if names is not None and not fits:
            given = f"{repr(names)[:60]}; it must be a list of {self._num_clients} different names"
            raise ConfigError(f"{type(self).__name__}.client_names: {given}")
        return owned

    def _split(
        self,
        owned: IndexArrays,
        targets: np.ndarray,
        loaded: Loaded,
        columns: Mapping[str, np.ndarray],
    ) -> Partition:
        """Returns each client's training, validation and test samples by the protocol."""
        labels = None
        if targets.dtype.kind == "i" and targets.ndim == 1:
            labels = targets
        whole = Pool(labels, len(loaded.train), len(targets), columns)
        try:
            partition = self.protocol.split(owned, whole, generator(self.seed, "protocol"))
        except RowError as error:
            told = self.in_file(error)
            client = owner_of(loaded, error.row - 1)
            if client is None:
                raise told from None
            raise told.of_client(client) from None
        if not partition.train.sizes.any():
            rules = f"{self.partitioner!r} and {self.protocol!r}"
            raise ConfigError(f"{type(self).__name__}: no client has a training sample, by {rules}")
        return partition

    def _fill(self, samples: TensorSamples, missing: np.ndarray, partition: Partition) -> None:
        """Gives missing values the means of their clients' training samples, and says so."""
        columns = self.feature_names or [str(number) for number in range(missing.shape[1])]
        given = None
        whose = "their client's training samples"
        if self._like is not None and self._like._missing is not None:
            given = self._means_of_run
            whose += " in the run"
        number = fill_with_means(
            samples.inputs, missing, partition, columns, self._client_names, given
        )
        lacking = [columns[column] for column in np.flatnonzero(missing.any(0))]
        self.conversions.append(
            f"{number} missing values of {', '.join(map(repr, lacking))} are the means of {whose}"
        )

    def _means_of_run(self, client: int) -> list[float]:
        """Returns the means [F] of the module that is read like; of all for another client."""
        assert self._like is not None
        known = self._like.client_names
        number = None
        if known is not None and self._client_names is not None and client >= 0:
            name = self._client_names[client]
            if name in known:
                number = known.index(name)
        means = self._like.gap_values(number)
        assert means is not None
        return means

    def _scale_by_all(self, samples: Samples, targets: np.ndarray, partition: Partition) -> None:
        """Finds the unit of the targets of all training samples, and says so."""
        key = f"{type(self).__name__}.scale_targets"
        expected = "false, unless the streamed samples have targets: DatasetSamples(data, targets)"
        require_value(key, self.scale_targets, samples.targets is not None, expected)
        trained = np.unique(partition.train.flat)
        self.target_scale = TargetScale.of(torch.from_numpy(targets[trained]))
        self.conversions.append(self.target_scale.describe())

    def _scale_by_client(self, samples: Samples, partition: Partition) -> None:
        """Gives targets the unit of the client that owns them, and says so."""
        key = f"{type(self).__name__}.scale_targets"
        expected = "true, as the samples are streamed"
        require_value(key, "client", isinstance(samples, TensorSamples), expected)
        assert isinstance(samples, TensorSamples)
        self._client_scales = scales_of_clients(samples.targets, partition)
        targets = scaled_by_client(samples.targets, partition, self._client_scales)
        self._samples = TensorSamples(samples.inputs, targets)
        self.conversions.append(
            "targets: standardized by the mean and standard deviation of each client's training "
            "samples; metrics and predictions are in the targets' own unit, losses are not"
        )

    def scale_of(self, client: int | None) -> TargetScale | None:
        """Returns the scale of a client's targets, or that of all; None where there is none."""
        if client is None or self._client_scales is None:
            return self.target_scale
        return self._client_scales[client]

    @property
    def differs_by_client(self) -> bool:
        """Whether a sample looks other, or has another target, as that of another client."""
        return self._client_scales is not None or self.transforms.per_client

    def own_unit(self, client: int, values: Tensor) -> Tensor:
        """Returns stored targets of a client, or predictions of them, [n, ...] in their own unit.

        These are other values with `scale_targets: client` only.
        """
        if self._client_scales is None:
            return values
        return self._client_scales[client].own_unit(values)

    def _ready(self) -> None:
        """Prepares and loads the data if no Trainer has done so."""
        if self._partition is None:
            self.prepare_data()
            self.setup()

    @property
    def samples(self) -> Samples:
        """The training samples, followed by the official test samples."""
        self._ready()
        assert self._samples is not None
        return self._samples

    @property
    def partition(self) -> Partition:
        """The training, validation and test samples of every client."""
        self._ready()
        assert self._partition is not None
        return self._partition

    @property
    def transforms(self) -> Pipeline:
        """The transforms of gathered samples, with the statistics of the data."""
        self._ready()
        return self._transforms

    @property
    def num_clients(self) -> int:
        """M, the number of clients."""
        if self._num_clients is None:
            return len(self.partition)
        return self._num_clients

    @property
    def client_names(self) -> list[str] | None:
        """The names of the clients [M], such as hospitals, if the rule gives them names; else None.

        `Natural` and `LEAF` take the ids, `Groups` the ids of each group, joined by "+".
        """
        self._ready()
        return self._client_names

    @property
    def names_or_numbers(self) -> list[str]:
        """What clients are called [M]: their names, or their numbers where they have none."""
        return self.client_names or [str(number) for number in range(self.num_clients)]

    @property
    def class_names(self) -> list[str] | None:
        """The names of the classes [K], in the order of their numbers; None if there are none."""
        self._ready()
        return self._class_names

    @property
    def client_sizes(self) -> np.ndarray:
        """The number of training samples of each client, int64 [M]."""
        return self.partition.train.sizes

    @cached_property
    def num_classes(self) -> int | None:
        """K, the largest integer target plus one; None for regression."""
        targets = self.samples.targets
        if targets is None or targets.is_floating_point():
            return None
        return int(targets.max()) + 1

    def training_targets(self, client: int) -> np.ndarray:
        """Returns the targets of a client's training samples [n, ...], in the order of time.

        That is the order of the column of `SplitOwn(order=...)`, or else that of the samples.
        """
        index = self.partition.train[client]
        if self._times is not None:
            index = index[np.argsort(self._times[index], kind="stable")]
        found = host_targets(self.samples)[index]
        if self._client_scales is None:
            return found
        return self.own_unit(client, torch.from_numpy(found)).numpy()

    @property
    def missing_cells(self) -> np.ndarray | None:
        """Which inputs had no value and became means, bool [N, F]; None where that is refused."""
        return self._missing

    def gap_values(self, client: int | None = None) -> list[float] | None:
        """Returns what a missing value of each input becomes [F]; None where it is refused.

        That is the mean of the column over the training samples of a client, or of all; NaN where
        none of them has a value.
        """
        samples = self.samples
        if self._missing is None or not isinstance(samples, TensorSamples):
            return None
        if client is None:
            train = np.unique(self.partition.train.flat)
        else:
            train = self.partition.train[client]
        values = []
        for column in range(self._missing.shape[1]):
            mean = mean_of_known(samples.inputs, self._missing, train, column)
            if mean is None:
                mean = math.nan
            values.append(mean)
        return values

    @property
    def has_labels(self) -> bool:
        """Whether every sample has one integer target, its class, as `label_counts` requires."""
        targets = self.samples.targets
        return targets is not None and not targets.is_floating_point() and targets.ndim == 1

    @property
    def input_shape(self) -> torch.Size:
        """The shape of one input after the transforms, without a batch axis."""
        one = torch.zeros(1, dtype=torch.int64)
        return self.transforms(self.samples.gather(one)[0], one, one).shape[1:]

    def label_counts(self, split: SplitName = "train", clients: slice = slice(None)) -> np.ndarray:
        """Returns the samples of each class that every client has in a split, int64 [M, K].

        `clients`, a slice of step 1, are those that are counted for. Targets must be classes.
        """
        splits = self.partition.splits
        require_value("label_counts.split", split, split in splits, "'train', 'val' or 'test'")
        targets = host_targets(self.samples)
        classes = self.num_classes
        if classes is None or not self.has_labels:
            raise ConfigError(
                f"label_counts: targets are {targets.dtype} of shape {targets.shape}; they must be "
                "one integer label per sample"
            )
        arrays = splits[split]
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

    def left_out(self) -> dict[str, int]:
        """Returns how much of the data set the partition leaves out, by name.

        `samples_unused` are those that the rule could have assigned and that no client has;
        official test samples count if the protocol gives them to clients to split.
        """
        parts = self.partition
        unused = np.ones(self._pool, bool)
        for arrays in parts.splits.values():
            unused &= ~is_owned(arrays, len(self.samples))[: self._pool]
        return {
            "samples_unused": int(unused.sum()),
            "clients_without_train_samples": int((parts.train.sizes == 0).sum()),
            "clients_without_test_samples": int((parts.test.sizes == 0).sum()),
        }

    def dataset(self, client: int, split: SplitName = "train") -> SampleDataset:
        """Returns the samples of one client as a map-style `torch.utils.data.Dataset`.

        An item is a pair (input, target), after the transforms, as in the first epoch. The samples
        are in ascending order of their indices, `partition.train[client]`.
        """
        return self.client(client).dataset(split)

    def client(self, client: int) -> "ClientDataModule":
        """Returns the data of one client as a Lightning data module."""
        last = self.num_clients - 1
        expected = f"the number of a client, from 0 to {last}"
        require_value("client", client, is_whole(client), expected)
        require_value("client", client, 0 <= client <= last, f"from 0 to {last}")
        return ClientDataModule(self, int(client))

    def train_dataloader(self) -> DataLoader:  # of all clients' samples, each sample once
        selection = self._pooled(self.partition.train, visit_key(self.seed, "pooled visits"))
        sampler = ShuffleSampler(len(selection), self.seed, "pooled order")
        return make_loader(selection, self.batch_size, self.num_workers, sampler)

    def val_dataloader(self) -> DataLoader:
        return make_loader(self._pooled(self.partition.val), self.batch_size, self.num_workers)

    def test_dataloader(self) -> DataLoader:
        return make_loader(self._pooled(self.partition.test), self.batch_size, self.num_workers)

    def _pooled(self, arrays: IndexArrays, augmented: int | None = None) -> Selection:
        """Returns the samples of all clients, each once; the first owner decides on transforms."""
        if arrays.is_shared:
            return Selection(self.samples, np.unique(arrays[0]), self.transforms)
        indices, first = np.unique(arrays.flat, return_index=True)
        owners = arrays.owners[first]
        return Selection(self.samples, indices, self.transforms, owners, augmented)

    def describe(self) -> str:
        """Describes partition rule, protocol and seed in words, for the record of a run."""
        rule = self.partitioner.describe()
        protocol = self.protocol.describe()
        changes = ", ".join(map(repr, self._transforms.transforms))
        ends = "."
        if changes:
            ends = f"; transforms {changes}."
        scale = ""
        if self.tells_scale and isinstance(self._samples, TensorSamples):
            scale = told_scale(self._samples.inputs)
        return f"{self.num_clients} clients, {rule}; {protocol}; seed {self.seed}{scale}{ends}"


def _warn_of_newcomers(name: str, partition: Partition) -> None:
    """Warns which clients have official test samples only, and how they become newcomers."""
    newcomers = np.flatnonzero((partition.train.sizes == 0) & (partition.test.sizes > 0))
    if not len(newcomers):
        return
    shown = ", ".join(map(str, newcomers[:_SHOWN]))
    if len(newcomers) > _SHOWN:
        shown += ", ..."
    rank_zero_warn(
        f"{name}: {len(newcomers)} of {len(partition)} clients have official test samples only, "
        f"and never train; loop.unseen: [{shown}] scores them as newcomers",
        category=UserWarning,
    )


class ClientDataModule(LightningDataModule):
    """The Lightning data module of one client, as `FederatedDataModule.client` builds it.

    `train`, `val` and `test` are the indices of the client's samples, int64 [n].

    Example:
        >>> from pfl.datamodules import DigitsDataModule
        >>> client = DigitsDataModule(num_clients=20, batch_size=8).client(3)
        >>> inputs, targets = next(iter(client.train_dataloader()))
        >>> inputs.shape, targets.shape
        (torch.Size([8, 1, 8, 8]), torch.Size([8]))
    """

    def __init__(self, data: FederatedDataModule, client: int) -> None:
        super().__init__()
        self.samples = data.samples
        self.transforms = data.transforms
        self.seed = data.seed
        self.batch_size = data.batch_size
        self.num_workers = data.num_workers
        self.client = client
        self.train, self.val, self.test = (part[client] for part in data.partition.splits.values())

    def train_dataloader(self) -> DataLoader:
        sampler = ShuffleSampler(len(self.train), self.seed, "client order", self.client)
        return self._loader("train", sampler)

    def val_dataloader(self) -> DataLoader:
        return self._loader("val")

    def test_dataloader(self) -> DataLoader:
        return self._loader("test")

    def dataset(self, split: SplitName = "train") -> SampleDataset:
        """Returns the samples of a split, in ascending order, as the client sees them."""
        indices = {"train": self.train, "val": self.val, "test": self.test}
        require_value("split", split, split in indices, "'train', 'val' or 'test'")
        key = None
        if split == "train":
            key = visit_key(self.seed, "client visits")
        return SampleDataset(self.samples, indices[split], self.transforms, self.client, key)

    def _loader(self, split: SplitName, sampler: Sampler | None = None) -> DataLoader:
        part = self.dataset(split)
        batches = Selection(
            part.samples, part.indices, part.transforms, self.client, part.augmented
        )
        return make_loader(batches, self.batch_size, self.num_workers, sampler)
