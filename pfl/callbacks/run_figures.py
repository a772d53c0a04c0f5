"""Callbacks that draw the figures of a run."""
# mypy: disable-error-code="override"

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger

from pfl.callbacks.recorder import RunRecorder
from pfl.files import last_round, write_figure
from pfl.method.algorithm import FederatedAlgorithm
from pfl.scores.table import ScoreTable


class RunFigure(Callback):
    """Writes `report.png` into the run's folder: labels, curves, clients.

    Example:
        >>> from pfl import Trainer
        >>> trainer = Trainer(callbacks=[RunFigure()], enable_progress_bar=False)
    """

    results = ("report.png",)  # a resumed run writes it if it is missing

    def on_train_start(self, trainer: pl.Trainer, pl_module: FederatedAlgorithm) -> None:
        if trainer.is_global_zero:  # the figure of fewer rounds
            (RunRecorder.of(trainer).folder / "report.png").unlink(missing_ok=True)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: FederatedAlgorithm) -> None:
        recorder = RunRecorder.of(trainer)
        if trainer.is_global_zero and recorder.summary:
            from pfl.report.figures import run_figure
            from pfl.report.matplotlib_drawer import draw  # matplotlib takes long to import

            scores = ScoreTable.read(recorder.folder)
            figure = run_figure(recorder.rows, recorder.columns, scores)
            write_figure(recorder.folder / "report.png", draw(figure))


class CollaborationMap(Callback):
    """Draws which clients learned from which in the last round, if the method records it.

    The figure is `collaboration.png` in the run's folder, and is sent to W&B. `pfl.Trainer` adds
    this callback to every run.

    Example:
        >>> from pfl import Trainer
        >>> trainer = Trainer(enable_progress_bar=False)
        >>> any(isinstance(callback, CollaborationMap) for callback in trainer.callbacks)
        True
    """

    def on_fit_end(self, trainer: pl.Trainer, pl_module: FederatedAlgorithm) -> None:
        if not trainer.is_global_zero or "collaboration" not in pl_module.tables:
            return
        folder = RunRecorder.of(trainer).folder
        if not (columns := last_round(folder / "collaboration.csv")):
            return
        from pfl.report.figures import collaboration_figure
        from pfl.report.matplotlib_drawer import draw

        title = f"Collaboration in round {pl_module.rounds}"
        figure = draw(collaboration_figure(**columns, title=title))
        write_figure(folder / "collaboration.png", figure)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                import wandb

                image = wandb.Image(figure)
                logger.experiment.log({"collaboration": image, "round": pl_module.rounds})
