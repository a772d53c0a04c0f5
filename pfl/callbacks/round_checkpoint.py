"""Checkpoints of whole rounds, saved as often as saving costs little."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from pfl.datamodules.errors import require_value
from pfl.distributed.collectives import first_says

COST_SHARE = 0.02  # largest share of the time since the last checkpoint that saving may take


class SavingClock:
    """Decides when to save next: after some seconds, or as soon as saving takes 2% of the time."""

    def __init__(self, every_seconds: float) -> None:
        self.every_seconds = every_seconds
        self._saved_at = time.monotonic()
        self._cost = 0.0  # seconds of the last save

    def is_due(self) -> bool:
        """Returns whether it is time to save."""
        passed = time.monotonic() - self._saved_at
        return passed >= self.every_seconds or self._cost <= COST_SHARE * passed

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measures how long saving takes."""
        begin = time.monotonic()
        yield
        self._saved_at = time.monotonic()
        self._cost = self._saved_at - begin


class RoundCheckpoint(ModelCheckpoint):
    """Saves `checkpoints/last.ckpt` at the end of rounds, always after the first and the last.

    A checkpoint holds every client's state, so saving after every short round could take longer
    than the round. If saving takes less than 2% of the time, every round is saved.

    Args:
        every_seconds: The longest time between two checkpoints, apart from the round that is under
            way; 0 saves after every round.

    Example:
        >>> from pfl import Trainer
        >>> trainer = Trainer(callbacks=[RoundCheckpoint(600)], enable_progress_bar=False)
    """

    def __init__(self, every_seconds: float = 30.0) -> None:
        key = "RoundCheckpoint.every_seconds"
        require_value(key, every_seconds, every_seconds >= 0, "a number of seconds of at least 0")
        super().__init__(
            filename="last",
            save_top_k=1,
            every_n_epochs=1,
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )
        self.clock = SavingClock(every_seconds)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Saving gathers the client states: all processes must take part, or none.
        if first_says(is_last(trainer) or self.clock.is_due()):
            with self.clock.saving():
                super().on_train_epoch_end(trainer, pl_module)


def is_last(trainer: pl.Trainer) -> bool:
    """Returns whether the run ends with the round that has just trained."""
    ended = trainer.current_epoch + 1 == trainer.max_epochs
    return trainer.should_stop or ended or 0 <= trainer.max_steps <= trainer.global_step
