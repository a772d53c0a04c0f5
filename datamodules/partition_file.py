"""Partitions as files: index arrays, their hash, and what was partitioned how.

The file is NumPy's `.npz` with these arrays, so that any program with NumPy can read it:

* `train_indices`, `train_sizes`: the training samples of client 0, then those of client 1, and so
  on, int32 or int64; and the number of training samples of each client, int64 [M]. `val_...` and
  `test_...` are alike. If all clients share one array (a common test set), the array is stored
  once, and is shorter than the sum of the sizes.
* `about`: JSON text: the keys of `Partition.about`, and `format`, `hash` (`Partition.hash` of the
  stored arrays), `samples` (N) and `targets_hash` (see `targets_hash`).
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.errors import ConfigError
from datamodules.partition import IndexArrays, Partition, Ragged

FORMAT = 1
SPLITS = ("train", "val", "test")


def write(partition: Partition, file: str | os.PathLike) -> None:
    """Writes a partition; see `Partition.save`."""
    parts = {split: _stored(held) for split, held in partition.splits.items()}
    stored = Partition(parts["train"], parts["val"], parts["test"])
    arrays: dict[str, np.ndarray] = {}
    for split, part in parts.items():
        widest = part.indices.max(initial=0)
        kind = np.int32 if widest <= np.iinfo(np.int32).max else np.int64
        arrays[f"{split}_indices"] = part.indices.astype(kind)
        arrays[f"{split}_sizes"] = np.asarray(part.sizes, np.int64)
    about = {**partition.about, "format": FORMAT, "hash": stored.hash}
    if partition.targets is not None:
        about["samples"] = len(partition.targets)
        about["targets_hash"] = targets_hash(partition.targets)
    try:
        with Path(file).expanduser().open("wb") as opened:
            np.savez_compressed(opened, about=np.array(json.dumps(about)), **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise ConfigError(
            f"Partition.save: {os.fspath(file)!r}; it must be a file that can be written "
            f"({error.strerror})"
        ) from error


def read(file: str | os.PathLike) -> Partition:
    """Reads a partition that `Partition.save` wrote.

    Returns:
        The partition with `about` and without targets.

    Raises:
        ConfigError: There is no such file, or the file is none of `Partition.save`, or damaged.
    """
    path, key = Path(file).expanduser(), f"Given.file: {os.fspath(file)!r}"
    if not path.is_file():
        raise ConfigError(f"{key}; it must be the path of an existing file")
    try:
        with np.load(path, allow_pickle=False) as stored:
            about: dict[str, Any] = json.loads(str(stored["about"]))
            train, val, test = (
                _part(stored[f"{split}_indices"], stored[f"{split}_sizes"]) for split in SPLITS
            )
    except Exception as error:  # NumPy, zipfile and json raise many types for other files
        raise ConfigError(f"{key}; it must be a file that Partition.save wrote") from error
    partition = Partition(train, val, test, about=about)
    if about.get("format") != FORMAT or about.get("hash") != partition.hash:
        raise ConfigError(
            f"{key}; it must be a file of the format {FORMAT} whose arrays have the hash that it "
            "states"
        )
    return partition


def targets_hash(targets: np.ndarray) -> str:
    """Returns the SHA-256 (64 hex digits) of the targets of all samples, equal on all platforms.

    Integers enter as little-endian int64, floating numbers as float64, after the shape.
    """
    kind = "<f8" if targets.dtype.kind == "f" else "<i8"
    digest = hashlib.sha256(f"{targets.shape};".encode())
    digest.update(np.ascontiguousarray(targets, kind).tobytes())
    return digest.hexdigest()


def _stored(arrays: IndexArrays) -> Ragged:
    """Returns the arrays as they are stored; those that are computed on access are computed."""
    if isinstance(arrays, Ragged):
        return arrays
    return Ragged.from_sizes(arrays.flat, arrays.sizes)


def _part(indices: np.ndarray, sizes: np.ndarray) -> Ragged:
    """Returns the index arrays of one split."""
    if len(indices) < sizes.sum():
        return Ragged.shared(indices, len(sizes))
    return Ragged.from_sizes(indices, sizes)
