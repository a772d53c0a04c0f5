"""What the benchmarks share: times in turn, and rounds with nothing on but the CSV files."""

import itertools
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import redirect_stdout
from datetime import date
from statistics import median
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch

from pfl import FederatedLoop, Trainer
from pfl.algorithms import FederatedAlgorithm

K = TypeVar("K", bound=Hashable)


class Clock(pl.Callback):
    """When each round began, and when the last one ended, by a clock such as `process_time`."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now, self.stamps = now, list[float]()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.stamps.append(self.now())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.stamps.append(self.now())


def stamps_of(
    method: FederatedAlgorithm,
    loop: FederatedLoop,
    rounds: int,
    processes: int = 1,
    callbacks: Sequence[pl.Callback] = (),
    now: Callable[[], float] = time.perf_counter,
    **settings: Any,
) -> list[float]:
    """Train on CPUs (`settings` say otherwise), without evaluation; see `Clock.stamps`."""
    clock = Clock(now)
    with tempfile.TemporaryDirectory() as root:
        trainer = Trainer(
            **{
                "max_epochs": rounds,
                "accelerator": "cpu",
                "devices": processes,
                "strategy": "client_parallel" if processes > 1 else "auto",
                "default_root_dir": root,
                "callbacks": [clock, *callbacks],
                "enable_progress_bar": False,
                "enable_checkpointing": False,
                "limit_val_batches": 0,
                **settings,
            }
        )
        with redirect_stdout(sys.stderr):  # what a run says at its end
            trainer.fit(method, datamodule=loop)
    return clock.stamps


def heading(turns: int) -> str:
    """What was measured with, above a table."""
    return (
        f"PyTorch {torch.__version__}, {torch.get_num_threads()} thread(s), {platform.machine()}, "
        f"{date.today()}; {turns} turns, medians\n"
    )


def seconds_of(stamps: list[float]) -> list[float]:
    """Of each round but the first, which warms up."""
    return [end - begin for begin, end in itertools.pairwise(stamps)][1:]


def medians(
    runs: dict[K, Callable[[], object]],
    repeats: int,
    now: Callable[[], float] = time.perf_counter,
) -> dict[K, float]:
    """Milliseconds of each by a clock; they take turns, and a first one of each warms up."""
    times: dict[K, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            begun = now()
            run()
            times[name].append(1000 * (now() - begun))
    return {name: median(own[1:]) for name, own in times.items()}
