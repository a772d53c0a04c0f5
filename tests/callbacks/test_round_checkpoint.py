"""`RoundCheckpoint` saves the first and the last round, and rounds between at little cost."""

from functools import partial
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import EarlyStopping

from datamodules import DigitsDataModule
from models import MLP
from pfl import FederatedLoop
from pfl.algorithms import FedAvg
from pfl.callbacks import RoundCheckpoint
from tests.problems import quiet


@pytest.fixture
def timed(monkeypatch):
    """A callback whose rounds last some seconds of a simulated clock, and the rounds it saved."""
    now, saved = [0.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("pfl.callbacks.round_checkpoint.time", clock)

    class Timed(RoundCheckpoint):
        lasts = 1

        def on_train_epoch_start(self, trainer, pl_module):
            now[0] += self.lasts

        def _save_checkpoint(self, trainer, filepath):
            saved.append(trainer.current_epoch + 1)
            now[0] += 1
            super()._save_checkpoint(trainer, filepath)

    return Timed, saved


def fit(root, rounds, *callbacks, **arguments):
    trainer = quiet(root, rounds, *callbacks, **arguments)
    trainer.fit(FedAvg(MLP(64, [8])), datamodule=FederatedLoop(DigitsDataModule(6)))


@pytest.mark.parametrize(
    ("every", "lasts", "expected"),
    [
        (0, 1, [1, 2, 3, 4, 5, 6]),
        (1e9, 1, [1, 6]),  # the first and the last
        (5, 2, [1, 4, 6]),  # when 5 seconds are up, after three rounds of 2
        (1e9, 30, [1, 3, 5, 6]),  # a second for saving is 2% of 50
        (1e9, 60, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_rounds_are_saved_if_saving_is_cheap_or_time_is_up(tmp_path, timed, every, lasts, expected):
    make, saved = timed
    callback = make(every_seconds=every)
    callback.lasts = lasts
    fit(tmp_path, 6, callback)
    assert saved == expected
    kept = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["last.ckpt", "previous.ckpt"]


class Stop(pl.Callback):
    """Stops the run after its fourth round."""

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = trainer.current_epoch == 3


@pytest.mark.parametrize("every", [1, 50], ids=["evaluated", "not evaluated"])
@pytest.mark.parametrize(
    ("rounds", "callbacks", "arguments"),
    [
        (4, [], {}),
        (50, [], {"max_steps": 4}),
        (50, [Stop], {}),
        # The loss falls by less than a million after the first round.
        (50, [partial(EarlyStopping, "train/loss", 1e6, 3, check_on_train_epoch_end=True)], {}),
    ],
    ids=["max_epochs", "max_steps", "should_stop", "EarlyStopping"],
)
def test_the_last_round_is_saved_whatever_ends_the_run(
    tmp_path, timed, every, rounds, callbacks, arguments
):
    callback, saved = timed
    made = [callback(1e9), *[make() for make in callbacks]]
    fit(tmp_path, rounds, *made, check_val_every_n_epoch=every, **arguments)
    assert saved == [1, 4]
