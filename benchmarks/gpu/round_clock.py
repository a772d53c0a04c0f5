"""A callback that times the rounds of a run, and ends the run when it has enough of them."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from benchmarks.gpu.measuring import FIRST_ROUNDS, MARKS, PROFILED, Kernels, planned, synchronize


def trained(network: torch.nn.Module) -> Tensor:
    """Returns a network's trainable parameters as one vector."""
    return torch.cat([p.detach().flatten() for p in network.parameters() if p.requires_grad])


class RoundClock(pl.Callback):
    """Times the rounds after the first two, from the start of one to the start of the next.

    Where the second round takes longer than all timed ones should, it alone is timed.

    The GPU is waited for at both ends. One round follows the timed ones: its kernels are counted.

    Args:
        device: Where the run is.
        seconds: About how long the timed rounds take together.
        folder: Where weights are written after the rounds of `MARKS`; None: nowhere.

    Attributes:
        first: Seconds of the first round.
        seconds: Those of each timed round.
        kernels: What the round after them did on the card.
        samples: Sample gradients of a timed round, on average.
    """

    def __init__(self, device: torch.device, seconds: float, folder: Path | None) -> None:
        self.device = device
        self.target = seconds
        self.folder = folder
        self.first = 0.0
        self.seconds: list[float] = []
        self.kernels: dict[str, Any] = {}
        self.samples = 0.0
        self._begun = 0.0
        self._paused = 0.0
        self._count: int | None = None  # rounds that are timed, once it is known
        self._done = 0
        self._counter = Kernels(device)
        self._seen = 0  # sample gradients of all rounds
        self._sum = 0  # those of the timed rounds

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        synchronize(self.device)
        now = time.perf_counter()
        if self._done:
            self._close(now - self._begun - self._paused, pl_module)
        if self._is_last() and min(self.seconds) < PROFILED:
            self._counter.start()
        self._paused = 0.0
        synchronize(self.device)
        self._begun = time.perf_counter()

    def _close(self, seconds: float, method: Any) -> None:
        """Takes down the seconds of the round that is over."""
        if self._done == 1:
            self.first = seconds
        elif self._done == FIRST_ROUNDS and seconds < self.target:
            self._count = planned(self.target, seconds)
        else:
            self._count = self._count or 1  # the second round is long enough
            self.seconds.append(seconds)
            self._sum += method.progress.samples - self._seen
            self.samples = self._sum / len(self.seconds)
        self._seen = method.progress.samples

    def _is_last(self) -> bool:
        return len(self.seconds) == self._count

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        synchronize(self.device)
        begun = time.perf_counter()
        self._done += 1
        if self._is_last():
            self._counter.stop()
            trainer.should_stop = True
        elif self.folder is not None and self._done in MARKS:
            torch.save(trained(pl_module.network).cpu(), self.folder / f"{self._done}.pt")
        self._paused = time.perf_counter() - begun

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.kernels = self._counter.found(median(self.seconds))
