"""The run's folder: its name, and its files after an error and in a continued run."""

import json
from datetime import timedelta

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from datamodules import DigitsDataModule, SplitOwn, TensorDataModule
from models import MLP
from pfl import FederatedLoop, Trainer
from pfl.algorithms import FedAvg, FedSLR, LocalTrain
from pfl.callbacks import LocalBaseline, RunRecorder
from pfl.report.comparison import ComparedRuns
from pfl.scores.runs import read_runs
from tests.commands import table
from tests.refusal import refused


def trainer_in(root, **kwargs):
    arguments = {"accelerator": "cpu", "enable_progress_bar": False, "max_epochs": 3}
    return Trainer(**{**arguments, "default_root_dir": root, **kwargs})


def fresh(method=FedAvg):
    torch.manual_seed(0)
    return method(MLP(64, [4]))


def fit(trainer, algorithm=None, ckpt_path=None, **loop):
    algorithm = algorithm or fresh()
    data = FederatedLoop(DigitsDataModule(6), **loop)
    trainer.fit(algorithm, datamodule=data, ckpt_path=ckpt_path)
    return algorithm


# ---- the folder's name --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run", "sweep/run"])
def test_runs_that_start_together_have_folders_of_their_own(tmp_path, name):
    """Each run has its folder before any run has written into one."""
    trainers = [trainer_in(tmp_path / "runs", name=name) for _ in range(3)]
    folders = [trainer.run_dir for trainer in trainers]
    assert folders == [tmp_path / "runs" / (name + end) for end in ("", "-2", "-3")]
    assert [trainer.run_dir for trainer in trainers] == folders


@pytest.mark.parametrize("name", ["", ".", "..", "../up", "a/../../up", "/tmp/elsewhere"])
def test_names_that_lead_out_of_the_root_are_refused(tmp_path, name):
    with refused(f"trainer.name: {name!r}", "within"):
        trainer_in(tmp_path, name=name)


def test_a_refused_run_leaves_nothing(tmp_path):
    root = tmp_path / "new" / "runs"
    trainer = trainer_in(root, precision="bf16-true")
    with refused("trainer.precision"):
        fit(trainer)
    assert list(tmp_path.iterdir()) == []
    # Another run may take the name. Later runs of this Trainer are refused early or late.
    other = trainer_in(root).run_dir
    for part, loop in (("loop.clients_per_round", {"clients_per_round": 7}), ("precision", {})):
        with refused(part):
            fit(trainer, **loop)
        assert list(root.iterdir()) == [other] and list(other.iterdir()) == []
    assert trainer.run_dir == root / "run-2"


def test_processes_that_are_not_connected_have_no_folder(tmp_path):
    trainer = trainer_in(tmp_path, strategy="client_parallel", devices=2)
    with refused("trainer.run_dir: several processes", "when the run begins"):
        _ = trainer.run_dir
    assert list(tmp_path.iterdir()) == []


# ---- runs that end with an error ----------------------------------------------------------------


class Broken(RuntimeError):
    pass


class BreakInSecondEvaluation(pl.Callback):
    def on_validation_batch_end(self, trainer, *args, **kwargs):
        if trainer.current_epoch == 1:
            raise Broken


def test_an_error_in_an_evaluation_leaves_the_scores_of_the_last_one(tmp_path):
    trainer = trainer_in(tmp_path, callbacks=BreakInSecondEvaluation())
    with pytest.raises(Broken):
        fit(trainer, clients_at_once=2)
    summary = json.loads((trainer.run_dir / "summary.json").read_text())
    rows = table(trainer.run_dir / "clients.csv")
    scores = [float(row["test/global/accuracy"]) for row in rows]
    assert summary["round"] == 1 and len(rows) == 6
    assert sum(scores) / 6 == pytest.approx(summary["test/global/accuracy"])


def test_the_first_error_of_a_full_disk_is_raised(tmp_path, monkeypatch):
    class FullDisk(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            monkeypatch.setattr("pfl.files.files.new_content", full("second"))
            raise OSError(28, "first")

    def full(message):
        def replaced(path):
            raise OSError(28, message)

        return replaced

    with pytest.raises(OSError, match="first"):
        fit(trainer_in(tmp_path, callbacks=[RunRecorder(), FullDisk()]))


class StopInThirdRound(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.current_epoch == 2 and batch_idx == 0:
            trainer.should_stop = True


def test_a_run_that_is_stopped_within_a_round_finishes_the_round(tmp_path):
    """The round is evaluated as the last one, and the continued run equals a whole one."""

    def run(callbacks=None, ckpt_path=None, **kwargs):
        # Lightning's Timer sets `should_stop` after every chunk, too.
        trainer = trainer_in(tmp_path, callbacks=callbacks, max_time={"hours": 1}, **kwargs)
        algorithm = fit(trainer, fresh(FedSLR), ckpt_path, clients_at_once=2)
        return trainer.recorder.rows, trainer, algorithm

    rows, trainer, _ = run(StopInThirdRound(), max_epochs=5, check_val_every_n_epoch=2)
    assert [row["round"] for row in rows] == [1, 2, 3] and trainer.current_epoch == 3
    assert ["test/global/loss" in row for row in rows] == [False, True, True]
    last = trainer.run_dir / "checkpoints" / "last.ckpt"
    rows, _, resumed = run(max_epochs=5, ckpt_path=last, check_val_every_n_epoch=2)
    expected, _, whole = run(max_epochs=5, check_val_every_n_epoch=2)
    assert [row["train/loss"] for row in rows] == [row["train/loss"] for row in expected]
    assert len(rows) == 5
    assert torch.equal(resumed.global_model, whole.global_model)


# ---- checkpoints of other callbacks -------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* is not empty")
def test_a_round_that_is_saved_after_its_evaluation_has_its_row(tmp_path):
    """Lightning saves at that point by default if only some rounds are evaluated."""

    def run(ckpt_path=None, **kwargs):
        best = ModelCheckpoint(monitor="val/global/loss", save_top_k=-1, filename="{step}")
        trainer = trainer_in(
            tmp_path, max_epochs=5, check_val_every_n_epoch=2, callbacks=best, **kwargs
        )
        fit(trainer, ckpt_path=ckpt_path, clients_per_round=4, clients_at_once=2)
        return trainer

    whole = run()
    text = (whole.run_dir / "metrics.csv").read_bytes()
    resumed = run(str(whole.run_dir / "checkpoints" / "step=2.ckpt"))
    assert resumed.run_dir == whole.run_dir
    assert (resumed.run_dir / "metrics.csv").read_bytes() == text
    assert resumed.recorder.rows == whole.recorder.rows and len(whole.recorder.rows) == 5


@pytest.mark.parametrize(
    "when", [{"every_n_train_steps": 1}, {"train_time_interval": timedelta(minutes=1)}], ids=str
)
def test_a_checkpoint_within_a_round_is_refused(tmp_path, when):
    with refused("trainer.callbacks: ModelCheckpoint", "every_n_epochs"):
        trainer_in(tmp_path, callbacks=ModelCheckpoint(**when))


# ---- objects that are used again ----------------------------------------------------------------


def test_another_fit_of_a_trained_method_warns(tmp_path):
    first = trainer_in(tmp_path, max_epochs=2)
    algorithm = fit(first)
    with pytest.warns(UserWarning, match="through 2 rounds; .* those of round 1 on again"):
        fit(trainer_in(tmp_path, max_epochs=1), algorithm)
    # With a checkpoint, or with the Trainer that trained the rounds, there is no warning.
    last = first.run_dir / "checkpoints" / "last.ckpt"
    second = trainer_in(tmp_path, max_epochs=3)
    fit(second, algorithm, ckpt_path=last)
    second.fit_loop.max_epochs = 4
    fit(second, algorithm)
    assert algorithm.rounds == 4


@pytest.fixture
def networks():
    """Two models with different initial values."""
    torch.manual_seed(0)
    return [MLP(64, [4]), MLP(64, [4])]


def test_one_local_baseline_serves_two_runs(tmp_path, networks):
    """The baseline of LocalTrain is the run itself, so the scores are equal."""
    baseline = LocalBaseline()
    for network in networks:
        method = fit(trainer_in(tmp_path, max_epochs=1, callbacks=baseline), LocalTrain(network))
        for name, values in method.evaluation.scores["test", "personalized"].items():
            np.testing.assert_array_equal(baseline.scores[name], values, err_msg=name)


def test_local_training_gains_nothing_over_itself(tmp_path, networks):
    """In the best round by validation, which is not the last, the baseline is the run itself."""
    data = DigitsDataModule(6, protocol=SplitOwn(test=0.3, validation=0.3))
    trainer = trainer_in(tmp_path, max_epochs=8, callbacks=LocalBaseline())
    trainer.fit(LocalTrain(networks[0], lr=2.0), datamodule=FederatedLoop(data))
    best = trainer.recorder.summary["best"]["round"]
    assert best < 8
    (run,) = read_runs([trainer.run_dir])
    comparison = ComparedRuns([run], "LocalTrain")
    assert run.local.rounds.tolist() == [best, 8] and comparison.gained_of(run) == 0
    np.testing.assert_array_equal(comparison.gains_of(run), np.zeros(6))
    last = run.scores.of(8, "test/personalized/accuracy")
    assert (last != run.scores.of(best, "test/personalized/accuracy")).any()


def test_a_run_that_overflows_in_float64_has_its_result(tmp_path):
    """Rate 1e37 for three steps: losses of 1e200 and more, whose squares are no float64."""
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    data = TensorDataModule(x, x.sum(1, keepdim=True), num_clients=3, seed=0)
    trainer = trainer_in(tmp_path, max_epochs=1, precision="64-true")
    method = FedAvg(torch.nn.Linear(3, 1), lr=1e37, local_steps=3)
    trainer.fit(method, datamodule=FederatedLoop(data))
    summary = json.loads((trainer.run_dir / "summary.json").read_text())
    assert summary["finished"] and 1e200 < summary["test/global/loss"] < 1e308
    assert 1 / 3 <= summary["distribution"]["test/global/loss"]["jain"] <= 1


def test_one_recorder_records_two_runs(tmp_path, networks):
    recorder = RunRecorder()
    for network, folder in zip(networks, ("run", "run-2"), strict=True):
        fit(trainer_in(tmp_path, max_epochs=2, callbacks=recorder), LocalTrain(network))
        assert [row["round"] for row in table(tmp_path / folder / "metrics.csv")] == ["1", "2"]


def test_a_used_trainer_refuses_another_method(tmp_path, networks):
    """The Trainer would train nothing, or not begin with the first round."""
    trainer = trainer_in(tmp_path, max_epochs=1)
    fit(trainer, FedAvg(networks[0]))
    with refused("trainer", "FedSLR", "new"):
        fit(trainer, FedSLR(networks[1]))
    assert trainer.recorder.summary["algorithm"] == "FedAvg"
