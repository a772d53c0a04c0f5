"""`pfl partition`: what it prints, and the files that it writes."""

import json
import re

import numpy as np
import pytest
import torch
from pyarrow import parquet

from datamodules import DigitsDataModule, Dirichlet, Given, SharedTest, SplitOwn
from pfl.datamodules.exports import write_parquet, write_pfllib
from tests.commands import QUICKSTART, call, table

pytestmark = pytest.mark.cli


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """What the command prints for the quick start, and the folder of its files."""
    out = tmp_path_factory.mktemp("partition") / "new" / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["pfl"])
        status, printed, errors = call("partition", "--config", QUICKSTART, "--out", out)
    assert status == 0, errors
    return printed, out


@pytest.fixture(scope="module")
def data():
    """The data of the quick start, whose configuration gives these values."""
    return DigitsDataModule(20, Dirichlet(0.1), SplitOwn(0.5), seed=0)


def test_the_hash_is_that_of_the_run(shown, data):
    assert f"Hash: {data.partition.hash}\n" in shown[0]


def test_the_table_has_a_row_for_each_client(shown, data):
    rows = [line.split() for line in shown[0].splitlines() if re.match(r"  \d", line)]
    assert [int(row[0]) for row in rows] == list(range(20))
    for number, split in enumerate(("train", "val", "test"), 1):
        sizes = data.partition.splits[split].sizes
        assert [int(row[number]) for row in rows] == sizes.tolist()
    assert "Every sample has a client." in shown[0]


def test_the_csv_holds_labels_and_distances(shown, data):
    rows = table(shown[1] / "partition.csv")
    targets = data.samples.targets.numpy()
    pooled = np.bincount(targets[data.partition.train.flat], minlength=10)
    for client, row in enumerate(rows):
        counts = np.bincount(targets[data.partition.train[client]], minlength=10)
        assert [int(row[f"label_{k}"]) for k in range(10)] == counts.tolist()
        p, q = counts / counts.sum(), pooled / pooled.sum()
        assert float(row["total_variation"]) == pytest.approx(np.maximum(p - q, 0).sum())
        distance = sum(abs(p[: k + 1].sum() - q[: k + 1].sum()) for k in range(10))
        assert float(row["wasserstein"]) == pytest.approx(distance)
        tested = np.bincount(targets[data.partition.test[client]], minlength=10)
        mismatch = np.maximum(p - tested / tested.sum(), 0).sum()
        assert float(row["train_test_variation"]) == pytest.approx(mismatch, abs=1e-12)


def test_the_saved_partition_is_the_run_s(shown, data):
    again = DigitsDataModule(None, Given(shown[1] / "partition.npz"), seed=8)
    assert again.partition.hash == data.partition.hash


def test_the_parquet_file_has_a_row_for_each_sample_of_each_client(shown, data):
    found = parquet.read_table(shown[1] / "clients.parquet").to_pydict()
    expected = [
        (index, split, client)
        for split, arrays in data.partition.splits.items()
        for client in range(20)
        for index in arrays[client].tolist()
    ]
    assert list(zip(*(found[k] for k in ("index", "split", "client")), strict=True)) == expected


def test_a_shared_test_set_has_one_row_for_each_sample(tmp_path):
    write_parquet(DigitsDataModule(3, protocol=SharedTest()), tmp_path / "c.parquet")
    found = parquet.read_table(tmp_path / "c.parquet").to_pydict()
    pairs = zip(found["index"], found["client"], strict=True)
    shared = [index for index, client in pairs if client is None]
    assert shared == list(range(1442, 1797))  # 355 official test samples of 1,797


def test_the_heat_map_is_a_png(shown):
    assert (shown[1] / "partition.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def read_as_pfllib_does(path):
    """Returns inputs and labels of a client; PFLlib's `read_data` has these two lines."""
    with path.open("rb") as file:
        data = np.load(file, allow_pickle=True)["data"].tolist()
    return torch.Tensor(data["x"]).type(torch.float32), torch.Tensor(data["y"]).type(torch.int64)


def test_the_folder_for_pfllib_holds_every_client(tmp_path, data):
    write_pfllib(data, tmp_path / "Digits")
    for client in range(20):
        parts = {s: arrays[client] for s, arrays in data.partition.splits.items()}
        own = {"train": np.sort(np.append(parts["train"], parts["val"])), "test": parts["test"]}
        for split, indices in own.items():
            x, y = read_as_pfllib_does(tmp_path / "Digits" / split / f"{client}.npz")
            inputs, targets = data.samples.gather(torch.from_numpy(indices).long())
            assert torch.equal(x, inputs) and torch.equal(y, targets)
    config = json.loads((tmp_path / "Digits" / "config.json").read_text())
    assert config["num_clients"] == 20 and config["num_classes"] == 10
    labels = np.bincount(data.samples.targets)
    totals = np.zeros(10, int)
    for client in config["Size of samples for labels in clients"]:
        for label, count in client:
            totals[label] += count
    assert totals.tolist() == labels.tolist()


def test_many_clients_are_printed_in_three_rows(here):
    words = ["--data", "DigitsDataModule", "--data.num_clients", 50, "--data.partition", "IID"]
    status, printed, _ = call("partition", *words)
    assert status == 0
    names = [line.split()[0] for line in printed.splitlines() if re.match(r"  \S.* \d", line)]
    assert names == ["least", "mean", "most"]


def test_what_is_left_out_is_printed(here, tmp_path):
    rng = np.random.default_rng(0)
    arrays = {"inputs": rng.random((30, 2)), "targets": np.arange(30) / 30}
    np.savez(tmp_path / "my.npz", **arrays, client_ids=np.repeat([1, 2, 3], [15, 10, 5]))
    words = ["--data", "ArrayDataModule", "--data.file", tmp_path / "my.npz"]
    words += ["--data.partition", "Natural", "--data.num_clients", 2]
    status, printed, _ = call("partition", *words)  # a regression has no labels
    assert status == 0 and "Left out: 5 samples that no client has." in printed


def test_mistakes_are_one_line(here, tmp_path):
    status, _, errors = call("partition", "--data", "DigitsDataModule", "--data.num_clients", 0)
    assert status == 2 and errors.startswith("error: ") and "num_clients" in errors
    (tmp_path / "file").write_text("")
    words = ["--data", "DigitsDataModule", "--out", tmp_path / "file" / "out"]
    status, _, errors = call("partition", *words)
    assert status == 2 and "partition: --out" in errors and errors.count("\n") == 1
