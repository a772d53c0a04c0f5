"""Ordinary torch loaders over part of the samples, and the data of one client."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from datamodules.randomness import generator
from datamodules.samples import Samples


class Selection(Dataset):
    """The samples at the given indices, as a map-style data set.

    Args:
        samples: All samples.
        indices: int64 [n].
    """

    def __init__(self, samples: Samples, indices: np.ndarray) -> None:
        self.samples = samples
        self.indices = torch.as_tensor(indices)

    def __len__(self) -> int:
        """Return n."""
        return len(self.indices)

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        """Return one sample."""
        return self.samples.gather(self.indices[position])

    def __getitems__(self, positions: list[int]) -> tuple[Tensor, Tensor]:
        """Return a whole batch by one gather; torch's loader calls this if it is there."""
        return self.samples.gather(self.indices[torch.as_tensor(positions)])


class ShuffleSampler(Sampler[int]):
    """A random order that depends on the seed and the epoch only.

    Lightning sets the epoch; a plain Python loop gets the next epoch with every pass.

    Args:
        length: Number of samples.
        keys: Seed, purpose and further keys of the generator.
    """

    def __init__(self, length: int, *keys: Any) -> None:
        self.length = length
        self.keys = keys
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.length

    def __iter__(self) -> Iterator[int]:
        """Start a pass."""
        order = generator(*self.keys, self.epoch).permutation(self.length)
        self.epoch += 1
        yield from order.tolist()


def make_loader(
    samples: Samples,
    indices: np.ndarray,
    batch_size: int | None,
    num_workers: int = 0,
    sampler: Sampler | None = None,
) -> DataLoader:
    """Return a loader of batches (x, y).

    Args:
        samples: All samples.
        indices: int64 [n], those to load.
        batch_size: Samples per batch; None loads all of them as one.
        num_workers: As of torch's DataLoader.
        sampler: The order; None keeps that of ``indices``.
    """
    # torch draws a seed for workers whenever a pass starts; a generator of the loader's own
    # keeps that away from the global random state.
    own = torch.Generator()
    return DataLoader(
        Selection(samples, indices),
        batch_size=batch_size or max(len(indices), 1),
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=_collate,
        generator=own.manual_seed(0),
    )


class ClientDataModule(LightningDataModule):
    """The data of one client; fits into any plain Lightning project.

    Args:
        samples: All samples of the data set.
        train: int64 [n], indices of the client's training samples.
        val: Indices of its validation samples.
        test: Indices of its test samples.
        batch_size: Samples per batch; None loads everything as one batch.
        num_workers: As of torch's DataLoader.
        seed: Seed of the order of the training samples.
        client: The client's number, so that clients have orders of their own.
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
    ) -> None:
        super().__init__()
        self.samples = samples
        self.train, self.val, self.test = train, val, test
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.client = client

    def train_dataloader(self) -> DataLoader:
        """Return the training samples, shuffled anew in every epoch."""
        sampler = ShuffleSampler(len(self.train), self.seed, "client order", self.client)
        return make_loader(self.samples, self.train, self.batch_size, self.num_workers, sampler)

    def val_dataloader(self) -> DataLoader:
        """Return the validation samples."""
        return make_loader(self.samples, self.val, self.batch_size, self.num_workers)

    def test_dataloader(self) -> DataLoader:
        """Return the test samples."""
        return make_loader(self.samples, self.test, self.batch_size, self.num_workers)


def _collate(batch: Any) -> Any:
    """Pass on a batch as ``__getitems__`` made it."""
    return batch
