"""Records that W&B gets besides the metrics of Lightning's logger."""
# mypy: disable-error-code="override"

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import WandbLogger

from pfl import files
from pfl._private import continue_wandb_run
from pfl.callbacks.recorder import RunRecorder
from pfl.callbacks.round_checkpoint import RoundCheckpoint
from pfl.method.algorithm import FederatedAlgorithm
from pfl.rounds.loop import FederatedLoop
from pfl.scores.evaluation import scores_by_name
from pfl.scores.names import scores_among
from pfl.scores.table import ScoreTable

if TYPE_CHECKING:  # slow to import
    import wandb

FILE = "wandb.json"  # in the run's folder: which W&B run it is
ROWS = 10_000  # of a table, which is what W&B shows


class WandbRecord(Callback):
    """Sends what a federated run has beside its metrics to W&B.

    W&B gets the partition as an artifact and as a heat map, a histogram over clients of every test
    score in each evaluation, the tables of `clients.csv` and of all clients' test scores by round,
    and the summary. Every curve is drawn against `round`, and the mean test scores once more, as
    `bytes/...`, against `comm/bytes`, all bytes sent since the start.

    A run that continues a checkpoint continues the same W&B run. `pfl.Trainer` adds this callback
    if one of its loggers is a `WandbLogger`; the callback does nothing for other loggers.

    Args:
        model: Whether checkpoints become versions of an artifact at the end of the run, offline as
            well: that of the last round with the alias `last`, and those that a `ModelCheckpoint`
            with a `monitor` calls the best with the alias `best`. They have the states of all
            clients, and can be large.

    Example:
        >>> from pfl import Trainer
        >>> trainer = Trainer(callbacks=[WandbRecord(model=True)], enable_progress_bar=False)
    """

    def __init__(self, model: bool = False) -> None:
        self.model = model
        self._by_bytes: set[str] = set()

    @staticmethod
    def continue_run(trainer: pl.Trainer, ckpt_path: str) -> None:
        """Makes unused loggers continue the W&B run of a checkpoint in its run's folder."""
        path = Path(ckpt_path).parent.parent / FILE
        if path.is_file():
            for logger in _loggers(trainer):
                continue_wandb_run(logger, json.loads(path.read_text(encoding="utf-8"))["id"])

    def on_fit_start(self, trainer: pl.Trainer, pl_module: FederatedAlgorithm) -> None:
        loop = pl_module.run.loop
        recorder = RunRecorder.of(trainer)
        self._by_bytes.clear()
        for logger in _loggers(trainer):
            run = logger.experiment
            run.define_metric("round")
            run.define_metric("comm/bytes", step_metric="round")
            run.define_metric("*", step_metric="round", step_sync=True)
            path = recorder.folder / FILE
            if not path.is_file() or json.loads(path.read_text(encoding="utf-8"))["id"] != run.id:
                files.write_json(path, {"id": run.id})
                _send_partition(run, loop)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: FederatedAlgorithm) -> None:
        loggers = _loggers(trainer)
        row = pl_module.row
        names = scores_among(row, "test")
        if not loggers or pl_module.evaluation is None or not names:
            return
        import wandb

        # Named after W&B's section for bytes.
        means = {f"bytes/{name.model}/{name.number}": row[str(name)] for name in names}
        sent = sum(row.get(f"comm/{way}_bytes", 0.0) for way in ("uplink", "downlink"))
        content: dict[str, Any] = {"round": pl_module.rounds, "comm/bytes": sent, **means}
        for score, values in scores_by_name(pl_module.evaluation.scores).items():
            finite = values[np.isfinite(values)].tolist()
            if score.split == "test" and finite:
                content[f"clients/{score}"] = wandb.Histogram(finite)
        for logger in loggers:
            for name in means.keys() - self._by_bytes:
                logger.experiment.define_metric(name, step_metric="comm/bytes")
            logger.experiment.log(content)
        self._by_bytes |= means.keys()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: FederatedAlgorithm) -> None:
        recorder = RunRecorder.of(trainer)
        for logger in _loggers(trainer) if recorder.summary else []:
            assert recorder.table is not None
            table = _table(recorder.table.columns(slice(ROWS)))
            content = {"clients": table, "round": recorder.summary["round"]}
            scores = ScoreTable.read(recorder.folder)
            if scores is not None and not scores.percentiles:
                content["clients_by_round"] = _table(_by_round(scores))
            logger.experiment.log(content)
            logger.experiment.summary.update(recorder.summary)
            if self.model:
                _send_models(logger.experiment, trainer, recorder.summary)


def _loggers(trainer: pl.Trainer) -> list[WandbLogger]:
    if trainer.is_global_zero:
        loggers = trainer.loggers
    else:
        loggers = []
    return [logger for logger in loggers if isinstance(logger, WandbLogger)]


def _send_partition(run: wandb.Run, loop: FederatedLoop) -> None:
    """Sends the partition as a file of NumPy arrays and, if samples have labels, as a heat map.

    The file has `<split>_sizes` [M] and `<split>_indices`, the indices of all clients' samples one
    after another; of splits that are computed when they are needed, `<split>_definition`.
    """
    import wandb

    from pfl.datamodules import Ragged

    partition = loop.datamodule.partition
    arrays: dict[str, np.ndarray] = {}
    for split in ("train", "val", "test"):
        owned = getattr(partition, split)
        if isinstance(owned, Ragged) and not owned.is_shared:
            arrays |= {f"{split}_sizes": owned.sizes, f"{split}_indices": owned.flat}
        else:
            parts = enumerate(owned.definition())
            arrays |= {f"{split}_definition_{number}": part for number, part in parts}
    about = {"hash": partition.hash, "protocol": loop.datamodule.describe()}
    name = f"partition-{partition.hash[:12]}"  # runs with the same partition share it
    artifact = wandb.Artifact(name, type="partition", metadata=about)
    with artifact.new_file("partition.npz", mode="wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    run.log_artifact(artifact)
    if loop.datamodule.has_labels:
        from pfl.report.figures import partition_figure
        from pfl.report.matplotlib_drawer import draw

        figure = draw(partition_figure(loop.datamodule.label_counts()))
        run.log({"partition": wandb.Image(figure), "round": 0})


def _send_models(run: wandb.Run, trainer: pl.Trainer, summary: Mapping[str, Any]) -> None:
    """Sends the checkpoints of the run as versions of one artifact, the last one last."""
    import wandb

    paths: dict[str, list[str]] = {}
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.monitor is not None:
            paths.setdefault(callback.best_model_path, []).append("best")
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, RoundCheckpoint):
            paths.setdefault(callback.best_model_path, []).append("last")
            best = (summary["best"] or {}).get("round")
            if best == summary["round"] and ["best"] not in paths.values():
                paths[callback.best_model_path].append("best")
    for path, aliases in paths.items():
        if Path(path).is_file():
            about = {"file": Path(path).name, "algorithm": summary["algorithm"]}
            artifact = wandb.Artifact(f"model-{run.id}", type="model", metadata=about)
            artifact.add_file(path, "model.ckpt")
            run.log_artifact(artifact, aliases=aliases)


def _by_round(scores: ScoreTable) -> dict[str, np.ndarray]:
    """Returns the columns of a table with a row for each client and evaluation.

    Where that would be too many rows, evaluations at equal distances are kept, and the last one.
    """
    rounds = scores.rounds
    most = max(1, ROWS * len(rounds) // len(scores.rows))
    kept = np.unique(np.linspace(len(rounds) - 1, 0, min(len(rounds), most)).round().astype(int))
    rows = scores.rows.reshape(len(rounds), -1)[kept].ravel()
    names = ["round", "client", *map(str, scores_among(rows.dtype.names or (), "test"))]
    return {name: rows[name] for name in names}


def _table(columns: Mapping[str, np.ndarray]) -> wandb.Table:
    import wandb

    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return wandb.Table(columns=list(columns), data=[list(row) for row in rows])
