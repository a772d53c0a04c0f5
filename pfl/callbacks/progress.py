"""A progress bar that counts rounds."""

from __future__ import annotations

import os
import sys
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from pfl.scores.names import MODELS, SPLITS, ScoreName


class RoundProgress(ProgressBar):
    """Shows one line: rounds, time of a round, train loss, global and personalized accuracy.

    The bar is shown only on a terminal, neither in redirected output nor under CI.

    Example:
        >>> from pfl import Trainer
        >>> bar = RoundProgress()
        >>> bar.disable()
        >>> trainer = Trainer(callbacks=[bar])
        >>> trainer.progress_bar_callback is bar
        True
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = sys.stderr.isatty() and not os.environ.get("CI")
        self._bar: tqdm | None = None
        self._shown: dict[str, str] = {}

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._enabled:
            self._bar = tqdm(
                total=None if trainer.max_epochs == -1 else trainer.max_epochs,
                initial=trainer.current_epoch,
                unit="round",
                # Always seconds per round; tqdm would change to rounds per second.
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} "
                "[{elapsed}<{remaining}, {rate_inv_fmt}{postfix}]",
                dynamic_ncols=True,
                file=sys.stderr,
            )

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._bar is None:
            return
        row: dict[str, Any] = getattr(pl_module, "row", {})
        if "train/loss" in row:
            self._shown["loss"] = f"{row['train/loss']:.3f}"
        for model in MODELS[:2]:  # validation scores come first
            for name in (ScoreName(split, model, "accuracy") for split in SPLITS):
                if str(name) in row:
                    self._shown[f"{model} {name.split}"] = f"{row[str(name)]:.3f}"
                    break
        self._bar.set_postfix(self._shown, refresh=False)
        self._bar.update()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.on_train_end(trainer, pl_module)  # so that the error starts on a line of its own

    def print(self, *args: Any, **kwargs: Any) -> None:
        tqdm.write(" ".join(map(str, args)), file=sys.stdout)
