"""The training, validation and test samples of every client, and the file that holds them.

The file of `Partition.save` is NumPy's `.npz` with these arrays, so that any program with NumPy can
read it:

* `train_indices`, `train_sizes`: the training samples of client 0, then client 1's, and so
  on, int32 or int64; and the number of training samples of each client, int64 [M]. `val_...` and
  `test_...` are alike. If all clients share one array (a common test set), the array is stored
  once, and is shorter than the sum of the sizes.
* `about`: JSON text: the keys of `Partition.about`, and `format`, `hash` (`Partition.hash` of the
  stored arrays), `samples` (N), `targets_hash` (see `targets_hash`) and, where clients share
  samples (`Sampled`), `shared_samples`: how many of their own samples other clients have, too; and
  where they have one several times (`FedSLRDirichlet`), `repeated_samples`: how often that is so.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..files import new_content
from .index_arrays import IndexArrays, Ragged

FORMAT = 1
SPLIT_NAMES = ("train", "val", "test")
_HASH_CHUNK = 1 << 20  # entries converted to little-endian int64 at a time


@dataclass(frozen=True, eq=False)
class Partition:
    """The training, validation and test samples of every client.

    Indices 0 to `num_train` - 1 are the training samples of the data set. The official test
    samples, if the data set has any, follow.

    Attributes:
        train, val, test: The samples of each client; empty arrays if there is no validation.
        targets: The targets of all N samples of the data set, [N] or [N, ...]; None if the
            partition was built without a data set.
        about: The data set, the rule, the protocol and the seed in words and numbers, as JSON can
            hold them; the method `save` stores them.

    Example:
        >>> from pfl.datamodules import DigitsDataModule
        >>> partition = DigitsDataModule(num_clients=4).partition
        >>> len(partition), len(partition.hash), partition.train.sizes.dtype
        (4, 64, dtype('int64'))
    """

    train: IndexArrays
    val: IndexArrays
    test: IndexArrays
    targets: np.ndarray | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def splits(self) -> dict[str, IndexArrays]:
        """The index arrays by the name of the split: "train", "val" and "test"."""
        return {"train": self.train, "val": self.val, "test": self.test}

    def save(self, file: str | os.PathLike) -> None:
        """Saves the partition as an `.npz` file, which the rule `Given(file)` reads.

        The docstring of this module describes the content.
        """
        arrays = dict[str, np.ndarray]()
        parts = dict[str, Ragged]()
        for split, part in self.splits.items():
            if not isinstance(part, Ragged):  # arrays that are computed on access
                part = Ragged.from_sizes(part.flat, part.sizes)
            parts[split] = part
            widest = part.indices.max(initial=0)
            kind = np.int32 if widest <= np.iinfo(np.int32).max else np.int64
            arrays[f"{split}_indices"] = part.indices.astype(kind)
            arrays[f"{split}_sizes"] = np.asarray(part.sizes, np.int64)
        stored = Partition(parts["train"], parts["val"], parts["test"])
        about = {**self.about, "format": FORMAT, "hash": stored.hash}
        if shared := _number_shared(stored):
            about["shared_samples"] = shared
        if repeated := len(_find_repeats(stored)[0]):
            about["repeated_samples"] = repeated
        if self.targets is not None:
            about["samples"] = len(self.targets)
            about["targets_hash"] = targets_hash(self.targets)
        try:
            with new_content(Path(file).expanduser()) as opened:
                np.savez_compressed(opened, about=np.array(json.dumps(about)), **arrays)  # type: ignore[arg-type]
        except OSError as error:
            raise ConfigError(
                f"Partition.save: {os.fspath(file)!r}; it must be a file that can be written "
                f"({error.strerror})"
            ) from error

    def __len__(self) -> int:
        return len(self.train)

    @cached_property
    def hash(self) -> str:
        """SHA-256 (64 hex digits) over all arrays as little-endian int64, equal on all platforms.

        The hash changes when any sample moves to another client or to another split. Arrays that
        are computed on access (`Sampled`) enter the hash by what determines them: the key derived
        from the seed, the number of clients, the number of samples per client and in all, the
        position of each split, and the labels used for stratification.
        """
        digest = hashlib.sha256()
        for name, arrays in self.splits.items():
            for array in arrays.definition():
                digest.update(f"{name}:{len(array)};".encode())
                for begin in range(0, len(array), _HASH_CHUNK):
                    digest.update(array[begin : begin + _HASH_CHUNK].astype("<i8").tobytes())
        return digest.hexdigest()


def read_partition(file: str | os.PathLike) -> Partition:
    """Reads a partition that `Partition.save` wrote, with `about` and without targets.

    Raises:
        ConfigError: There is no such file, or it is damaged or not one of `Partition.save`, or
            clients share samples, or have one several times, though the file does not say so.
    """
    path = Path(file).expanduser()
    key = f"Given.file: {os.fspath(file)!r}"
    if not path.is_file():
        raise ConfigError(f"{key}; it must be the path of an existing file")
    try:
        with np.load(path, allow_pickle=False) as stored:
            about: dict[str, Any] = json.loads(str(stored["about"]))
            train, val, test = (
                _part(split, stored[f"{split}_indices"], stored[f"{split}_sizes"], about, key)
                for split in SPLIT_NAMES
            )
    except ConfigError:
        raise
    except Exception as error:  # NumPy, zipfile and json raise many types for other files
        raise ConfigError(f"{key}; it must be a file that Partition.save wrote") from error
    partition = Partition(train, val, test, about=about)
    if about.get("format") != FORMAT or about.get("hash") != partition.hash:
        raise ConfigError(
            f"{key}; it must be a file of the format {FORMAT} whose arrays have the hash that it "
            "states"
        )
    _check_samples(key, partition)
    return partition


def targets_hash(targets: np.ndarray) -> str:
    """Returns the SHA-256 (64 hex digits) of the targets of all samples, equal on all platforms.

    Integers enter as little-endian int64, floating numbers as float64, after the shape.
    """
    kind = "<f8" if targets.dtype.kind == "f" else "<i8"
    digest = hashlib.sha256(f"{targets.shape};".encode())
    digest.update(np.ascontiguousarray(targets, kind).tobytes())
    return digest.hexdigest()


def _part(
    split: str, indices: np.ndarray, sizes: np.ndarray, about: Mapping[str, Any], key: str
) -> Ragged:
    total = about.get("samples", np.iinfo(np.int64).max)
    for name, array, limit in (("indices", indices, total), ("sizes", sizes, len(indices) + 1)):
        whole = array.dtype.kind in "iu" and array.ndim == 1
        if not whole or array.min(initial=0) < 0 or array.max(initial=0) >= limit:
            raise ConfigError(
                f"{key}: {split}_{name} are {array.dtype} of shape {array.shape}, from "
                f"{array.min(initial=0)} to {array.max(initial=0)}; they must be whole numbers "
                f"from 0 to {limit - 1}"
            )
    indices = indices.astype(np.int64, copy=False)  # uint64 and int64 have no common whole numbers
    is_shared = split == "test" and len(indices) < sizes.sum()
    if (sizes != len(indices)).any() if is_shared else sizes.sum() != len(indices):
        raise ConfigError(
            f"{key}: {split}_sizes add up to {sizes.sum()}; they must add up to {len(indices)}, "
            f"the number of {split}_indices{', or all be that number' if split == 'test' else ''}"
        )
    if is_shared:
        return Ragged.shared(indices, len(sizes))
    return Ragged.from_sizes(indices, sizes)


def _number_shared(partition: Partition) -> int:
    """Returns how many training or validation samples of a client another client has, too."""
    parts = {
        name: part.of(slice(0, 1)) if part.is_shared else part.flat
        for name, part in partition.splits.items()
    }
    own = np.concatenate([parts["train"], parts["val"]])
    total = int(max(own.max(initial=-1), parts["test"].max(initial=-1))) + 1
    counts = np.bincount(own, minlength=total)
    tested = np.bincount(parts["test"], minlength=total) > 0
    return int(((counts > 1) | ((counts > 0) & tested)).sum())


def _find_repeats(partition: Partition) -> tuple[np.ndarray, np.ndarray]:
    """Returns clients, and samples that are repeated among their own (no shared test set)."""
    parts = [part for part in partition.splits.values() if not part.is_shared]
    sample = np.concatenate([part.flat for part in parts]).astype(np.int64)
    total = int(sample.max(initial=0)) + 1
    pairs = np.concatenate([part.owners for part in parts]) * total + sample
    pairs.sort()
    return np.divmod(pairs[1:][np.diff(pairs) == 0], total)


def _check_samples(key: str, partition: Partition) -> None:
    sizes = {name: len(part) for name, part in partition.splits.items()}
    if len(set(sizes.values())) > 1:
        raise ConfigError(f"{key} has {sizes} clients; all splits must have as many")
    clients, samples = _find_repeats(partition)
    stated = partition.about
    if len(clients) != (expected := stated.get("repeated_samples", 0)):
        such = f" (the sample {samples[0]} of client {clients[0]})" if len(clients) else ""
        raise ConfigError(
            f"{key}: {len(clients)} samples are repeated in the training, validation or test "
            f"samples of a client{such}; it must be {expected}, as the file's repeated_samples says"
        )
    common = partition.test[0] if partition.test.is_shared else samples[:0]
    if len(np.unique(common)) < len(common):
        raise ConfigError(f"{key}: test_indices hold a sample twice; all of them must differ")
    if (found := _number_shared(partition)) != (expected := stated.get("shared_samples", 0)):
        raise ConfigError(
            f"{key}: {found} training or validation samples belong to several clients, or are test "
            f"samples, too; it must be {expected}, as the file's shared_samples says"
        )
