"""Draws a run's figure."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from pfl.callbacks.recorder import RunRecorder


class RunFigure(Callback):
    """Writes `report.png` into the run's folder: labels, curves, clients."""

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw, on the first process."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        recorder = next(c for c in callbacks if isinstance(c, RunRecorder))
        if not (trainer.is_global_zero and recorder.summary):
            return
        from pfl.report.figures import run_figure  # matplotlib is slow to import

        path = Path(recorder.folder) / "report.png"
        run_figure(recorder.rows, recorder.columns).savefig(path, dpi=150)
