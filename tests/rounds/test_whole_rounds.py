"""Rounds are trained, evaluated and saved whole, however many chunks of clients they are."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    SpikeDetection,
    StochasticWeightAveraging,
)

from datamodules import DigitsDataModule, Dirichlet
from models import MLP
from pfl import FederatedLoop, Trainer
from pfl.algorithms import FedACS
from tests.algorithms.methods import differing, everything
from tests.refusal import refused

FILES = ("metrics.csv", "clients.csv", "collaboration.csv")


def trainer_in(root, *callbacks, **kwargs):
    arguments = {"max_epochs": 4, "accelerator": "cpu", "enable_progress_bar": False}
    return Trainer(**arguments | kwargs, default_root_dir=root, callbacks=list(callbacks))


def fit(trainer, ckpt_path=None):
    """Five of six clients train, in three chunks; six are evaluated, in three for each split."""
    torch.manual_seed(0)
    method = FedACS(MLP(64, [4]), local_steps=2)
    data = DigitsDataModule(6, Dirichlet(1.0), seed=0)
    loop = FederatedLoop(data, clients_per_round=5, clients_at_once=2)
    trainer.fit(method, datamodule=loop, ckpt_path=ckpt_path)
    return method


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of four rounds."""
    return fit(trainer_in(tmp_path_factory.mktemp("whole")))


def assert_same(run, expected):
    """Models, states, counts and files."""
    assert differing(everything(run), everything(expected)) == set()
    for name in FILES:
        actual, other = (method.trainer.run_dir / name for method in (run, expected))
        assert actual.read_bytes() == other.read_bytes(), name


# ---- parts of rounds ----------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [True, 2])
def test_a_fast_dev_run_is_of_whole_rounds(tmp_path, whole, rounds):
    method = fit(trainer_in(tmp_path, fast_dev_run=rounds))
    actual, expected = (m.trainer.recorder.rows for m in (method, whole))
    assert actual == expected[: int(rounds)] and "test/personalized/loss" in actual[-1]
    assert not (method.trainer.run_dir / "checkpoints").exists()


@pytest.mark.parametrize("stage", ["train", "val", "test", "predict"])
@pytest.mark.parametrize("limit", [1, 3, 0.5])
def test_some_chunks_of_a_round_are_refused(tmp_path, stage, limit):
    name = f"limit_{stage}_batches"
    with refused(f"trainer.{name}: {limit};", "whole"):
        trainer_in(tmp_path, **{name: limit})
    for all_or_none in (1.0, None, *([] if stage == "train" else [0])):
        trainer_in(tmp_path, **{name: all_or_none})


@pytest.mark.parametrize("none", [0, 0.0])
def test_a_fit_without_training_is_refused(tmp_path, none):
    with refused("trainer.limit_train_batches: 0;", "validate or test"):
        trainer_in(tmp_path, limit_train_batches=none)


@pytest.mark.parametrize("limit", [1, 0.5])
def test_the_same_chunks_in_all_rounds_are_refused(tmp_path, limit):
    with refused(f"trainer.overfit_batches: {limit};", "loop.trace"):
        trainer_in(tmp_path, overfit_batches=limit)


@pytest.mark.parametrize(
    "make", [BatchSizeFinder, LearningRateFinder, lambda: GradientAccumulationScheduler({0: 2})]
)
def test_callbacks_of_batches_of_samples_are_refused(tmp_path, make):
    with refused(f"trainer.callbacks: {type(make()).__name__}", "batches of samples", "model.lr"):
        trainer_in(tmp_path, make())


def test_averages_of_steps_that_nobody_takes_are_refused(tmp_path):
    with refused("trainer.callbacks: StochasticWeightAveraging", "EMAWeightAveraging"):
        trainer_in(tmp_path, StochasticWeightAveraging(0.01))


@pytest.mark.parametrize(
    ("make", "instead"),
    [
        (BackboneFinetuning, "model.trainable"),
        (lambda: ModelPruning("l1_unstructured"), "FedSpa"),
        (SpikeDetection, "divergence_threshold"),
    ],
)
def test_callbacks_of_the_trainers_own_network_and_steps_are_refused(tmp_path, make, instead):
    with refused(f"trainer.callbacks: {type(make()).__name__}", instead):
        trainer_in(tmp_path, make())


@pytest.mark.parametrize(
    ("option", "value", "instead"),
    [("gradient_clip_val", 0.5, "model.lr"), ("accumulate_grad_batches", 4, "model.batch_size")],
)
def test_options_of_the_trainers_own_steps_are_refused(tmp_path, option, value, instead):
    with refused(f"trainer.{option}: {value};", "the clients' own", instead):
        trainer_in(tmp_path, **{option: value})


@pytest.mark.parametrize(
    "options",
    [{"gradient_clip_val": None}, {"gradient_clip_val": 0}, {"accumulate_grad_batches": 1}],
)
def test_options_that_change_no_step_are_taken(tmp_path, options):
    trainer_in(tmp_path, **options)


def test_sanity_checks_leave_no_trace(tmp_path, whole):
    assert_same(fit(trainer_in(tmp_path, num_sanity_val_steps=3)), whole)


# ---- checkpoints --------------------------------------------------------------------------------


class Save(pl.Callback):
    """Saves the third round in one of its hooks."""

    def __init__(self, hook, error=None):
        self.hook, self.error = hook, error
        setattr(self, hook, self.save)

    def save(self, trainer, pl_module, *rest):
        if trainer.current_epoch == 2:
            trainer.save_checkpoint(trainer.run_dir / "checkpoints" / "own.ckpt")
            if self.error is not None:
                raise self.error


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_batch_start"])
def test_a_round_that_is_not_over_is_not_saved(tmp_path, hook):
    """Some of its clients have trained; a run that went on from there would train them again."""
    trainer = trainer_in(tmp_path, Save(hook))
    with refused("trainer.save_checkpoint: round 3 is not over"):
        fit(trainer)
    assert not (trainer.run_dir / "checkpoints" / "own.ckpt").exists()


@pytest.mark.parametrize("hook", ["on_validation_end", "on_train_epoch_end"])
def test_a_round_that_is_over_is_saved_with_its_records(tmp_path, whole, hook):
    """Also where the run ends at once, before the round's row is written."""
    with pytest.raises(RuntimeError, match="killed"):
        fit(trainer_in(tmp_path, Save(hook, error=RuntimeError("killed"))))
    own = tmp_path / "run" / "checkpoints" / "own.ckpt"
    assert_same(fit(trainer_in(tmp_path), own), whole)


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["on_train_start", "on_train_end"])
def test_a_run_is_saved_before_and_after_its_rounds(tmp_path, whole, hook):
    class SaveThen(Save):
        def save(self, trainer, *_):
            trainer.save_checkpoint(trainer.run_dir / "checkpoints" / "own.ckpt")

    first = fit(trainer_in(tmp_path, SaveThen(hook), max_epochs=2))
    own = first.trainer.run_dir / "checkpoints" / "own.ckpt"
    assert_same(fit(trainer_in(tmp_path), own), whole)


@pytest.mark.parametrize(
    "make", [lambda: ModelCheckpoint(save_on_exception=True), lambda: OnExceptionCheckpoint(".")]
)
def test_saving_where_an_error_is_met_is_refused(tmp_path, make):
    with refused("trainer.callbacks", "within a round", "RoundCheckpoint"):
        trainer_in(tmp_path, make())
