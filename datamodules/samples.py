"""What a data set gives: inputs and targets that can be gathered by index."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset

from datamodules.errors import ConfigError

_BLOCK = 1 << 20  # entries that are looked through at a time
_ITEMS = (
    "the data set's items must be pairs (input, target) of tensors, arrays or numbers, the "
    "inputs all of one shape"
)


class Samples(ABC):
    """N pairs of an input and a target.

    Attributes:
        targets: The targets on the host or device, [N] or [N, ...]: int64 for classes, float for
            regression; None only for streamed regression data.
    """

    targets: Tensor | None

    @abstractmethod
    def __len__(self) -> int:
        """Return N."""

    @abstractmethod
    def gather(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the samples at ``index``.

        Images stored as uint8 come out as float32 in [0, 1]: they are scaled here, batch by
        batch, and so take a quarter of the memory.

        Args:
            index: int64 of any shape S.

        Returns:
            inputs [*S, ...] and targets [*S, ...].
        """

    @abstractmethod
    def to(self, device: torch.device | str) -> "Samples":
        """Return samples whose ``gather`` answers on ``device``."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held in memory; 0 for streamed data."""

    @property
    def input_shape(self) -> torch.Size:
        """Shape of one input, without a batch axis."""
        return self.gather(torch.zeros(1, dtype=torch.int64))[0].shape[1:]


class TensorSamples(Samples):
    """Samples held in memory.

    Args:
        inputs: Tensor or array [N, ...] of any type; uint8 is scaled to [0, 1] by ``gather``.
        targets: Tensor, array or list [N] or [N, ...]; integers (and bool) become int64.

    Raises:
        ConfigError: The numbers of inputs and targets differ, or there are none.
    """

    targets: Tensor

    def __init__(
        self, inputs: Tensor | np.ndarray, targets: Tensor | np.ndarray | Sequence[float]
    ) -> None:
        inputs, targets = _as_tensor("inputs", inputs), _as_tensor("targets", targets)
        if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) != len(targets) or not len(inputs):
            raise ConfigError(
                f"inputs of shape {tuple(inputs.shape)} and targets of shape "
                f"{tuple(targets.shape)} need the same, non-zero number of samples"
            )
        self.inputs = inputs
        self.targets = targets if targets.is_floating_point() else targets.long()

    def __len__(self) -> int:
        """Return N."""
        return len(self.targets)

    def gather(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the samples at ``index``; see ``Samples.gather``."""
        flat = index.reshape(-1).to(self.inputs.device)
        inputs = scaled(self.inputs.index_select(0, flat))
        targets = self.targets.index_select(0, flat)
        return (
            inputs.reshape(index.shape + self.inputs.shape[1:]),
            targets.reshape(index.shape + self.targets.shape[1:]),
        )

    def to(self, device: torch.device | str) -> "TensorSamples":
        """Return a copy on ``device``, or this object if it is there already."""
        inputs, targets = self.inputs.to(device), self.targets.to(device)
        if inputs is self.inputs and targets is self.targets:
            return self
        return TensorSamples(inputs, targets)

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return self.inputs.nbytes + self.targets.nbytes


class DatasetSamples(Samples):
    """Samples read one at a time from a data set that does not fit into memory.

    Args:
        dataset: A map-style torch data set whose items are pairs (input, target) of tensors,
            arrays or numbers, all inputs of one shape.
        targets: All targets, a tensor, array or list [N], if known without reading every item.
            They are needed for classification; None means regression.
        device: Where ``gather`` puts what it returns.

    Raises:
        ConfigError: The numbers of items and targets differ.
    """

    def __init__(
        self,
        dataset: Dataset,
        targets: Tensor | np.ndarray | Sequence[float] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._length = len(dataset)  # type: ignore[arg-type]
        if targets is not None:
            targets = _as_tensor("targets", targets)
        if targets is not None and targets.shape[:1] != (self._length,):
            raise ConfigError(
                f"targets of shape {tuple(targets.shape)} do not fit a data set of "
                f"{self._length} items"
            )
        self.dataset = dataset
        if targets is not None and not targets.is_floating_point():
            targets = targets.long()
        self.targets = targets
        self.device = torch.device(device)

    def __len__(self) -> int:
        """Return N."""
        return self._length

    def gather(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Read the items at ``index`` one by one; see ``Samples.gather``.

        Raises:
            ConfigError: The items are not pairs that can be stacked.
        """
        # An empty index still needs the shape of an item.
        items = [self.dataset[i] for i in index.reshape(-1).tolist() or [0]]
        inputs, targets = (column[: index.numel()] for column in _stack(items))
        if not targets.is_floating_point():
            targets = targets.long()
        return (
            scaled(inputs.to(self.device)).reshape(index.shape + inputs.shape[1:]),
            targets.to(self.device).reshape(index.shape + targets.shape[1:]),
        )

    def to(self, device: torch.device | str) -> "DatasetSamples":
        """Return samples that stay on the host and answer on ``device``."""
        return DatasetSamples(self.dataset, self.targets, device)

    @property
    def nbytes(self) -> int:
        """Return 0: nothing is held."""
        return 0


def concatenate(first: Samples, second: Samples) -> Samples:
    """Join two sets of samples into one index space, ``first`` before ``second``.

    Raises:
        ConfigError: One is streamed and the other is not, or their inputs or targets differ in
            shape or type.
    """
    if isinstance(first, TensorSamples) and isinstance(second, TensorSamples):
        for key in ("inputs", "targets"):
            a, b = getattr(first, key), getattr(second, key)
            if a.shape[1:] != b.shape[1:] or a.dtype != b.dtype:
                raise ConfigError(
                    f"test_{key} of shape {tuple(b.shape)} and type {b.dtype} do not fit {key} "
                    f"of shape {tuple(a.shape)} and type {a.dtype}"
                )
        return TensorSamples(
            torch.cat([first.inputs, second.inputs]), torch.cat([first.targets, second.targets])
        )
    if isinstance(first, DatasetSamples) and isinstance(second, DatasetSamples):
        if (first.targets is None) != (second.targets is None):
            raise ConfigError("targets are given for only one of the training and test samples")
        targets = None
        if first.targets is not None and second.targets is not None:
            targets = torch.cat([first.targets, second.targets])
        joined: Dataset = ConcatDataset([first.dataset, second.dataset])
        return DatasetSamples(joined, targets, first.device)
    raise ConfigError(
        f"training samples are {type(first).__name__} but test samples are "
        f"{type(second).__name__}; use one of TensorSamples and DatasetSamples for both"
    )


def scaled(inputs: Tensor) -> Tensor:
    """Turn uint8 into float32 in [0, 1]; leave every other type alone."""
    return inputs.float().div_(255) if inputs.dtype == torch.uint8 else inputs


def check_finite(key: str, values: Tensor) -> None:
    """Raise ConfigError if floating ``values`` [N, ...] hold NaN or infinite numbers."""
    if not values.is_floating_point() or not values.numel():
        return
    # Block by block, as `isfinite` takes memory and time; a sum that is finite shows the same.
    bad = 0
    for block in values.split(max(1, _BLOCK // values[0].numel())):
        if not block.sum(dtype=torch.float32).isfinite():
            bad += int((~block.reshape(len(block), -1).isfinite().all(1)).sum())
    if bad:
        raise ConfigError(
            f"{key} hold NaN or infinite values (as {str(values.dtype).removeprefix('torch.')}) in "
            f"{bad} of {len(values)} samples; all must be finite"
        )


def _as_tensor(key: str, values: Any) -> Tensor:
    """Turn an array or a list into a tensor."""
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{key} of type {type(values).__name__} must be a tensor, or numbers that "
            f"torch.as_tensor takes: {_line(error)}"
        ) from error


def _stack(items: list[Any]) -> tuple[Tensor, Tensor]:
    """Stack the inputs and the targets of several items."""
    for item in items:
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise ConfigError(f"{_ITEMS}, but one is {_kind(item)}")
    try:
        inputs, targets = (
            torch.stack([torch.as_tensor(value) for value in column])
            for column in zip(*items, strict=True)
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{_ITEMS}, but one is {_kind(items[0])}: {_line(error)}") from error
    return inputs, targets


def _kind(item: Any) -> str:
    """Say what an item consists of."""
    name = type(item).__name__
    if isinstance(item, tuple | list):
        return f"a {name} of {', '.join(type(value).__name__ for value in item)}"
    return f"of type {name}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
