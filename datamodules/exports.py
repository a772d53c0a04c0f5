"""Partitions in the formats of other programs: a Parquet table, and a folder as PFLlib reads it."""

import json
import os
from pathlib import Path

import numpy as np

from .base import FederatedDataModule
from .errors import ConfigError, optional_module
from .files import new_content
from .loaders import SampleDataset


def write_parquet(data: FederatedDataModule, file: str | os.PathLike) -> None:
    """Writes a table with a row for each sample of each client.

    The columns are `index` (int64: the training samples of the data set come first, then the
    official test samples), `split` ("train", "val" or "test") and `client` (int64). The samples of
    a test set that all clients share have one row each, whose `client` is null.
    """
    pyarrow = optional_module(os.fspath(file), "pyarrow")
    from pyarrow import parquet

    tables = []
    for split, arrays in data.partition.splits.items():
        if arrays.is_shared:
            index = arrays[0]
            client = pyarrow.nulls(len(arrays[0]), pyarrow.int64())
        else:
            index = arrays.flat
            client = pyarrow.array(arrays.owners, pyarrow.int64())
        names = pyarrow.DictionaryArray.from_arrays(np.zeros(len(index), np.int8), [split])
        columns = {"index": pyarrow.array(index, pyarrow.int64()), "split": names, "client": client}
        tables.append(pyarrow.table(columns))
    table = pyarrow.concat_tables(tables).unify_dictionaries()
    with new_content(Path(file)) as opened:
        parquet.write_table(table, opened)


def write_pfllib(data: FederatedDataModule, folder: str | os.PathLike) -> None:
    """Writes the clients' samples as PFLlib reads them: `dataset/<name>` is the folder.

    The folder has `train/<i>.npz` and `test/<i>.npz` for each client i, each with a pickled
    dictionary `data` of the inputs `x` and the labels `y`, and `config.json`. Inputs are as this
    client sees them in evaluation: after the transforms, not augmented. PFLlib has no validation
    samples: they stand with the training samples, in ascending order of their indices.
    """
    root = Path(folder)
    counts = data.label_counts("train") + data.label_counts("val") + data.label_counts("test")
    parts = data.partition
    try:
        for split in ("train", "test"):
            (root / split).mkdir(parents=True, exist_ok=True)
            for client in range(data.num_clients):
                indices = parts.splits[split][client]
                if split == "train":
                    indices = np.sort(np.concatenate([indices, parts.val[client]]))
                dataset = SampleDataset(data.samples, indices, data.transforms, client)
                inputs, targets = dataset.batch(list(range(len(indices))))
                content = np.empty((), object)  # PFLlib reads it by `.tolist()`
                content[()] = {"x": inputs.cpu().numpy(), "y": targets.cpu().numpy()}
                with new_content(root / split / f"{client}.npz") as file:
                    np.savez_compressed(file, data=content)
        config = {
            "num_clients": data.num_clients,
            "num_classes": data.num_classes,
            "non_iid": True,
            "balance": False,
            "partition": repr(data.partitioner),
            "Size of samples for labels in clients": [
                [[int(label), int(row[label])] for label in np.flatnonzero(row)] for row in counts
            ],
            "alpha": getattr(data.partitioner, "alpha", None),
            "batch_size": data.batch_size,
        }
        with new_content(root / "config.json") as file:
            file.write(json.dumps(config).encode())
    except OSError as error:
        raise ConfigError(
            f"{root}: it must be a folder that can be written ({error.strerror})"
        ) from error
