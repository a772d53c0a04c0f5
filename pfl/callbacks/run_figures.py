"""Callbacks that draw the figures of a run."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger

from pfl.callbacks.recorder import RunRecorder
from pfl.method.algorithm import FederatedAlgorithm


class RunFigure(Callback):
    """Writes `report.png` into the run's folder: labels, curves, clients.

    Example:
        >>> from pfl import Trainer
        >>> trainer = Trainer(callbacks=[RunFigure()], enable_progress_bar=False)
    """

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draws the figure on the first process."""
        recorder = RunRecorder.of(trainer)
        if not (trainer.is_global_zero and recorder.summary):
            return
        from pfl.report.figures import run_figure  # matplotlib is slow to import

        figure = run_figure(recorder.rows, recorder.columns)
        figure.savefig(recorder.folder / "report.png", dpi=150)


class CollaborationMap(Callback):
    """Draws which clients learned from which in the last round, if the method records it (FedACS).

    The figure is `collaboration.png` in the run's folder, and is sent to W&B. `pfl.Trainer` adds
    this callback to every run.

    Example:
        >>> from pfl import Trainer
        >>> trainer = Trainer(enable_progress_bar=False)
        >>> any(isinstance(callback, CollaborationMap) for callback in trainer.callbacks)
        True
    """

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draws the figure on the first process."""
        assert isinstance(pl_module, FederatedAlgorithm)
        columns = pl_module.recorded.get("collaboration")
        if not (trainer.is_global_zero and columns):
            return
        from pfl.report.figures import collaboration_figure

        figure = collaboration_figure(**columns, round_index=pl_module.rounds)
        figure.savefig(RunRecorder.of(trainer).folder / "collaboration.png", dpi=150)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                import wandb

                image = wandb.Image(figure)
                logger.experiment.log({"collaboration": image, "round": pl_module.rounds})
