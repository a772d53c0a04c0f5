"""Lightning's Trainer with the defaults that federated training needs."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.accelerators import Accelerator, MPSAccelerator
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    ProgressBar,
)
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.strategies import (
    DDPStrategy,
    ParallelStrategy,
    Strategy,
    StrategyRegistry,
)

from pfl.callbacks import (
    CollaborationMap,
    LocalBaseline,
    RoundCheckpoint,
    RoundProgress,
    RunRecorder,
    WandbRecord,
)
from pfl.callbacks.run_files import run_folder_errors
from pfl.distributed.strategy import ClientParallelStrategy
from pfl.errors import ConfigError
from pfl.rounds.checkpoint_io import StreamedCheckpointIO

STAGES = ("train", "val", "test", "predict")
OF_BATCHES = (BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder)


class Trainer(pl.Trainer):
    """`lightning.pytorch.Trainer` for federated runs: one epoch is one round.

    A run writes into `<default_root_dir>/<name>/`, or `<name>-2/` and so on where that folder is
    taken, also by a run that starts at the same moment; a run that continues a checkpoint writes
    into the folder where the checkpoint lies.

    Args:
        name: Of the run; with slashes, of a folder in folders ("sweep/run").
        max_epochs: Number of rounds.
        default_root_dir: Folder of all runs.
        logger: Loggers besides the run's own CSV and JSON files, which are always written.
        callbacks: As in Lightning. `RunRecorder`, `CollaborationMap`, `RoundProgress` and
            `RoundCheckpoint` are added where the list has none of their kind and the Trainer's
            `enable_...` arguments allow it.
        accelerator: As in Lightning, but "auto" takes the CPU instead of an Apple GPU, which has no
            float64.
        strategy: As in Lightning, but "auto" takes `client_parallel` where several processes run.
            A name of any other strategy of several processes is refused: it would wrap the model.
        kwargs: Everything else that Lightning's Trainer takes. `fast_dev_run` is of whole rounds.

    Raises:
        ConfigError: Where the name leaves the folder of all runs, the accelerator is an Apple GPU,
            the strategy wraps the model, or a part of a round is to be trained, evaluated or saved.
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
        strategy: str | Strategy = "auto",
        enable_checkpointing: bool = True,
        enable_progress_bar: bool = True,
        enable_model_summary: bool = False,
        num_sanity_val_steps: int = 0,
        log_every_n_steps: int = 1,
        use_distributed_sampler: bool = False,
        inference_mode: bool = False,
        **kwargs: Any,
    ) -> None:
        if not Path(name).parts or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ConfigError(f"trainer.name: {name!r}; it must be a name within the runs folder")
        self.name = name
        self.root = Path(default_root_dir or "runs").expanduser()
        self._run_dir: Path | None = None
        self._made: list[Path] = []  # the run's folder, and those around it that were not there
        self._continues: str | Path | None = None
        self._stop = False
        if isinstance(logger, Iterable):
            logger = list(logger)
        callbacks = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or [])
        # The comparison must be there when the recorder writes, and both when figures are drawn.
        callbacks.sort(key=lambda callback: not isinstance(callback, LocalBaseline))
        _add(callbacks, RunRecorder)
        _add(callbacks, CollaborationMap)
        if any(
            isinstance(x, WandbLogger) for x in (logger if isinstance(logger, list) else [logger])
        ):
            _add(callbacks, WandbRecord)
        if enable_checkpointing:
            _add(callbacks, RoundCheckpoint)
        if enable_progress_bar:
            _add(callbacks, RoundProgress)
        # Lightning's own use of PyTorch, and advice that does not apply: what the algorithms log
        # has been reduced over processes already.
        warnings.filterwarnings("ignore", message=".*LeafSpec.*")
        warnings.filterwarnings("ignore", message=".*It is recommended to use .*sync_dist=True")
        if accelerator == "auto" and MPSAccelerator.is_available():
            accelerator = "cpu"
            warnings.filterwarnings("ignore", message="GPU available but not used")
        _check_strategy(strategy)
        _check_callbacks(callbacks)
        super().__init__(
            max_epochs=max_epochs,
            default_root_dir=str(self.root),
            logger=logger,
            callbacks=callbacks,
            accelerator=accelerator,
            devices=devices,
            strategy=strategy,
            enable_checkpointing=enable_checkpointing,
            enable_progress_bar=enable_progress_bar,
            enable_model_summary=enable_model_summary,
            num_sanity_val_steps=num_sanity_val_steps,
            log_every_n_steps=log_every_n_steps,
            use_distributed_sampler=use_distributed_sampler,
            inference_mode=inference_mode,
            **kwargs,
        )
        environment = self._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment):
            environment.auto_requeue = False  # it saves within a round, and begins a run anew
        if strategy == "auto" and type(self.strategy) is DDPStrategy:
            self._train_clients_in_parallel(self.strategy)
        self._check_whole_rounds()
        if isinstance(self.accelerator, MPSAccelerator):
            raise ConfigError(
                f"trainer.accelerator: {accelerator!r} is an Apple GPU here, which has no float64 "
                f"for sums over clients and samples; use cpu"
            )
        if type(self.strategy.checkpoint_io) is TorchCheckpointIO:
            self.strategy.checkpoint_io = StreamedCheckpointIO()

    def _check_whole_rounds(self) -> None:
        """A batch of Lightning's is a chunk of clients: some of them are no round, and no score."""
        if debug := self.fast_dev_run:
            self.fit_loop.max_epochs = int(debug)
            for stage in STAGES:
                setattr(self, f"limit_{stage}_batches", 1.0)
        if (same := self.overfit_batches) > 0:  # type: ignore[attr-defined]
            raise ConfigError(
                f"trainer.overfit_batches: {same}; a batch is some clients of a round, which is "
                f"trained whole: give fewer clients, by loop.trace"
            )
        for name in (f"limit_{stage}_batches" for stage in STAGES):
            limit = getattr(self, name)
            if limit != 0 and not (isinstance(limit, float) and limit == 1):
                raise ConfigError(
                    f"trainer.{name}: {limit}; a batch is some clients of a round, and rounds are "
                    f"trained and evaluated whole: leave it open, or give 0 for none"
                )
        if self.check_val_every_n_epoch is not None and self.check_val_every_n_epoch < 1:
            raise ConfigError(
                f"trainer.check_val_every_n_epoch: {self.check_val_every_n_epoch}; it must be at "
                f"least 1"
            )
        interval = self.val_check_interval
        if isinstance(interval, int | float) and interval != 1:
            raise ConfigError(
                f"trainer.val_check_interval: {interval}; whole rounds are evaluated: give their "
                f"number as check_val_every_n_epoch"
            )

    def _train_clients_in_parallel(self, chosen: DDPStrategy) -> None:
        """Take the place of what Lightning has chosen, who knows how many processes will run."""
        connector = self._accelerator_connector
        connector.strategy = ClientParallelStrategy(start_method=chosen._start_method)
        connector._lazy_init_strategy()

    @property
    def recorder(self) -> RunRecorder:
        """The callback that writes the run's folder."""
        return RunRecorder.of(self)

    @property
    def should_stop(self) -> bool:
        """Whether this round is the last; Lightning would leave it with some clients untrained."""
        return self._stop and not self._within_round()

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        self._stop = stop or (self._stop and self._within_round())  # where it looks like False
        if stop:  # as the last round always is
            self.check_val_every_n_epoch = 1

    def _within_round(self) -> bool:
        progress = self.fit_loop.epoch_loop.batch_progress
        return progress.current.ready > 0 and not progress.is_last_batch

    @property
    def run_dir(self) -> Path:
        """The folder of this run; claimed when it is first asked for, the same on every process."""
        if self._run_dir is None:
            if self.world_size > 1 and not torch.distributed.is_initialized():
                raise ConfigError(
                    "trainer.run_dir: several processes agree on it when the run begins; ask then"
                )
            chosen = self._choose_run_dir() if self.is_global_zero else Path()
            self._run_dir = self.strategy.broadcast(chosen)
            self._default_root_dir = str(self._run_dir)
        return self._run_dir

    def _run(self, model: pl.LightningModule, ckpt_path: Any = None, *args: Any, **kw: Any) -> Any:
        # The first place where Lightning has settled ckpt_path; its own property comes after
        # callbacks are set up, which is when the folder must be known.
        self._continues = ckpt_path
        self._stop = False
        self._check_unused(model)
        try:
            return super()._run(model, ckpt_path, *args, **kw)
        finally:
            self._leave_no_empty_folder()

    def _check_unused(self, model: pl.LightningModule) -> None:
        """Its count of rounds would be the new method's: cohorts and rates begin behind them."""
        new = self._continues is None and getattr(model, "rounds", None) == 0
        if self.state.fn == "fit" and new and self.current_epoch > 0:
            raise ConfigError(
                f"trainer: it has been through {self.current_epoch} rounds with another method; "
                f"make a new one for {type(model).__name__}"
            )

    def _choose_run_dir(self) -> Path:
        if self._continues is not None:
            folder = Path(self._continues).parent
            if folder.resolve().name == "checkpoints":
                # As the user writes it: Lightning warns where it is not what the checkpoint has.
                return Path(os.path.normpath(folder / ".."))
        return self._claim_run_dir()

    def _claim_run_dir(self) -> Path:
        """Make a folder that nobody else has, even if another run starts at the same moment."""
        first = self.root / self.name
        with run_folder_errors(first):
            missing = [folder for folder in first.parents if not folder.exists()]
            first.parent.mkdir(parents=True, exist_ok=True)
            for number in itertools.count(1):
                path = self.root / (self.name + (f"-{number}" if number > 1 else ""))
                with suppress(FileExistsError):
                    path.mkdir()
                    break
        self._made = [path, *missing]
        return path

    def _leave_no_empty_folder(self) -> None:
        """Give the name back where nothing was written, as by a run that set-up refuses."""
        made, self._made = self._made, []
        with suppress(OSError):  # the first folder that is not empty ends this
            for folder in made:
                folder.rmdir()
                if self.world_size == 1:  # else all processes would have to forget it together
                    self._run_dir = None


def _add(callbacks: list[Callback], kind: type[Callback]) -> None:
    base = ProgressBar if kind is RoundProgress else kind
    if not any(isinstance(callback, base) for callback in callbacks):
        callbacks.append(kind())


def _check_strategy(strategy: str | Strategy) -> None:
    """An object is taken as it is: whoever makes one knows what it does."""
    if isinstance(strategy, str) and strategy.lower() in StrategyRegistry:
        kind = StrategyRegistry[strategy.lower()]["strategy"]
        if issubclass(kind, ParallelStrategy) and not issubclass(kind, ClientParallelStrategy):
            raise ConfigError(
                f"trainer.strategy: {strategy!r} wraps or shards the model, which every process "
                f"needs whole to train its clients; use client_parallel"
            )


def _check_callbacks(callbacks: list[Callback]) -> None:
    """Within a round there is nothing from which a run could go on, and no batch of samples."""
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, ModelCheckpoint) and (
            callback._every_n_train_steps or callback._train_time_interval is not None
        ):
            raise ConfigError(
                "trainer.callbacks: ModelCheckpoint saves whole rounds; give every_n_epochs, not "
                "every_n_train_steps or train_time_interval"
            )
        if isinstance(callback, OnExceptionCheckpoint) or getattr(
            callback, "save_on_exception", False
        ):
            raise ConfigError(
                f"trainer.callbacks: {name} saves where an error is met, which is within a round; "
                f"RoundCheckpoint has saved the last whole one"
            )
        if isinstance(callback, OF_BATCHES):
            raise ConfigError(
                f"trainer.callbacks: {name} works on batches of samples, and the Trainer's are "
                f"clients here; set model.lr and model.batch_size instead"
            )
