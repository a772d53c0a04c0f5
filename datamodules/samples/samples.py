"""Samples of a data set: inputs and targets that can be gathered by index."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset

from ..errors import ConfigError, add_note, error_line, require_value

IGNORED = -100  # a target that counts nowhere if the loss has no `ignore_index`, as in PyTorch

_BLOCK = 1 << 20  # entries that are checked at a time
ITEMS = (
    "all items must be pairs (input, target) of tensors, arrays or numbers, with inputs of one "
    "shape"
)


class Samples(ABC):
    """N pairs of an input and a target.

    Attributes:
        targets: The targets, [N] or [N, ...]: int64 for classes, floating for regression and, as 0
            and 1, for several labels of a sample [N, L]; None only for streamed regression data.

    Example:
        >>> from pfl.datamodules import DigitsDataModule
        >>> samples = DigitsDataModule().samples
        >>> inputs, targets = samples.gather(torch.tensor([[0, 1, 2], [3, 4, 5]]))
        >>> len(samples), inputs.shape, targets.shape
        (1797, torch.Size([2, 3, 1, 8, 8]), torch.Size([2, 3]))
    """

    targets: Tensor | None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def gather(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Returns inputs [*S, ...] and targets [*S, ...] at `index`, int64 of any shape S.

        Inputs stored as uint8, which take a quarter of the memory, become float32: images, which
        have two axes or more, in [0, 1], and rows of a table as they are.
        """

    @abstractmethod
    def to(self, device: torch.device | str) -> "Samples":
        """Returns samples whose method `gather` returns tensors on `device`."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The number of bytes held in memory; 0 for streamed data."""

    @property
    def input_shape(self) -> torch.Size:
        """The shape of one input."""
        return self.gather(torch.zeros(1, dtype=torch.int64))[0].shape[1:]


class TensorSamples(Samples):
    """Samples held in memory.

    Args:
        inputs: Tensor or array [N, ...] of any type; `gather` scales uint8 images to [0, 1].
        targets: Tensor, array or list [N] or [N, ...]; integers and booleans become int64, but
            booleans of several labels, [N, L], become 0 and 1 as float32.

    Example:
        >>> samples = TensorSamples(torch.rand(10, 3), torch.arange(10) % 2)
        >>> inputs, targets = samples.gather(torch.tensor([4, 1]))
        >>> inputs.shape, targets
        (torch.Size([2, 3]), tensor([0, 1]))
    """

    targets: Tensor

    def __init__(
        self, inputs: Tensor | np.ndarray, targets: Tensor | np.ndarray | Sequence[float]
    ) -> None:
        inputs = _as_tensor("TensorSamples.inputs", inputs)
        targets = _as_tensor("TensorSamples.targets", targets)
        shape = tuple(inputs.shape)
        number = 0
        if inputs.ndim:
            number = len(inputs)
        require_value(
            "TensorSamples.inputs.shape", shape, number > 0, "(N, ...) with N > 0 samples"
        )
        shape = tuple(targets.shape)
        expected = f"({number}, ...), one target per input"
        require_value("TensorSamples.targets.shape", shape, shape[:1] == (number,), expected)
        self.inputs = inputs
        self.targets = _as_targets(targets)
        self.device = inputs.device

    def __len__(self) -> int:
        return len(self.targets)

    def gather(self, index: Tensor) -> tuple[Tensor, Tensor]:
        flat = index.reshape(-1).to(self.inputs.device)
        inputs = scaled(self.inputs.index_select(0, flat).to(self.device))
        targets = self.targets.index_select(0, flat).to(self.device)
        return (
            inputs.reshape(index.shape + self.inputs.shape[1:]),
            targets.reshape(index.shape + self.targets.shape[1:]),
        )

    def to(self, device: torch.device | str) -> "TensorSamples":
        inputs = self.inputs.to(device)
        targets = self.targets.to(device)
        if inputs is self.inputs and targets is self.targets:
            return self
        return TensorSamples(inputs, targets)

    @property
    def nbytes(self) -> int:
        return self.inputs.nbytes + self.targets.nbytes


class DatasetSamples(Samples):
    """Samples read one at a time from a data set, which need not fit into memory.

    Args:
        dataset: A map-style torch data set whose items are pairs (input, target) of tensors,
            arrays or numbers, all inputs of one shape.
        targets: All targets, a tensor, array or list [N], required for classification; None means
            regression.
        device: The device of the tensors that `gather` returns.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> dataset = TensorDataset(torch.rand(10, 3), torch.arange(10) % 2)
        >>> samples = DatasetSamples(dataset, targets=torch.arange(10) % 2)
        >>> samples.gather(torch.tensor([4, 1]))[0].shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        dataset: Dataset,
        targets: Tensor | np.ndarray | Sequence[float] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._length = len(dataset)  # type: ignore[arg-type]
        self.targets = None
        if targets is not None:
            targets = _as_tensor("DatasetSamples.targets", targets)
            shape = tuple(targets.shape)
            expected = f"({self._length}, ...), one target per item"
            require_value(
                "DatasetSamples.targets.shape", shape, shape[:1] == (self._length,), expected
            )
            self.targets = _as_targets(targets)
        self.dataset = dataset
        self.device = torch.device(device)

    def __len__(self) -> int:
        return self._length

    def gather(self, index: Tensor) -> tuple[Tensor, Tensor]:
        # For an empty index one item is read all the same, as its shape is needed.
        numbers = index.reshape(-1).tolist() or [0]
        items = []
        for number in numbers:
            try:
                items.append(self.dataset[number])
            except Exception as error:
                add_note(error, f"item {number} of DatasetSamples.dataset")
                raise
        inputs, targets = (column[: index.numel()] for column in stack_items(items, numbers))
        targets = _as_targets(targets)
        return (
            scaled(inputs.to(self.device)).reshape(index.shape + inputs.shape[1:]),
            targets.to(self.device).reshape(index.shape + targets.shape[1:]),
        )

    def to(self, device: torch.device | str) -> "DatasetSamples":
        return DatasetSamples(self.dataset, self.targets, device)

    @property
    def nbytes(self) -> int:
        return 0


def concatenate(first: Samples, second: Samples) -> Samples:
    """Joins training and official test samples; the indices of the latter follow the former."""
    if isinstance(first, TensorSamples) and isinstance(second, TensorSamples):
        for key in ("inputs", "targets"):
            a = getattr(first, key)
            b = getattr(second, key)
            sizes = ", ".join(map(str, ("N", *a.shape[1:])))
            fits = a.shape[1:] == b.shape[1:]
            require_value(f"test_{key}.shape", tuple(b.shape), fits, f"({sizes}), as of {key}")
            require_value(
                f"test_{key}.dtype", b.dtype, a.dtype == b.dtype, f"{a.dtype}, as of {key}"
            )
        kind = TensorSamples
        if type(first) is type(second):
            kind = type(first)
        return kind(_join(first.inputs, second.inputs), torch.cat([first.targets, second.targets]))
    if isinstance(first, DatasetSamples) and isinstance(second, DatasetSamples):
        given = [targets for targets in (first.targets, second.targets) if targets is not None]
        if len(given) == 1:
            raise ConfigError(
                "DatasetSamples.targets: given for only one of training and test samples; they "
                "must be given for both, or for neither"
            )
        joined: Dataset = ConcatDataset([first.dataset, second.dataset])
        all_targets = None
        if given:
            all_targets = torch.cat(given)
        return DatasetSamples(joined, all_targets, first.device)
    raise ConfigError(
        f"Loaded.test: {type(second).__name__}, but Loaded.train is {type(first).__name__}; both "
        "must be TensorSamples, or both DatasetSamples"
    )


def _join(first: Tensor, second: Tensor) -> Tensor:
    """Concatenates tensors; adjacent parts of one tensor are not copied."""
    end = first.data_ptr() + first.nbytes
    whole = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    plain = first.is_contiguous() and second.is_contiguous()
    if not (whole and plain and end == second.data_ptr()):
        return torch.cat([first, second])
    shape = (len(first) + len(second), *first.shape[1:])
    return first.as_strided(shape, first.stride(), first.storage_offset())


def scaled(inputs: Tensor) -> Tensor:
    """Returns uint8 inputs [n, ...] as float32, and inputs of any other type unchanged.

    Inputs of the shape of images are divided by 255.
    """
    if inputs.dtype != torch.uint8:
        return inputs
    if are_scaled(inputs):
        return inputs.float().div_(255)
    return inputs.float()


def are_scaled(inputs: Tensor) -> bool:
    """Returns whether inputs are uint8 of the shape of images: [n, H, W], [n, C, H, W] or more."""
    return inputs.dtype == torch.uint8 and inputs.ndim > 2


def check_finite(
    key: str, values: Tensor, place: Callable[[int, Tensor], str] = lambda sample, wrong: ""
) -> None:
    """Raises a ConfigError if floating `values` [N, ...] contain NaN or infinite numbers.

    Args:
        key: What the values are called.
        values: The values.
        place: Returns where else a sample is to be found, in brackets, from its number and from
            which of its values are wrong.
    """
    if not values.is_floating_point() or not values.numel():
        return
    # `isfinite` takes much memory and time. A finite sum shows that all values of a block are.
    bad = 0
    for block in values.split(max(1, _BLOCK // values[0].numel())):
        if not block.sum(dtype=torch.float32).isfinite():
            bad += int((~block.reshape(len(block), -1).isfinite().all(1)).sum())
    if bad:
        wrong = ~values.reshape(len(values), -1).isfinite()
        sample = int(wrong.any(1).int().argmax())
        raise ConfigError(
            f"{key}: NaN or infinite values (as {str(values.dtype).removeprefix('torch.')}) in "
            f"{bad} of {len(values)} samples, first in sample {sample}"
            f"{place(sample, wrong[sample])}; all values must be finite"
        )


def _as_tensor(key: str, values: Any) -> Tensor:
    try:
        found = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, LookupError) as error:
        raise ConfigError(
            f"{key}: an object of type {type(values).__name__}; it must be a tensor, or numbers "
            f"that torch.as_tensor accepts{_array_of(values)}: {error_line(error)}"
        ) from error
    expected = "a dense tensor, as to_dense() makes one"
    given = f"a tensor of the layout {found.layout}"
    require_value(key, given, found.layout == torch.strided, expected)
    return found


def _array_of(values: Any) -> str:
    """Returns how an object of pandas or SciPy becomes an array, for an error."""
    for name in ("to_numpy", "toarray"):
        if hasattr(values, name):
            return f", as its {name}() gives"
    return ""


def _as_targets(targets: Tensor) -> Tensor:
    """Returns targets [N, ...] as classes (int64), or as values or several labels (floating)."""
    if targets.dtype == torch.bool and targets.ndim > 1:
        return targets.float()
    if targets.is_floating_point():
        return targets
    return targets.long()


def stack_items(items: list[Any], numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Stacks the inputs and the targets of several items, whose numbers errors tell."""
    for number, item in zip(numbers, items, strict=True):
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise ConfigError(
                f"DatasetSamples.dataset: an item is {_kind(item)}, item {number}; {ITEMS}"
            )
    try:
        columns = zip(*items, strict=True)
        inputs, targets = (torch.stack([torch.as_tensor(v) for v in c]) for c in columns)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"DatasetSamples.dataset: an item is {_kind(items[0])}{_odd_item(items, numbers)}; "
            f"{ITEMS}: {error_line(error)}"
        ) from error
    return inputs, targets


def _odd_item(items: list[Any], numbers: Sequence[int]) -> str:
    """Returns which item has another shape than most of them, for an error."""
    shapes = [tuple(np.shape(part) for part in item) for item in items]
    usual = max(shapes, key=shapes.count)
    for number, shape in zip(numbers, shapes, strict=True):
        if shape != usual:
            return f", and item {number} has the shapes {shape}, others {usual}"
    return ""


def _kind(item: Any) -> str:
    name = type(item).__name__
    if isinstance(item, tuple | list):
        return f"a {name} of {', '.join(type(value).__name__ for value in item)}"
    return f"of type {name}"
