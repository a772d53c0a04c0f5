"""Federated data modules for a user's own tensors, arrays or `.npz` file."""

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..base import FederatedDataModule
from ..errors import ConfigError, error_line, require_value
from ..rules.sample_values import add_rule
from ..samples.loaded import Loaded, NewSamples
from ..samples.samples import TensorSamples, are_scaled


class TensorDataModule(FederatedDataModule):
    """A data set given as tensors, or as NumPy arrays whose types are kept.

    Integer targets are classes, which keep their numbers: the largest one decides how many outputs
    a network needs, and a run says if classes below it do not occur. Floating targets mean
    regression; booleans [N, L] are L labels of a sample, floating 0 and 1 (docs/metrics.md). Inputs
    of type uint8 are stored as uint8, and become float32 in every batch. Those of the shape of
    images, [N, H, W] or [N, C, H, W], are divided by 255; those of a table, [N, F], are not.

    Args:
        inputs: Training inputs [N, ...].
        targets: Training targets [N] or [N, ...].
        test_inputs, test_targets: The official test set, if there is one.
        client_ids: The client of each training sample, or of each sample (training samples first),
            numbers or text. If neither `partition` nor `num_clients` is given, each id is a client,
            as with `Natural()`.

    Example:
        >>> inputs, targets = torch.rand(100, 8), torch.arange(100) % 2
        >>> data = TensorDataModule(inputs, targets, num_clients=5)
        >>> data.num_classes, data.client_sizes.tolist()
        (2, [14, 14, 14, 14, 14])
    """

    tells_scale = True

    def __init__(
        self,
        inputs: Tensor | np.ndarray,
        targets: Tensor | np.ndarray,
        test_inputs: Tensor | np.ndarray | None = None,
        test_targets: Tensor | np.ndarray | None = None,
        client_ids: np.ndarray | None = None,
        **kwargs: Any,
    ) -> None:
        add_rule(client_ids is not None, kwargs)
        super().__init__(**kwargs)
        arrays = (inputs, targets, test_inputs, test_targets, client_ids)
        self._loaded = _as_loaded(dict(zip(_KEYS, arrays, strict=True)))
        self.conversions = _unused_classes(self._loaded)

    def load(self) -> Loaded:
        return self._loaded


class ArrayDataModule(FederatedDataModule):
    """A data set given as NumPy arrays, or as an `.npz` file of NumPy arrays.

    The arguments are those of `TensorDataModule`, but inputs and targets of type float64 (or wider)
    become float32. Whole numbers from 2**24 on are no classes, and refused as targets [N]. Masked
    values are NaN.

    `np.savez("mine.npz", inputs=x, targets=y)` writes such a file.

    Args:
        file: Path of an `.npz` file whose arrays have the names of the arguments, instead of them.
        missing: What becomes of samples with NaN, where a value is missing. "refuse" refuses them.
            "drop" leaves them out. "mean" gives an input of a table, [N, F], the mean of its column
            over its client's training samples; a sample without target is still refused.

    Example:
        >>> from pfl.datamodules import Dirichlet
        >>> x, y = np.random.rand(100, 8), np.arange(100) % 2
        >>> data = ArrayDataModule(x, y, num_clients=2, partition=Dirichlet(0.3))
        >>> data.samples.inputs.dtype, data.num_clients
        (torch.float32, 2)
    """

    tells_scale = True

    def __init__(
        self,
        inputs: np.ndarray | None = None,
        targets: np.ndarray | None = None,
        test_inputs: np.ndarray | None = None,
        test_targets: np.ndarray | None = None,
        client_ids: np.ndarray | None = None,
        file: str | os.PathLike | None = None,
        missing: Literal["refuse", "drop", "mean"] = "refuse",
        **kwargs: Any,
    ) -> None:
        add_rule(client_ids is not None or has_ids(file), kwargs)
        super().__init__(**kwargs)
        self.missing = missing
        arrays = zip(_KEYS, (inputs, targets, test_inputs, test_targets, client_ids), strict=True)
        given = {key: _array(key, value) for key, value in arrays if value is not None}
        key = "ArrayDataModule.file"
        self._file: Path | None = None
        if file is not None:
            require_value(key, str(file), not given, f"None, as {', '.join(given)} are given")
            self._file = Path(file).expanduser()
            require_value(key, str(file), self._file.is_file(), "the path of an existing .npz file")
        else:
            self._loaded = self._convert("an array, as there is no file", given)

    def load(self) -> Loaded:
        if self._file is None:
            return self._loaded
        return self._convert(f"an array in {str(self._file)!r}", _read(self._file))

    def new_samples(self, path: Path) -> NewSamples:
        """Reads the array `inputs` of an `.npz` file, perhaps with `client_ids`.

        With `missing: mean` NaN are missing values, and else refused.
        """
        if path.suffix != ".npz":
            raise ConfigError("it must be an .npz file")
        arrays = _read(path)
        require_value("inputs", None, "inputs" in arrays, f"an array in {str(path)!r}")
        inputs = _tensor("inputs", arrays["inputs"])
        samples = self.samples
        assert isinstance(samples, TensorSamples)
        expected = f"{samples.inputs.dtype}, as the run's"
        holds = inputs.dtype == samples.inputs.dtype
        require_value("inputs.dtype", inputs.dtype, holds, expected)
        values = inputs.numpy()
        gaps = np.argwhere(_gaps(values))
        if self.missing != "mean" and len(gaps):
            sample = int(gaps[0][0])
            raise ConfigError(f"sample {sample} has no value in a place; a prediction needs all")
        clients = None
        if "client_ids" in arrays:
            clients = [str(client) for client in arrays["client_ids"].tolist()]
            number = len(clients)
            expected = f"{len(values)}, one for each sample"
            require_value("number of client_ids", number, number == len(values), expected)
        ids = {"sample": np.arange(len(values))}
        return NewSamples(values, ids, clients, "client_ids in the file")

    def _convert(self, expected: str, arrays: dict[str, np.ndarray]) -> Loaded:
        """Converts arrays, by name, and notes which are rounded; `expected` is for an error."""
        for key in ("inputs", "targets"):
            require_value(f"ArrayDataModule.{key}", None, key in arrays, expected)
        left_out = ""
        if self.missing == "drop":
            arrays, left_out = _without_gaps(arrays)
        missing = None
        if self.missing == "mean":
            arrays, missing = _with_zeros(arrays)
        tensors = {key: _tensor(key, array) for key, array in arrays.items() if key != "client_ids"}
        wide = [key for key, t in tensors.items() if t.element_size() < arrays[key].dtype.itemsize]
        self.rounded_arrays = [k for k in wide if (arrays[k] != tensors[k].numpy()).any()]
        self.conversions = []
        if left_out:
            self.conversions.append(left_out)
        for key in self.rounded_arrays:
            self.conversions.append(f"{key}: rounded from {arrays[key].dtype} to float32")
        for key in ("inputs", "test_inputs"):
            if key in tensors and are_scaled(tensors[key]):
                self.conversions.append(f"{key}: uint8 images, divided by 255")
        loaded = _as_loaded({**arrays, **tensors})
        self.conversions += _unused_classes(loaded)
        return loaded._replace(missing=missing)


_KEYS = ("inputs", "targets", "test_inputs", "test_targets", "client_ids")


def has_ids(file: str | os.PathLike | None) -> bool:
    """Returns whether an `.npz` file has ids of clients; of another file `load` says what it is."""
    if file is None or not zipfile.is_zipfile(path := Path(file).expanduser()):
        return False
    with zipfile.ZipFile(path) as stored:
        return "client_ids.npy" in stored.namelist()


def _read(path: Path) -> dict[str, np.ndarray]:
    key = f"ArrayDataModule.file: {str(path)!r}"
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: _read_array(key, stored, name) for name in stored.files}
    except ConfigError:
        raise
    except Exception as error:  # NumPy and zipfile raise many types for files of other formats
        expected = "an .npz file of plain arrays, as numpy.savez writes"
        raise ConfigError(f"{key}; it must be {expected}") from error
    if unknown := ", ".join(sorted(arrays.keys() - set(_KEYS))):
        raise ConfigError(f"{key} holds {unknown}; it must hold only {', '.join(_KEYS)}")
    return arrays


def _read_array(key: str, stored: Any, name: str) -> np.ndarray:
    try:
        return stored[name]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        kind = '"float32"'
        if name == "client_ids":
            kind = "str"
        # `astype(str)` of pandas gives objects again.
        raise ConfigError(
            f"{key}: the array {name} is of Python objects, as pandas gives text; it must be saved "
            f"as np.array({name}, {kind})"
        ) from error


def _array(key: str, value: Any) -> np.ndarray:
    """Returns what is given as an array, with NaN for values of a masked array that are masked."""
    if np.ma.is_masked(value):
        kind = f"{value.dtype}, with {np.ma.count_masked(value)} masked values"
        expected = "floating, where values are masked"
        require_value(f"ArrayDataModule.{key}", kind, value.dtype.kind == "f", expected)
        return value.filled(np.nan)
    given = f"an object of type {type(value).__name__}"
    expected = "an array, as its toarray() gives"
    require_value(f"ArrayDataModule.{key}", given, not hasattr(value, "toarray"), expected)
    try:
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:  # lists of several lengths, tensors
        raise ConfigError(
            f"ArrayDataModule.{key}: {error_line(error)}; it must be an array, or lists of one "
            "length"
        ) from error


def _gaps(values: np.ndarray) -> np.ndarray:
    """Returns where floating values are NaN, and False of other types."""
    if values.dtype.kind == "f":
        return np.isnan(values)
    return np.zeros(values.shape, bool)


def _without_gaps(arrays: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], str]:
    """Returns arrays without the samples that lack a value, and a line about how many they are."""
    result = dict(arrays)
    kept = []
    for prefix in ("", "test_"):
        names = [name for name in (f"{prefix}inputs", f"{prefix}targets") if name in arrays]
        if not names:
            continue
        if len({len(arrays[name]) for name in names}) > 1:  # this is refused later
            return arrays, ""
        gaps = np.zeros(len(arrays[names[0]]), bool)
        for name in names:
            gaps |= _gaps(arrays[name]).reshape(len(gaps), -1).any(1)
        for name in names:
            result[name] = arrays[name][~gaps]
        kept.append(~gaps)
    whole = np.concatenate(kept)
    if whole.all():
        return arrays, ""
    if "client_ids" in arrays:  # of the training samples, or of all
        ids = arrays["client_ids"]
        number = len(kept[0])
        expected = f"({number},), one id per training sample, or per sample"
        holds = len(ids) in (number, len(whole))
        require_value("ArrayDataModule.client_ids.shape", ids.shape, holds, expected)
        result["client_ids"] = ids[whole[: len(ids)]]
    expected = "'refuse' or 'mean', as each training sample lacks a value"
    require_value("ArrayDataModule.missing", "drop", len(result["inputs"]) > 0, expected)
    return result, f"{(~whole).sum()} of {len(whole)} samples are left out, as they have NaN"


def _with_zeros(arrays: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns arrays with 0 for NaN in the inputs, and where NaN was, [N, F] of all samples."""
    result = dict(arrays)
    parts = []
    for name in ("inputs", "test_inputs"):
        if name not in arrays:
            continue
        values = arrays[name]
        expected = "'refuse' or 'drop', as only inputs of a table, [N, F], have columns"
        require_value("ArrayDataModule.missing", "mean", values.ndim == 2, expected)
        gaps = _gaps(values)
        result[name] = np.where(gaps, 0, values)
        parts.append(gaps)
    return result, np.concatenate(parts)


def _tensor(key: str, array: np.ndarray) -> Tensor:
    """Converts an array to a tensor; float64 and wider types become float32."""
    is_number = array.dtype.kind in "biuf"
    require_value(f"ArrayDataModule.{key}.dtype", array.dtype, is_number, "a type of numbers")
    if array.dtype.kind == "f" and array.dtype.itemsize > 4:
        with np.errstate(over="ignore"):  # infinite values raise an error when the data are loaded
            array = array.astype(np.float32)
    if array.dtype.kind == "u" and array.dtype != np.uint8:
        most = int(array.max(initial=0))
        expected = "below 2**63, or floating numbers"
        require_value(f"ArrayDataModule.{key}: the largest value", most, most < 2**63, expected)
        array = array.astype(np.int64)
    # A file may have the other byte order, which PyTorch does not accept.
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    # Arrays of pandas cannot be written to, of which PyTorch warns.
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def _as_loaded(given: Mapping[str, Any]) -> Loaded:
    """Builds the samples of a data set from its arrays by name, of which some may be missing."""
    arrays: dict[str, Any] = {**dict.fromkeys(_KEYS), **given}
    for missing, other in (("test_inputs", "test_targets"), ("test_targets", "test_inputs")):
        if arrays[missing] is None and arrays[other] is not None:
            raise ConfigError(f"{missing}: None; it must be given, as {other} is")
    test = arrays["test_inputs"]
    ids = arrays["client_ids"]
    train = TensorSamples(arrays["inputs"], arrays["targets"])
    if test is not None:
        test = TensorSamples(test, arrays["test_targets"])
    if ids is not None:
        ids = np.asarray(ids)
    return Loaded(train, test, ids)


def _unused_classes(loaded: Loaded) -> list[str]:
    """Returns a line about classes [N] below the largest one that do not occur; none without."""
    found: set[int] = set()
    for samples in (loaded.train, loaded.test):
        if samples is None or samples.targets is None:
            continue
        targets = samples.targets
        if targets.is_floating_point() or targets.ndim != 1:
            return []
        found |= set(map(int, targets.unique().tolist()))
    largest = max(found, default=-1)
    if min(found, default=-1) < 0 or len(found) > largest:  # negative ones are refused later
        return []
    return [
        f"targets: {len(found)} of the classes 0 to {largest} occur; they keep their numbers, so "
        f"that a network needs {largest + 1} outputs"
    ]
