"""Samples in a file that is mapped into memory, for data sets that do not fit there."""

import functools
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import ConfigError
from .images import read_items
from .samples import ITEMS, DatasetSamples, TensorSamples, stack_items


class MappedSamples(TensorSamples):
    """Samples whose inputs are mapped from a file into memory, which need not hold all of them.

    The inputs, such as `numpy.load` with a `mmap_mode` returns, stay on the host; `device` is that
    of the tensors that `gather` returns. Targets are as in `TensorSamples`.

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

        From then on samples are gathered from the file, an `.npy` file of the inputs. If it exists,
        it is used as it is: where the data set changes, give it another name.
        """
        if samples.targets is None:
            raise ConfigError(
                "DatasetSamples.targets: None; it must be given, as mapped samples have their "
                "targets in memory"
            )
        read = functools.partial(_input, samples.dataset)
        inputs = "the inputs of the items {} and {} have the shapes {} and {}"
        differ = f"DatasetSamples.dataset: {inputs}; {ITEMS}"
        items = read_items(read, range(len(samples)), differ, Path(file).expanduser())
        return cls(items, samples.targets)


def train_and_test(
    inputs: np.ndarray, targets: np.ndarray, num_train: int
) -> tuple[TensorSamples, TensorSamples | None]:
    """Returns the first `num_train` samples, and the others, the official test samples, or None.

    Inputs [N, ...] in memory give `TensorSamples`, those mapped from a file `MappedSamples`.
    """
    kind = TensorSamples
    if isinstance(inputs, np.memmap):
        kind = MappedSamples
    x = torch.from_numpy(inputs)
    y = torch.from_numpy(targets)
    test = None
    if num_train < len(x):
        test = kind(x[num_train:], y[num_train:])
    return kind(x[:num_train], y[:num_train]), test


def _input(dataset: Dataset, number: int) -> np.ndarray:
    inputs, _ = stack_items([dataset[number]], [number])
    return inputs[0].numpy()
