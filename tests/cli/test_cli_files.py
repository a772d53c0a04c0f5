"""The command line: the files of a run, and the evaluation of its checkpoint."""

import json

import numpy as np
import pytest
import torch

from datamodules import DigitsDataModule, Dirichlet, SplitOwn
from tests.commands import QUICKSTART, call, elsewhere, table

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("here")]


def column(rows, name):
    return np.array([float(row[name]) for row in rows])


@pytest.fixture(scope="module")
def run(tmp_path_factory, run_figures):
    """The folder and the output of a quickstart with few rounds and clients."""
    root, cwd = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("cwd")
    with elsewhere(cwd):
        status, out, err = call(
            "fit",
            f"--config={QUICKSTART}",
            "--trainer.max_epochs=2",
            "--trainer.accelerator=cpu",
            f"--trainer.default_root_dir={root}",
            "--data.num_clients=6",
            "--data.partition.alpha=1.0",
            "--loop.clients_per_round=4",
        )
    assert status == 0 and err == ""
    assert [path.name for path in root.iterdir()] == ["quickstart"]
    return root / "quickstart", out


@pytest.fixture(scope="module")
def data():
    """The data of `run`."""
    datamodule = DigitsDataModule(6, Dirichlet(1.0), SplitOwn(test=0.5), seed=0)
    datamodule.setup()
    return datamodule


# ---- what a run writes --------------------------------------------------------------------------


def test_a_run_writes_its_files(run):
    folder, _ = run
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    names = "config.yaml metrics.csv clients.csv summary.json report.png checkpoints/last.ckpt"
    names += " client_scores.npy local_scores.npy checkpoints/previous.ckpt .lock"
    assert files == set(names.split())
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)


def test_metrics_have_a_row_for_each_round(run):
    rows = table(run[0] / "metrics.csv")
    assert [row["round"] for row in rows] == ["1", "2"]
    names = {"train/loss", "comm/uplink_bytes", "comm/downlink_bytes", "participants"}
    for split in ("val", "test"):
        for kind in ("global", "personalized"):
            for number in ("accuracy", "loss"):
                for suffix in ("", "_std", "_worst10", "_pooled"):
                    names.add(f"{split}/{kind}/{number}{suffix}")
    assert names <= set(rows[0])
    assert not names - {name for name in rows[0] if np.isfinite(column(rows, name)).all()}
    assert column(rows, "participants").tolist() == [4, 4]


def test_clients_have_counts_scores_and_bytes(run, data):
    clients, last = table(run[0] / "clients.csv"), table(run[0] / "metrics.csv")[-1]
    assert column(clients, "client").tolist() == list(range(6))
    targets = data.samples.targets.numpy()
    for split in ("train", "val", "test"):
        owned = getattr(data.partition, split)
        assert column(clients, f"{split}_samples").tolist() == owned.sizes.tolist()
    for k in range(10):
        count = [(targets[data.partition.train[i]] == k).sum() for i in range(6)]
        assert column(clients, f"label_{k}").tolist() == count
    for split in ("val", "test"):
        samples = column(clients, f"{split}_samples")
        for kind in ("global", "personalized"):
            for number, worst in (("accuracy", min), ("loss", max)):
                name = f"{split}/{kind}/{number}"
                values = column(clients, name)
                assert float(last[name]) == pytest.approx(values.mean())
                assert float(last[f"{name}_std"]) == pytest.approx(values.std())
                assert float(last[f"{name}_worst10"]) == pytest.approx(worst(values))
                pooled = (values * samples).sum() / samples.sum()
                assert float(last[f"{name}_pooled"]) == pytest.approx(pooled)
    for way in ("uplink", "downlink"):
        booked = column(clients, f"{way}_bytes")
        assert booked.sum() == float(last[f"comm/{way}_bytes"]) > 0
    # Two rounds, four of six clients each: every upload is the dense model.
    values = sum(w.numel() for w in checkpoint(run)["state_dict"].values() if w.is_floating_point())
    values -= checkpoint(run)["state_dict"]["gamma_mean"].numel()
    assert set(column(clients, "uplink_bytes") / (4 * values)) <= {0, 1, 2}
    assert (column(clients, "uplink_bytes") / (4 * values)).sum() == 8


def checkpoint(run):
    return torch.load(run[0] / "checkpoints" / "last.ckpt", weights_only=True)


def test_summary_has_the_last_and_the_best_round_and_how_they_came_about(run, data):
    summary, rows = json.loads((run[0] / "summary.json").read_text()), table(run[0] / "metrics.csv")
    for name, value in rows[-1].items():
        assert summary[name] == float(value), name
    best = summary["best"]
    assert best["selected_by"] == "val/personalized/accuracy"
    validation = column(rows, "val/personalized/accuracy")
    assert best["round"] == validation.argmax() + 1
    for name, value in rows[best["round"] - 1].items():
        assert best[name] == float(value), name
    assert summary["name"] == "quickstart" and summary["folder"] == str(run[0])
    assert summary["algorithm"] == "FedSLR"
    assert summary["engine"] in ("compiled chain", "sequential")
    assert summary["round"] == 2 and summary["seed"] == 0
    assert summary["parameters/global"] > 0 and summary["parameters/personalized"] > 0
    assert 0 < summary["wall_seconds"] < 300 and summary["samples_per_second"] > 0
    assert summary["peak_memory_bytes"] > 1e7
    assert summary["partition_hash"] == data.partition.hash
    assert {"python", "torch", "lightning"} <= set(summary["versions"])
    words = ("6 clients", "alpha=1.0", "50%", "10%", "4 clients a round", "uniform", "seed 0")
    assert not [word for word in words if word not in summary["protocol"]]
    assert summary["gained"] + summary["equal"] + summary["lost"] == pytest.approx(1)
    assert 0 <= summary["test/local/accuracy"] <= 1


def test_the_table_is_printed(run):
    folder, out = run
    summary = json.loads((folder / "summary.json").read_text())
    for kind in ("test/global", "test/personalized", "test/local"):
        for suffix in ("", "_std", "_worst10"):
            assert f"{summary[f'{kind}/accuracy{suffix}']:.4f}" in out
    assert "FedSLR, 2 rounds" in out and str(folder) in out


@pytest.mark.slow
def test_a_saved_config_repeats_its_run_in_a_folder_of_its_own(run):
    folder, _ = run
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    status, _, err = call("fit", "--config", folder / "config.yaml")
    again = folder.with_name("quickstart-2")
    assert status == 0 and err == ""
    for name in ("config.yaml", "metrics.csv", "clients.csv"):
        assert (again / name).read_bytes() == before[name]
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    assert json.loads((again / "summary.json").read_text())["name"] == "quickstart-2"


# ---- validate, test, predict --------------------------------------------------------------------


def evaluated(run, subcommand):
    """Runs a subcommand on the checkpoint of the run; returns the folder of the run."""
    folder, _ = run
    kept = ("metrics.csv", "clients.csv", "summary.json", "config.yaml")
    before = [(folder / name).read_bytes() for name in kept]
    others = {path.name for path in folder.parent.iterdir()}
    status, out, err = call(
        subcommand,
        f"--config={folder / 'config.yaml'}",
        f"--ckpt_path={folder / 'checkpoints' / 'last.ckpt'}",
    )
    assert status == 0 and err == ""
    assert subcommand != "predict" or f"predictions: {folder}" in out
    assert [(folder / name).read_bytes() for name in kept] == before
    assert {path.name for path in folder.parent.iterdir()} == others
    return folder


@pytest.mark.parametrize("subcommand, splits", [("validate", ("val", "test")), ("test", ("test",))])
def test_evaluating_the_checkpoint_gives_the_numbers_of_the_last_round(run, subcommand, splits):
    folder = evaluated(run, subcommand)
    row = json.loads((folder / f"{subcommand}.json").read_text())
    last = json.loads((folder / "summary.json").read_text())
    scores = [n for n in last if n.startswith(splits) and not n.startswith("test/local/")]
    assert scores
    for name in ("round", "parameters/global", "parameters/personalized", *scores):
        assert row[name] == last[name], name
    assert not [name for name in row if name.startswith("val/") and "val" not in splits]
    fitted = table(folder / "clients.csv")
    for one, other in zip(table(folder / f"{subcommand}_clients.csv"), fitted, strict=True):
        shared = set(one) & set(other)
        assert {f"{split}/global/accuracy" for split in splits} | {"uplink_bytes"} <= shared
        assert {name: one[name] for name in shared} == {name: other[name] for name in shared}


def test_predict_writes_every_test_samples_predictions(run, data):
    for rank in (0, 1):  # of an earlier model, and of two processes
        (run[0] / f"predictions-{rank}.csv").write_text("client,sample,target,global\n")
    rows = table(evaluated(run, "predict") / "predictions.csv")
    assert [path.name for path in run[0].glob("predictions*")] == ["predictions.csv"]
    clients = table(run[0] / "clients.csv")
    assert list(rows[0]) == ["client", "sample", "target", "global", "personalized"]
    owner, sample = column(rows, "client").astype(int), column(rows, "sample").astype(int)
    target = data.samples.targets.numpy()
    assert (column(rows, "target") == target[sample]).all()
    for i in range(6):
        mine = owner == i
        assert sorted(sample[mine]) == sorted(data.partition.test[i])
        for kind in ("global", "personalized"):
            right = column(rows, kind)[mine] == target[sample[mine]]
            assert right.mean() == pytest.approx(float(clients[i][f"test/{kind}/accuracy"]))
