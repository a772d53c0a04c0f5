"""The record of a run: config, a row per round, a row per client, a summary, a table."""

from __future__ import annotations

import csv
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from pfl.callbacks import run_files
from pfl.callbacks.local_baseline import LocalBaseline
from pfl.callbacks.run_result import ClientTable, compare, peak_memory, versions
from pfl.errors import ConfigError
from pfl.method.algorithm import FederatedAlgorithm
from pfl.report import client_scores
from pfl.report.results import best_round
from pfl.report.table import summary_table
from pfl.rounds.loop import FederatedLoop

MOST_CLIENTS = 10_000  # of a run whose scores of single clients are kept for every evaluation


class RunRecorder(Callback):
    """Writes `config.yaml`, `metrics.csv`, `clients.csv` and `summary.json` into the run's folder.

    Every client's scores in every evaluation are in `client_scores.bin` (see
    `pfl.report.client_scores`), of runs with at most 10,000 clients.

    `metrics.csv` and the tables that a method records are written round by round, the other files
    at the end of the run and after an error. A resumed run begins with the rows of the checkpoint,
    so that its files equal those of an uninterrupted run. At the end of the run, a table of the
    result is printed. `pfl.Trainer` adds this callback to every run.

    Args:
        config: YAML text of the run's configuration; the command line provides the text.

    Attributes:
        rows: The rows of `metrics.csv`.
        table: The content of `clients.csv`; None before training ends.
        summary: The content of `summary.json`; empty before training ends.
        folder: The run's folder.

    Example:
        >>> from pfl import Trainer
        >>> recorder = RunRecorder(config="model: FedAvg")
        >>> trainer = Trainer(callbacks=[recorder], enable_progress_bar=False)
        >>> trainer.recorder is recorder
        True
    """

    def __init__(self, config: str | None = None) -> None:
        self.config = config
        self.rows: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.table: ClientTable | None = None
        self.seconds = 0.0
        self._names: list[str] = []
        self._rounds_in_tables = 0
        self._start = time.monotonic()
        self.folder = Path()
        self._writes = True

    @staticmethod
    def of(trainer: pl.Trainer) -> RunRecorder:
        """Returns the recorder of a Trainer."""
        return next(c for c in _callbacks(trainer) if isinstance(c, RunRecorder))

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """All columns of `clients.csv`; empty before training ends."""
        return {} if self.table is None else self.table.columns()

    # ---- training -----------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Chooses the folder, and forgets the rows of another method's run.

        If the run is resumed, the checkpoint restores its rows later.
        """
        if stage == "fit" and getattr(pl_module, "rounds", None) == 0:
            self.rows, self.summary, self.table, self.seconds = [], {}, None, 0.0
        self.folder = Path(getattr(trainer, "run_dir", trainer.default_root_dir))
        self._writes = trainer.is_global_zero
        for callback in trainer.checkpoint_callbacks:  # the default is a logger's folder
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = str(self.folder / "checkpoints")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes the files that exist before the first round."""
        self._start = time.monotonic() - self.seconds
        self._names, self._rounds_in_tables = [], len(self.rows)
        if not self._writes:
            return
        self._make_folder()
        if self.config is not None:
            (self.folder / "config.yaml").write_text(self.config)
        if self.rows:
            self._rewrite_metrics()
        for table in pl_module.tables if isinstance(pl_module, FederatedAlgorithm) else ():
            run_files.cut(self.folder / f"{table}.csv", len(self.rows))
        client_scores.cut(self.folder, len(self.rows))
        rank_zero_info(f"Writing to {self.folder}")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warns if a trained method is fitted again without its Trainer or `ckpt_path`."""
        assert isinstance(pl_module, FederatedAlgorithm)
        if trainer.ckpt_path is None and pl_module.rounds != trainer.current_epoch:
            rank_zero_warn(
                f"The method has been through {pl_module.rounds} rounds; this run continues with "
                f"its models, but the cohorts and the orders of samples are those of round "
                f"{trainer.current_epoch + 1} on again. Give ckpt_path to continue a run",
                category=UserWarning,
            )

    def _make_folder(self) -> None:
        with run_files.run_folder_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Adds the round's row."""
        assert isinstance(pl_module, FederatedAlgorithm)
        if self.rows and self.rows[-1]["round"] == pl_module.rounds:
            return  # resumed after the round's evaluation: the checkpoint has the row
        row: dict[str, Any] = dict(pl_module.row)
        self.rows.append(row)
        self.seconds = time.monotonic() - self._start
        if not self._writes:
            return
        new = [name for name in row if name not in self._names]
        if new:
            self._rewrite_metrics()
        else:
            with (self.folder / "metrics.csv").open("a", newline="") as file:
                csv.DictWriter(file, self._names).writerow(row)
        self._write_tables(pl_module)
        self._write_client_scores(pl_module)

    def _write_tables(self, algorithm: FederatedAlgorithm) -> None:
        if self._writes and self._rounds_in_tables < algorithm.rounds:
            for table, columns in algorithm.recorded.items():
                run_files.append(self.folder / f"{table}.csv", algorithm.rounds, columns)
            self._rounds_in_tables = algorithm.rounds

    def _write_client_scores(self, algorithm: FederatedAlgorithm) -> None:
        """Keeps the scores of the round's evaluation, if the round was evaluated."""
        scored = any(name.startswith("test/") for name in algorithm.row)
        if scored and algorithm.evaluation and algorithm.num_clients <= MOST_CLIENTS:
            scores = {
                f"{split}_{kind}_{number}": values[number]
                for (split, kind), values in algorithm.evaluation.scores.items()
                for number in ("accuracy", "loss")
            }
            client_scores.append(self.folder, algorithm.rounds, scores)

    def _rewrite_metrics(self) -> None:
        self._names = list(dict.fromkeys(name for row in self.rows for name in row))
        with (self.folder / "metrics.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, self._names)
            writer.writeheader()
            writer.writerows(self.rows)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes the result."""
        assert isinstance(pl_module, FederatedAlgorithm)
        self._write_result(trainer, pl_module)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prints the result, or that a resumed run had no round left."""
        if self._writes:
            nothing = f"Nothing to do: {trainer.ckpt_path} has been through {len(self.rows)} rounds"
            print(summary_table(self.summary) if self.summary else nothing, flush=True)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Writes the result of the rounds before the error."""
        if not isinstance(pl_module, FederatedAlgorithm) or pl_module.rounds == 0:
            return  # the rows are not yet, or no longer, this method's
        one = trainer.num_devices == 1 and trainer.num_nodes == 1  # several processes would hang
        if self.rows and one and trainer.state.fn == "fit":
            with suppress(OSError):  # the disk may be full; the user should see the first error
                self._write_result(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Returns the rows and the time so far."""
        return {"rows": self.rows, "seconds": self.seconds}

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds the row of a round that has trained but not ended.

        A run that is resumed from here does not repeat the round.
        """
        assert isinstance(pl_module, FederatedAlgorithm)
        last = self.rows[-1]["round"] if self.rows else 0
        if trainer.state.fn == "fit" and last < pl_module.rounds == pl_module.row.get("round"):
            checkpoint["callbacks"][self.state_key]["rows"] = [*self.rows, pl_module.row]
            self._write_tables(pl_module)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the rows and the time."""
        self.rows = list(state_dict["rows"])
        self.seconds = state_dict["seconds"]

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuses a checkpoint with more rounds than `max_epochs`."""
        rounds, limit = checkpoint["federated"]["rounds"], trainer.max_epochs
        if trainer.state.fn == "fit" and limit is not None and 0 <= limit < rounds:
            raise ConfigError(
                f"trainer.max_epochs: {limit}; it must be at least {rounds}, the number of "
                f"rounds in the checkpoint"
            )

    # ---- test and predict ---------------------------------------------------------------------

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes `test.json` and `test_clients.csv`."""
        self._write_evaluation(trainer, pl_module, "test")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes `validate.json` and `validate_clients.csv` after `validate`, not within `fit`."""
        if trainer.state.fn == "validate":
            self._write_evaluation(trainer, pl_module, "validate")

    def _write_evaluation(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, name: str
    ) -> None:
        assert isinstance(pl_module, FederatedAlgorithm)
        table = ClientTable.of(pl_module, _loop(trainer))
        if self._writes:
            self._make_folder()
            run_files.write_json(self.folder / f"{name}.json", pl_module.row)
            table.write(self.folder / f"{name}_clients.csv")

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Deletes earlier predictions, perhaps of another number of processes."""
        if trainer.local_rank == 0:
            for path in self.folder.glob("predictions*.csv"):
                path.unlink(missing_ok=True)
        trainer.strategy.barrier()  # before anyone writes

    def on_predict_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Appends a chunk's predictions to `predictions.csv`, one row for each sample."""
        self._make_folder()
        rank = f"-{trainer.global_rank}" if trainer.world_size > 1 else ""
        path = self.folder / f"predictions{rank}.csv"
        if outputs:
            run_files.write_csv(path, outputs, append=batch_idx > 0)

    # ---- the result ---------------------------------------------------------------------------

    def _write_result(self, trainer: pl.Trainer, algorithm: FederatedAlgorithm) -> None:
        loop = _loop(trainer)
        baseline = next((c for c in _callbacks(trainer) if isinstance(c, LocalBaseline)), None)
        self.table = ClientTable.of(algorithm, loop, baseline.scores if baseline else None)
        self.summary = {
            "name": self.folder.name,
            "folder": str(self.folder),
            "algorithm": type(algorithm).__name__,
            **self.rows[-1],
            "best": best_round(self.rows),
            **compare(self.table.scores),
            "protocol": loop.describe(),
            "partition_hash": loop.datamodule.partition.hash,
            "seed": loop.seed,
            "wall_seconds": self.seconds,
            "samples_per_second": algorithm.samples_seen / max(self.seconds, 1e-9),
            "peak_memory_bytes": peak_memory(),
            "engine": algorithm.oracle.engine.name,
            "versions": versions(),
        }
        if self._writes:
            self.table.write(self.folder / "clients.csv")
            run_files.write_json(self.folder / "summary.json", self.summary)


def _callbacks(trainer: pl.Trainer) -> list[Callback]:
    return trainer.callbacks  # type: ignore[attr-defined]


def _loop(trainer: pl.Trainer) -> FederatedLoop:
    return trainer.datamodule  # type: ignore[attr-defined]
