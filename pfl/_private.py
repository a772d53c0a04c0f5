"""The one place where private names of Lightning, PyTorch and jsonargparse are used.

A private name may change with any release. Each use is a function or a base class here, with the
reason and the oldest version that was checked for the name. `tests/test_private.py` fails if the
installed version lacks a name, or if any other module uses a private name of these packages.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

# ---- Lightning ----------------------------------------------------------------------------------


class RunTrainer(pl.Trainer):
    """A Trainer that runs `fit`, `validate`, `test` and `predict` inside a context of its own.

    Why: `_run` is the first method to which Lightning gives the resolved `ckpt_path`. The public
    property `ckpt_path` is set only after the callbacks' `setup`, which needs the run's folder.
    Since Lightning 2.0.
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

    def _run(self, model: pl.LightningModule, ckpt_path: Any = None, *args: Any, **kw: Any) -> Any:
        with self.around_run(model, ckpt_path):
            return super()._run(model, ckpt_path, *args, **kw)


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
