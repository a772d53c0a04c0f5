"""What the Trainer takes, beyond Lightning's own."""

import pytest
from lightning.fabric.accelerators import MPSAccelerator
from lightning.pytorch.accelerators import CPUAccelerator

from pfl import Trainer
from pfl.errors import ConfigError


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
