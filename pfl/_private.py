"""The one place where private names of Lightning, PyTorch and jsonargparse are used.

A private name may change with any release. Each use is a function or a base class here, with the
reason and the oldest version that was checked for the name. `tests/test_private.py` fails if the
installed version lacks a name, or if any other module uses a private name of these packages.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from traceback import walk_tb
from typing import Any

import lightning.pytorch as pl
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors import checkpoint_connector
from torch import Tensor, nn

# ---- Lightning ----------------------------------------------------------------------------------


class RunTrainer(pl.Trainer):
    """A Trainer that runs `fit`, `validate`, `test` and `predict` inside a context of its own.

    Why: `_run` is the first method to which Lightning gives the resolved `ckpt_path`. The public
    property `ckpt_path` is set only after the callbacks' `setup`, which needs the run's folder.
    `_run_stage` is the last one before the strategy is torn down, and it runs where no round is
    left to train. Since Lightning 2.0.
    """

    def around_run(
        self, model: pl.LightningModule, ckpt_path: str | None
    ) -> AbstractContextManager[None]:
        """Returns the context of one run.

        Args:
            model: The model that is run.
            ckpt_path: The checkpoint that is loaded first, if there is one.
        """
        raise NotImplementedError

    def resolve(self, ckpt_path: str | None) -> str | None:
        """Returns the checkpoint of a run for the `ckpt_path` that was given."""
        return ckpt_path

    def after_stage(self) -> None:
        """Acts when the loop of a run has ended, before Lightning tears the run down."""

    def _run_stage(self) -> Any:
        result = super()._run_stage()
        self.after_stage()
        return result

    def _run(self, model: pl.LightningModule, ckpt_path: Any = None, *args: Any, **kw: Any) -> Any:
        ckpt_path = self.resolve(ckpt_path)
        with self.around_run(model, ckpt_path):
            return super()._run(model, ckpt_path, *args, **kw)


def was_restoring(error: BaseException) -> bool:
    """Returns whether an error arose while Lightning restored a checkpoint.

    Why: a checkpoint whose parts are missing or of another type fails at many places, of which only
    the caller has a name. Since Lightning 2.0.
    """
    place = vars(checkpoint_connector)
    return any(frame.f_globals is place for frame, _ in walk_tb(error.__traceback__))


class ScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher that starts this script once more for every further device.

    Why: Lightning has no public launcher, and kills the processes of this class on Ctrl-C. Since
    Lightning 2.0.
    """

    def start_other_processes(self) -> None:
        """Starts the other processes of this machine and lists them in `procs`."""
        self._call_children_scripts()


def saves_within_rounds(callback: ModelCheckpoint) -> bool:
    """Returns whether a callback saves after some batches or after some time.

    Why: `ModelCheckpoint` has no public attribute for either argument. Since Lightning 2.0.
    """
    return bool(callback._every_n_train_steps) or callback._train_time_interval is not None


def continue_wandb_run(logger: WandbLogger, run_id: str) -> None:
    """Makes a logger continue a W&B run, unless it has begun one or the user has named one.

    Why: the logger takes the id of a run in its constructor only, before the checkpoint is known.
    Since Lightning 2.0.
    """
    if logger._experiment is None and logger._wandb_init["id"] is None:
        logger._wandb_init["id"] = logger._id = run_id


class CommandLine(LightningCLI):
    """LightningCLI with public hooks in the place of two private steps.

    Why: Lightning loads the whole file of `ckpt_path` for hyperparameters, which our checkpoints do
    not have; and its hooks `before_fit` and `after_fit` cannot handle what a run raises. Since
    Lightning 2.5.5.
    """

    def check_checkpoint(self) -> None:
        """Checks the file of `ckpt_path`, after parsing."""

    def run_subcommand(self, subcommand: str) -> None:
        """Runs `fit`, `validate`, `test` or `predict`."""
        super()._run_subcommand(subcommand)

    def _parse_ckpt_path(self) -> None:
        self.check_checkpoint()

    def _run_subcommand(self, subcommand: str) -> None:
        self.run_subcommand(subcommand)


class MovableModule(pl.LightningModule):
    """A module with a hook after every change of its parameters' storage (`.to`, `.double`).

    Why: PyTorch has no public hook for it. Since torch 1.0.
    """

    def after_move(self) -> None:
        """Acts on the new storage of the parameters."""

    def _apply(self, fn: Any, recurse: bool = True) -> MovableModule:
        super()._apply(fn, recurse)
        self.after_move()
        return self


# ---- PyTorch ------------------------------------------------------------------------------------


def version_of(buffer: Tensor) -> int:
    """Returns how often a tensor was written in place.

    Why: a buffer that training writes with the value it has shows in no other way. Since torch 1.0.
    """
    return buffer._version


def has_hooks(module: nn.Module) -> bool:
    """Returns whether a module runs hooks.

    Why: PyTorch has no public way to ask, and chains of layers do not run hooks. Since torch 2.0.
    """
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


# ---- jsonargparse -------------------------------------------------------------------------------


def argument_types(parser: ArgumentParser) -> dict[str, tuple[Any, Any]]:
    """Returns the type and the default of each argument of a parser, by its name.

    Why: a parser has no public list of its arguments. Since jsonargparse 4.51.
    """
    return {
        action.dest: (action._typehint, action.default)
        for action in parser._actions
        if hasattr(action, "_typehint") and not action.dest.endswith(".help")
    }


def set_types(parser: ArgumentParser, types: dict[str, Any]) -> None:
    """Gives arguments of a parser the types that their constructor's annotations say.

    Why: of an annotation that is postponed (`from __future__ import annotations`) the parser drops
    what `Annotated` adds to the type, such as a range. Since jsonargparse 4.51.
    """
    for action in parser._actions:
        if action.dest in types and hasattr(action, "_typehint"):
            action._typehint = types[action.dest]
