"""Rounds are trained, evaluated and saved whole, however many chunks of clients they are."""

import pytest
import torch

from datamodules import DigitsDataModule, Dirichlet
from models import MLP
from pfl import FederatedLoop, Trainer
from pfl.algorithms import FedACS
from tests.refusal import refused


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


# ---- parts of rounds ----------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [True, 2])
def test_a_fast_dev_run_is_of_whole_rounds(tmp_path, whole, rounds):
    method = fit(trainer_in(tmp_path, fast_dev_run=rounds))
    found, wanted = (m.trainer.recorder.rows for m in (method, whole))
    assert found == wanted[: int(rounds)] and "test/personalized/loss" in found[-1]
    assert not (method.trainer.run_dir / "checkpoints").exists()


@pytest.mark.parametrize("stage", ["train", "val", "test", "predict"])
@pytest.mark.parametrize("limit", [1, 3, 0.5])
def test_some_chunks_of_a_round_are_refused(tmp_path, stage, limit):
    name = f"limit_{stage}_batches"
    with refused(f"trainer.{name}: {limit};", "whole"):
        trainer_in(tmp_path, **{name: limit})
    for all_or_none in (1.0, None, 0):
        trainer_in(tmp_path, **{name: all_or_none})


@pytest.mark.parametrize("limit", [1, 0.5])
def test_the_same_chunks_in_all_rounds_are_refused(tmp_path, limit):
    with refused(f"trainer.overfit_batches: {limit};", "loop.trace"):
        trainer_in(tmp_path, overfit_batches=limit)
