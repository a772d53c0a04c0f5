"""PyTorch data loaders of a part of the samples, and the data module of one client."""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from .errors import require
from .randomness import fold, generator
from .samples.samples import Samples
from .transforms.transform import Pipeline


class SampleDataset(Dataset):
    """A map-style data set of the samples at the given indices, after the transforms.

    Args:
        samples: All samples.
        indices: The indices of the n samples of this data set, int64 [n].
        transforms: The transforms; None for none.
        owners: The client of each sample, int64 [n], or of all samples.
        augmented: In training, the key of the random numbers of augmentation; None in evaluation.
    """

    def __init__(
        self,
        samples: Samples,
        indices: np.ndarray | Tensor,
        transforms: Pipeline | None = None,
        owners: np.ndarray | int = 0,
        augmented: int | None = None,
    ) -> None:
        self.samples = samples
        self.indices = torch.as_tensor(indices)
        self.transforms = Pipeline() if transforms is None else transforms
        self.owners = torch.as_tensor(owners).expand(len(self.indices))
        self.augmented = augmented

    def __len__(self) -> int:
        """Returns n, the number of samples."""
        return len(self.indices)

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        """Returns the input and the target of one sample, as in the first epoch."""
        inputs, targets = self.batch([range(len(self))[position]])
        return inputs[0], targets[0]

    def batch(self, positions: list[int]) -> tuple[Tensor, Tensor]:
        """Returns a whole batch, gathered at once.

        Args:
            positions: Positions in this data set, plus the epoch (from 0) times its length.
        """
        given, length = torch.as_tensor(positions), len(self)
        place = given % length
        index = self.indices[place]
        inputs, targets = self.samples.gather(index)
        if not self.transforms:
            return inputs, targets
        owners, visits = self.owners[place], None
        if self.augmented is not None:
            visits = fold(fold(torch.full_like(owners, self.augmented), owners), given // length)
        return self.transforms(inputs, owners, index, visits), targets


class Selection(SampleDataset):
    """A `SampleDataset` for `make_loader`, which gets whole batches."""

    def __getitems__(self, positions: list[int]) -> tuple[Tensor, Tensor]:
        """Returns a whole batch; PyTorch's loader calls this method of data sets that have one."""
        return self.batch(positions)


class ShuffleSampler(Sampler[int]):
    """A sampler in random order, which depends on its keys and the epoch only.

    Lightning sets the epoch. Without Lightning every pass advances the epoch by one.

    Args:
        length: The number of samples.
        keys: The arguments of `datamodules.randomness.generator`: seed, purpose, further keys.

    Attributes:
        epoch: The epoch of the next pass, counted from 0.
    """

    def __init__(self, length: int, *keys: Any) -> None:
        self.length = length
        self.keys = keys
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Returns the number of samples."""
        return self.length

    def __iter__(self) -> Iterator[int]:
        """Yields the positions of the epoch in random order, as `Selection` expects them.

        In the epoch e these are the numbers from e `length` to (e + 1) `length` - 1.
        """
        order = generator(*self.keys, self.epoch).permutation(self.length)
        order += self.epoch * self.length
        self.epoch += 1
        yield from order.tolist()


def make_loader(
    selection: Selection,
    batch_size: int | None,
    num_workers: int = 0,
    sampler: Sampler | None = None,
) -> DataLoader:
    """Returns a loader of batches (inputs, targets).

    Args:
        selection: The n samples to load.
        batch_size: Samples per batch; None loads all n samples as one batch.
        num_workers: Worker processes of the loader.
        sampler: The order of the samples; None keeps the order of `selection`.
    """
    # PyTorch draws a seed for workers at the start of every pass. With a generator of its own a
    # loader does not draw this seed from the global random state.
    own = torch.Generator()
    return DataLoader(
        selection,
        batch_size=batch_size or max(len(selection), 1),
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=_collate,
        generator=own.manual_seed(0),
    )


class ClientDataModule(LightningDataModule):
    """The Lightning data module of one client, built by `FederatedDataModule.client`.

    Args:
        samples: All samples of the data set.
        train: Indices of the client's training samples, int64 [n].
        val: Indices of the client's validation samples, int64.
        test: Indices of the client's test samples, int64.
        batch_size: Samples per batch; None loads all samples of a split as one batch.
        num_workers: Worker processes of the loaders.
        seed: Seed of the order of the training samples.
        client: The number of the client, on which the order of the training samples depends, too.
        transforms: The transforms of the samples; None for none.

    Example:
        >>> from datamodules import DigitsDataModule
        >>> client = DigitsDataModule(num_clients=20, batch_size=8).client(3)
        >>> inputs, targets = next(iter(client.train_dataloader()))
        >>> inputs.shape, targets.shape
        (torch.Size([8, 1, 8, 8]), torch.Size([8]))
    """

    def __init__(
        self,
        samples: Samples,
        train: np.ndarray,
        val: np.ndarray,
        test: np.ndarray,
        batch_size: int | None,
        num_workers: int,
        seed: int,
        client: int,
        transforms: Pipeline | None = None,
    ) -> None:
        super().__init__()
        self.samples = samples
        self.train, self.val, self.test = train, val, test
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.client = client
        self.transforms = transforms

    def train_dataloader(self) -> DataLoader:
        """Returns a loader of the training samples, in a new random order in every epoch."""
        sampler = ShuffleSampler(len(self.train), self.seed, "client order", self.client)
        selection = self._selection("train")
        return make_loader(selection, self.batch_size, self.num_workers, sampler)

    def val_dataloader(self) -> DataLoader:
        """Returns a loader of the validation samples."""
        return make_loader(self._selection("val"), self.batch_size, self.num_workers)

    def test_dataloader(self) -> DataLoader:
        """Returns a loader of the test samples."""
        return make_loader(self._selection("test"), self.batch_size, self.num_workers)

    def dataset(self, split: Literal["train", "val", "test"] = "train") -> SampleDataset:
        """Returns the samples of a split, in ascending order, as the client sees them.

        Raises:
            ConfigError: The split is unknown.
        """
        indices = {"train": self.train, "val": self.val, "test": self.test}
        require("split", split, split in indices, "'train', 'val' or 'test'")
        key = visit_key(self.seed, "client visits") if split == "train" else None
        return SampleDataset(self.samples, indices[split], self.transforms, self.client, key)

    def _selection(self, split: Literal["train", "val", "test"]) -> Selection:
        """Returns `dataset(split)` for a loader of this module."""
        whole = self.dataset(split)
        return Selection(
            whole.samples, whole.indices, whole.transforms, self.client, whole.augmented
        )


def visit_key(seed: int, purpose: str) -> int:
    """Returns the key of the augmentation of a loader's samples."""
    return int(generator(seed, purpose).integers(1 << 63))


def _collate(batch: Any) -> Any:
    """Returns a batch unchanged, as `Selection.__getitems__` has built it."""
    return batch
