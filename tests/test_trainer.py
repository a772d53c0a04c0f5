"""What the Trainer takes, beyond Lightning's own."""

from pathlib import Path

import pytest
from lightning.fabric.accelerators import MPSAccelerator
from lightning.pytorch.accelerators import CPUAccelerator

from datamodules import DigitsDataModule
from models import MLP
from pfl import FederatedLoop, Trainer
from pfl.algorithms import FedAvg
from pfl.errors import ConfigError
from tests.refusal import refused


@pytest.fixture
def apple(monkeypatch):
    """A machine with an Apple GPU, as far as Lightning asks for one."""
    monkeypatch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: True))


def test_auto_means_the_cpu_where_there_is_an_apple_gpu(tmp_path, apple):
    """It has no float64, which sums over samples and clients need."""
    trainer = Trainer(default_root_dir=tmp_path, enable_progress_bar=False)
    assert isinstance(trainer.accelerator, CPUAccelerator)


@pytest.mark.parametrize("accelerator", ["mps", "gpu"])
def test_an_apple_gpu_is_refused(tmp_path, apple, accelerator):
    message = f"trainer.accelerator: '{accelerator}' .* no float64 .*; use cpu"
    with pytest.raises(ConfigError, match=message):
        Trainer(accelerator=accelerator, default_root_dir=tmp_path, enable_progress_bar=False)


def fit(rounds, ckpt_path=None, run=Trainer.fit):
    trainer = Trainer(max_epochs=rounds, accelerator="cpu", enable_progress_bar=False)
    data = FederatedLoop(DigitsDataModule(6))
    run(trainer, FedAvg(MLP(64, [4])), datamodule=data, ckpt_path=ckpt_path)
    return trainer


@pytest.mark.filterwarnings("error:The dirpath has changed")
def test_a_resumed_run_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("runs", "run")
    last = folder / "checkpoints" / "last.ckpt"
    assert fit(2).run_dir == folder and last.is_file()
    for rounds in (0, 1):
        with refused(f"trainer.max_epochs: {rounds};", "at least 2"):
            fit(rounds, str(last))
    assert fit(1, str(last), run=Trainer.test).run_dir == folder  # which goes through no round
    for rounds in (2, 3):
        resumed = fit(rounds, str(last))
        assert resumed.run_dir == folder and resumed.current_epoch == rounds
    assert [path.name for path in Path("runs").iterdir()] == ["run"]


def test_a_run_is_found_from_within_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = (fit(1).run_dir / "checkpoints").resolve()
    monkeypatch.chdir(folder)
    with pytest.warns(UserWarning, match="The dirpath has changed"):  # which is true
        assert fit(2, "last.ckpt").run_dir.resolve() == folder.parent
