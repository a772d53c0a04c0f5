"""What the benchmarks share: rounds with nothing on but the CSV files, and when they begin."""

import itertools
import sys
import tempfile
import time
from contextlib import redirect_stdout
from typing import Any

import lightning.pytorch as pl

from pfl import FederatedLoop, Trainer
from pfl.algorithms import FederatedAlgorithm


class Clock(pl.Callback):
    """When each round began, and when the last one ended."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.stamps.append(time.perf_counter())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.stamps.append(time.perf_counter())


def stamps_of(
    method: FederatedAlgorithm,
    loop: FederatedLoop,
    rounds: int,
    processes: int = 1,
    **settings: Any,
) -> list[float]:
    """Train on CPUs (`settings` say otherwise), without evaluation; see `Clock.stamps`."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as root:
        trainer = Trainer(
            **{
                "max_epochs": rounds,
                "accelerator": "cpu",
                "devices": processes,
                "strategy": "auto" if processes == 1 else "client_parallel",
                "default_root_dir": root,
                "callbacks": [clock],
                "enable_progress_bar": False,
                "enable_checkpointing": False,
                "limit_val_batches": 0,
                **settings,
            }
        )
        with redirect_stdout(sys.stderr):  # what a run says at its end
            trainer.fit(method, datamodule=loop)
    return clock.stamps


def seconds_of(stamps: list[float]) -> list[float]:
    """Of each round but the first, which warms up."""
    return [end - begin for begin, end in itertools.pairwise(stamps)][1:]
