"""Tables are written block by block, and the size of the blocks does not change the file."""

import csv
import io
import json

import numpy as np
import pytest
import torch

from datamodules import IID, Natural, Sampled, TensorDataModule
from models import LogisticRegression
from pfl import FederatedLoop, files
from pfl.algorithms import FedAvg
from pfl.callbacks import LocalBaseline
from pfl.report.figures import run_figure
from pfl.report.matplotlib_drawer import draw
from pfl.report.partition import partition_columns, partition_text
from tests.commands import table
from tests.problems import quiet
from tests.refusal import refused


@pytest.mark.parametrize("rows", [1, 2, 3, 100])  # of a block
def test_the_size_of_blocks_does_not_change_a_table(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CSV_ROWS", rows)
    columns = {"client": np.arange(5), "loss": np.array([0.1, np.nan, 1e-9, 2.0, 1 / 3])}
    path = tmp_path / "table.csv"
    files.write_csv(path, [columns])
    files.append_csv(path, columns)
    lines = [f"{i},{x!r}\r\n" for i, x in enumerate(columns["loss"].tolist())]
    assert path.read_bytes().decode() == "client,loss\r\n" + "".join(lines) * 2


@pytest.mark.parametrize(
    "column",
    [
        np.array([0, 7, 4095, 7]),
        np.array([5, 4096, 10**15]),
        np.array([-1, 0, 3]),
        np.array([2**64 - 1, 0], np.uint64),
        np.array([], np.int64),
        np.array([0.1, -0.0, 1e300, np.nan, -np.inf, 5e-324, 2.0]),
        np.array([0.1, 16777216.0], np.float32),
        np.array(["a,b", 'say "so"', "=1", "two\nlines"]),
        np.array([True, False]),
    ],
    ids=str,
)
def test_columns_are_written_as_python_s_csv_writes_them(column, tmp_path):
    """Alone, beside numbers and beside a text; the apostrophe is told by a test below."""
    rows = len(column)
    shown = [f"'{value}" if value == "=1" else value for value in column.tolist()]
    for other in (np.arange(rows) / 8, np.full(rows, "x")):
        files.write_csv(tmp_path / "table.csv", [{"a": column, "b": other}])
        expected = io.StringIO(newline="")
        csv.writer(expected).writerows([["a", "b"], *zip(shown, other.tolist(), strict=True)])
        assert (tmp_path / "table.csv").read_bytes().decode() == expected.getvalue()


@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_several_values_of_a_sample_are_a_list_in_one_cell(dtype, tmp_path):
    """As `pfl predict` writes several labels or values, and sequences."""
    targets = np.array([[1, 0], [2, 3]], dtype)
    files.append_csv(tmp_path / "table.csv", {"sample": np.arange(2), "target": targets})
    rows = table(tmp_path / "table.csv")
    assert [row["sample"] for row in rows] == ["0", "1"]
    assert [json.loads(row["target"]) for row in rows] == targets.tolist()


@pytest.mark.parametrize("partition", [Sampled(12), IID()], ids=repr)
def test_the_table_of_clients_is_the_same_in_blocks(partition, tmp_path, monkeypatch):
    torch.manual_seed(0)
    data = TensorDataModule(
        torch.randn(96, 5), torch.arange(96) % 3, num_clients=8, partition=partition
    )
    trainer = quiet(tmp_path, 2, LocalBaseline(), enable_checkpointing=False)
    trainer.fit(FedAvg(LogisticRegression(5, 3)), datamodule=FederatedLoop(data, 3))
    written, columns = trainer.recorder.table, trainer.recorder.columns
    whole = (trainer.run_dir / "clients.csv").read_bytes()
    head, *rows = whole.decode().splitlines()
    assert head.split(",") == list(columns) and len(rows) == 8
    cells = zip(*(column.tolist() for column in columns.values()), strict=True)
    assert rows == [",".join(map(str, row)) for row in cells]
    for name in ("train", "val", "test"):
        counts = [len(getattr(data.partition, name)[i]) for i in range(8)]
        assert columns[f"{name}_samples"].tolist() == counts
    labels = np.stack([columns[f"label_{k}"] for k in range(3)], 1)
    assert labels.tolist() == data.label_counts().tolist()
    assert columns["uplink_bytes"].sum() == 2 * 3 * (5 * 3 + 3) * 4  # rounds, clients, float32
    for size in (1, 3, 8):
        monkeypatch.setattr(files, "CSV_ROWS", size)
        written.write(tmp_path / "again.csv")
        assert (tmp_path / "again.csv").read_bytes() == whole


def test_a_text_is_never_a_formula_of_a_spreadsheet(tmp_path):
    """A spreadsheet computes a text that begins so; numbers below 0 stay numbers."""
    records = [{"method": "=1+1", "score": -0.5}, {"method": "@A", "score": None}]
    files.write_records(tmp_path / "table.csv", records)
    assert (tmp_path / "table.csv").read_text() == "method,score\n'=1+1,-0.5\n'@A,\n"


@pytest.mark.parametrize("text", ["-1", "+1", "-007", "-0.5", "+2.25"])
def test_a_text_that_is_a_number_stays_as_it_is(text, tmp_path):
    """Such as the classes -1 and +1, and ids below 0: no spreadsheet computes them."""
    files.write_csv(tmp_path / "table.csv", [{"prediction": np.array([text], object)}])
    assert (tmp_path / "table.csv").read_bytes().decode() == f"prediction\r\n{text}\r\n"


@pytest.mark.parametrize("text", ["-1+2", "+cmd", "-", "-1.", "+1e5|x", "-1\n"])
def test_what_only_begins_as_a_number_is_no_formula(text, tmp_path):
    files.write_records(tmp_path / "table.csv", [{"name": text}])
    assert table(tmp_path / "table.csv") == [{"name": f"'{text}"}]


def test_a_figure_is_written_as_a_whole(tmp_path):
    """On a full disk the file stays what it was."""

    class FullDisk:
        def savefig(self, file, **kwargs):
            file.write(b"half")
            raise OSError(28, "No space left on device")

    path = tmp_path / "figure.png"
    path.write_bytes(b"before")
    with refused(str(path), "No space left"):
        files.write_figure(path, FullDisk())
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]


class Cities(TensorDataModule):
    """Clients that are cities, in the order of the alphabet, and two classes of animals."""

    def load(self):
        return super().load()._replace(class_names=["cat", "dog"])


def test_clients_and_classes_have_their_names(tmp_path, capsys):
    """In clients.csv, in the partition's table, and in the lines at the end of the run."""
    torch.manual_seed(0)
    owners = np.array(["Bern", "=Oslo", "Rome"])[np.arange(60) % 3]
    inputs, targets = torch.randn(60, 5), torch.arange(60) % 2
    data = Cities(inputs, targets, client_ids=owners, partition=Natural())
    trainer = quiet(tmp_path, 1, LocalBaseline(), enable_checkpointing=False)
    trainer.fit(FedAvg(LogisticRegression(5, 2)), datamodule=FederatedLoop(data))
    rows = table(tmp_path / "run" / "clients.csv")
    assert [row["name"] for row in rows] == ["'=Oslo", "Bern", "Rome"]
    counts = [[int(row[f"label_{name}"]) for name in data.class_names] for row in rows]
    assert counts == data.label_counts().tolist()
    summary, printed = trainer.recorder.summary, capsys.readouterr().out
    scores = {row["name"].lstrip("'"): float(row["test/global/accuracy"]) for row in rows}
    worst = min(scores, key=scores.get)
    assert (
        summary["lowest_clients"] == scores and f"  lowest: {worst} {scores[worst]:.4f}" in printed
    )
    local = {row["name"].lstrip("'"): float(row["test/local/accuracy"]) for row in rows}
    assert summary["lost_clients"] == [name for name in scores if scores[name] < local[name]]
    drawn = draw(run_figure(trainer.recorder.rows, trainer.recorder.columns)).axes[0]
    assert [label.get_text() for label in drawn.get_yticklabels()] == data.class_names
    assert "Bern  " in partition_text(data, partition_columns(data))
