"""What the benchmarks share: when rounds begin and end."""

import time

import lightning.pytorch as pl


class Clock(pl.Callback):
    """When each round began, and when the last one ended."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.stamps.append(time.perf_counter())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.stamps.append(time.perf_counter())
