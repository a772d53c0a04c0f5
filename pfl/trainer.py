"""Lightning's Trainer with the defaults that federated training needs."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.accelerators import Accelerator, CUDAAccelerator, MPSAccelerator
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    ProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from pfl._private import RunTrainer, saves_within_rounds, was_restoring
from pfl.callbacks import (
    CollaborationMap,
    LocalBaseline,
    RoundCheckpoint,
    RoundProgress,
    RunRecorder,
    WandbRecord,
)
from pfl.callbacks.round_checkpoint import is_last
from pfl.datamodules.errors import check_optional, require_value
from pfl.distributed.launch import is_lost_contact
from pfl.distributed.strategy import Plugin, resolve_strategy, without_requeue
from pfl.errors import ConfigError
from pfl.files import run_folder_errors
from pfl.method.set_up import SCALED, refused_precision
from pfl.rounds.checkpoint_io import (
    BEFORE,
    Malformed,
    StreamedCheckpointIO,
    last_checkpoint,
    restore_error,
)

STAGES = ("train", "val", "test", "predict")
OF_BATCHES = (
    "works on batches of samples, but the Trainer's batches are clients; set model.lr and "
    "model.batch_size instead"
)
OF_STEPS: dict[type[Callback], str] = {  # callbacks that act on steps, and why they are refused
    StochasticWeightAveraging: (
        "averages the steps of the Trainer's own optimizer, which a federated method does not "
        "have; EMAWeightAveraging averages the global model over rounds"
    ),
    BaseFinetuning: (
        "freezes layers for the Trainer's own optimizer, and clients take the steps; set "
        "model.trainable to what clients train, or take FedBABU"
    ),
    ModelPruning: (
        "prunes the Trainer's network and not the clients' models; FedSLR and FedSpa train sparse "
        "models"
    ),
    SpikeDetection: (
        "needs the loss of the Trainer's own steps, and clients take the steps; EarlyStopping with "
        "the monitor train/loss has a divergence_threshold"
    ),
    BatchSizeFinder: OF_BATCHES,
    GradientAccumulationScheduler: OF_BATCHES,
    LearningRateFinder: OF_BATCHES,
}


class Trainer(RunTrainer):
    """`lightning.pytorch.Trainer` for federated runs: one epoch is one round.

    A run writes into the folder `<default_root_dir>/<name>/`. If that folder exists, the run
    writes into `<name>-2/` and so on, even if two runs start at the same moment. A run that
    continues from a checkpoint writes into the folder of that checkpoint. `fit` with
    `ckpt_path="auto"` continues from the last checkpoint of the run `name`, or begins that run in
    its folder if there is none yet, so that the same command can be given again and again.

    Args:
        name: Name of the run. A name with slashes ("sweep/run") is a folder within folders.
        max_epochs: Number of rounds.
        default_root_dir: Folder of all runs.
        logger: Loggers besides the run's own CSV and JSON files, which are always written.
        callbacks: As in Lightning. `RunRecorder`, `CollaborationMap`, `RoundProgress` and
            `RoundCheckpoint` are added unless the list has a callback of that kind or an
            `enable_...` argument excludes it.
        accelerator: As in Lightning, but "auto" means the CPU and not an Apple GPU, which has no
            float64.
        devices: As in Lightning; 1 by default. Several CPUs of a machine are one process with
            threads, unless the strategy is named.
        num_nodes: Number of machines.
        strategy: As in Lightning, but "auto" means `client_parallel` if there are several
            processes. The name of any other strategy for several processes is refused, since such
            a strategy wraps or shards the model.
        plugins: As in Lightning. SLURM's automatic requeue is switched off, since it saves within
            a round.
        kwargs: All other arguments of Lightning's Trainer. `fast_dev_run` counts whole rounds.

    Raises:
        ConfigError: If the name leads out of the folder of all runs, the accelerator is an Apple
            GPU, the strategy wraps the model, or a part of a round would be trained, evaluated or
            saved.

    Example:
        >>> trainer = Trainer(name="first", max_epochs=20, enable_progress_bar=False)
        >>> trainer.max_epochs
        20
    """

    fast_dev_run: bool | int  # Lightning sets it

    def __init__(
        self,
        *,
        name: str = "run",
        max_epochs: int | None = 100,
        default_root_dir: str | Path | None = "runs",
        logger: Logger | Iterable[Logger] | bool | None = False,
        callbacks: list[Callback] | Callback | None = None,
        accelerator: str | Accelerator = "auto",
        devices: list[int] | str | int = 1,
        num_nodes: int = 1,
        strategy: str | Strategy = "auto",
        plugins: Plugin | list[Plugin] | None = None,
        enable_checkpointing: bool = True,
        enable_progress_bar: bool = True,
        enable_model_summary: bool = False,
        num_sanity_val_steps: int = 0,
        log_every_n_steps: int = 1,
        use_distributed_sampler: bool = False,
        inference_mode: bool = False,
        **kwargs: Any,
    ) -> None:
        _check_run(name, max_epochs, log_every_n_steps)
        _check_steps(kwargs)
        if str(kwargs.get("precision")) in SCALED:  # Lightning takes bf16-mixed for it on CPUs
            raise refused_precision(kwargs["precision"])
        self.name = name
        self.root = Path(default_root_dir or "runs").expanduser()
        self._run_dir: Path | None = None
        self._new_folders: list[Path] = []  # made by this run: its folder, and missing parents
        self._continued_from: str | None = None
        self._same_folder = False  # whether the run `name` is this one, even if its folder exists
        self._stop = False
        self.finishing = False  # whether the result of an earlier run is written
        self._evaluation_interval: int | None = 1
        self._steps_before = 0  # steps of the server before this run
        if isinstance(logger, Iterable):
            logger = list(logger)
        own: list[type[Callback]] = [RunRecorder, CollaborationMap]
        if _sends_to_wandb(logger):
            own.append(WandbRecord)
        if enable_checkpointing:
            own.append(RoundCheckpoint)
        if enable_progress_bar:
            own.append(RoundProgress)
        callbacks = _with_own(callbacks, own)
        _check_callbacks(callbacks)
        automatic = accelerator == "auto"
        # A strategy object may bring its own accelerator, which Lightning then takes.
        if automatic and (isinstance(strategy, str) or MPSAccelerator.is_available()):
            accelerator = "cpu"
            if CUDAAccelerator.is_available():
                accelerator = "cuda"
        strategy, devices = resolve_strategy(strategy, accelerator, devices, num_nodes)
        with warnings.catch_warnings():
            if automatic:  # Lightning recommends the Apple GPU
                warnings.filterwarnings("ignore", message="GPU available but not used")
            super().__init__(
                max_epochs=max_epochs,
                default_root_dir=str(self.root),
                logger=logger,
                callbacks=callbacks,
                accelerator=accelerator,
                devices=devices,
                num_nodes=num_nodes,
                strategy=strategy,
                plugins=without_requeue(plugins, strategy),
                enable_checkpointing=enable_checkpointing,
                enable_progress_bar=enable_progress_bar,
                enable_model_summary=enable_model_summary,
                num_sanity_val_steps=num_sanity_val_steps,
                log_every_n_steps=log_every_n_steps,
                use_distributed_sampler=use_distributed_sampler,
                inference_mode=inference_mode,
                **kwargs,
            )
        self._check_whole_rounds()
        if isinstance(self.accelerator, MPSAccelerator):
            raise ConfigError(
                f"trainer.accelerator: {accelerator!r} is an Apple GPU here, which has no float64 "
                f"for sums over clients and samples; use cpu"
            )
        if type(self.strategy.checkpoint_io) is TorchCheckpointIO:
            self.strategy.checkpoint_io = StreamedCheckpointIO()

    def _check_whole_rounds(self) -> None:
        """Refuses settings of Lightning's that train or evaluate only some clients of a round.

        Lightning's batch is a chunk of clients here, so a limit on batches would cut rounds.
        """
        if debug := self.fast_dev_run:
            self.fit_loop.max_epochs = int(debug)
            for stage in STAGES:
                setattr(self, f"limit_{stage}_batches", 1.0)
        if (same := self.overfit_batches) > 0:  # type: ignore[attr-defined]
            raise ConfigError(
                f"trainer.overfit_batches: {same}; a batch is some clients of a round, and rounds "
                f"are trained whole; to train on few clients, set loop.trace"
            )
        if self.limit_train_batches == 0:
            raise ConfigError(
                "trainer.limit_train_batches: 0; no client would train; to evaluate only, use "
                "validate or test, and to stop early, a small trainer.max_epochs"
            )
        for name in (f"limit_{stage}_batches" for stage in STAGES):
            limit = getattr(self, name)
            if limit != 0 and not (isinstance(limit, float) and limit == 1):
                raise ConfigError(
                    f"trainer.{name}: {limit}; a batch is some clients of a round, and rounds are "
                    f"trained and evaluated whole; omit the option, or set it to 0 for none"
                )
        check_optional("trainer.check_val_every_n_epoch", self.check_val_every_n_epoch)
        interval = self.val_check_interval
        if isinstance(interval, int | float) and interval != 1:
            raise ConfigError(
                f"trainer.val_check_interval: {interval}; whole rounds are evaluated; set "
                f"check_val_every_n_epoch to a number of rounds"
            )

    @property
    def recorder(self) -> RunRecorder:
        """The callback that writes the run's folder."""
        return RunRecorder.of(self)

    # ---- whole rounds -------------------------------------------------------------------------

    @property
    def should_stop(self) -> bool:
        """Whether the run ends after this round; False until all clients of the round trained.

        Lightning would stop at once and leave the round with some clients untrained.
        """
        return self._stop and not self._within_round()

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        # Within a round the property is False. A callback that adds its own reason to that value
        # (`trainer.should_stop = trainer.should_stop or mine`) must not take back another's.
        self._stop = stop or (self._stop and self._within_round())

    def _within_round(self) -> bool:
        return self.fit_loop.batch_idx >= 0 and not self.is_last_batch

    @property
    def check_val_every_n_epoch(self) -> int | None:
        """Rounds from one evaluation to the next; 1 after the run's last round has trained.

        The last round of a run is always evaluated.
        """
        running = self.state.fn == "fit" and self.state.status == "running"
        trained = running and self.global_step > self._steps_before
        if trained and is_last(self):
            return 1
        return self._evaluation_interval

    @check_val_every_n_epoch.setter
    def check_val_every_n_epoch(self, rounds: int | None) -> None:
        self._evaluation_interval = rounds

    # ---- the end of a run ---------------------------------------------------------------------

    def after_stage(self) -> None:
        """Writes the result of a resumed run that has no round left, if it is missing.

        Such a run was ended between its last round and its last file.
        """
        recorder = self.recorder
        callbacks = self.callbacks  # type: ignore[attr-defined]
        if self.state.fn != "fit" or recorder.summary or not recorder.rows:
            return
        progress: Any = self.fit_loop.epoch_progress.current
        progress.completed = progress.processed  # Lightning counts it where max_epochs ends the run
        results = [recorder.folder / name for c in callbacks for name in getattr(c, "results", ())]
        complete = recorder.has_result() and all(path.is_file() for path in results)
        if self.strategy.broadcast(complete):
            return
        self.validating = self.finishing = True
        self.fit_loop.epoch_loop.val_loop.run()  # scores of clients are not in checkpoints
        self.training = True
        self.finishing = False
        for callback in callbacks:
            callback.on_train_end(self, self.lightning_module)

    # ---- the run and its folder ---------------------------------------------------------------

    def resolve(self, ckpt_path: str | None) -> str | None:
        """Returns the last checkpoint of the run `name` for "auto", or None if there is none."""
        self._same_folder = ckpt_path == "auto"
        if not self._same_folder:
            return ckpt_path
        last = last_checkpoint(self.root / self.name)
        paths = (str(path) for path in (last, last.with_name(BEFORE)) if path.is_file())
        return next(paths, None)

    @contextmanager
    def around_run(self, model: pl.LightningModule, ckpt_path: str | None) -> Iterator[None]:
        """Prepares a run, and removes the run's folder if nothing was written into it."""
        self._continued_from = ckpt_path
        self._stop = False
        self._steps_before = self.global_step
        new = ckpt_path is None and getattr(model, "rounds", None) == 0
        if self.state.fn == "fit" and new and self.current_epoch > 0:
            # The Trainer's count of rounds would shift the method's cohorts and learning rates.
            raise ConfigError(
                f"trainer: it has trained {self.current_epoch} rounds of another method; make a "
                f"new Trainer for {type(model).__name__}"
            )
        if self.state.fn == "fit" and ckpt_path is not None:
            WandbRecord.continue_run(self, ckpt_path)
        try:
            with warnings.catch_warnings():
                # Lightning's own use of PyTorch.
                warnings.filterwarnings("ignore", message=".*LeafSpec.*")
                # A resumed run continues in its own folder.
                warnings.filterwarnings("ignore", message="Checkpoint directory .* is not empty")
                # What methods log is already reduced over processes.
                message = ".*It is recommended to use .*sync_dist=True"
                warnings.filterwarnings("ignore", message=message)
                yield
        except Exception as error:
            clear = isinstance(error, ConfigError | MisconfigurationException | OSError)
            unfit = isinstance(error, Malformed) or was_restoring(error)
            if ckpt_path is None or clear or is_lost_contact(error) or not unfit:
                raise
            raise restore_error(Path(ckpt_path), error) from error
        finally:
            self.recorder.place.unlock()
            self._remove_empty_folders()

    @property
    def default_root_dir(self) -> str:
        """The run's folder once it is known, before that the folder of all runs."""
        return os.path.normpath(self._run_dir or self.root)

    @property
    def run_dir(self) -> Path:
        """The run's folder, the same on every process; the first access creates it.

        Raises:
            ConfigError: If the processes of the run are not connected yet.
        """
        if self._run_dir is None:
            if self.world_size > 1 and not torch.distributed.is_initialized():
                raise ConfigError(
                    "trainer.run_dir: several processes choose it when the run begins; use it then"
                )
            chosen = Path()
            if self.is_global_zero:
                chosen = self._choose_run_dir()
            self._run_dir, first = self.strategy.broadcast((chosen, self._continued_from))
            if first != self._continued_from:
                raise ConfigError(
                    f"ckpt_path: auto is {self._continued_from} on process {self.global_rank}, and "
                    f"{first} on the first; all machines need the same runs folder"
                )
        return self._run_dir

    def _choose_run_dir(self) -> Path:
        """Returns the folder of the checkpoint's run, or creates one that no other run has."""
        if self._continued_from is not None:
            folder = Path(self._continued_from).parent
            if folder.resolve().name == "checkpoints":
                # Relative if the user's path is: Lightning warns if the checkpoint has another one.
                return Path(os.path.normpath(folder / ".."))
        first = self.root / self.name
        with run_folder_errors(first):
            missing = [folder for folder in first.parents if not folder.exists()]
            first.parent.mkdir(parents=True, exist_ok=True)
            for number in itertools.count(1):
                path = first
                if number > 1:
                    path = self.root / f"{self.name}-{number}"
                with suppress(FileExistsError):
                    path.mkdir(exist_ok=self._same_folder)
                    break
        self._new_folders = [path, *missing]
        return path

    def _remove_empty_folders(self) -> None:
        """Removes the run's new folders if they are empty, as after an error in set-up."""
        folders = self._new_folders
        self._new_folders = []
        with suppress(OSError):  # the first folder that is not empty ends this
            for folder in folders:
                if {path.name for path in folder.iterdir()} == {".lock"}:
                    (folder / ".lock").unlink()
                folder.rmdir()
                if self.world_size == 1:  # otherwise all processes would have to forget it together
                    self._run_dir = None


def _check_run(name: str, max_epochs: int | None, log_every_n_steps: int) -> None:
    """Refuses a name that leads out of the folder of all runs, and numbers that are too small."""
    parts = Path(name).parts
    within = bool(parts) and not Path(name).is_absolute() and ".." not in parts
    holds = within and name.isprintable()
    require_value("trainer.name", name, holds, "a name within the runs folder")
    holds = max_epochs is None or max_epochs >= 1 or max_epochs == -1
    expected = "a number of rounds of at least 1, or -1 if something else ends the run"
    require_value("trainer.max_epochs", max_epochs, holds, expected)
    require_value(
        "trainer.log_every_n_steps", log_every_n_steps, log_every_n_steps >= 1, "at least 1"
    )


def _sends_to_wandb(logger: Any) -> bool:
    """Returns whether a logger, or one of a list, is that of W&B."""
    loggers = logger if isinstance(logger, list) else [logger]
    return any(isinstance(one, WandbLogger) for one in loggers)


def _with_own(given: list[Callback] | Callback | None, own: list[type[Callback]]) -> list[Callback]:
    """Returns the given callbacks, and one of each other kind in `own`."""
    if isinstance(given, Callback):
        given = [given]
    # The recorder reads the local baseline, and the figures read both.
    callbacks = sorted(given or [], key=lambda one: not isinstance(one, LocalBaseline))
    for kind in own:
        base: type[Callback] = kind
        if kind is RoundProgress:
            base = ProgressBar
        if not any(isinstance(callback, base) for callback in callbacks):
            callbacks.append(kind())
    # What other callbacks remember of a round is to be in its checkpoint.
    return sorted(callbacks, key=lambda one: isinstance(one, RoundCheckpoint))


def _check_steps(arguments: dict[str, Any]) -> None:
    """Refuses what Lightning does around the Trainer's own steps, which clients take here."""
    if clip := arguments.get("gradient_clip_val"):
        raise ConfigError(
            f"trainer.gradient_clip_val: {clip}; the steps are the clients' own, without clipping; "
            f"omit the option, and set a smaller model.lr"
        )
    batches = arguments.get("accumulate_grad_batches", 1)
    if batches != 1:
        raise ConfigError(
            f"trainer.accumulate_grad_batches: {batches}; the steps are the clients' own; omit the "
            f"option, and set a larger model.batch_size"
        )


def _check_callbacks(callbacks: list[Callback]) -> None:
    """Refuses callbacks that save within a round, or act on steps which clients take here."""
    for callback in callbacks:
        after_errors = getattr(callback, "save_on_exception", False)
        if isinstance(callback, ModelCheckpoint) and saves_within_rounds(callback):
            wrong = (
                "saves whole rounds; set every_n_epochs, not every_n_train_steps or "
                "train_time_interval"
            )
        elif isinstance(callback, OnExceptionCheckpoint) or after_errors:
            wrong = (
                "saves after an error, which is within a round; RoundCheckpoint has already saved "
                "the last whole round"
            )
        else:
            wrong = next((why for kind, why in OF_STEPS.items() if isinstance(callback, kind)), "")
        if wrong:
            raise ConfigError(f"trainer.callbacks: {type(callback).__name__} {wrong}")
