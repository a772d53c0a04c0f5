"""Draws the figures of a run."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger

from pfl.callbacks.recorder import RunRecorder
from pfl.method.algorithm import FederatedAlgorithm


class RunFigure(Callback):
    """Writes `report.png` into the run's folder: labels, curves, clients."""

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw, on the first process."""
        recorder = RunRecorder.of(trainer)
        if not (trainer.is_global_zero and recorder.summary):
            return
        from pfl.report.figures import run_figure  # matplotlib is slow to import

        figure = run_figure(recorder.rows, recorder.columns)
        figure.savefig(recorder.folder / "report.png", dpi=150)


class CollaborationMap(Callback):
    """Draws who learned from whom in the last round, for methods that record it (FedACS).

    Writes `collaboration.png` into the run's folder and sends it to W&B. `pfl.Trainer` adds it.
    """

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw, on the first process."""
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
