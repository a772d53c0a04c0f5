"""A run that is continued from a checkpoint gives what it would have given in one go, exactly.

tests/algorithms/test_conformance.py asks that of every method; here are its optimizers, buffers,
files, interruptions and refusals.
"""

import csv
import json
import os
import platform
import re
import sys
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from datamodules import IID, ArrayDataModule, ConfigError, DigitsDataModule, Dirichlet
from models import MLP
from pfl import FederatedLoop
from pfl.aggregation.robust import GeometricMedian, Median
from pfl.algorithms import SCAFFOLD, FedAvg, FedPD, FedProx, FedSLR
from pfl.callbacks import LocalBaseline, RoundCheckpoint, RunFigure
from pfl.callbacks.local_baseline import BaselineCheckpoint
from pfl.callbacks.run_settings import changes, settings
from pfl.cli import main
from pfl.rounds.checkpoint_io import StreamedCheckpointIO
from pfl.rounds.clock import Clock
from pfl.scores.table import header_size
from tests.algorithms.methods import differing, everything
from tests.problems import quiet
from tests.refusal import refused

CLIENTS = 6
FILES = ("metrics.csv", "clients.csv")
MEASURED = {"name", "folder", "wall_seconds", "samples_per_second", "peak_memory_bytes"}


def mlp(hidden=8):
    return MLP(64, [hidden])


def batchnorm():
    """Running statistics, and random numbers."""
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8)),
        *(nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 10)),
    )


CASES = {
    "FedSLR": (
        lambda: FedSLR(mlp(), low_rank_penalty=0.01, sparse_penalty=0.01),
        {"clients_per_round": 2, "clients_at_once": 1},
    ),
    "clients that fail, are slow or never train": (
        lambda: SCAFFOLD(mlp()),
        {"dropout": 0.4, "stragglers": 0.5, "unseen": 0.2},
    ),
    "FedProx, momentum, Bernoulli": (
        lambda: FedProx(mlp(), optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
        {"clients_per_round": 2, "sampling": "bernoulli"},
    ),
    "BatchNorm, local buffers": (
        lambda: FedAvg(batchnorm(), batch_size=None, buffers="local"),
        {"clients_per_round": 2},
    ),
    "BatchNorm, averaged buffers": (
        lambda: FedAvg(batchnorm(), batch_size=None, buffers="average"),
        {"clients_per_round": 2},
    ),
}


def fit(root, make, rounds, *callbacks, start=0, data_seed=0, ckpt_path=None, **loop):
    """Train new objects, whose network begins at random (`start` is the seed); the algorithm."""
    torch.manual_seed(start)
    algorithm = make()
    trainer = quiet(root, rounds, RoundCheckpoint(every_seconds=0), *callbacks)
    data = FederatedLoop(DigitsDataModule(CLIENTS, Dirichlet(1.0), seed=data_seed), **loop)
    trainer.fit(algorithm, datamodule=data, ckpt_path=ckpt_path)
    return algorithm


def assert_equal(actual, expected):
    assert differing(actual, expected) == set()


def assert_same_files(folder, expected):
    for name in FILES:
        assert (folder / name).read_bytes() == (expected / name).read_bytes(), name
    one, other = (json.loads((path / "summary.json").read_text()) for path in (folder, expected))
    assert {k: v for k, v in one.items() if k not in MEASURED} == {
        k: v for k, v in other.items() if k not in MEASURED
    }


def rounds_in(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return [int(row["round"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize("case", CASES)
def test_resumed_run_equals_the_uninterrupted_one(tmp_path, case):
    make, loop = CASES[case]
    expected = fit(tmp_path / "straight", make, 6, LocalBaseline(), **loop)
    fit(tmp_path / "parts", make, 3, LocalBaseline(), **loop)
    folder = tmp_path / "parts" / "run"
    last = folder / "checkpoints" / "last.ckpt"
    torch.load(last, weights_only=True)
    assert rounds_in(folder) == [1, 2, 3]
    # Another beginning and another state of the global generator: all that counts is in the file.
    resumed = fit(tmp_path / "parts", make, 6, LocalBaseline(), start=1, ckpt_path=last, **loop)
    assert_equal(everything(resumed), everything(expected))
    assert_same_files(folder, tmp_path / "straight" / "run")
    assert rounds_in(folder) == [1, 2, 3, 4, 5, 6]
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["run"]
    assert resumed.trainer.recorder.seconds > 0


def test_the_cases_differ_from_their_beginning(tmp_path):
    """What the comparison above compares does change between rounds 3 and 6."""
    make, loop = CASES["FedSLR"]
    early, late = (everything(fit(tmp_path, make, rounds, **loop)) for rounds in (3, 6))
    states = {"client gamma", "client p", "module gamma_mean", "ledger uplink", "rounds"}
    assert states <= differing(early, late)


class Interrupt(pl.Callback):
    """Breaks the fourth round off, in one of its hooks."""

    def __init__(self, hook, error):
        self.error = error
        setattr(self, hook, self.strike)

    def strike(self, trainer, *_):
        if trainer.current_epoch == 3:
            raise self.error


@pytest.mark.parametrize(
    "hook, error, done",
    [
        ("on_train_batch_start", RuntimeError("out of memory"), [1, 2, 3]),
        ("on_train_batch_start", KeyboardInterrupt(), [1, 2, 3]),
        ("on_train_batch_end", RuntimeError("out of memory"), [1, 2, 3]),
        ("on_validation_start", RuntimeError("out of memory"), [1, 2, 3]),
        ("on_train_epoch_end", RuntimeError("disk full"), None),  # the row may be there already
    ],
)
def test_interrupted_run_loses_nothing(tmp_path, hook, error, done):
    make, loop = CASES["FedSLR"]
    expected = fit(tmp_path / "straight", make, 6, **loop)
    with pytest.raises((type(error), SystemExit)):
        fit(tmp_path / "parts", make, 6, Interrupt(hook, error), **loop)
    folder = tmp_path / "parts" / "run"
    rounds = rounds_in(folder)
    assert rounds in ([done] if done else [[1, 2, 3], [1, 2, 3, 4]])
    assert json.loads((folder / "summary.json").read_text())["round"] == rounds[-1]
    with (folder / "clients.csv").open(newline="") as file:
        clients = list(csv.DictReader(file))
    assert len(clients) == CLIENTS and "test/personalized/accuracy" in clients[0]
    last = folder / "checkpoints" / "last.ckpt"
    resumed = fit(tmp_path / "parts", make, 6, start=1, ckpt_path=last, **loop)
    assert_equal(everything(resumed), everything(expected))
    assert_same_files(folder, tmp_path / "straight" / "run")


@pytest.mark.usefixtures("run_figures")
def test_resuming_a_finished_run_changes_nothing(tmp_path):
    make, loop = CASES["FedSLR"]
    expected = everything(fit(tmp_path, make, 2, RunFigure(), LocalBaseline(), **loop))
    folder = tmp_path / "run"
    names = (*FILES, "summary.json", "report.png")
    before = {name: (folder / name).read_bytes() for name in names}
    last = folder / "checkpoints" / "last.ckpt"
    again = fit(tmp_path, make, 2, RunFigure(), LocalBaseline(), start=1, ckpt_path=last, **loop)
    changed = differing(everything(again), expected)
    assert {name for name in changed if not name.startswith("row ")} == set()  # no round, no row
    assert {name: (folder / name).read_bytes() for name in names} == before


@pytest.mark.parametrize("done", ["two rounds", "all rounds", "everything"])
def test_a_run_that_was_stopped_early_ends_after_the_same_round(tmp_path, done, capsys):
    """The loss does not fall by a million: it is best in round 1, and the patience ends in 3."""

    def run(root, rounds, ckpt_path=None):
        stock = EarlyStopping("train/loss", 1e6, 2), ModelCheckpoint(monitor="train/loss")
        algorithm = fit(root, make, rounds, *stock, ckpt_path=ckpt_path, **loop)
        saved = algorithm.trainer.run_dir / "checkpoints"
        return everything(algorithm), sorted(path.name for path in saved.iterdir())

    make, loop = CASES["FedSLR"]
    expected, names = run(tmp_path / "straight", 6)
    assert rounds_in(tmp_path / "straight" / "run") == [1, 2, 3]
    if done == "two rounds":
        run(tmp_path / "parts", 2)
    else:
        run(tmp_path / "parts", 6)
    folder = tmp_path / "parts" / "run"
    if done == "all rounds":  # the process was killed before it wrote the result
        (folder / "summary.json").unlink()
    actual, found = run(tmp_path / "parts", 6, folder / "checkpoints" / "last.ckpt")
    changed = {name for name in differing(actual, expected) if not name.startswith("row ")}
    assert (changed, found) == (set(), names)
    assert_same_files(folder, tmp_path / "straight" / "run")
    nothing = "has been through 3 rounds, and EarlyStopping has ended it"
    assert (nothing in capsys.readouterr().out) == (done == "everything")


def test_a_run_whose_time_is_over_says_so(tmp_path, capsys):
    make, loop = CASES["FedSLR"]
    fit(tmp_path, make, 6, Timer({"microseconds": 1}), **loop)
    saved = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert rounds_in(saved.parents[1]) == [1]  # a round that has begun ends
    fit(tmp_path, make, 6, Timer({"microseconds": 1}), ckpt_path=saved, **loop)
    assert "has been through 1 rounds, and their time is over" in capsys.readouterr().out
    fit(tmp_path, make, 2, Timer({"days": 1}), ckpt_path=saved, **loop)
    assert rounds_in(saved.parents[1]) == [1, 2]


def test_a_baseline_of_other_settings_starts_anew(tmp_path, monkeypatch):
    """The run ends in the first of two rounds of the baseline and goes on with clipped gradients:
    the baseline is that of a run which has clipped them from its beginning."""
    save = BaselineCheckpoint.save

    def save_and_end(self, store, rounds, scores):
        save(self, store, rounds, scores)
        raise RuntimeError("ended")

    def method(clip):
        return FedAvg(MLP(64, [4]), lr=0.1, local_epochs=1, clip=clip)

    expected = LocalBaseline()
    fit(tmp_path / "straight", lambda: method(0.01), 2, expected)
    unclipped = LocalBaseline()
    fit(tmp_path / "other", lambda: method(None), 2, unclipped)
    assert differing(unclipped.scores, expected.scores) >= {"loss"}
    with monkeypatch.context() as patch:
        patch.setattr(BaselineCheckpoint, "save", save_and_end)
        with pytest.raises(RuntimeError, match="ended"):
            fit(tmp_path / "parts", lambda: method(None), 2, LocalBaseline())
    checkpoints = tmp_path / "parts" / "run" / "checkpoints"
    assert (checkpoints / "local.ckpt").is_file()
    resumed = LocalBaseline()
    with pytest.warns(UserWarning, match="model.clip was None and is 0.01"):
        last = checkpoints / "last.ckpt"
        fit(tmp_path / "parts", lambda: method(0.01), 2, resumed, start=1, ckpt_path=last)
    assert_equal(resumed.scores, expected.scores)


class Resume(pl.Callback):
    """Tries to resume the run in whose second round it is, as a requeued job would."""

    line = ""

    def on_train_epoch_start(self, trainer, *_):
        if trainer.current_epoch == 1:
            folder = trainer.run_dir
            before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
            with pytest.raises(ConfigError) as caught:
                fit(folder.parent, self.make, 2, ckpt_path=folder / "checkpoints" / "last.ckpt")
            self.line = str(caught.value)
            assert before == {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    @staticmethod
    def make():
        return FedAvg(mlp())


def test_a_second_resume_is_refused_while_the_first_lives(tmp_path):
    fit(tmp_path, Resume.make, 1)
    last, twice = tmp_path / "run" / "checkpoints" / "last.ckpt", Resume()
    fit(tmp_path, Resume.make, 2, twice, ckpt_path=last)
    assert twice.line.startswith(f"ckpt_path: another process is writing to {tmp_path / 'run'};")
    assert "\n" not in twice.line and rounds_in(tmp_path / "run") == [1, 2]
    fit(tmp_path, Resume.make, 3, ckpt_path=last)  # the lock is free again


def edit(path):
    path.write_text(path.read_text().replace("\n1,", "\n1,9", 1))


@pytest.mark.parametrize(
    "change", [edit, Path.unlink, Path.touch, lambda path: path.write_text("")]
)
@pytest.mark.parametrize("table", ["metrics.csv", "client_scores.npy"])
def test_a_table_that_someone_changed_is_told_and_restored(tmp_path, change, table):
    if table.endswith(".npy") and change is edit:
        pytest.skip("not a text")
    fit(tmp_path, Resume.make, 2)
    path = tmp_path / "run" / table
    whole = path.read_bytes()
    change(path)
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    if change is Path.touch:  # which changes nothing
        fit(tmp_path, Resume.make, 3, ckpt_path=last)
    else:
        with pytest.warns(UserWarning, match=f"{table} was changed or removed .* up to round 2"):
            fit(tmp_path, Resume.make, 3, ckpt_path=last)
    skip = 0 if table == "metrics.csv" else header_size(whole)  # the header counts the rows
    after = path.read_bytes()
    assert after[skip:].startswith(whole[skip:]) and len(after) > len(whole)


class Watch(pl.Callback):
    """Says whether training began."""

    began = False

    def on_train_start(self, *_):
        self.began = True


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The checkpoint of a short run of FedAvg."""
    root = tmp_path_factory.mktemp("saved")
    fit(root, lambda: FedAvg(mlp()), 1)
    return root / "run" / "checkpoints" / "last.ckpt"


@pytest.mark.parametrize(
    "make, data_seed, words",
    [
        (lambda: FedProx(mlp()), 0, ["algorithm", "FedAvg", "FedProx"]),
        (lambda: FedAvg(mlp(9)), 0, ["parameters", "610", "685"]),
        (lambda: FedAvg(nn.Sequential(mlp(), nn.Tanh())), 0, ["network"]),
        (lambda: FedAvg(mlp()), 1, ["seed is 0", "1"]),
    ],
    ids=["algorithm", "network", "layers", "seed"],
)
def test_checkpoint_of_another_run_is_refused(saved, tmp_path, make, data_seed, words):
    files = [path for path in saved.parents[1].rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    assert_refused(tmp_path, make, data_seed, saved, words)
    assert {path: path.read_bytes() for path in saved.parents[1].rglob("*") if path.is_file()} == (
        before
    )


@pytest.mark.parametrize(
    ("make", "other"),
    [
        (lambda: FedPD(mlp(), variance_reduction=True, inner_step=0.5), lambda: FedPD(mlp())),
        (
            lambda: FedAvg(batchnorm(), batch_size=None, buffers="local"),
            lambda: FedAvg(batchnorm(), batch_size=None),
        ),
    ],
    ids=["states", "buffers"],
)
def test_checkpoint_with_other_states_is_refused(tmp_path, make, other):
    """In both directions: the checkpoint lacks states of the method, or has others."""
    for number, (first, second) in enumerate(((make, other), (other, make))):
        fit(tmp_path / "saved", first, 1)
        folder = "run" if number == 0 else "run-2"
        path = tmp_path / "saved" / folder / "checkpoints" / "last.ckpt"
        assert_refused(tmp_path, second, 0, path, ["client states"])


def assert_refused(tmp_path, make, data_seed, path, words):
    watch = Watch()
    with pytest.raises(ConfigError) as caught:
        fit(tmp_path, make, 3, watch, data_seed=data_seed, ckpt_path=path)
    message = str(caught.value)
    assert message.startswith("ckpt_path") and "\n" not in message
    assert not [word for word in words if word not in message], message
    assert not watch.began and list(tmp_path.glob("*/metrics.csv")) == []


def test_a_save_that_fails_leaves_the_checkpoint_before_it(tmp_path, monkeypatch):
    path, io = tmp_path / "folder" / "last.ckpt", StreamedCheckpointIO()
    io.save_checkpoint({"round": 1}, path)

    def full(_, where):
        Path(where).write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, refused(str(path), "cannot be saved", "No space left"):
        patch.setattr(torch, "save", full)
        io.save_checkpoint({"round": 2}, path)
    assert io.load_checkpoint(path) == {"round": 1}
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no file that is always full")
def test_pytorch_reports_a_full_disk_in_the_words_that_we_look_for(tmp_path):
    part = f"last.ckpt.{platform.node()}.{os.getpid()}.part"
    (tmp_path / part).symlink_to("/dev/full")
    with refused(str(tmp_path), "cannot be saved", "disk is full"):
        StreamedCheckpointIO().save_checkpoint({"w": torch.ones(2**20)}, tmp_path / "last.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_errors_that_are_not_of_the_disk_stay_what_they_are(tmp_path):
    with pytest.raises(AttributeError, match="pickle"):
        StreamedCheckpointIO().save_checkpoint({"w": lambda: 0}, tmp_path / "last.ckpt")
    (tmp_path / "file").touch()
    with refused(str(tmp_path), "Not a directory"):
        StreamedCheckpointIO().save_checkpoint({}, tmp_path / "file" / "folder" / "last.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_checkpoint_of_plain_lightning_is_refused(tmp_path):
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(BoringModel())
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    words = ["federated"]
    assert_refused(tmp_path, lambda: FedAvg(mlp()), 0, tmp_path / "plain.ckpt", words)


MEDIANS = ("Median", "GeometricMedian")


def test_other_samples_are_refused_where_models_are_only_used(tmp_path):
    """`Normalize` would take means and deviations that the models were not trained with."""
    inputs = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    fit_arrays(tmp_path, inputs, 1)
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    for stage in ("validate", "test", "predict"):
        for sign in (1, -1):
            data = ArrayDataModule(sign * inputs, np.arange(40) % 2, num_clients=4, partition=IID())
            run = partial(
                getattr(quiet(tmp_path, 1, logger=False), stage),
                FedAvg(nn.Linear(3, 2), lr=0.1),
                FederatedLoop(data),
                ckpt_path=last,
            )
            if sign == 1:
                run()
                continue
            with refused("ckpt_path", "samples are other ones"):
                run()


def fit_arrays(root, inputs, rounds, *, lr=0.1, ckpt_path=None, **loop):
    """Trains on arrays; the method."""
    data = ArrayDataModule(inputs, np.arange(len(inputs)) % 2, num_clients=4, partition=IID())
    algorithm = FedAvg(nn.Linear(3, 2), lr=lr)
    quiet(root, rounds).fit(algorithm, FederatedLoop(data, **loop), ckpt_path=ckpt_path)
    return json.loads((root / "run" / "summary.json").read_text())


def test_other_samples_or_another_seed_are_refused(tmp_path):
    """The partition is the same: it depends on the number of samples and the data's seed."""
    inputs = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    assert "resumed" not in fit_arrays(tmp_path, inputs, 1)
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    with refused("ckpt_path", "samples are other ones"):
        fit_arrays(tmp_path, -inputs, 2, ckpt_path=last)
    with refused("ckpt_path", "seed is 0", "5"):
        fit_arrays(tmp_path, inputs, 2, ckpt_path=last, seed=5)
    with refused("ckpt_path", "partition"):
        fit_arrays(tmp_path, inputs[:-1], 2, ckpt_path=last)
    with refused("ckpt_path", "seed is 0", "6"):  # which is said of another partition, too
        fit_arrays(tmp_path, inputs[:-1], 2, ckpt_path=last, seed=6)
    assert "resumed" not in fit_arrays(tmp_path, inputs, 2, ckpt_path=last)


def test_other_settings_are_told_and_recorded(tmp_path):
    inputs = np.zeros((40, 3), np.float32)
    fit_arrays(tmp_path, inputs, 2)
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    with pytest.warns(UserWarning, match="From round 3 on .* model.lr was 0.1 and is 0.05$"):
        changed = fit_arrays(tmp_path, inputs, 3, lr=0.05, ckpt_path=last)["resumed"]
    assert changed == [{"round": 3, "changed": {"model.lr": [0.1, 0.05]}}]
    with pytest.warns(UserWarning, match="From round 4 on .* loop.clients_per_round was None"):
        again = fit_arrays(tmp_path, inputs, 4, lr=0.05, ckpt_path=last, clients_per_round=2)
    assert [entry["round"] for entry in again["resumed"]] == [3, 4]


@pytest.mark.parametrize(
    ("loop", "key", "was", "now"),
    [
        ({"clock": [Clock(speed=2.0), Clock(speed=4.0)]}, "clock.speed", 2.0, 4.0),
        ({"trace": [[[0], [1], [2]], [[0], [1], [3]]]}, "trace", [[0], [1], [2]], [[0], [1], [3]]),
        ({"unseen": [[3], [2]]}, "unseen", [3], [2]),
        ({"dropout": [0.0, 0.5]}, "dropout", 0.0, 0.5),
        ({"aggregation": [Median(), GeometricMedian()]}, "aggregation.class", *MEDIANS),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_every_other_setting_of_the_loop_is_told_from_python(tmp_path, loop, key, was, now):
    """Without a configuration file, from which the command line knows the settings."""
    inputs = np.zeros((40, 3), np.float32)
    ((name, (before, after)),) = loop.items()
    fit_arrays(tmp_path, inputs, 2, **{name: before})
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    with pytest.warns(UserWarning, match=re.escape(f"loop.{key} was {was} and is {now}")):
        changed = fit_arrays(tmp_path, inputs, 3, ckpt_path=last, **{name: after})["resumed"]
    assert changed[0]["round"] == 3
    assert changed[0]["changed"][f"loop.{key}"] == [was, now]


def test_a_long_trace_is_told_by_its_beginning():
    traces = [[[client] for client in range(100)] + [[last]] for last in range(2)]
    before, now = (settings({"loop": {"trace": trace}})["loop.trace"] for trace in traces)
    assert before != now
    assert before.startswith("[[0], [1], [2]")
    assert len(before) < 220 and len(now) < 220


@pytest.mark.filterwarnings("ignore:From round 2 on the run has other settings")
def test_another_rate_of_the_server_counts_and_its_momentum_stays(tmp_path):
    """SGD moves by rate x velocity, and the velocity of round 2 does not depend on that rate.

    So half the rate in round 2 moves the model half as far as the rate of before does.
    """

    def after(rounds, folder, rate, **keys):
        server = partial(torch.optim.SGD, lr=rate, momentum=0.9)
        return fit(
            tmp_path / folder, lambda: FedAvg(mlp(), server_optimizer=server), rounds, **keys
        ).space.vector.detach()

    first = after(1, "run", 1.0)
    whole = after(2, "whole", 1.0)
    last = tmp_path / "run" / "run" / "checkpoints" / "last.ckpt"
    half = after(2, "run", 0.5, ckpt_path=last)
    torch.testing.assert_close(half - first, (whole - first) / 2, rtol=0, atol=1e-7)
    assert (whole - first).abs().max() > 1e-3


@pytest.mark.cli
def test_another_name_of_a_resumed_run_is_told(tmp_path, capsys):
    """A run goes on where its checkpoint is, also if it is the second run of its name."""

    def call(rounds, *words):
        small = ("--data.num_clients=6", "--data.partition.alpha=1.0", "--trainer.accelerator=cpu")
        trainer = (f"--trainer.max_epochs={rounds}", f"--trainer.default_root_dir={tmp_path}")
        config = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
        assert main(["fit", f"--config={config}", *small, *trainer, *words]) == 0
        assert capsys.readouterr().err == ""

    (tmp_path / "one").mkdir()
    call(1, "--trainer.name=one")
    folder = tmp_path / "one-2"
    last = f"--ckpt_path={folder / 'checkpoints' / 'last.ckpt'}"
    call(2, "--trainer.name=one", last)
    with pytest.warns(UserWarning, match=f"{tmp_path / 'two'} has no effect; .* {folder}$"):
        call(3, "--trainer.name=two", last)
    assert rounds_in(folder) == [1, 2, 3] and not (tmp_path / "two").exists()


def test_another_content_of_a_trace_is_another_setting(tmp_path):
    path = tmp_path / "trace.json"
    found = []
    for text in ("[[0]]", "[[1]]"):
        path.write_text(text)
        found.append(settings({"loop": {"trace": str(path)}}))
    assert list(changes(*found)) == ["loop.trace"]


@pytest.mark.slow
@pytest.mark.cli
def test_resume_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pfl"])
    config = Path(__file__).parents[2] / "configs" / "quickstart.yaml"

    def call(root, rounds, *args):
        small = ("--data.num_clients=6", "--data.partition.alpha=1.0", "--model.local_epochs=1")
        trainer = (f"--trainer.max_epochs={rounds}", f"--trainer.default_root_dir={root}")
        every = "--trainer.accelerator=cpu"
        assert main(["fit", f"--config={config}", *small, *trainer, every, *args]) == 0
        assert capsys.readouterr().err == ""

    call(tmp_path / "straight", 2)
    call(tmp_path / "parts", 1)
    folder = tmp_path / "parts" / "quickstart"
    last = folder / "checkpoints" / "last.ckpt"
    call(tmp_path / "parts", 2, f"--ckpt_path={last}")
    assert_same_files(folder, tmp_path / "straight" / "quickstart")
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["quickstart"]
    # The folder's configuration is that of the whole run.
    assert yaml.safe_load((folder / "config.yaml").read_text())["trainer"]["max_epochs"] == 2
    # Another learning rate is told, and the earlier configuration stays.
    with pytest.warns(UserWarning, match="From round 3 on .*: model.lr was 0.05 and is 0.02$"):
        call(tmp_path / "parts", 3, f"--ckpt_path={last}", "--model.lr=0.02")
    for name, lr in (("config", 0.02), ("config-until-round-2", 0.05)):
        assert (
            yaml.safe_load((folder / f"{name}.yaml").read_text())["model"]["init_args"]["lr"] == lr
        )
