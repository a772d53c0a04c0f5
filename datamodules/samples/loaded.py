"""What the method `load` of a data module returns, and the checks of it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from ..errors import ConfigError, require_value
from .samples import Samples, TensorSamples, are_scaled, check_finite

_PIXELS = 64  # so many columns of uint8 may be images, as small as 8x8
_MOST_CLASSES = 2**24  # larger whole numbers are ids, times or prices


class Loaded(NamedTuple):
    """The samples of a data set.

    Attributes:
        train: The training samples.
        test: The official test samples, or None if the data set has none.
        client_ids: For `Natural`: the client of each training sample, or of each sample (training
            samples first), numbers or text [N]; or None.
        columns: Further values of each training sample, or of each sample, by name: numbers or
            text [N], for rules such as `Natural("hospital")` and `ByValue("age")`; or None.
        class_names: The names of the classes, in the order of their numbers; or None.
        missing: Which values of the inputs [N, F] of all samples, the training samples first, are
            missing; each becomes the mean of its column over its client's training samples, also in
            rows that are predicted later; or None.

    Example:
        >>> from pfl.datamodules import TensorSamples
        >>> loaded = Loaded(TensorSamples(torch.rand(10, 3), torch.arange(10) % 2))
        >>> len(loaded.train), loaded.test
        (10, None)
    """

    train: Samples
    test: Samples | None = None
    client_ids: np.ndarray | None = None
    columns: Mapping[str, np.ndarray] | None = None
    class_names: Sequence[str] | None = None
    missing: np.ndarray | None = None


class NewSamples(NamedTuple):
    """Samples of a file that a run has not seen, perhaps without targets, as for `pfl predict`.

    Attributes:
        inputs: Inputs as those of `Loaded`, [n, ...]; NaN where a value is missing.
        ids: Columns that tell the samples apart, by name, the main one first: values [n].
        clients: The name of the client that each sample names, [n]; None: they name none.
        naming: How samples name their clients, for a message; "": they cannot.
        columns: The columns of the file by name, of which each may be the id: values [n]; None:
            it has none.

    Example:
        >>> samples = NewSamples(np.zeros((2, 3), np.float32), {"sample": np.arange(2)})
        >>> len(samples.inputs), samples.clients
        (2, None)
    """

    inputs: np.ndarray
    ids: Mapping[str, np.ndarray]
    clients: Sequence[str] | None = None
    naming: str = ""
    columns: Mapping[str, np.ndarray] | None = None


def check_loaded(name: str, loaded: object, columns: Sequence[str] | None = None) -> None:
    """Checks the result of `load` of the data module `name`, and warns of what looks wrong.

    `columns` are the names of the inputs' values, if they have names.
    """
    if not isinstance(loaded, Loaded):
        raise ConfigError(
            f"{name}.load: returned {type(loaded).__name__}; it must return "
            "pfl.datamodules.Loaded(train, test)"
        )
    for prefix, samples in {"": loaded.train, "test_": loaded.test}.items():
        if prefix and samples is None:  # there is no official test set
            continue
        if not isinstance(samples, Samples):
            raise ConfigError(
                f"{name}.load: returned a Loaded of {type(samples).__name__}; it must hold "
                "TensorSamples(inputs, targets) or DatasetSamples(dataset, targets)"
            )
        if isinstance(samples, TensorSamples):
            first = 0
            if prefix:
                first = len(loaded.train)
            check_finite(f"{prefix}inputs", samples.inputs, partial(_place, loaded, first, columns))
            place = partial(_place, loaded, first, None)
            check_finite(key := f"{prefix}targets", samples.targets, place)
            _check_classes(key, samples.targets, place)
            if _is_one_hot(samples.targets):
                n, classes = samples.targets.shape  # each sample would have that many targets
                raise ConfigError(
                    f"{key}: one-hot rows of shape {(n, classes)}; they must be the numbers of the "
                    f"classes, of shape ({n},): {key}.argmax(1)"
                )
    if loaded.class_names is None:  # named classes are numbered already
        for remark in _remarks(loaded.train, loaded.test):
            rank_zero_warn(f"{name}: {remark}", category=UserWarning)


def owner_of(loaded: Loaded, sample: int) -> str | None:
    """Returns the id of the client that the data set names for a sample, as text."""
    ids = loaded.client_ids
    if ids is None or sample >= len(ids):
        return None
    return str(np.asarray(ids)[sample])


def _place(
    loaded: Loaded, first: int, columns: Sequence[str] | None, sample: int, wrong: Tensor
) -> str:
    """Returns the client and the first wrong column of a sample, in brackets.

    Args:
        loaded: The data set.
        first: The number of the first of the samples among all.
        columns: The names of the values, or None.
        sample: The number of the sample, after the first one.
        wrong: Which of its values are wrong, bool [F].
    """
    parts = []
    client = owner_of(loaded, first + sample)
    if client is not None:
        parts.append(f"of the client {client!r}")
    if columns is not None and len(columns) == len(wrong):
        parts.append(f"in the column {columns[int(wrong.int().argmax())]!r}")
    if not parts:
        return ""
    return f" ({', '.join(parts)})"


def _check_classes(key: str, targets: Tensor, place: Callable[[int, Tensor], str]) -> None:
    """Refuses negative and huge classes of samples that have one class each."""
    if targets.is_floating_point() or targets.ndim != 1 or not len(targets):
        return
    sample = int(targets.argmin())
    least = int(targets[sample])
    if least < 0:
        raise ConfigError(
            f"{key}: smallest target: {least}; it must be at least 0, as integer targets are "
            f"classes: sample {sample}{place(sample, targets[sample : sample + 1] < 0)}"
        )
    sample = int(targets.argmax())
    most = int(targets[sample])
    if most >= _MOST_CLASSES:
        raise ConfigError(
            f"{key}: largest target: {most}; it must be below {_MOST_CLASSES}, as integer targets "
            "are classes, which count from 0, and values of a regression must be floating numbers: "
            f"sample {sample}{place(sample, targets[sample : sample + 1] >= _MOST_CLASSES)}"
        )


def told_scale(inputs: Tensor) -> str:
    """Says whether inputs of type uint8 are divided by 255, for the description of a data set."""
    if inputs.dtype != torch.uint8:
        return ""
    if are_scaled(inputs):
        return "; uint8 inputs of the shape of images, divided by 255"
    return "; uint8 inputs of a table, not divided by 255"


def rule_columns(loaded: Loaded) -> dict[str, np.ndarray]:
    """Returns the values of the samples that rules may need, by name."""
    columns = {name: np.asarray(values) for name, values in (loaded.columns or {}).items()}
    if loaded.client_ids is not None:
        columns["client_ids"] = np.asarray(loaded.client_ids)
    return columns


def host_targets(samples: Samples) -> np.ndarray:
    """Returns the targets as an array; NaN [N] for regression targets that are only streamed."""
    if samples.targets is None:
        return np.full(len(samples), np.nan, np.float32)
    targets = samples.targets.cpu().numpy()
    if targets.dtype.kind == "i" and targets.ndim == 1:
        least = int(targets.min())
        require_value(
            "smallest target", least, least >= 0, "at least 0, as integer targets are classes"
        )
    return targets


def _remarks(train: Samples, test: Samples | None) -> list[str]:
    """Returns sentences about samples that can be used, but are probably not what was meant."""
    found = []
    targets = train.targets
    if targets is not None and not targets.is_floating_point() and targets.ndim == 1:
        both = [targets]
        if test is not None and test.targets is not None:
            both.append(test.targets)
        classes = torch.cat(both)
        if classes.min() == 1 and 2 <= classes.max() == len(classes := classes.unique()):
            found.append(
                f"the classes are 1 to {len(classes)}, and none is 0; classes count from 0, so a "
                f"network needs {len(classes) + 1} outputs unless 1 is subtracted from the targets"
            )
    if isinstance(train, TensorSamples) and train.inputs.ndim == 4:
        _, channels, height, width = train.inputs.shape
        if width in (1, 3) and channels == height > 4:
            found.append(
                f"the inputs have the shape {tuple(train.inputs.shape)}, which looks like images "
                "with the channels last; PyTorch's networks need [N, C, H, W]"
            )
    if isinstance(train, TensorSamples) and train.inputs.dtype == torch.uint8:
        size = train.inputs[0].numel()
        if train.inputs.ndim == 2 and size >= _PIXELS:
            found.append(
                f"the inputs, uint8 [N, {size}], are taken for a table, and are not divided by "
                "255; images need the shape [N, C, H, W]"
            )
    if isinstance(train, TensorSamples) and isinstance(test, TensorSamples):
        same = torch.equal(train.targets, test.targets) and torch.equal(train.inputs, test.inputs)
        if same and (train.inputs[1:] != train.inputs[:1]).any():  # and not all of them are equal
            found.append("the official test samples are the training samples")
    return found


def _is_one_hot(targets: Tensor) -> bool:
    """Returns whether each row [N, K] has a 1 and otherwise 0, and not always at one place."""
    if targets.ndim != 2 or targets.shape[1] < 2:
        return False
    ones = targets == 1
    alone = (ones.sum(1) == 1).all() and (ones | (targets == 0)).all()
    return bool(alone) and bool((ones.sum(0) > 0).sum() > 1)
