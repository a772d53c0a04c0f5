"""A partition before any training: a table, numbers for each client, and files of both."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from datamodules import ConfigError, FederatedDataModule
from datamodules.exports import write_parquet
from datamodules.partitions.measures import (
    effective_classes,
    label_overlap,
    label_shares,
    shared_samples,
    total_variation,
    trained_on,
    wasserstein,
)
from pfl.files import write_csv
from pfl.report.table import left_out

MOST_ROWS = 20  # clients of a table that is printed
HEADS = {  # column of `partition.csv`: its heading in the printed table, and its format
    "train_samples": ("train", "8,.0f"),
    "val_samples": ("val", "8,.0f"),
    "test_samples": ("test", "8,.0f"),
    "effective_classes": ("classes", "9.2f"),
    "total_variation": ("variation", "11.3f"),
    "wasserstein": ("Wasserstein", "13.3f"),
    "train_test_variation": ("train/test", "12.3f"),
}


def partition_columns(data: FederatedDataModule) -> dict[str, np.ndarray]:
    """Returns the columns of `partition.csv`, a row for each client.

    They are `client`, the number of samples by split, and where every sample has one label: the
    number of training samples of each class, `label_0` and so on; `effective_classes`;
    `total_variation` and `wasserstein`, the distances of the client's training labels from those of
    all clients together; and `train_test_variation`, the total variation between the labels that
    the client trains on and those that it is tested on. The module
    `datamodules.partitions.measures` defines all of them.
    """
    columns = {"client": np.arange(data.num_clients)}
    for split, arrays in data.partition.splits.items():
        columns[f"{split}_samples"] = np.asarray(arrays.sizes)
    if data.has_labels:
        counts = data.label_counts()
        shares, tested = label_shares(counts), label_shares(data.label_counts("test"))
        everyone = counts.sum(0) / counts.sum()
        columns |= {f"label_{k}": counts[:, k] for k in range(counts.shape[1])}
        columns["effective_classes"] = effective_classes(shares)
        columns["total_variation"] = total_variation(shares, everyone)
        columns["wasserstein"] = wasserstein(shares, everyone)
        columns["train_test_variation"] = total_variation(shares, tested)
    return columns


def partition_text(data: FederatedDataModule, columns: dict[str, np.ndarray]) -> str:
    """Returns the partition in words and numbers, to be printed.

    Args:
        data: The data module.
        columns: Its `partition_columns`.
    """
    shown = {name: entry for name, entry in HEADS.items() if name in columns}
    head = f"  {'client':<8}" + "".join(
        f"{title:>{form.split('.')[0].rstrip(',')}}" for title, form in shown.values()
    )
    lines = [f"{type(data).__name__}: {data.describe()}", "", head, "  " + "-" * (len(head) - 2)]
    for client in range(data.num_clients if data.num_clients <= MOST_ROWS else 0):
        lines.append(_row(str(client), {name: columns[name][client] for name in shown}))
    if data.num_clients <= MOST_ROWS:
        lines.append(lines[3])
    for name, statistic in (("least", np.min), ("mean", np.mean), ("most", np.max)):
        lines.append(_row(name, {key: statistic(_known(columns[key])) for key in shown}))
    return "\n".join([*lines, "", *_notes(data, columns)])


def write_files(data: FederatedDataModule, columns: dict[str, np.ndarray], out: Path) -> list[Path]:
    """Writes `partition.npz`, `.csv` and `.png`, and `clients.parquet`, and returns their paths.

    Without the package `pyarrow`, and for targets that are no labels, what cannot be written is
    left out.
    """
    files = [out / "partition.npz", out / "partition.csv"]
    data.partition.save(files[0])
    write_csv(files[1], columns)
    if data.has_labels:
        from pfl.report.figures import partition_figure  # matplotlib takes long to import

        files.append(out / "partition.png")
        partition_figure(data.label_counts()).savefig(files[-1], dpi=150)
    try:
        write_parquet(data, out / "clients.parquet")
        files.append(out / "clients.parquet")
    except ConfigError as error:
        print(error)
    return files


def _row(name: str, values: dict[str, float]) -> str:
    """Returns a row of the printed table."""
    return f"  {name:<8}" + "".join(f"{values[key]:>{HEADS[key][1]}}" for key in values)


def _known(values: np.ndarray) -> np.ndarray:
    """Returns the values that are no NaN, or one NaN if there are none."""
    known = values[~np.isnan(values)]
    return known if len(known) else np.array([np.nan])


def _notes(data: FederatedDataModule, columns: dict[str, np.ndarray]) -> list[str]:
    """Returns what stands below the table: overlap, what is left out, the hash."""
    parts, total = data.partition, len(data.samples)
    notes = []
    if data.has_labels:
        shares = label_shares(data.label_counts())
        notes.append(f"Two clients share {label_overlap(shares):.1%} of their labels on average.")
    notes.append(
        f"{shared_samples(parts.train, total):,} samples are trained on by more than one client; "
        f"{trained_on(parts.train, parts.test, total):,} are trained on by one client and tested "
        "by a client."
    )
    told = left_out(data.left_out())
    notes.append(f"Left out: {told}." if told else "Every sample has a client.")
    return [*notes, f"Hash: {parts.hash}"]
