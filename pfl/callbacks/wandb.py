"""Records that W&B gets besides the metrics of Lightning's logger."""

from __future__ import annotations

import inspect
from typing import Any

import lightning.pytorch as pl
import yaml
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger

from pfl.callbacks.recorder import RunRecorder
from pfl.method.algorithm import FederatedAlgorithm
from pfl.rounds.loop import FederatedLoop


class WandbRecord(Callback):
    """Sends a run's config, the partition's heat map, the per-client table and the summary to W&B.

    Every curve is drawn against `round`. `pfl.Trainer` adds this callback if one of its loggers is
    a `WandbLogger`; the callback does nothing for other loggers. Checkpoints become artifacts with
    the logger's own `log_model: true`.

    Example:
        >>> from pfl import Trainer
        >>> trainer = Trainer(callbacks=[WandbRecord()], enable_progress_bar=False)
    """

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sends the config, the axes of the curves and the heat map."""
        for logger in _loggers(trainer):
            logger.log_hyperparams(self._config(trainer, pl_module))
            logger.experiment.define_metric("round")
            logger.experiment.define_metric("*", step_metric="round", step_sync=True)
            loop = trainer.datamodule  # type: ignore[attr-defined]
            assert isinstance(loop, FederatedLoop)
            if loop.datamodule.has_labels:
                import wandb

                from pfl.report.figures import partition_figure

                figure = partition_figure(loop.datamodule.label_counts())
                logger.experiment.log({"partition": wandb.Image(figure), "round": 0})

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sends the table and the summary."""
        recorder = RunRecorder.of(trainer)
        for logger in _loggers(trainer) if recorder.summary else []:
            import wandb

            columns = recorder.columns
            rows = zip(*(column.tolist() for column in columns.values()), strict=True)
            table = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
            logger.experiment.log({"clients": table, "round": recorder.summary["round"]})
            logger.experiment.summary.update(recorder.summary)

    def _config(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        assert isinstance(pl_module, FederatedAlgorithm)
        text = RunRecorder.of(trainer).config
        if text is not None:
            return yaml.safe_load(text)
        return {
            "algorithm": type(pl_module).__name__,
            "network": type(pl_module.network).__name__,
            "max_epochs": trainer.max_epochs,
            "protocol": trainer.datamodule.describe(),  # type: ignore[attr-defined]
            **_settings(pl_module),
        }


def _settings(algorithm: FederatedAlgorithm) -> dict[str, float | str]:
    """Returns the plain arguments of the constructors, by name."""
    names = [n for cls in type(algorithm).__mro__ for n in inspect.signature(cls).parameters]
    values = {name: getattr(algorithm, name, None) for name in dict.fromkeys(names)}
    return {k: v for k, v in values.items() if isinstance(v, int | float | str)}


def _loggers(trainer: pl.Trainer) -> list[WandbLogger]:
    loggers = trainer.loggers if trainer.is_global_zero else []
    return [logger for logger in loggers if isinstance(logger, WandbLogger)]
