"""Samples in a file that is mapped into memory, for data sets that do not fit there."""

import functools
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import require
from .images import read_items
from .samples import ITEMS, DatasetSamples, TensorSamples, stack_items


class MappedSamples(TensorSamples):
    """Samples whose inputs are mapped from a file into memory, which need not hold all of them.

    The inputs stay on the host; on another device only the gathered samples arrive.

    Args:
        inputs: Tensor or array [N, ...], such as `numpy.load` with a `mmap_mode` returns.
        targets: Tensor, array or list [N] or [N, ...]; integers and booleans become int64.
        device: The device of the tensors that `gather` returns.

    Raises:
        ConfigError: The numbers of inputs and targets differ or are 0.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.save(f"{folder}/x.npy", np.eye(3, dtype=np.float32))
        ...     samples = MappedSamples(np.load(f"{folder}/x.npy", mmap_mode="c"), [0, 1, 1])
        ...     samples.gather(torch.tensor([2]))
        (tensor([[0., 0., 1.]]), tensor([1]))
    """

    def __init__(
        self,
        inputs: Tensor | np.ndarray,
        targets: Tensor | np.ndarray | Sequence[float],
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(inputs, targets)
        self.device = torch.device(device)

    def to(self, device: torch.device | str) -> "MappedSamples":
        return MappedSamples(self.inputs, self.targets, device)

    @property
    def nbytes(self) -> int:
        return self.targets.nbytes  # the inputs are in a file

    @classmethod
    def read(cls, samples: DatasetSamples, file: str | os.PathLike) -> "MappedSamples":
        """Reads a data set once, in worker processes, into a file that is mapped into memory.

        From then on samples are gathered from the file, as from memory, and not from the data set.
        The file is not made anew where the data set changes: give it another name.

        Args:
            samples: The data set, and all of its targets.
            file: An `.npy` file for the inputs, in their own type. If it exists, it is used.

        Raises:
            ConfigError: There are no targets, or the inputs differ in shape or type.

        Example:
            >>> import tempfile
            >>> from torch.utils.data import TensorDataset
            >>> from datamodules import DatasetSamples, MappedSamples
            >>> data = TensorDataset(torch.rand(10, 3), torch.arange(10) % 2)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     samples = DatasetSamples(data, targets=torch.arange(10) % 2)
            ...     len(MappedSamples.read(samples, f"{folder}/inputs.npy"))
            10
        """
        targets, expected = samples.targets, "given, as mapped samples have them in memory"
        require("DatasetSamples.targets", None, targets is not None, expected)
        assert targets is not None
        read = functools.partial(_input, samples.dataset)
        differ = (
            "DatasetSamples.dataset: the inputs of the items {} and {} have the shapes {} and {}"
        )
        items = read_items(read, range(len(samples)), f"{differ}; {ITEMS}", Path(file).expanduser())
        return cls(items, targets)


def train_and_test(
    inputs: np.ndarray, targets: np.ndarray, num_train: int
) -> tuple[TensorSamples, TensorSamples | None]:
    """Returns the first `num_train` samples, and the others, the official test samples, or None.

    Inputs [N, ...] in memory give `TensorSamples`, those mapped from a file `MappedSamples`.
    """
    kind = MappedSamples if isinstance(inputs, np.memmap) else TensorSamples
    x, y = torch.from_numpy(inputs), torch.from_numpy(targets)
    test = kind(x[num_train:], y[num_train:]) if num_train < len(x) else None
    return kind(x[:num_train], y[:num_train]), test


def _input(dataset: Dataset, number: int) -> np.ndarray:
    """Returns the input of an item."""
    inputs, _ = stack_items([dataset[number]])
    return inputs[0].numpy()
