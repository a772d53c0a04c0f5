"""The record of a run: config, a row per round, a row per client, a summary, a table."""

from __future__ import annotations

import csv
import importlib.metadata
import math
import platform
import resource
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from datamodules import FederatedDataModule
from pfl.callbacks import run_files
from pfl.callbacks.local_baseline import LocalBaseline
from pfl.communication import Ledger
from pfl.errors import ConfigError
from pfl.method.algorithm import FederatedAlgorithm
from pfl.report.table import summary_table
from pfl.rounds.evaluation import worst_tenth
from pfl.rounds.loop import FederatedLoop

PACKAGES = ("torch", "lightning", "torchmetrics", "numpy")


class RunRecorder(Callback):
    """Writes `config.yaml`, `metrics.csv`, `clients.csv` and `summary.json` into the run's folder.

    `metrics.csv` and the tables of methods that record some are written round by round, the others
    at the end and when a run is broken off. A resumed run begins with the rows of the checkpoint,
    so that its files equal those of an uninterrupted run. At the end a table of the result is
    printed.

    Args:
        config: YAML text of the run's configuration; the command line gives it.

    Attributes:
        rows: Of `metrics.csv`.
        table: Of `clients.csv`, once training has ended.
        summary: Of `summary.json`, likewise.
        folder: Where they are written.
    """

    def __init__(self, config: str | None = None) -> None:
        self.config = config
        self.rows: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.table: ClientTable | None = None
        self.seconds = 0.0
        self._names: list[str] = []
        self._tabled = 0  # the last round whose tables are written
        self._begun = time.monotonic()
        self.folder = Path()
        self._writes = True

    @staticmethod
    def of(trainer: pl.Trainer) -> RunRecorder:
        """The recorder of a Trainer."""
        return next(c for c in _callbacks(trainer) if isinstance(c, RunRecorder))

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """All columns of `clients.csv`, once training has ended; made when asked for."""
        return {} if self.table is None else self.table.columns()

    # ---- training -----------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Choose the folder, and forget another method's run; a resumed one's rows come later."""
        if stage == "fit" and getattr(pl_module, "rounds", None) == 0:
            self.rows, self.summary, self.table, self.seconds = [], {}, None, 0.0
        self.folder = Path(getattr(trainer, "run_dir", trainer.default_root_dir))
        self._writes = trainer.is_global_zero
        for callback in trainer.checkpoint_callbacks:  # else they lie where a logger has its files
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = str(self.folder / "checkpoints")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write what is known before the first round."""
        self._begun = time.monotonic() - self.seconds
        self._names, self._tabled = [], len(self.rows)
        if not self._writes:
            return
        self._make_folder()
        if self.config is not None:
            (self.folder / "config.yaml").write_text(self.config)
        if self.rows:
            self._rewrite_metrics()
        for table in pl_module.tables if isinstance(pl_module, FederatedAlgorithm) else ():
            run_files.cut(self.folder / f"{table}.csv", len(self.rows))
        rank_zero_info(f"Writing to {self.folder}")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tell of a trained method that goes on without its Trainer or checkpoint."""
        assert isinstance(pl_module, FederatedAlgorithm)
        if trainer.ckpt_path is None and pl_module.rounds != trainer.current_epoch:
            rank_zero_warn(
                f"The method has been through {pl_module.rounds} rounds; this run goes on with its "
                f"models, but draws cohorts and orders from those of round "
                f"{trainer.current_epoch + 1} on again. Give ckpt_path to continue a run",
                category=UserWarning,
            )

    def _make_folder(self) -> None:
        with run_files.run_folder_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The last round that may be is evaluated; the Trainer sees to one that ends the run."""
        rounds, steps = trainer.current_epoch + 1, trainer.global_step + 1  # the server's, one each
        if rounds == trainer.max_epochs or steps == trainer.max_steps:
            trainer.check_val_every_n_epoch = 1

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add the round's row."""
        assert isinstance(pl_module, FederatedAlgorithm)
        if self.rows and self.rows[-1]["round"] == pl_module.rounds:
            return  # resumed behind the round's evaluation: its row came with the checkpoint
        row: dict[str, Any] = dict(pl_module.row)
        self.rows.append(row)
        self.seconds = time.monotonic() - self._begun
        if not self._writes:
            return
        new = [name for name in row if name not in self._names]
        if new:
            self._rewrite_metrics()
        else:
            with (self.folder / "metrics.csv").open("a", newline="") as file:
                csv.DictWriter(file, self._names).writerow(row)
        self._write_tables(pl_module)

    def _write_tables(self, algorithm: FederatedAlgorithm) -> None:
        if self._writes and self._tabled < algorithm.rounds:
            for table, columns in algorithm.recorded.items():
                run_files.append(self.folder / f"{table}.csv", algorithm.rounds, columns)
            self._tabled = algorithm.rounds

    def _rewrite_metrics(self) -> None:
        self._names = list(dict.fromkeys(name for row in self.rows for name in row))
        with (self.folder / "metrics.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, self._names)
            writer.writeheader()
            writer.writerows(self.rows)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the result."""
        assert isinstance(pl_module, FederatedAlgorithm)
        self._write_result(trainer, pl_module)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print it, or that a resumed run had nothing left to do."""
        if self._writes:
            none = f"Nothing to do: {trainer.ckpt_path} has been through {len(self.rows)} rounds"
            print(summary_table(self.summary) if self.summary else none, flush=True)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Nothing that was computed is lost."""
        if not isinstance(pl_module, FederatedAlgorithm) or pl_module.rounds == 0:
            return  # the rows are not yet, or no longer, this method's
        alone = trainer.num_devices == 1 and trainer.num_nodes == 1  # else others would hang
        if self.rows and alone and trainer.state.fn == "fit":
            with suppress(OSError):  # the disk may be full: the first error is the one to see
                self._write_result(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Rows and time so far."""
        return {"rows": self.rows, "seconds": self.seconds}

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the row of a trained round that ends after this; it is not gone through again."""
        assert isinstance(pl_module, FederatedAlgorithm)
        booked = self.rows[-1]["round"] if self.rows else 0
        if trainer.state.fn == "fit" and booked < pl_module.rounds == pl_module.row.get("round"):
            checkpoint["callbacks"][self.state_key]["rows"] = [*self.rows, pl_module.row]
            self._write_tables(pl_module)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.rows = list(state_dict["rows"])
        self.seconds = state_dict["seconds"]

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse to go on to a round that the checkpoint is past."""
        rounds, wanted = checkpoint["federated"]["rounds"], trainer.max_epochs
        if trainer.state.fn == "fit" and wanted is not None and 0 <= wanted < rounds:
            raise ConfigError(
                f"trainer.max_epochs: {wanted}; it must be at least {rounds}, the rounds that the "
                f"checkpoint has been through"
            )

    # ---- test and predict ---------------------------------------------------------------------

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write `test.json` and `test_clients.csv`."""
        self._write_evaluation(trainer, pl_module, "test")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """After `validate` (not within `fit`): write `validate.json`, `validate_clients.csv`."""
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
        """Take away what was predicted before, maybe by another number of processes."""
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
        """Append a chunk's predictions to `predictions.csv`, a row a sample."""
        self._make_folder()
        rank = f"-{trainer.global_rank}" if trainer.world_size > 1 else ""
        path = self.folder / f"predictions{rank}.csv"
        if outputs:
            run_files.write_csv(path, outputs, append=batch_idx > 0)

    # ---- the result ---------------------------------------------------------------------------

    def _write_result(self, trainer: pl.Trainer, algorithm: FederatedAlgorithm) -> None:
        loop = _loop(trainer)
        alone = next((c for c in _callbacks(trainer) if isinstance(c, LocalBaseline)), None)
        self.table = ClientTable.of(algorithm, loop, alone.scores if alone else None)
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


def best_round(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The row that validation selects, with `selected_by`; None without validation.

    By the mean accuracy of the personalized models where there are some, else of the global model;
    for regression by the loss. The first of equal rounds.
    """
    for number, sign in (("accuracy", 1), ("loss", -1)):
        for kind in ("personalized", "global"):
            name = f"val/{kind}/{number}"
            have = [row for row in rows if name in row and not math.isnan(row[name])]
            if have:
                best = max(have, key=lambda row: sign * row[name])
                return {"selected_by": name, **best}
    return None


@dataclass(frozen=True)
class ClientTable:
    """The rows of `clients.csv`, one a client, of which only some need be there at a time.

    Attributes:
        data: Whose clients they are.
        scores: Of the last evaluation, and of training alone, by the name of the column; [M].
        ledger: What the clients sent and received.
    """

    data: FederatedDataModule
    scores: dict[str, np.ndarray]
    ledger: Ledger

    @classmethod
    def of(
        cls,
        algorithm: FederatedAlgorithm,
        loop: FederatedLoop,
        alone: dict[str, np.ndarray] | None = None,
    ) -> ClientTable:
        """The present state of a run; every process must call it."""
        evaluation = getattr(algorithm, "evaluation", None)
        pairs = evaluation.scores.items() if evaluation else ()
        found = {f"{split}_{kind}": values for (split, kind), values in pairs}
        if alone is not None:
            found["test_local"] = alone
        scores = {
            f"{name}_{number}": values[number]
            for name, values in found.items()
            for number in ("accuracy", "loss")
        }
        return cls(loop.datamodule, scores, algorithm.client_bytes())

    def columns(self, clients: slice = slice(None)) -> dict[str, np.ndarray]:
        """Id, sample counts, label counts, scores and bytes of a stretch of clients (or all)."""
        data, ids = self.data, np.arange(*clients.indices(self.data.num_clients))
        columns = {"client": ids}
        for split in ("train", "val", "test"):
            columns[f"{split}_samples"] = getattr(data.partition, split).sizes[clients]
        if data.has_labels:
            counts = data.label_counts(clients=clients)
            columns |= {f"label_{k}": counts[:, k] for k in range(counts.shape[1])}
        columns |= {name: values[clients] for name, values in self.scores.items()}
        received, sent = self.ledger.of(ids)
        return columns | {"uplink_bytes": sent, "downlink_bytes": received}

    def write(self, path: Path) -> None:
        """Write all rows, block by block."""
        for begin in range(0, self.data.num_clients, run_files.CSV_ROWS):
            block = self.columns(slice(begin, begin + run_files.CSV_ROWS))
            run_files.write_csv(path, block, append=begin > 0)


def compare(columns: dict[str, np.ndarray]) -> dict[str, Any]:
    """What clients gained over training alone, if that was measured, by their columns of scores.

    `local/...` are the scores of training alone; `gained`, `equal` and `lost` the shares of the
    clients whose federated model (the personalized one where there is one) has a higher, the same
    or a lower test accuracy; for regression, a lower, the same or a higher loss.
    """
    if "test_local_accuracy" not in columns or np.isnan(columns["test_local_loss"]).all():
        return {}  # it was not measured, or nobody has test samples
    number, sign = "accuracy", 1
    if np.isnan(columns["test_local_accuracy"]).all():
        number, sign = "loss", -1
    kinds = [k for k in ("personalized", "global") if f"test_{k}_{number}" in columns]
    alone = columns[f"test_local_{number}"]
    have = ~np.isnan(alone)
    result: dict[str, Any] = {
        f"local/{number}": float(alone[have].mean()),
        f"local/{number}_std": float(alone[have].std()),
        f"local/{number}_worst10": worst_tenth(alone[have] * sign) * sign,
    }
    if kinds:
        gain = sign * (columns[f"test_{kinds[0]}_{number}"] - alone)[have]
        shares = {"gained": gain > 0, "equal": gain == 0, "lost": gain < 0}
        result |= {name: float(mask.mean()) for name, mask in shares.items()}
    return result


def peak_memory() -> int:
    """The most memory this process has held so far, in bytes: of the GPU where one was used."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def versions() -> dict[str, str]:
    """Of Python and of the packages that could change a result."""
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
    }
