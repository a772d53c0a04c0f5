"""How far a run is: a bar that counts rounds, or a line a minute where there is no terminal."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from pfl.scores.names import MODELS, SPLITS, ScoreName

MINUTE = 60.0  # seconds between two lines
SECOND = 1.0  # between two looks at the clients of a round that takes longer


class Ticker:
    """Calls a function at regular times, in a thread, from `start` to `stop`.

    Example:
        >>> ticker = Ticker(lambda: print("an hour has passed"), seconds=3600)
        >>> ticker.start()
        >>> ticker.stop()
    """

    def __init__(self, work: Callable[[], None], seconds: float) -> None:
        self.work = work
        self.seconds = seconds
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="progress", daemon=True)

    def start(self) -> None:
        """Begins; the first call is after so many seconds."""
        self._thread.start()

    def stop(self) -> None:
        """Ends, after a call that is under way."""
        self._done.set()
        self._thread.join()

    def _tick(self) -> None:
        while not self._done.wait(self.seconds):
            self.work()


def on_terminal() -> bool:
    """Returns whether somebody watches: neither under CI nor where errors go to a file."""
    return sys.stderr.isatty() and not os.environ.get("CI")


def time_left(begun: float, done: float, total: float) -> str:
    """Returns in words how long the rest takes if it goes on as it has since `begun`.

    Args:
        begun: The value of `time.monotonic` at the beginning.
        done: How much has been done since then.
        total: How much was to be done then.
    """
    if not done:
        return ""
    minutes = (time.monotonic() - begun) * (total - done) / done / 60
    if minutes < 1:
        return ", less than a minute left"
    if minutes < 120:
        return f", about {minutes:.0f} min left"
    return f", about {minutes / 60:.0f} h left"


def clients_text(pl_module: pl.LightningModule) -> str:
    """Returns how many clients of the round that runs have trained: "12/100", or nothing."""
    progress = getattr(pl_module, "progress", None)
    if progress is None or not 0 < progress.trained < progress.to_train:
        return ""
    return f"{progress.trained}/{progress.to_train}"


def scores_text(row: dict[str, Any], shown: dict[str, str]) -> None:
    """Adds to what is shown a round's training loss and accuracies, by their names."""
    if "train/loss" in row:
        shown["loss"] = f"{row['train/loss']:.3f}"
    for model in MODELS[:2]:  # validation scores come first
        for name in (ScoreName(split, model, "accuracy") for split in SPLITS):
            if str(name) in row:
                shown[f"{model} {name.split}"] = f"{row[str(name)]:.3f}"
                break


class RoundProgress(ProgressBar):
    """Shows one line: rounds, time of a round, train loss, global and personalized accuracy.

    On a terminal it is a bar, which counts clients within rounds that take longer than a second. In
    redirected output, as of `nohup` and SLURM, and under CI, it is a line on the standard error a
    minute; runs of less than a minute have none.

    Example:
        >>> from pfl import Trainer
        >>> bar = RoundProgress()
        >>> bar.disable()
        >>> trainer = Trainer(callbacks=[bar])
        >>> trainer.progress_bar_callback is bar
        True
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._bar: tqdm | None = None
        self._ticker: Ticker | None = None
        self._shown: dict[str, str] = {}

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._enabled:
            return
        if trainer.max_epochs == -1:
            total = None
        else:
            total = trainer.max_epochs
        if on_terminal():
            self._bar = tqdm(
                total=total,
                initial=trainer.current_epoch,
                unit="round",
                # Always seconds per round; tqdm would change to rounds per second.
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} "
                "[{elapsed}<{remaining}, {rate_inv_fmt}{postfix}]",
                dynamic_ncols=True,
                file=sys.stderr,
            )

            def move() -> None:
                bar = self._bar
                clients = clients_text(pl_module)
                if bar is not None and clients:
                    bar.set_postfix({**self._shown, "clients": clients})

            self._ticker = Ticker(move, SECOND)
            self._ticker.start()
            return
        begun = time.monotonic()
        before = trainer.current_epoch

        def tell() -> None:
            rounds = trainer.current_epoch
            scores = "".join(f", {name} {value}" for name, value in list(self._shown.items()))
            of_all = ""
            left = ""
            if total is not None:
                of_all = f" of {total}"
                left = time_left(begun, rounds - before, total - before)
            clients = clients_text(pl_module)
            if clients:
                clients = f", {clients} clients of the next one"
            print(f"{rounds}{of_all} rounds{clients}{scores}{left}", file=sys.stderr, flush=True)

        self._ticker = Ticker(tell, MINUTE)
        self._ticker.start()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        scores_text(getattr(pl_module, "row", {}), self._shown)
        if self._bar is not None:
            self._bar.set_postfix(self._shown, refresh=False)
            self._bar.update()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._ticker is not None:
            self._ticker.stop()
            self._ticker = None
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.on_train_end(trainer, pl_module)  # so that the error starts on a line of its own

    def print(self, *args: Any, **kwargs: Any) -> None:
        tqdm.write(" ".join(map(str, args)), file=sys.stdout)
