"""PFLlib's files of samples as arrays."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pfl.errors import ConfigError


class _Arrays(pickle.Unpickler):
    """Reads pickled arrays of NumPy; a file that asks for anything else is refused."""

    allowed: ClassVar[dict[str, Any]] = {
        "_reconstruct": np.zeros(0).__reduce__()[0],
        "scalar": np.float64(0).__reduce__()[0],
        "ndarray": np.ndarray,
        "dtype": np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "numpy" and name in self.allowed:
            return self.allowed[name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def write_dataset(folder: Path, file: Path, clients: int) -> None:
    """Writes the samples of the first clients in a folder of PFLlib as a file of `ArrayDataModule`.

    A file with the same samples stays.

    Raises:
        ConfigError: The folder cannot be read, or a file with something else is there already.
    """
    arrays: dict[str, Any] = read_dataset(folder, clients)
    if not file.exists():
        np.savez_compressed(file, **arrays)
    elif not _holds(file, arrays):
        raise ConfigError(f"import: {file}: another file is there already; rename or remove it")


def _holds(file: Path, arrays: dict[str, np.ndarray]) -> bool:
    """Returns whether a file has these arrays, and no others."""
    try:
        with np.load(file) as found:
            same = set(found) == set(arrays)
            return same and all(np.array_equal(found[name], arrays[name]) for name in arrays)
    except DAMAGE:
        return False


DAMAGE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    EOFError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
)


def read_dataset(folder: Path, clients: int | None = None) -> dict[str, np.ndarray]:
    """Returns a folder of PFLlib's samples as the arrays of `ArrayDataModule`.

    The folder has `train/<i>.npz` and `test/<i>.npz` for each client i. Nothing but arrays is
    unpickled.

    Args:
        folder: The folder.
        clients: How many clients are read, from 0; None: all.

    Raises:
        ConfigError: A file is missing, is damaged, or holds something else than arrays.
    """
    columns: dict[str, list[np.ndarray]] = {}
    owners = []
    for split, prefix in (("train", ""), ("test", "test_")):
        files = sorted((folder / split).glob("*.npz"), key=lambda path: (len(path.stem), path.stem))
        if not files:
            raise ConfigError(
                f"import: --folder {folder}: there is no {split}/0.npz; it must be a folder such "
                f"as PFLlib/dataset/MNIST"
            )
        for file in files:
            try:
                client = int(file.stem)
                samples = _read(file)
                inputs = np.asarray(samples["x"])
                targets = np.asarray(samples["y"])
            except DAMAGE as error:
                line = " ".join(str(error).split())[:80]
                raise ConfigError(
                    f"import: {file}: it is no file of PFLlib's samples ({line})"
                ) from error
            if clients is not None and client >= clients:
                continue
            columns.setdefault(f"{prefix}inputs", []).append(inputs)
            columns.setdefault(f"{prefix}targets", []).append(targets)
            owners.append(np.full(len(targets), client))
    arrays = {name: np.concatenate(parts) for name, parts in columns.items()}
    return {**arrays, "client_ids": np.concatenate(owners)}


def _read(file: Path) -> Any:
    """Returns the dictionary in a file of PFLlib."""
    with zipfile.ZipFile(file) as stored:
        content = io.BytesIO(stored.read("data.npy"))
    np.lib.format.read_magic(content)
    np.lib.format.read_array_header_1_0(content)
    return _Arrays(content).load().item()
