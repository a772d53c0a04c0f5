"""A checkpoint that costs little: of whole rounds, and not more often than it pays."""

from __future__ import annotations

import time
import warnings

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

COST = 0.02  # of the time since the last checkpoint that saving one may take at any time


class RoundCheckpoint(ModelCheckpoint):
    """Keeps `checkpoints/last.ckpt`: at the end of a round, and always of the first and the last.

    A checkpoint holds every client's state, so saving after every short round could take longer
    than the round. Where it costs less than 2% of the time, every round is saved.

    Args:
        every_seconds: The time that a crash may cost at most; 0 saves after every round.
    """

    def __init__(self, every_seconds: float = 30.0) -> None:
        super().__init__(
            filename="last",
            save_top_k=1,
            every_n_epochs=1,
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )
        self.every_seconds = every_seconds
        self._saved_at = time.monotonic()
        self._cost = 0.0  # seconds of the last save

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """As in Lightning, without its warning that a resumed run's folder is not empty."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Checkpoint directory .* is not empty")
            super().setup(trainer, pl_module, stage)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save if it is time, or if this was the last round."""
        last = is_last(trainer)
        begun = time.monotonic()
        passed = begun - self._saved_at
        due = passed >= self.every_seconds or self._cost <= COST * passed
        if trainer.strategy.broadcast(last or due):  # saving gathers: all processes or none
            super().on_train_epoch_end(trainer, pl_module)
            self._saved_at = time.monotonic()
            self._cost = self._saved_at - begun


def is_last(trainer: pl.Trainer) -> bool:
    """Whether the round that ends is the run's last."""
    ended = trainer.current_epoch + 1 == trainer.max_epochs
    return trainer.should_stop or ended or 0 <= trainer.max_steps <= trainer.global_step
