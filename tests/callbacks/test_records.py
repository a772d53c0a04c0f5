"""Records of a run: metrics, progress bar, printed table, figures."""

import io
import json
import re
import sys
import threading
import time

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn

from datamodules import DigitsDataModule, Dirichlet, SplitOwn, TensorDataModule
from models import MLP
from pfl import FederatedLoop
from pfl.algorithms import FedACS, FedAvg, FedSLR, LocalTrain
from pfl.callbacks import LocalBaseline, RunFigure, RunRecorder, progress
from pfl.report.figures import collaboration_figure, run_figure
from pfl.report.matplotlib_drawer import draw
from pfl.report.run_summary import size, summary_table
from tests.commands import table
from tests.problems import quiet


def digits(**kwargs):
    return DigitsDataModule(6, Dirichlet(1.0), **{"protocol": SplitOwn(test=0.3), **kwargs})


def regression(protocol=None):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(120, 3, generator=rng)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.1 * torch.randn(120, 1, generator=rng)
    return TensorDataModule(x, y, num_clients=6, protocol=protocol or SplitOwn(test=0.3), seed=0)


def fit(root, algorithm, data, *callbacks, rounds=3, loop=None, **trainer):
    made = quiet(root, rounds, *callbacks, **{"enable_checkpointing": False, **trainer})
    made.fit(algorithm, datamodule=FederatedLoop(data, **(loop or {})))
    return made


# ---- metrics.csv --------------------------------------------------------------------------------


def test_rounds_without_validation_have_empty_cells(tmp_path):
    algorithm = FedAvg(MLP(64, [8]))
    trainer = fit(tmp_path, algorithm, digits(), rounds=5, check_val_every_n_epoch=2)
    rows = table(tmp_path / "run" / "metrics.csv")
    assert [row["round"] for row in rows] == ["1", "2", "3", "4", "5"]
    for row in rows:
        scores = [row[name] for name in row if name.startswith(("val/", "test/", "parameters/"))]
        evaluated = row["round"] in ("2", "4", "5")  # the last round always
        assert scores and all((value != "") == evaluated for value in scores)
        assert float(row["train/loss"]) > 0 and int(row["comm/uplink_bytes"]) > 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["test/global/accuracy"] == float(rows[-1]["test/global/accuracy"])
    assert summary["best"]["round"] in (2, 4, 5)
    # The result belongs to the last round.
    scores = [float(row["test/global/accuracy"]) for row in table(tmp_path / "run" / "clients.csv")]
    assert np.mean(scores) == pytest.approx(summary["test/global/accuracy"])
    assert trainer.recorder.rows[0].keys() < trainer.recorder.rows[1].keys()


def test_the_round_that_reaches_max_steps_is_the_last(tmp_path):
    loop = {"clients_at_once": 2}  # there are more chunks than rounds; a step is a round
    limits = {"max_steps": 2, "check_val_every_n_epoch": 5}
    fit(tmp_path, FedAvg(MLP(64, [8])), digits(), loop=loop, **limits)
    rows = table(tmp_path / "run" / "metrics.csv")
    assert [row["round"] for row in rows] == ["1", "2"]
    assert [row["test/global/accuracy"] != "" for row in rows] == [False, True]


class Late(FedAvg):
    """FedAvg that logs a number from the second round on."""

    def server_update(self, mean):
        super().server_update(mean)
        if self.rounds >= 1:
            self.log_metric("drift", float(self.rounds))


class Peek(pl.Callback):
    """Counts the rows of the file before every round."""

    def __init__(self):
        self.seen = []

    def on_train_epoch_start(self, trainer, pl_module):
        path = trainer.run_dir / "metrics.csv"
        self.seen.append(len(table(path)) if path.exists() else 0)


def test_rows_are_on_disk_after_every_round_and_a_column_may_appear_later(tmp_path):
    peek = Peek()
    fit(tmp_path, Late(MLP(64, [8])), digits(), peek)
    assert peek.seen == [0, 1, 2]
    rows = table(tmp_path / "run" / "metrics.csv")
    assert [row["drift"] for row in rows] == ["", "1.0", "2.0"]
    assert all(None not in row and None not in row.values() for row in rows)


def test_a_given_recorder_is_the_only_one(tmp_path):
    own = RunRecorder(config="a: 1\n")
    trainer = fit(tmp_path, FedAvg(MLP(64, [8])), digits(), own, rounds=1)
    assert trainer.recorder is own
    assert [type(c) for c in trainer.callbacks].count(RunRecorder) == 1
    assert (tmp_path / "run" / "config.yaml").read_text() == "a: 1\n"
    assert own.summary["name"] == "run" and len(own.columns["client"]) == 6


# ---- regression ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("run_figures")
def test_regression_is_recorded_by_its_loss(tmp_path, capsys):
    algorithm = FedSLR(nn.Linear(3, 1), lr=0.05, proximal_step=1.0)
    fit(tmp_path, algorithm, regression(), LocalBaseline(), RunFigure())
    folder = tmp_path / "run"
    rows, clients = table(folder / "metrics.csv"), table(folder / "clients.csv")
    assert not [name for name in rows[0] if "accuracy" in name]
    assert float(rows[-1]["test/global/loss"]) > 0
    assert not [name for name in clients[0] if name.startswith("label_")]
    losses = [float(row["test/personalized/loss"]) for row in clients]
    assert np.mean(losses) == pytest.approx(float(rows[-1]["test/personalized/loss"]))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["best"]["selected_by"] == "val/personalized/loss"
    assert summary["gained"] + summary["equal"] + summary["lost"] == pytest.approx(1)
    printed = capsys.readouterr().out
    assert "test loss" in printed and "accuracy" not in printed
    assert f"{summary['test/global/loss']:.4f}" in printed
    assert f"{summary['test/local/loss']:.4f}" in printed
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")


# ---- the bar ------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(monkeypatch, root, terminal, **kwargs):
    """Returns the Trainer and the standard error of a run of three rounds."""
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


@pytest.mark.parametrize("terminal", [io.StringIO, Terminal], ids=["a file", "under CI"])
def test_a_short_run_is_silent_without_a_terminal_and_under_ci(tmp_path, monkeypatch, terminal):
    monkeypatch.delenv("CI", raising=False)
    if terminal is Terminal:
        monkeypatch.setenv("CI", "true")
    assert shown(monkeypatch, tmp_path, terminal())[1] == ""


class Slow(pl.Callback):
    """Each round lasts several of the minutes of these tests."""

    def on_train_epoch_start(self, trainer, pl_module):
        time.sleep(0.2)


def test_without_a_terminal_a_line_a_minute_says_how_far_the_run_is(tmp_path, monkeypatch):
    """With the scores of the last round: those of round 1 stand in the lines of round 2."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(progress, "MINUTE", 0.02)
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    trainer = fit(tmp_path, FedAvg(MLP(64, [8])), digits(), Slow(), enable_progress_bar=True)
    lines = file.getvalue().splitlines()
    assert {"0 of 3 rounds"} <= set(lines)
    row = trainer.recorder.rows[0]
    scores = f"loss {row['train/loss']:.3f}, global val {row['val/global/accuracy']:.3f}"
    assert f"1 of 3 rounds, {scores}, less than a minute left" in lines
    assert [t for t in threading.enumerate() if t.name == "progress"] == []


class SlowClients(FedAvg):
    """Each client takes several of the seconds of this test."""

    def client_update(self, clients, w):
        time.sleep(0.05)
        return super().client_update(clients, w)


def test_a_bar_moves_within_a_long_round(tmp_path, monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(progress, "SECOND", 0.01)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    method = SlowClients(MLP(64, [8]), engine="sequential")
    fit(tmp_path, method, digits(), loop={"clients_at_once": 1}, enable_progress_bar=True)
    total = method.num_clients
    seen = {int(done) for done in re.findall(rf"clients=(\d+)/{total}\b", terminal.getvalue())}
    assert seen & set(range(1, total)) and max(seen) < total


def test_time_left_is_in_proportion_to_what_was_done(monkeypatch):
    """Ten of 40 rounds took ten minutes: 30 more take 30, and 400 of 410 take 400."""
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    assert progress.time_left(400.0, 10, 40) == ", about 30 min left"
    assert progress.time_left(400.0, 10, 410) == ", about 7 h left"
    assert progress.time_left(400.0, 0, 40) == ""


def test_bar_closes_after_an_error(tmp_path, monkeypatch):
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


# ---- table and figure ---------------------------------------------------------------------------


def test_table_shows_scores_gains_bytes_and_parameters():
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
    for k, kind in enumerate(("test/global", "test/personalized", "test/local")):
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


def test_table_has_metrics_and_the_clients_that_count():
    summary = {"algorithm": "FedAvg", "round": 1, "wall_seconds": 1.0, "folder": "runs/x"}
    summary |= {"comm/uplink_bytes": 1, "comm/downlink_bytes": 1}
    summary |= {"test/global/accuracy": 0.5, "test/global/accuracy_std": 0.1}
    summary |= {"test/global/balanced_accuracy": 0.25, "test/global/balanced_accuracy_std": 0.2}
    summary |= {"test/global/balanced_accuracy_clients": 7.0, "test/local/balanced_accuracy": 0.125}
    summary |= {"test/global/undefined_clients": 0.0, "lost_clients": ["\x1b[2J"]}
    cells = [line.split() for line in summary_table(summary).splitlines()]
    assert ["test", "accuracy", "mean", "std"] in cells
    assert ["global", "0.5000", "0.1000"] in cells
    assert ["test", "balanced_accuracy", "mean", "std", "clients"] in cells
    assert ["global", "0.2500", "0.2000", "7"] in cells and ["local", "0.1250"] in cells
    assert not [line for line in cells if "undefined" in line]
    assert ["lost:", r"\x1b[2J"] in cells  # what a terminal would obey is shown


def test_a_name_with_a_comma_does_not_look_like_two():
    summary = {"algorithm": "FedAvg", "round": 1, "wall_seconds": 1.0, "folder": "runs/x"}
    summary |= {"comm/uplink_bytes": 1, "comm/downlink_bytes": 1, "test/global/accuracy": 0.5}
    summary["lowest_clients"] = {"Mainz, Dom": 0.25, "Bonn": 0.5}
    summary["lost_clients"] = ["Bonn", "Mainz, Dom"]
    lines = [line.strip() for line in summary_table(summary).splitlines()]
    assert "lowest: 'Mainz, Dom' 0.2500, Bonn 0.5000" in lines
    assert "lost: Bonn, 'Mainz, Dom'" in lines


def test_table_names_the_last_round_and_the_best_one_by_validation():
    """The last round's score is 0.25; validation is best in round 4, whose test score is 0.75."""
    summary = {"algorithm": "FedRep", "round": 5, "wall_seconds": 1.0, "folder": "runs/x"}
    summary |= {"comm/uplink_bytes": 1, "comm/downlink_bytes": 1}
    summary |= {"test/personalized/accuracy": 0.25, "test/global/accuracy": 0.5}
    best = {"round": 4, "selected_by": "val/personalized/accuracy"}
    best |= {"val/personalized/accuracy": 1.0, "test/personalized/accuracy": 0.75}
    best |= {"test/global/accuracy": 0.625}
    lines = [line.strip() for line in summary_table(summary | {"best": best}).splitlines()]
    assert "FedRep, 5 rounds, 1 s; last round:" in lines
    assert "best by validation: round 4, test score personalized accuracy 0.7500" in lines
    chosen = {"best": best, "select_by": "global/accuracy"}
    assert "round 4, test score global accuracy 0.6250" in summary_table(summary | chosen)
    assert "best by validation" not in summary_table(summary | {"best": None})


def test_the_gradients_of_fine_tuning_are_in_the_summary(tmp_path):
    """Five steps with batches of 16 are, for a client with n samples, whole epochs of n samples and
    the first batches of the next one; a client that never trains, and one step, count apart."""
    loop = {"finetune": [1, 5], "unseen": [0]}
    trainer = fit(tmp_path, FedAvg(MLP(64, [8]), batch_size=16), digits(), loop=loop)
    sizes = trainer.recorder.columns["train_samples"][1:].tolist()
    expected = {"1": 0, "5": 0}
    for n in sizes:
        batches = [min(16, n - begin) for begin in range(0, n, 16)] * 5
        expected["1"] += batches[0]
        expected["5"] += sum(batches[:5])
    assert trainer.recorder.summary["finetuning_samples"] == expected
    trainer = fit(tmp_path / "without", FedAvg(MLP(64, [8])), digits())
    assert "finetuning_samples" not in trainer.recorder.summary


def test_table_of_a_run_without_tests_has_no_scores(tmp_path, capsys):
    data = regression(SplitOwn(test=0.0, validation=0.2))
    fit(tmp_path, FedAvg(nn.Linear(3, 1), lr=0.05), data)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line]
    words = (
        "FedAvg, 3 rounds",
        "nothing was tested",
        "best by validation: round 3, validation score global loss ",
        "sent up ",
        "parameters: ",
        "left out: ",
        "everything else: ",
    )
    assert len(lines) == len(words)
    assert all(line.startswith(word) for line, word in zip(lines, words, strict=True))


def test_size_chooses_the_unit():
    sizes = [size(count) for count in (0, 999, 1000, 1_234_567, 893_920_000_000, 5e15)]
    assert sizes == ["0 B", "999 B", "1.00 kB", "1.23 MB", "893.92 GB", "5,000.00 TB"]


@pytest.mark.parametrize(
    "make, data",
    [
        (lambda: FedSLR(MLP(64, [8])), digits),
        (lambda: LocalTrain(MLP(64, [8])), digits),
        (lambda: FedAvg(nn.Linear(3, 1), lr=0.05), lambda: regression(SplitOwn(0.0, 0.2))),
    ],
    ids=["digits", "nothing global", "nothing tested"],
)
@pytest.mark.usefixtures("run_figures")
def test_figure_draws_the_kinds_of_models_that_were_tested(tmp_path, make, data):
    trainer = fit(tmp_path, make(), data(), RunFigure())
    assert (tmp_path / "run" / "report.png").read_bytes().startswith(b"\x89PNG")
    recorder = trainer.recorder
    plots = run_figure(recorder.rows, recorder.columns).plots
    number = "accuracy" if trainer.datamodule.datamodule.num_classes else "loss"
    drawn, clients = ({curve.label: curve.y for curve in plots[k].marks} for k in (1, 2))
    kinds = {name.split("/")[1] for r in recorder.rows for name in r if name.startswith("test/")}
    assert {label for label in drawn if "worst" not in label} == clients.keys() == kinds
    for kind in kinds:
        assert list(drawn[kind]) == [row[f"test/{kind}/{number}"] for row in recorder.rows]
        assert sorted(clients[kind]) == sorted(recorder.columns[f"test/{kind}/{number}"])


@pytest.mark.usefixtures("run_figures")
def test_the_collaboration_map_shows_the_last_round(tmp_path):
    method = FedACS(MLP(64, [4]), quantile=0.5)
    fit(tmp_path, method, digits(), rounds=3, loop={"clients_per_round": 3})
    assert (tmp_path / "run" / "collaboration.png").read_bytes().startswith(b"\x89PNG")
    rows = [row for row in table(tmp_path / "run" / "collaboration.csv") if row["round"] == "3"]
    axes = draw(collaboration_figure(**method.recorded["collaboration"], title="Map")).axes[0]
    assert axes.get_title() == "Map"
    shown = np.asarray(axes.images[0].get_array())
    ids = sorted({int(row["client"]) for row in rows})
    assert shown.shape == (3, 3) and [int(t.get_text()) for t in axes.get_xticklabels()] == ids
    for row in rows:
        place = ids.index(int(row["client"])), ids.index(int(row["partner"]))
        assert shown[place] == pytest.approx(float(row["weight"]), rel=1e-6)
    assert np.count_nonzero(shown) == len(rows)


def test_methods_without_collaboration_draw_no_map(tmp_path):
    fit(tmp_path, FedAvg(MLP(64, [4])), digits(), rounds=1)
    assert not (tmp_path / "run" / "collaboration.png").exists()
