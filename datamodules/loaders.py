"""PyTorch data loaders of a part of the samples."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from .randomness import fold, generator
from .samples.images import unchanged
from .samples.samples import Samples
from .transforms.transform import Pipeline


class SampleDataset(Dataset):
    """A map-style data set of the samples at the given indices [n], after the transforms.

    Args:
        samples: All samples.
        indices: The indices of the n samples of this data set.
        transforms: The transforms; None for none.
        owners: The client of each sample, [n], or of all samples.
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
        if transforms is None:
            transforms = Pipeline()
        self.transforms = transforms
        self.owners = torch.as_tensor(owners).expand(len(self.indices))
        self.augmented = augmented

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:  # as in the first epoch
        inputs, targets = self.batch([range(len(self))[position]])
        return inputs[0], targets[0]

    def batch(self, positions: list[int]) -> tuple[Tensor, Tensor]:
        """Gathers a batch by positions in this data set, plus the epoch times its length."""
        given = torch.as_tensor(positions)
        length = len(self)
        place = given % length
        index = self.indices[place]
        inputs, targets = self.samples.gather(index)
        if not self.transforms:
            return inputs, targets
        owners = self.owners[place]
        visits = None
        if self.augmented is not None:
            visits = fold(fold(torch.full_like(owners, self.augmented), owners), given // length)
        return self.transforms(inputs, owners, index, visits), targets


class Selection(SampleDataset):
    """A `SampleDataset` for `make_loader`, which gets whole batches."""

    def __getitems__(self, positions: list[int]) -> tuple[Tensor, Tensor]:
        """Returns a whole batch; PyTorch's loader calls this method of data sets that have one."""
        return self.batch(positions)


class ShuffleSampler(Sampler[int]):
    """A sampler in random order, which depends on its keys (see `generator`) and the epoch only.

    Lightning sets the epoch. Without Lightning every pass advances the epoch by one.
    """

    def __init__(self, length: int, *keys: Any) -> None:
        self.length = length
        self.keys = keys
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        # The epoch e has the positions from e `length` to (e + 1) `length` - 1.
        order = generator(*self.keys, self.epoch).permutation(self.length)
        order += self.epoch * self.length
        self.epoch += 1
        yield from order.tolist()


def make_loader(
    selection: Selection, batch_size: int | None, num_workers: int, sampler: Sampler | None = None
) -> DataLoader:
    """Returns a loader of batches (inputs, targets), or of one batch if `batch_size` is None."""
    # With a generator of its own a loader draws no seed for workers from the global random state.
    return DataLoader(
        selection,
        batch_size=batch_size or max(len(selection), 1),
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=unchanged,
        generator=torch.Generator().manual_seed(0),
    )


def visit_key(seed: int, purpose: str) -> int:
    """Returns the key of the augmentation of a loader's samples."""
    return int(generator(seed, purpose).integers(1 << 63))
