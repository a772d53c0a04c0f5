"""What is recorded of a run, beside what the command line writes: rules, bars, tables, figures."""

import io
import json
import re
import sys

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn

from datamodules import DigitsDataModule, Dirichlet, SplitOwn, TensorDataModule
from models import MLP
from pfl import FederatedLoop, Trainer
from pfl.algorithms import FedACS, FedAvg, FedSLR, LocalTrain
from pfl.callbacks import LocalBaseline, RoundProgress, RunFigure, RunRecorder
from pfl.callbacks.run_result import best_round, compare, peak_memory, versions
from pfl.report.figures import collaboration_figure, run_figure
from pfl.report.table import size, summary_table
from pfl.rounds.evaluation import worst_tenth
from tests.commands import table


def digits(**kwargs):
    return DigitsDataModule(6, Dirichlet(1.0), **{"protocol": SplitOwn(test=0.3), **kwargs})


def regression(protocol=None):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(120, 3, generator=rng)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.1 * torch.randn(120, 1, generator=rng)
    return TensorDataModule(x, y, num_clients=6, protocol=protocol or SplitOwn(test=0.3), seed=0)


def fit(root, algorithm, data, *callbacks, rounds=3, loop=None, **trainer):
    trainer = Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        default_root_dir=root,
        callbacks=list(callbacks),
        **{"enable_progress_bar": False, "enable_checkpointing": False, **trainer},
    )
    trainer.fit(algorithm, datamodule=FederatedLoop(data, **(loop or {})))
    return trainer


# ---- rules --------------------------------------------------------------------------------------


NAN = float("nan")
VAL = {
    f"{k[0]}{n[0]}": f"val/{k}/{n}"
    for k in ("global", "personalized")
    for n in ("accuracy", "loss")
}


@pytest.mark.parametrize(
    "values, best, by",
    [
        ({"ga": [0.1, 0.5, 0.3]}, 2, "ga"),
        ({"ga": [0.1, 0.5, 0.5]}, 2, "ga"),  # the first of equal rounds
        ({"ga": [0.9, 0.5, 0.3], "pa": [0.1, 0.2, 0.3]}, 3, "pa"),
        ({"ga": [0.9, 0.5, 0.3], "pl": [3.0, 2.0, 1.0]}, 1, "ga"),
        ({"gl": [0.2, 0.1, 0.3]}, 2, "gl"),
        ({"gl": [0.1, 0.2, 0.3], "pl": [0.3, 0.2, 0.4]}, 2, "pl"),
        ({"ga": [None, 0.2, None]}, 2, "ga"),  # not evaluated in every round
        ({"ga": [NAN, 0.1, NAN]}, 2, "ga"),
        ({"ga": [NAN, NAN, NAN], "gl": [3.0, 2.0, 1.0]}, 3, "gl"),
    ],
)
def test_best_round(values, best, by):
    rows = [
        {"round": r + 1, **{VAL[k]: v[r] for k, v in values.items() if v[r] is not None}}
        for r in range(3)
    ]
    found = best_round(rows)
    assert found.pop("selected_by") == VAL[by]
    assert found is not rows[best - 1] and found == rows[best - 1]


def test_test_scores_never_select():
    assert best_round([{"round": 1, "test/global/accuracy": 0.9}]) is None
    assert best_round([]) is None


def test_compare_counts_gains_against_training_alone():
    columns = {
        "test_local_accuracy": np.array([0.5, 0.5, 0.5, 0.5, np.nan]),
        "test_local_loss": np.array([1.0, 1.0, 1.0, 1.0, np.nan]),
        "test_global_accuracy": np.array([0.0, 0.0, 0.0, 0.0, np.nan]),
        "test_personalized_accuracy": np.array([0.7, 0.6, 0.5, 0.4, np.nan]),
    }
    found = compare(columns)
    assert (found["gained"], found["equal"], found["lost"]) == (0.5, 0.25, 0.25)
    assert found["local/accuracy"] == 0.5 and found["local/accuracy_std"] == 0.0
    del columns["test_personalized_accuracy"]
    found = compare(columns)
    assert (found["gained"], found["equal"], found["lost"]) == (0.0, 0.0, 1.0)
    nobody = {name: np.full(5, np.nan) for name in columns}  # has test samples
    assert compare(nobody) == {}
    del columns["test_local_accuracy"]
    assert compare(columns) == {}


def test_compare_takes_a_lower_loss_as_a_gain():
    columns = {
        "test_local_accuracy": np.full(4, np.nan),
        "test_local_loss": np.array([1.0, 2.0, 3.0, 10.0]),
        "test_global_loss": np.array([0.5, 2.0, 4.0, 5.0]),
        "test_global_accuracy": np.full(4, np.nan),
    }
    found = compare(columns)
    assert (found["gained"], found["equal"], found["lost"]) == (0.5, 0.25, 0.25)
    assert (found["local/loss"], found["local/loss_worst10"]) == (4.0, 10.0)
    assert "local/accuracy" not in found


@pytest.mark.parametrize("count, worst", [(1, 0), (10, 0), (11, 0.5), (20, 0.5), (21, 1)])
def test_worst_tenth_is_rounded_up(count, worst):
    values = np.random.default_rng(0).permutation(count).astype(float)
    assert worst_tenth(values) == worst


def test_peak_memory_and_versions():
    assert 1e7 < peak_memory() < 1e12
    assert versions()["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert versions()["python"] == ".".join(map(str, sys.version_info[:3]))


# ---- metrics.csv --------------------------------------------------------------------------------


def test_rounds_without_validation_have_empty_cells(tmp_path):
    algorithm = FedAvg(MLP(64, [8]))
    trainer = fit(tmp_path, algorithm, digits(), rounds=5, check_val_every_n_epoch=2)
    rows = table(tmp_path / "run" / "metrics.csv")
    assert [row["round"] for row in rows] == ["1", "2", "3", "4", "5"]
    for row in rows:
        scores = [row[name] for name in row if name.startswith(("val/", "test/", "parameters/"))]
        evaluated = row["round"] in ("2", "4", "5")  # the last round always is
        assert scores and all((value != "") == evaluated for value in scores)
        assert float(row["train/loss"]) > 0 and int(row["comm/uplink_bytes"]) > 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["test/global/accuracy"] == float(rows[-1]["test/global/accuracy"])
    assert summary["best"]["round"] in (2, 4, 5)
    # The result belongs to the last round.
    scores = [float(row["test_global_accuracy"]) for row in table(tmp_path / "run" / "clients.csv")]
    assert np.mean(scores) == pytest.approx(summary["test/global/accuracy"])
    assert trainer.recorder.rows[0].keys() < trainer.recorder.rows[1].keys()


def test_the_round_that_reaches_max_steps_is_the_last(tmp_path):
    fit(
        *(tmp_path, FedAvg(MLP(64, [8])), digits()),
        loop={"clients_at_once": 2},  # more chunks than rounds: a step is a round
        max_steps=2,
        check_val_every_n_epoch=5,
    )
    rows = table(tmp_path / "run" / "metrics.csv")
    assert [row["round"] for row in rows] == ["1", "2"]
    assert [row["test/global/accuracy"] != "" for row in rows] == [False, True]


class Late(FedAvg):
    """Reports a number from its second round on."""

    def server_update(self, mean):
        super().server_update(mean)
        if self.rounds >= 1:
            self.log_metric("drift", float(self.rounds))


def test_a_column_may_appear_later(tmp_path):
    fit(tmp_path, Late(MLP(64, [8])), digits())
    rows = table(tmp_path / "run" / "metrics.csv")
    assert [row["drift"] for row in rows] == ["", "1.0", "2.0"]
    assert all(None not in row and None not in row.values() for row in rows)


class Peek(pl.Callback):
    """Reads the file after every round."""

    def __init__(self):
        self.seen = []

    def on_train_epoch_start(self, trainer, pl_module):
        path = trainer.run_dir / "metrics.csv"
        self.seen.append(len(table(path)) if path.exists() else 0)


def test_metrics_are_on_disk_after_every_round(tmp_path):
    peek = Peek()
    fit(tmp_path, FedAvg(MLP(64, [8])), digits(), peek)
    assert peek.seen == [0, 1, 2]


def test_a_recorder_of_ones_own_is_the_one_that_records(tmp_path):
    own = RunRecorder(config="a: 1\n")
    trainer = fit(tmp_path, FedAvg(MLP(64, [8])), digits(), own, rounds=1)
    assert trainer.recorder is own
    assert [type(c) for c in trainer.callbacks].count(RunRecorder) == 1
    assert (tmp_path / "run" / "config.yaml").read_text() == "a: 1\n"
    assert own.summary["name"] == "run" and len(own.columns["client"]) == 6


# ---- regression ---------------------------------------------------------------------------------


def test_regression_is_recorded_by_its_loss(tmp_path, capsys):
    algorithm = FedSLR(nn.Linear(3, 1), lr=0.05, proximal_step=1.0)
    fit(tmp_path, algorithm, regression(), LocalBaseline(), RunFigure())
    folder = tmp_path / "run"
    rows, clients = table(folder / "metrics.csv"), table(folder / "clients.csv")
    assert not [name for name in rows[0] if "accuracy" in name]
    assert float(rows[-1]["test/global/loss"]) > 0
    assert not [name for name in clients[0] if name.startswith("label_")]
    losses = [float(row["test_personalized_loss"]) for row in clients]
    assert np.mean(losses) == pytest.approx(float(rows[-1]["test/personalized/loss"]))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["best"]["selected_by"] == "val/personalized/loss"
    assert summary["gained"] + summary["equal"] + summary["lost"] == pytest.approx(1)
    printed = capsys.readouterr().out
    assert "test loss" in printed and "accuracy" not in printed
    assert f"{summary['test/global/loss']:.4f}" in printed
    assert f"{summary['local/loss']:.4f}" in printed
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")


# ---- the bar ------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(monkeypatch, root, terminal, **kwargs):
    """What is written to standard error in a run of three rounds."""
    monkeypatch.setattr(sys, "stderr", terminal)
    # Two chunks of clients a round: the bar must not count them.
    loop = {"clients_at_once": 3}
    algorithm = FedSLR(MLP(64, [8]))
    trainer = fit(root, algorithm, digits(), loop=loop, enable_progress_bar=True, **kwargs)
    return trainer, terminal.getvalue()


def test_bar_counts_rounds_on_a_terminal(tmp_path, monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    trainer, text = shown(monkeypatch, tmp_path, Terminal())
    assert "3/3" in text and "100%" in text and "round" in text
    assert set(re.findall(r"(\d+)/3 ", text)) <= {"0", "1", "2", "3"} and "/6" not in text
    row = trainer.recorder.rows[-1]
    last = text.split("\r")[-1]
    assert f"loss={row['train/loss']:.3f}" in last
    assert f"{row['val/global/accuracy']:.3f}" in last
    assert f"{row['val/personalized/accuracy']:.3f}" in last
    assert text.endswith("\n")


def test_bar_is_silent_where_nobody_watches(tmp_path, monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    assert shown(monkeypatch, tmp_path, io.StringIO())[1] == ""
    monkeypatch.setenv("CI", "true")
    assert shown(monkeypatch, tmp_path, Terminal())[1] == ""


def test_bar_closes_when_a_run_breaks_off(tmp_path, monkeypatch):
    class Break(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 2:
                raise RuntimeError("enough")

    monkeypatch.delenv("CI", raising=False)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(RuntimeError, match="enough"):
        fit(tmp_path, FedAvg(MLP(64, [8])), digits(), Break(), enable_progress_bar=True)
    assert "2/3" in terminal.getvalue() and terminal.getvalue().endswith("\n")


def test_bar_can_be_switched():
    bar = RoundProgress()
    bar.enable()
    assert bar._enabled
    bar.disable()
    assert not bar._enabled


# ---- table and figure ---------------------------------------------------------------------------


def test_table_has_the_numbers():
    summary = {
        "algorithm": "FedSLR",
        "round": 100,
        "wall_seconds": 12.3,
        "folder": "runs/x",
        "comm/uplink_bytes": 893_920_000_000,
        "comm/downlink_bytes": 999,
        "parameters/global": 12345,
        "gained": 0.5,
        "equal": 0.25,
        "lost": 0.25,
    }
    for k, kind in enumerate(("test/global", "test/personalized", "local")):
        for n, suffix in enumerate(("", "_std", "_worst10")):
            summary[f"{kind}/accuracy{suffix}"] = 0.1 * (k + 1) + 0.01 * (n + 1)
    lines = summary_table(summary).splitlines()
    text = "\n".join(lines)
    assert "FedSLR, 100 rounds, 12 s" in text and "runs/x" in text
    for name, numbers in (
        ("global", ["0.1100", "0.1200", "0.1300"]),
        ("personalized", ["0.2100", "0.2200", "0.2300"]),
        ("local", ["0.3100", "0.3200", "0.3300"]),
    ):
        assert [name, *numbers] in [line.split() for line in lines]
    for words in ("893.92 GB", "999 B", "12,345", "50%", "25%"):
        assert words in text
    assert max(map(len, lines)) <= 80


def test_table_of_a_run_without_tests_has_no_scores(tmp_path, capsys):
    data = regression(SplitOwn(test=0.0, validation=0.2))
    fit(tmp_path, FedAvg(nn.Linear(3, 1), lr=0.05), data)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line]
    words = ("FedAvg, 3 rounds", "sent up ", "parameters: ", "everything else: ")
    assert len(lines) == len(words)
    assert all(line.startswith(word) for line, word in zip(lines, words, strict=True))


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1_234_567, "1.23 MB"),
        (893_920_000_000, "893.92 GB"),
        (5e15, "5,000.00 TB"),
    ],
)
def test_size(count, text):
    assert size(count) == text


@pytest.mark.parametrize(
    "make, data",
    [
        (lambda: FedSLR(MLP(64, [8])), digits),
        (lambda: LocalTrain(MLP(64, [8])), digits),
        (lambda: FedAvg(nn.Linear(3, 1), lr=0.05), regression),
        (lambda: FedAvg(nn.Linear(3, 1), lr=0.05), lambda: regression(SplitOwn(0.0, 0.2))),
    ],
    ids=["digits", "nothing global", "regression", "nothing tested"],
)
def test_figure_draws_what_there_is(tmp_path, make, data):
    trainer = fit(tmp_path, make(), data(), RunFigure())
    assert (tmp_path / "run" / "report.png").read_bytes().startswith(b"\x89PNG")
    recorder = trainer.recorder
    axes = run_figure(recorder.rows, recorder.columns).axes
    number = "accuracy" if trainer.datamodule.datamodule.num_classes else "loss"
    drawn = {}
    for line in axes[1].lines:
        drawn[str(line.get_label())] = line.get_ydata()
    kinds = {
        name.split("/")[1] for row in recorder.rows for name in row if name.startswith("test/")
    }
    assert {label for label in drawn if "worst" not in label} == kinds
    for kind in kinds:
        wanted = [row[f"test/{kind}/{number}"] for row in recorder.rows]
        assert list(drawn[kind]) == wanted
        assert len(axes[2].lines) >= 1


def test_the_collaboration_map_shows_the_last_round(tmp_path):
    method = FedACS(MLP(64, [4]), quantile=0.5)
    fit(tmp_path, method, digits(), rounds=3, loop={"clients_per_round": 3})
    assert (tmp_path / "run" / "collaboration.png").read_bytes().startswith(b"\x89PNG")
    rows = [row for row in table(tmp_path / "run" / "collaboration.csv") if row["round"] == "3"]
    axes = collaboration_figure(**method.recorded["collaboration"], round_index=3).axes[0]
    assert axes.get_title().endswith("round 3")
    shown = np.asarray(axes.images[0].get_array())
    ids = sorted({int(row["client"]) for row in rows})
    assert shown.shape == (3, 3) and [int(t.get_text()) for t in axes.get_xticklabels()] == ids
    for row in rows:
        place = ids.index(int(row["client"])), ids.index(int(row["partner"]))
        assert shown[place] == pytest.approx(float(row["weight"]), rel=1e-6)
    assert np.count_nonzero(shown) == len(rows)


def test_methods_without_collaboration_draw_none(tmp_path):
    fit(tmp_path, FedAvg(MLP(64, [4])), digits(), rounds=1)
    assert not (tmp_path / "run" / "collaboration.png").exists()
