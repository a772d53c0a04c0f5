"""Whose a run's folder is, and what is in it when a run is broken off or goes on."""

import pytest

from datamodules import DigitsDataModule
from models import MLP
from pfl import FederatedLoop, Trainer
from pfl.algorithms import FedAvg
from tests.refusal import refused


def trainer_in(root, **kwargs):
    return Trainer(**{"accelerator": "cpu", "default_root_dir": root, **kwargs})


def fit(trainer, algorithm=None, ckpt_path=None, **loop):
    algorithm = algorithm or FedAvg(MLP(64, [4]))
    data = FederatedLoop(DigitsDataModule(6), **loop)
    trainer.fit(algorithm, datamodule=data, ckpt_path=ckpt_path)
    return algorithm


# ---- whose it is --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run", "sweep/run"])
def test_runs_that_start_together_have_folders_of_their_own(tmp_path, name):
    """Each has its folder before any of them has written into it."""
    trainers = [trainer_in(tmp_path / "runs", name=name) for _ in range(3)]
    folders = [trainer.run_dir for trainer in trainers]
    assert folders == [tmp_path / "runs" / (name + end) for end in ("", "-2", "-3")]
    assert [trainer.run_dir for trainer in trainers] == folders


def test_a_refused_run_leaves_nothing(tmp_path):
    root = tmp_path / "new" / "runs"
    trainer = trainer_in(root, max_epochs=1, precision="bf16-true", enable_progress_bar=False)
    with refused("trainer.precision"):
        fit(trainer)
    assert list(tmp_path.iterdir()) == []
    # Another run may take the name before this Trainer's next one, which is refused early or late.
    other = trainer_in(root).run_dir
    for part, loop in (("loop.clients_per_round", {"clients_per_round": 7}), ("precision", {})):
        with refused(part):
            fit(trainer, **loop)
        assert list(root.iterdir()) == [other] and list(other.iterdir()) == []
    assert trainer.run_dir == root / "run-2"


def test_processes_that_have_not_met_have_no_folder(tmp_path):
    trainer = trainer_in(tmp_path, strategy="client_parallel", devices=2)
    with refused("trainer.run_dir: several processes", "when the run begins"):
        _ = trainer.run_dir
    assert list(tmp_path.iterdir()) == []
