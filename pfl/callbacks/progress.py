"""A progress bar that counts rounds."""

from __future__ import annotations

import os
import sys
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm


class RoundProgress(ProgressBar):
    """One line: rounds done, time of a round, train loss, global and personalized accuracy.

    Shown only on a terminal: quiet where the output is redirected, and under CI.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = sys.stderr.isatty() and not os.environ.get("CI")
        self._bar: tqdm | None = None
        self._shown: dict[str, str] = {}

    def disable(self) -> None:
        """Show nothing (Lightning calls this on all processes but the first)."""
        self._enabled = False

    def enable(self) -> None:
        """Show the bar, whatever the output is."""
        self._enabled = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the bar at the round where training begins."""
        if self._enabled:
            self._bar = tqdm(
                total=None if trainer.max_epochs == -1 else trainer.max_epochs,
                initial=trainer.current_epoch,
                unit="round",
                # always seconds a round, where tqdm would turn to rounds a second
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} "
                "[{elapsed}<{remaining}, {rate_inv_fmt}{postfix}]",
                dynamic_ncols=True,
                file=sys.stderr,
            )

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """One round further."""
        if self._bar is None:
            return
        row: dict[str, Any] = getattr(pl_module, "row", {})
        if "train/loss" in row:
            self._shown["loss"] = f"{row['train/loss']:.3f}"
        for kind in ("global", "personalized"):
            for split in ("val", "test"):
                if (name := f"{split}/{kind}/accuracy") in row:
                    self._shown[f"{kind} {split}"] = f"{row[name]:.3f}"
                    break
        self._bar.set_postfix(self._shown, refresh=False)
        self._bar.update()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Leave the terminal clean."""
        self.on_train_end(trainer, pl_module)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar."""
        tqdm.write(" ".join(map(str, args)), file=sys.stdout)
