"""A partition before any training: a table, numbers for each client, and files of both."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pfl.datamodules import ConfigError, FederatedDataModule
from pfl.datamodules.exports import write_parquet
from pfl.datamodules.partitions import measures
from pfl.files import write_csv, write_figure, writing
from pfl.report.run_summary import left_out
from pfl.report.table import Cell, Column, Table, text

MOST_ROWS = 20  # clients of a table that is printed
HEADS = {  # column of `partition.csv`: its heading in the printed table, and its format
    "train_samples": ("train", ",.0f"),
    "val_samples": ("val", ",.0f"),
    "test_samples": ("test", ",.0f"),
    "effective_classes": ("classes", ".2f"),
    "total_variation": ("variation", ".3f"),
    "wasserstein": ("Wasserstein", ".3f"),
    "train_test_variation": ("train/test", ".3f"),
}


def client_columns(
    data: FederatedDataModule, clients: slice = slice(None)
) -> dict[str, np.ndarray]:
    """Returns who some clients are and what they own, a row for each.

    The columns are `client`; `name`, if the data module has `client_names`; the number of samples
    by split; and where every sample has one label the number of training samples of each class,
    `label_0` and so on, or with the names of the data module's `class_names`.
    """
    ids = np.arange(*clients.indices(data.num_clients))
    columns = {"client": ids}
    if (names := getattr(data, "client_names", None)) is not None:
        columns["name"] = np.array(names, str)[clients]
    for split, arrays in data.partition.splits.items():
        columns[f"{split}_samples"] = np.asarray(arrays.sizes)[clients]
    if data.has_labels and data.partition.targets is not None:  # None: they are elsewhere
        counts = data.label_counts(clients=clients)
        classes = getattr(data, "class_names", None) or range(counts.shape[1])
        columns |= {f"label_{name}": counts[:, k] for k, name in enumerate(classes)}
    return columns


def partition_columns(data: FederatedDataModule) -> dict[str, np.ndarray]:
    """Returns the columns of `partition.csv`, a row for each client.

    They are the columns of `client_columns` and, where every sample has one label, the numbers of
    `datamodules.partitions.measures`: `total_variation` and `wasserstein` are the distances of the
    client's training labels from the labels of all clients together, and `train_test_variation`
    that between the labels that the client trains on and those that it is tested on.
    """
    columns = client_columns(data)
    if data.has_labels:
        counts = data.label_counts()
        shares = measures.label_shares(counts)
        tested = measures.label_shares(data.label_counts("test"))
        everyone = counts.sum(0) / counts.sum()
        columns["effective_classes"] = measures.effective_classes(shares)
        columns["total_variation"] = measures.total_variation(shares, everyone)
        columns["wasserstein"] = measures.wasserstein(shares, everyone)
        columns["train_test_variation"] = measures.total_variation(shares, tested)
    return columns


def partition_text(data: FederatedDataModule, columns: dict[str, np.ndarray]) -> str:
    """Returns the partition in words and numbers, to be printed."""
    shown = {name: entry for name, entry in HEADS.items() if name in columns}
    heads = [Column("client".ljust(8)), *(Column(head, form) for head, form in shown.values())]
    names = columns.get("name", columns["client"]).tolist()
    few = len(names) <= MOST_ROWS
    rows: list[list[Cell]] = []
    if few:
        for client, name in enumerate(names):
            rows.append([str(name), *(float(columns[head][client]) for head in shown)])
    for word, statistic in (("least", np.min), ("mean", np.mean), ("most", np.max)):
        rows.append([word, *(float(statistic(_known_values(columns[name]))) for name in shown)])
    lines = text(Table(heads, rows)).splitlines()
    if few:
        lines.insert(-3, lines[1])
    above = [f"{type(data).__name__}: {data.describe()}", ""]
    return "\n".join([*above, *(f"  {line}" for line in lines), "", *_notes(data, columns)])


def write_files(data: FederatedDataModule, columns: dict[str, np.ndarray], out: Path) -> list[Path]:
    """Writes `partition.npz`, `.csv` and `.png`, and `clients.parquet`, and returns their paths.

    Skips `clients.parquet` if pyarrow is not installed, and the label columns if the targets are
    not class labels.
    """
    files = [out / "partition.npz", out / "partition.csv"]
    data.partition.save(files[0])
    write_csv(files[1], [columns])
    if data.has_labels:
        from pfl.report.figures import partition_figure
        from pfl.report.matplotlib_drawer import draw  # matplotlib takes long to import

        files.append(out / "partition.png")
        names = getattr(data, "class_names", None)
        write_figure(files[-1], draw(partition_figure(data.label_counts(), names)))
    with writing(out / "clients.parquet"):
        try:
            write_parquet(data, out / "clients.parquet")
            files.append(out / "clients.parquet")
        except ConfigError as error:
            print(error)
    return files


def _known_values(values: np.ndarray) -> np.ndarray:
    """Returns the values that are not NaN, or one NaN if all are."""
    known = values[~np.isnan(values)]
    if len(known):
        return known
    return np.array([np.nan])


def _notes(data: FederatedDataModule, columns: dict[str, np.ndarray]) -> list[str]:
    """Returns what stands below the table: overlap, what is left out, the hash."""
    parts = data.partition
    total = len(data.samples)
    notes = []
    if data.has_labels and data.num_clients > 1:
        overlap = measures.label_overlap(measures.label_shares(data.label_counts()))
        notes.append(f"Two clients share {overlap:.1%} of their labels on average.")
    shared = measures.shared_samples(parts.train, total)
    tested = measures.trained_on(parts.train, parts.test, total)
    notes.append(
        f"{shared:,} samples are trained on by more than one client; {tested:,} are trained on by "
        "one client and tested by a client."
    )
    words = left_out(data.left_out())
    if words:
        notes.append(f"Left out: {words}.")
    else:
        notes.append("Every sample has a client.")
    return [*notes, f"Hash: {parts.hash}"]
