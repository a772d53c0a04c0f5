"""Draws a run's figure."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from pfl.callbacks.recorder import RunRecorder


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
