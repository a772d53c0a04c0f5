"""Federated data modules for a user's own tensors, arrays or ``.npz`` file."""

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from datamodules.base import FederatedDataModule, Loaded
from datamodules.errors import ConfigError
from datamodules.partitioners import Partitioner
from datamodules.protocols import Protocol
from datamodules.samples import TensorSamples


class TensorDataModule(FederatedDataModule):
    """A data set given as tensors, or as numpy arrays that are taken as they are.

    Integer targets are classes, float targets are regression. Inputs of type uint8 are images:
    they are kept as they are and scaled to float32 in [0, 1] batch by batch.

    Args:
        inputs: Training inputs [N, ...].
        targets: Training targets [N] or [N, ...].
        test_inputs: Inputs of the official test set, if there is one.
        test_targets: Its targets.
        client_ids: For ``Natural``: the client of each training sample, or of each sample
            (training, then test).
        num_clients: M; None takes one client per id with ``partition=Natural()``.
        partition: The rule that deals samples to clients; None is ``IID()``.
        protocol: What every client is tested on; None is ``SplitOwn()``.
        batch_size: Samples per batch of the loaders; None loads everything as one batch.
        seed: Seed of the partition and of the order of training samples; None is 0.
        num_workers: Worker processes of the loaders.

    Raises:
        ConfigError: The tensors do not fit one another.
    """

    def __init__(
        self,
        inputs: Tensor | np.ndarray,
        targets: Tensor | np.ndarray,
        test_inputs: Tensor | np.ndarray | None = None,
        test_targets: Tensor | np.ndarray | None = None,
        client_ids: np.ndarray | None = None,
        num_clients: int | None = None,
        partition: Partitioner | None = None,
        protocol: Protocol | None = None,
        batch_size: int | None = 32,
        seed: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__(num_clients, partition, protocol, batch_size, seed, num_workers)
        ids = None if client_ids is None else np.asarray(client_ids)
        self._loaded = _loaded(inputs, targets, test_inputs, test_targets, ids)

    def load(self) -> Loaded:
        """Return the samples that were given."""
        return self._loaded


class ArrayDataModule(FederatedDataModule):
    """A data set given as numpy arrays, or as an ``.npz`` file that holds them.

    In Python::

        ArrayDataModule(x, y, num_clients=10, partition=Dirichlet(0.3))

    On the command line, with ``np.savez("mine.npz", inputs=x, targets=y)``::

        data:
          class_path: ArrayDataModule
          init_args: {file: mine.npz, num_clients: 10, partition: IID}

    Integer targets are classes, float targets are regression. Inputs of type uint8 are images:
    they are kept as they are and scaled to float32 in [0, 1] batch by batch. Inputs and targets of
    type float64 (or wider) become float32.

    Args:
        inputs: Training inputs [N, ...].
        targets: Training targets [N] or [N, ...].
        test_inputs: Inputs of the official test set, if there is one.
        test_targets: Its targets.
        client_ids: For ``Natural``: the client of each training sample, or of each sample
            (training, then test), numbers or text.
        file: Path of an ``.npz`` file with arrays of these names, instead of the arrays.
        num_clients: M; None takes one client per id with ``partition=Natural()``.
        partition: The rule that deals samples to clients; None is ``IID()``.
        protocol: What every client is tested on; None is ``SplitOwn()``.
        batch_size: Samples per batch of the loaders; None loads everything as one batch.
        seed: Seed of the partition and of the order of training samples; None is 0.
        num_workers: Worker processes of the loaders.

    Raises:
        ConfigError: There is no such file, an array is missing, or the arrays do not fit one
            another.
    """

    def __init__(
        self,
        inputs: np.ndarray | None = None,
        targets: np.ndarray | None = None,
        test_inputs: np.ndarray | None = None,
        test_targets: np.ndarray | None = None,
        client_ids: np.ndarray | None = None,
        file: str | os.PathLike | None = None,
        num_clients: int | None = None,
        partition: Partitioner | None = None,
        protocol: Protocol | None = None,
        batch_size: int | None = 32,
        seed: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__(num_clients, partition, protocol, batch_size, seed, num_workers)
        arrays = {
            "inputs": inputs,
            "targets": targets,
            "test_inputs": test_inputs,
            "test_targets": test_targets,
            "client_ids": client_ids,
        }
        given = {key: np.asarray(value) for key, value in arrays.items() if value is not None}
        if file is not None and given:
            raise ConfigError(f"file={str(file)!r} and {', '.join(given)} exclude one another")
        self._file = None if file is None else Path(file).expanduser()
        self._loaded: Loaded | None = None
        if self._file is None:
            self._loaded = _from_arrays("the call", given)
        elif not self._file.is_file():
            raise ConfigError(f"file={str(file)!r} does not exist; give the path of an .npz file")

    def load(self) -> Loaded:
        """Return the samples that were given, or read them from the file."""
        if self._loaded is not None:
            return self._loaded
        assert self._file is not None
        return _from_arrays(f"file={str(self._file)!r}", _read(self._file))


_KEYS = ("inputs", "targets", "test_inputs", "test_targets", "client_ids")


def _read(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of an ``.npz`` file."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {key: stored[key] for key in stored.files}
    except Exception as error:  # whatever numpy and zipfile raise for broken or foreign files
        raise ConfigError(
            f"file={str(path)!r} is not an .npz file of plain arrays, as numpy.savez writes"
        ) from error
    if unknown := sorted(arrays.keys() - set(_KEYS)):
        raise ConfigError(
            f"file={str(path)!r} holds {', '.join(unknown)}; it may hold {', '.join(_KEYS)}"
        )
    return arrays


def _from_arrays(source: str, arrays: dict[str, np.ndarray]) -> Loaded:
    """Turn arrays into samples."""
    for key in ("inputs", "targets"):
        if key not in arrays:
            raise ConfigError(f"{key} is missing: {source} must give inputs and targets")
    tensors = {key: _tensor(key, array) for key, array in arrays.items() if key != "client_ids"}
    return _loaded(
        tensors["inputs"],
        tensors["targets"],
        tensors.get("test_inputs"),
        tensors.get("test_targets"),
        arrays.get("client_ids"),
    )


def _tensor(key: str, array: np.ndarray) -> Tensor:
    """Turn an array into a tensor; float64 and wider become float32."""
    if array.dtype.kind not in "biuf":
        raise ConfigError(f"{key} of type {array.dtype} must be numbers")
    if array.dtype.kind == "f" and array.dtype.itemsize > 4:
        with np.errstate(over="ignore"):  # what becomes infinite is refused with the other data
            array = array.astype(np.float32)
    if array.dtype.kind == "u" and array.dtype != np.uint8:
        array = array.astype(np.int64)
    # A file may come from a machine of the other byte order, which torch does not take.
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.ascontiguousarray(array))


def _loaded(
    inputs: Tensor | np.ndarray,
    targets: Tensor | np.ndarray,
    test_inputs: Tensor | np.ndarray | None = None,
    test_targets: Tensor | np.ndarray | None = None,
    client_ids: np.ndarray | None = None,
) -> Loaded:
    """Pair up tensors as samples."""
    if (test_inputs is None) != (test_targets is None):
        missing = "test_inputs" if test_inputs is None else "test_targets"
        raise ConfigError(f"{missing} is missing: give both of test_inputs and test_targets")
    test = None
    if test_inputs is not None and test_targets is not None:
        test = TensorSamples(test_inputs, test_targets)
    return Loaded(TensorSamples(inputs, targets), test, client_ids)
