"""The record of a run: config, a row per round, a row per client, a summary, a table."""
# mypy: disable-error-code="override"

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from pfl import files
from pfl.callbacks import run_result
from pfl.callbacks.run_folder import RunFolder
from pfl.callbacks.run_settings import changes, configuration, run_name, settings
from pfl.datamodules.errors import require_value
from pfl.errors import ConfigError
from pfl.method.algorithm import FederatedAlgorithm
from pfl.report.run_summary import summary_table
from pfl.rounds.checkpoint_io import check_parts
from pfl.scores import table
from pfl.scores.evaluation import scores_by_name
from pfl.scores.names import ScoreName, candidates, scores_among
from pfl.scores.runs import Row, best_round
from pfl.scores.table import ScoreTable


class RunRecorder(Callback):
    """Writes `config.yaml`, `metrics.csv`, `clients.csv` and `summary.json` into the run's folder.

    Every client's scores in every evaluation are in `client_scores.npy` (see `pfl.scores.table`),
    and the local baseline's in `local_scores.npy`.

    `metrics.csv` and the tables that a method records are written round by round, the other files
    at the end of the run, or after an error, where `finished` in `summary.json` is false.
    Checkpoints hold the rows of all tables. A resumed run begins with them, so its files are
    as without the interruption. Only one process at a time may write into a run's folder. Loggers
    get the configuration as hyperparameters. At the end of the run, a table of the result is
    printed. `pfl.Trainer` adds this callback to every run.

    `test` writes `test.json` and `test_clients.csv`, `validate` the same under its own name, and
    `predict` a row for each sample in `predictions.csv`, where several labels or values of a sample
    are a list in one cell.

    Args:
        config: YAML text of the run's configuration; the command line provides the text.

    Attributes:
        rows: The rows of `metrics.csv`.
        table: The content of `clients.csv`; None before training ends.
        summary: The content of `summary.json`; empty before training ends.
        place: The run's folder as an object that writes its tables.

    Example:
        >>> from pfl import Trainer
        >>> recorder = RunRecorder(config="model: FedAvg")
        >>> trainer = Trainer(callbacks=[recorder], enable_progress_bar=False)
        >>> trainer.recorder is recorder
        True
    """

    def __init__(self, config: str | None = None) -> None:
        self.config = config
        self.rows: list[Row] = []
        self.summary: dict[str, Any] = {}
        self.table: run_result.ClientTable | None = None
        self.place = RunFolder()
        self.seconds = 0.0
        self.settings: dict[str, Any] = {}
        self.resumed: list[dict[str, Any]] = []  # where another setting began, and which
        self._saved_files: dict[str, Tensor] | None = None  # the checkpoint's tables
        self._saved_config: str | None = None
        self._start = time.monotonic()

    @staticmethod
    def of(trainer: pl.Trainer) -> RunRecorder:
        """Returns the recorder of a Trainer."""
        return next(c for c in _callbacks(trainer) if isinstance(c, RunRecorder))

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.place.path

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """All columns of `clients.csv`; empty before training ends."""
        if self.table is None:
            return {}
        return self.table.columns()

    # ---- training -----------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: FederatedAlgorithm, stage: str) -> None:
        # The rows of another method's run are forgotten; a checkpoint restores its own later.
        if stage == "fit" and getattr(pl_module, "rounds", None) == 0:
            self.rows = []
            self.seconds = 0.0
            self.settings = {}
            self.resumed = []
        if stage == "fit":
            self.summary = {}
            self.table = None
            self._saved_files = None
        place = Path(getattr(trainer, "run_dir", trainer.default_root_dir))
        self.place = RunFolder(place, trainer.is_global_zero)
        if stage == "fit":
            self.place.lock()
        for callback in trainer.checkpoint_callbacks:  # the default is a logger's folder
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = str(self.folder / "checkpoints")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: FederatedAlgorithm) -> None:
        self._start = time.monotonic() - self.seconds
        if self.place.writes and self.config is not None:
            files.write(self.folder / "config.yaml", self.config)
        content = configuration(trainer, pl_module, self.config)
        _log_configuration(trainer, content)
        self._compare_settings(content)
        self._compare_folders(trainer)
        if self._saved_files is not None and _stopped(trainer):
            trainer.should_stop = True  # Lightning would train on until the callback says so again
        self.place.begin(self.rows, self._saved_files, list(pl_module.tables))
        if self.place.writes:
            _log_earlier(trainer, self.rows)
            rank_zero_info(f"Writing to {self.folder}")

    def _compare_settings(self, content: dict[str, Any]) -> None:
        """Warns of settings that differ from the checkpoint's, and records from which round."""
        now = settings(content)
        if self._saved_files is not None:
            changed = changes(self.settings, now)
        else:
            changed = {}
        self.settings = now
        rounds = len(self.rows)
        if not changed:
            return
        self.resumed.append({"round": rounds + 1, "changed": changed})
        words = [f"{key} was {was} and is {value}" for key, (was, value) in changed.items()]
        text = f"From round {rounds + 1} on the run has other settings: {'; '.join(words)}"
        rank_zero_warn(text, category=UserWarning)
        if self.place.writes and self._saved_config is not None:
            files.write(self.folder / f"config-until-round-{rounds}.yaml", self._saved_config)

    def _compare_folders(self, trainer: pl.Trainer) -> None:
        """Warns of another name for the run than the checkpoint's, which a resumed run ignores."""
        if self._saved_files is None or self.config is None or self._saved_config is None:
            return
        if run_name(self.config) == run_name(self._saved_config):
            return  # the folder may have been moved, or be <name>-2
        given = Path(getattr(trainer, "root", ""), getattr(trainer, "name", ""))
        if given.resolve() != self.folder.resolve():
            rank_zero_warn(
                f"trainer.name and trainer.default_root_dir: {given} has no effect; a run that is "
                f"resumed goes on in the folder of its checkpoint, {self.folder}",
                category=UserWarning,
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: FederatedAlgorithm) -> None:
        if trainer.ckpt_path is None and pl_module.rounds != trainer.current_epoch:
            rank_zero_warn(
                f"The method has been through {pl_module.rounds} rounds; this run continues with "
                f"its models, but the cohorts and the orders of samples are those of round "
                f"{trainer.current_epoch + 1} on again. Give ckpt_path to continue a run",
                category=UserWarning,
            )

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: FederatedAlgorithm) -> None:
        if self.rows and self.rows[-1]["round"] == pl_module.rounds:
            return  # resumed after the round's evaluation: the checkpoint has the row
        self.rows.append(dict(pl_module.row))
        self.seconds = time.monotonic() - self._start
        self.place.add_row(self.rows)
        for logger in trainer.loggers:
            _log_row(logger, self.rows[-1])
        self.place.add_tables(pl_module.rounds, pl_module.recorded)
        tested = scores_among(pl_module.row, "test")
        if self.place.writes and pl_module.evaluation and tested:
            scores = scores_by_name(pl_module.evaluation.scores)
            table.append_scores(self.folder / table.CLIENTS, pl_module.rounds, scores)

    def on_train_end(self, trainer: pl.Trainer, pl_module: FederatedAlgorithm) -> None:
        self._write_result(trainer, pl_module, finished=True)

    def has_result(self) -> bool:
        """Returns whether the folder has a result that was written after the run's last round."""
        return self.place.has_result(self.rows[-1]["round"])

    def on_fit_end(self, trainer: pl.Trainer, pl_module: FederatedAlgorithm) -> None:
        if self.place.writes:
            who = trainer.ckpt_path or type(pl_module).__name__
            nothing = f"Nothing to do: {who} has been through {len(self.rows)} rounds"
            if _stopped(trainer):
                nothing = f"{nothing}, and EarlyStopping has ended it; without it the run goes on"
            elif _time_is_over(trainer):
                nothing = (
                    f"{nothing}, and their time is over; with a longer trainer.max_time, or a "
                    f"longer duration of Timer, the run goes on"
                )
            print(summary_table(self.summary) if self.summary else nothing, flush=True)

    def on_exception(self, trainer: pl.Trainer, pl_module: FederatedAlgorithm, *_: Any) -> None:
        if not isinstance(pl_module, FederatedAlgorithm) or pl_module.rounds == 0:
            return  # the rows are not yet, or no longer, this method's
        one = trainer.num_devices == 1 and trainer.num_nodes == 1  # several processes would hang
        if self.rows and one and trainer.state.fn == "fit" and not self.has_result():
            with suppress(ConfigError):  # the disk may be full; the user should see the first error
                self._write_result(trainer, pl_module, finished=False)

    def state_dict(self) -> dict[str, Any]:
        names = ("rows", "seconds", "settings", "resumed", "config")
        return {name: getattr(self, name) for name in names}

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: FederatedAlgorithm, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != "fit":
            return
        # A round that has trained but not ended is not repeated by a run that is resumed from here.
        if self.rows:
            last = self.rows[-1]["round"]
        else:
            last = 0
        state = checkpoint["callbacks"][self.state_key]
        if last < pl_module.rounds == pl_module.row.get("round"):
            state["rows"] = [*self.rows, pl_module.row]
            self.place.add_tables(pl_module.rounds, pl_module.recorded)
        if self.place.writes:
            state["files"] = self.place.content(list(pl_module.tables))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = {"rows": [], "seconds": 0.0, "files": {}, "settings": {}, "resumed": []}
        check_parts(state_dict, {**own, "config": None}, "RunRecorder")
        rows = state_dict["rows"]
        saved = state_dict["files"]
        for number, row in enumerate(rows):
            check_parts(row, {"round": 0}, f"RunRecorder.rows[{number}]")
        for name, content in saved.items():
            check_parts(content, torch.zeros(0, dtype=torch.uint8), f"RunRecorder.files.{name}")
        self.rows = list(rows)
        self.seconds = state_dict["seconds"]
        self._saved_files = saved
        self.settings = state_dict["settings"]
        self.resumed = list(state_dict["resumed"])
        self._saved_config = state_dict["config"]

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: FederatedAlgorithm, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == "fit":
            check_parts(checkpoint, {"callbacks": {self.state_key: {}}}, "checkpoint")
        rounds = checkpoint["federated"]["rounds"]
        limit = trainer.max_epochs
        holds = trainer.state.fn != "fit" or limit is None or limit < 0 or limit >= rounds
        expected = f"at least {rounds}, the number of rounds in the checkpoint"
        require_value("trainer.max_epochs", limit, holds, expected)

    # ---- test and predict ---------------------------------------------------------------------

    def on_test_end(self, trainer: pl.Trainer, pl_module: FederatedAlgorithm) -> None:
        self._write_evaluation(pl_module, "test")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: FederatedAlgorithm) -> None:
        if trainer.state.fn == "validate":  # `fit` records elsewhere
            self._write_evaluation(pl_module, "validate")

    def _write_evaluation(self, pl_module: FederatedAlgorithm, name: str) -> None:
        table = run_result.ClientTable.of(pl_module, pl_module.run.loop)
        if self.place.writes:
            files.make_folder(self.folder)
            files.write_json(self.folder / f"{name}.json", pl_module.row)
            table.write(self.folder / f"{name}_clients.csv")

    def on_predict_start(self, trainer: pl.Trainer, pl_module: FederatedAlgorithm) -> None:
        if trainer.local_rank == 0:  # an earlier prediction may have had more processes
            for path in self.folder.glob("predictions*.csv"):
                path.unlink(missing_ok=True)
        trainer.strategy.barrier()  # before any process writes

    def on_predict_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        files.make_folder(self.folder)
        if trainer.world_size > 1:
            rank = f"-{trainer.global_rank}"
        else:
            rank = ""
        if outputs:
            files.append_csv(self.folder / f"predictions{rank}.csv", outputs)

    def on_predict_end(self, trainer: pl.Trainer, pl_module: FederatedAlgorithm) -> None:
        if trainer.is_global_zero:
            print(f"predictions: {self.folder}", flush=True)

    # ---- the result ---------------------------------------------------------------------------

    def _write_result(
        self, trainer: pl.Trainer, algorithm: FederatedAlgorithm, finished: bool
    ) -> None:
        local: dict[int, dict[ScoreName, np.ndarray]] = {}
        for callback in _callbacks(trainer):
            if hasattr(callback, "by_round"):
                local = callback.by_round
                break
        loop = algorithm.run.loop
        self.table = run_result.ClientTable.of(algorithm, loop, local.get(self.rows[-1]["round"]))
        self.summary = self._summary(algorithm, self.table, finished)
        if self.place.writes:
            if local:
                table.write_scores(self.folder / table.LOCAL, ScoreTable.from_rounds(local).rows)
            self.table.write(self.folder / "clients.csv")
            files.write_json(self.folder / "summary.json", self.summary)

    def _summary(
        self, algorithm: FederatedAlgorithm, clients: run_result.ClientTable, finished: bool
    ) -> dict[str, Any]:
        """Returns the content of `summary.json`."""
        loop = algorithm.run.loop
        scores = clients.scores
        better = loop.metrics.higher_is_better
        chosen = loop.select_by
        model = None
        for name in candidates(map(str, scores), "test", chosen)[:1]:
            model = name.model
        summary: dict[str, Any] = {
            "name": self.folder.name,
            "folder": str(self.folder),
            "algorithm": type(algorithm).__name__,
            "finished": finished,
            **self.rows[-1],
            "model": model,
            "select_by": chosen,
            "best": best_round(self.rows, chosen, better),
            **run_result.against_local(scores, better, chosen),
        }
        names = getattr(loop.datamodule, "client_names", None)
        if names is not None:
            summary |= run_result.named_clients(names, scores, better, chosen)
        summary["distribution"] = run_result.distributions(scores, better, chosen)
        summary["higher_is_better"] = better
        summary["protocol"] = loop.describe()
        summary["partition_hash"] = loop.datamodule.partition.hash
        if algorithm.run.private is not None:
            summary["privacy"] = algorithm.run.private.describe()
        if clients.epsilons is not None and not np.isnan(clients.epsilons).any():
            summary["sample_epsilon"] = float(clients.epsilons.max())
        summary |= loop.datamodule.left_out()
        summary["conversions"] = loop.datamodule.conversions
        if loop.finetuning.steps:
            summary["finetuning_samples"] = run_result.finetuning_samples(algorithm, loop)
        if algorithm.initial_weights is not None:
            summary["initial_weights"] = algorithm.initial_weights
        summary["seed"] = loop.seed
        summary["wall_seconds"] = self.seconds
        summary["samples_per_second"] = algorithm.progress.samples / max(self.seconds, 1e-9)
        summary["peak_memory_bytes"] = run_result.peak_memory()
        summary["engine"] = algorithm.oracle.engine.name
        if algorithm.oracle.timing is not None:
            summary["engine_milliseconds"] = algorithm.oracle.timing.milliseconds
        summary |= run_result.arithmetic(algorithm.trainer.precision, algorithm.device)
        if self.resumed:
            summary["resumed"] = self.resumed
        summary["versions"] = run_result.versions()
        return summary


def _callbacks(trainer: pl.Trainer) -> list[Callback]:
    return trainer.callbacks  # type: ignore[attr-defined]


def _stopped(trainer: pl.Trainer) -> bool:
    """Returns whether an `EarlyStopping` has ended the run, perhaps before it was resumed."""
    found = (one for one in _callbacks(trainer) if isinstance(one, EarlyStopping))
    return any(one.stopped_epoch > 0 for one in found)


def _time_is_over(trainer: pl.Trainer) -> bool:
    """Returns whether a `Timer`, which may be that of `max_time`, has ended the run."""
    found = (one for one in _callbacks(trainer) if isinstance(one, Timer))
    left = (one.time_remaining() for one in found)
    return any(seconds is not None and seconds <= 0 for seconds in left)


def _log_row(logger: Logger, row: Row) -> None:
    """Sends a round's numbers to a logger, whose step is the round, from 0."""
    numbers = {name: float(value) for name, value in row.items()}
    logger.log_metrics({**numbers, "epoch": row["round"] - 1}, row["round"] - 1)


def _log_earlier(trainer: pl.Trainer, rows: Sequence[Row]) -> None:
    """Sends a resumed run's earlier rounds to CSV loggers, which begin a file in every process."""
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            writer: Any = logger.experiment
            if not (writer.metrics or writer.metrics_keys):  # else it has had them
                for row in rows:
                    _log_row(logger, row)


def _log_configuration(trainer: pl.Trainer, content: dict[str, Any]) -> None:
    """Sends the configuration to all loggers; a run goes on without one that refuses it.

    MLflow refuses other values than those that a resumed run has had.
    """
    for logger in trainer.loggers:
        try:
            logger.log_hyperparams(content)
        except Exception as error:
            kind = type(logger).__name__
            rank_zero_warn(f"{kind} does not take the run's configuration: {error}")
