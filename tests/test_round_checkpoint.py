"""When a checkpoint is saved."""

from types import SimpleNamespace

import pytest

from datamodules import DigitsDataModule
from models import MLP
from pfl import FederatedLoop, Trainer
from pfl.algorithms import FedAvg
from pfl.callbacks import RoundCheckpoint


@pytest.mark.parametrize(
    ("every", "lasts", "wanted"),
    [
        (0, 1, [1, 2, 3, 4, 5, 6]),
        (1e9, 1, [1, 6]),  # the first and the last
        (5, 2, [1, 4, 6]),  # when 5 seconds are up, after three rounds of 2
        (1e9, 30, [1, 3, 5, 6]),  # a second for saving is 2% of 50
        (1e9, 60, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_checkpoints_come_where_they_cost_little_or_time_is_up(
    tmp_path, monkeypatch, every, lasts, wanted
):
    now, saved = [0.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("pfl.callbacks.checkpoint.time", clock)

    class Timed(RoundCheckpoint):
        def on_train_epoch_start(self, trainer, pl_module):
            now[0] += lasts

        def _save_checkpoint(self, trainer, filepath):
            saved.append(trainer.current_epoch + 1)
            now[0] += 1
            super()._save_checkpoint(trainer, filepath)

    timed = Timed(every_seconds=every)
    trainer = Trainer(
        max_epochs=6,
        accelerator="cpu",
        default_root_dir=tmp_path,
        callbacks=[timed],
        enable_progress_bar=False,
    )
    trainer.fit(FedAvg(MLP(64, [8])), datamodule=FederatedLoop(DigitsDataModule(6)))
    assert saved == wanted
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["last.ckpt"]
