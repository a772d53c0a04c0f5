"""The command line: what a run writes, how one is asked for, and what a mistake gets."""

import contextlib
import copy
import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from datamodules import DigitsDataModule, Dirichlet, SplitOwn
from pfl.algorithms import FedAvg
from pfl.cli import FederatedCLI, main

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
SMALL = {
    "seed_everything": 0,
    "trainer": {"name": "small", "max_epochs": 2, "accelerator": "cpu"},
    "model": {
        "class_path": "FedAvg",
        "init_args": {
            "network": {"class_path": "MLP", "init_args": {"in_features": 64, "hidden": [8]}},
            "batch_size": 50,
        },
    },
    "data": {
        "class_path": "DigitsDataModule",
        "init_args": {
            "num_clients": 6,
            "partition": {"class_path": "Dirichlet", "init_args": {"alpha": 1.0}},
        },
    },
    "loop": {"clients_per_round": 3},
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty current folder, in which nothing may be left."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["pfl"])  # LightningCLI warns where it has arguments
    yield folder
    assert list(folder.iterdir()) == []


def write(path, config):
    path.write_text(yaml.safe_dump(config))
    return path


def changed(config, key, value):
    """A copy in which one value, given by its dotted path, is another one."""
    config = copy.deepcopy(config)
    *path, last = key.split(".")
    inner = config
    for name in path:
        inner = inner.setdefault(name, {})
    inner[last] = value
    return config


def call(*args):
    """Status, standard output and standard error of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(a) for a in args])
    return status, out.getvalue(), err.getvalue()


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def column(rows, name):
    return np.array([float(row[name]) for row in rows])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The quickstart with few rounds and clients: its folder and what it printed."""
    root, cwd = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("cwd")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["pfl"])
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
    assert list(cwd.iterdir()) == []
    assert [path.name for path in root.iterdir()] == ["quickstart"]
    return root / "quickstart", out


@pytest.fixture(scope="module")
def data():
    """The data of `run`."""
    datamodule = DigitsDataModule(6, Dirichlet(1.0), SplitOwn(test=0.5), seed=0)
    datamodule.setup()
    return datamodule


# ---- what a run writes --------------------------------------------------------------------------


def test_files_of_a_run(run):
    folder, _ = run
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    names = "config.yaml metrics.csv clients.csv summary.json report.png checkpoints/last.ckpt"
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
                values = column(clients, name.replace("/", "_"))
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


def test_summary_has_everything_that_the_design_lists(run, data):
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
    assert summary["algorithm"] == "FedSLR" and summary["engine"] in ("loop", "vmap")
    assert summary["round"] == 2 and summary["seed"] == 0
    assert summary["parameters/global"] > 0 and summary["parameters/personalized"] > 0
    assert 0 < summary["wall_seconds"] < 300 and summary["samples_per_second"] > 0
    assert summary["peak_memory_bytes"] > 1e7
    assert summary["partition_hash"] == data.partition.hash
    assert {"python", "torch", "lightning"} <= set(summary["versions"])
    words = ("6 clients", "alpha=1.0", "50%", "10%", "4 clients a round", "uniform", "seed 0")
    assert not [word for word in words if word not in summary["protocol"]]
    assert summary["gained"] + summary["equal"] + summary["lost"] == pytest.approx(1)
    assert 0 <= summary["alone/accuracy"] <= 1


def test_the_table_is_printed(run):
    folder, out = run
    summary = json.loads((folder / "summary.json").read_text())
    for kind in ("test/global", "test/personalized", "alone"):
        for suffix in ("", "_std", "_worst10"):
            assert f"{summary[f'{kind}/accuracy{suffix}']:.4f}" in out
    assert "FedSLR, 2 rounds" in out and str(folder) in out


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
    """The folder, after running a subcommand on the run's checkpoint."""
    folder, _ = run
    kept = ("metrics.csv", "clients.csv", "summary.json", "config.yaml")
    before = [(folder / name).read_bytes() for name in kept]
    others = {path.name for path in folder.parent.iterdir()}
    status, _, err = call(
        subcommand,
        f"--config={folder / 'config.yaml'}",
        f"--ckpt_path={folder / 'checkpoints' / 'last.ckpt'}",
    )
    assert status == 0 and err == ""
    assert [(folder / name).read_bytes() for name in kept] == before
    assert {path.name for path in folder.parent.iterdir()} == others
    return folder


@pytest.mark.parametrize("subcommand, splits", [("validate", ("val", "test")), ("test", ("test",))])
def test_evaluating_the_checkpoint_gives_the_numbers_of_the_last_round(run, subcommand, splits):
    folder = evaluated(run, subcommand)
    row = json.loads((folder / f"{subcommand}.json").read_text())
    last = json.loads((folder / "summary.json").read_text())
    scores = [name for name in last if name.startswith(splits)]
    assert scores
    for name in ("round", "parameters/global", "parameters/personalized", *scores):
        assert row[name] == last[name], name
    assert not [name for name in row if name.startswith("val/") and "val" not in splits]
    fitted = table(folder / "clients.csv")
    for one, other in zip(table(folder / f"{subcommand}_clients.csv"), fitted, strict=True):
        shared = set(one) & set(other)
        assert {f"{split}_global_accuracy" for split in splits} | {"uplink_bytes"} <= shared
        assert {name: one[name] for name in shared} == {name: other[name] for name in shared}


def test_predict_writes_every_test_samples_predictions(run, data):
    rows = table(evaluated(run, "predict") / "predictions.csv")
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
            assert right.mean() == pytest.approx(float(clients[i][f"test_{kind}_accuracy"]))


# ---- configurations -----------------------------------------------------------------------------


@pytest.fixture
def parsed(monkeypatch):
    """Builds everything that a command names, and runs nothing."""
    monkeypatch.setattr(FederatedCLI, "_run_subcommand", lambda self, subcommand: None)
    return lambda *args: FederatedCLI(["fit", *map(str, args)])


# Those of the papers are grids of runs: tests/test_recipes.py.
CONFIGS = [p for p in sorted((ROOT / "configs").rglob("*.yaml")) if "papers" not in p.parts]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_config_file_can_be_used(parsed, path):
    config = yaml.safe_load(path.read_text())
    whole = {"model", "data"} <= set(config)
    cli = parsed(*([] if whole else ["--config", QUICKSTART]), "--config", path)
    assert cli.datamodule.datamodule is not None and cli.model.space.size > 0


def test_later_files_and_arguments_win(parsed, tmp_path):
    first = write(tmp_path / "a.yaml", changed(SMALL, "model.init_args.lr", 0.5))
    second = write(tmp_path / "b.yaml", {"trainer": {"max_epochs": 7}, "seed_everything": 3})
    cli = parsed("--config", first, "--config", second)
    assert isinstance(cli.model, FedAvg)
    assert (cli.model.lr, cli.model.batch_size) == (0.5, 50)
    assert (cli.trainer.max_epochs, cli.trainer.name) == (7, "small")
    assert cli.datamodule.clients_per_round == 3
    assert cli.datamodule.datamodule.seed == 3
    cli = parsed(
        *("--config", first, "--config", second, "--model.lr=0.05", "--data.num_clients=8"),
        *("--loop.clients_per_round=2", "--data.seed=5", "--model.network.hidden=[4,4]"),
    )
    assert cli.model.lr == 0.05 and cli.datamodule.datamodule.num_clients == 8
    assert cli.datamodule.clients_per_round == 2
    assert cli.datamodule.datamodule.seed == 5
    assert [p.shape[0] for p in cli.model.network.parameters()] == [4, 4, 4, 4, 10, 10]


def test_a_seed_of_zero_is_a_seed(parsed, tmp_path):
    path = write(tmp_path / "a.yaml", changed(SMALL, "data.init_args.seed", 0))
    assert parsed("--config", path, "--seed_everything=3").datamodule.datamodule.seed == 0


# ---- mistakes -----------------------------------------------------------------------------------

NETWORK = "model.init_args.network"
PARTITION = "data.init_args.partition"
MISTAKES = {
    "unknown option": ("model.init_args.batchsize", 10, ["batchsize", "FedAvg", "'batch_size'"]),
    "unknown key": ("trainer.max_epoch", 10, ["trainer.max_epoch", "max_epochs'"]),
    "unknown loop key": (
        "loop.client_per_round",
        10,
        ["loop.client_per_round", "clients_per_round'"],
    ),
    "unknown top key": ("modell", 10, ["modell", "'model'"]),
    "algorithm": ("model.class_path", "FedAvgg", ["model", "FedAvgg", "'FedAvg'"]),
    "network": (f"{NETWORK}.class_path", "MPL", ["network", "'MPL'", "'MLP'"]),
    "data": ("data.class_path", "DigitDataModule", ["data", "DigitDataM", "'DigitsDataModule'"]),
    "partition": (f"{PARTITION}.class_path", "Dirichlett", ["partition", "Dirichlett", "'Dirich"]),
    "protocol": (
        "data.init_args.protocol",
        {"class_path": "SplitOwnn"},
        ["protocol", "SplitOwnn", "'SplitOwn'"],
    ),
    "callback": (
        "trainer.callbacks",
        [{"class_path": "RunFigures"}],
        ["callbacks", "RunFigures", "'RunFigure'"],
    ),
    "type of a number": ("model.init_args.lr", "fast", ["lr", "fast", "float"]),
    "type of an int": ("trainer.max_epochs", "many", ["max_epochs", "many", "int"]),
    "type of a list": (f"{NETWORK}.init_args.hidden", "wide", ["hidden", "wide"]),
    "option of a partition": (
        f"{PARTITION}.init_args.beta",
        1.0,
        ["beta", "Dirichlet", "alpha"],
    ),
    "lr": ("model.init_args.lr", -1.0, ["model.lr", "-1.0", "positive"]),
    "batch_size": ("model.init_args.batch_size", 0, ["model.batch_size", "0", "at least 1"]),
    "cohort too large": ("loop.clients_per_round", 7, ["loop.clients_per_round", "7", "to 6"]),
    "cohort empty": ("loop.clients_per_round", 0, ["loop.clients_per_round", "0", "from 1"]),
    "cohort fraction": ("loop.clients_per_round", 1.5, ["loop.clients_per_round", "1.5", "int"]),
    "sampling": ("loop.sampling", "random", ["sampling", "random", "uniform", "bernoulli"]),
    "too many clients": ("data.init_args.num_clients", 5000, ["num_clients", "5000"]),
    "impossible min_size": (f"{PARTITION}.init_args.min_size", 1000, ["min_size", "1000"]),
    "alpha": (f"{PARTITION}.init_args.alpha", -1.0, ["alpha", "-1.0"]),
    "too many classes": (
        PARTITION,
        {"class_path": "ClassesPerClient", "init_args": {"classes": 11}},
        ["classes", "11", "10"],
    ),
    "too few outputs": (f"{NETWORK}.init_args.num_classes", 5, ["network", "MLP", "5", "10"]),
    "channels": (
        NETWORK,
        {"class_path": "SmallCNN", "init_args": {"in_channels": 3}},
        ["network", "SmallCNN", "[1, 8, 8]", "3"],
    ),
    "image size": (
        NETWORK,
        {"class_path": "LeNet5", "init_args": {"image_size": 8}},
        ["LeNet5", "image_size", "8"],
    ),
    "loss": (
        "model.init_args.loss",
        {"class_path": "torch.nn.BCEWithLogitsLoss"},
        ["loss", "BCEWithLogitsLoss"],
    ),
    "optimizer": (
        "model.init_args.optimizer",
        {"class_path": "torch.optim.LBFGS"},
        ["optimizer", "LBFGS"],
    ),
    "clipping": ("trainer.gradient_clip_val", 1.0, ["gradient_clip_val"]),
    "short trace": ("loop.trace", [[0, 1]], ["loop.trace", "1 rounds", "trainer.max_epochs"]),
    "trace of strangers": ("loop.trace", [[0], [6]], ["loop.trace", "6", "round 1"]),
    "missing trace": ("loop.trace", "nowhere.json", ["loop.trace", "nowhere.json"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_line(tmp_path, mistake):
    key, value, words = MISTAKES[mistake]
    path = write(tmp_path / "mistake.yaml", changed(SMALL, key, value))
    assert_refused(tmp_path, words, "fit", "--config", path)


def assert_refused(tmp_path, words, *args):
    runs = tmp_path / "runs"
    try:
        status, out, err = call(*args, "--trainer.default_root_dir", runs)
    except SystemExit as error:
        pytest.fail(f"left by sys.exit({error.code})")
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("error: ") and len(err) < 400, err
    assert not [word for word in words if word not in err], err
    assert not runs.exists()


def test_config_files_that_cannot_be_read(tmp_path):
    missing = tmp_path / "missing.yaml"
    assert_refused(tmp_path, [str(missing)], "fit", "--config", missing)
    broken = tmp_path / "broken.yaml"
    broken.write_text("trainer: {max_epochs: 2\nmodel: [")
    assert_refused(tmp_path, [str(broken), "line"], "fit", "--config", broken)


def test_a_run_needs_model_and_data(tmp_path):
    for key in ("model", "data"):
        rest = {name: value for name, value in SMALL.items() if name != key}
        assert_refused(tmp_path, [key], "fit", "--config", write(tmp_path / "rest.yaml", rest))


@pytest.mark.parametrize("subcommand", ["fit", "test"])
def test_files_that_are_no_checkpoints(tmp_path, subcommand):
    config = write(tmp_path / "small.yaml", SMALL)
    path = tmp_path / "some.ckpt"
    words = ["ckpt_path", str(path)]
    assert_refused(tmp_path, words, subcommand, "--config", config, "--ckpt_path", path)
    path.write_text("This is no checkpoint.")
    assert_refused(tmp_path, words, subcommand, "--config", config, "--ckpt_path", path)
    torch.save({"something": torch.zeros(3)}, path)
    assert_refused(tmp_path, words[:1], subcommand, "--config", config, "--ckpt_path", path)


def test_unknown_subcommand(tmp_path):
    assert_refused(tmp_path, ["train", "fit"], "train")


# ---- as a program -------------------------------------------------------------------------------


def program(*args, cwd):
    command = [sys.executable, "-m", "pfl", *map(str, args)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def test_program_refuses_an_unknown_key_in_one_line(tmp_path, here):
    config = write(tmp_path / "a.yaml", changed(SMALL, "model.init_args.batchsize", 10))
    done = program("fit", "--config", config, cwd=here)
    assert (done.returncode, done.stdout) == (2, "")
    line, rest = done.stderr.split("\n", 1)
    assert line.startswith("error: ") and "batchsize" in line and rest == ""


def test_program_is_quiet_where_output_is_redirected(tmp_path, here):
    config = write(tmp_path / "a.yaml", SMALL)
    done = program("fit", "--config", config, "--trainer.default_root_dir", tmp_path, cwd=here)
    assert (done.returncode, done.stderr) == (0, "")
    assert "FedAvg, 2 rounds" in done.stdout and "test accuracy" in done.stdout
    assert "\r" not in done.stdout and "\x1b" not in done.stdout
    assert (tmp_path / "small" / "summary.json").is_file()
