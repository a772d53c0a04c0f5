"""Processes of one machine that start together and, where one of them dies, end together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException

STARTED_BY = "PFL_STARTED_BY"  # environment variable: id of the process that started the others
POLL = 0.2  # seconds between two looks at the others
GRACE = 0.5  # seconds in which an error of its own may end the main thread before the watch does
SAME = 2.0  # seconds in which all processes meet an error that they all have


class ProcessLost(RuntimeError):
    """Another process of the run is gone; the user has been told the message, one line."""


class Ended(SystemExit):
    """A signal has ended the run; the user has been told, and the status is a shell's."""


class Launcher(_SubprocessScriptLauncher):
    """Lightning's launcher of one process per device, with a watch over them.

    The first process starts the others. A thread of each looks whether those are still there that
    it can see: the first process the others, and these the first. A process that trains clients
    would not notice before the round's end, and one that waits for a GPU not at all. (Lightning's
    own watch kills the first process without a word, and does not watch over that one.) What
    torchrun or SLURM has started, they watch.
    """

    children: ClassVar[list[subprocess.Popen]] = []  # outlive the Trainer that started them

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        """Start the other processes if nobody has yet, and call `function` in all of them."""
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            os.environ[STARTED_BY] = str(os.getpid())
            self._call_children_scripts()
            Launcher.children = self.procs
        _set_num_threads_if_needed(num_processes=self.num_processes)
        with self._watch(trainer):
            try:
                result = function(*args, **kwargs)
                if trainer is not None:
                    # Nobody leaves while others still write, who would think that it was killed.
                    trainer.strategy.barrier()
                return result
            except RuntimeError as error:
                if not _between_processes(error):
                    raise
                raise ProcessLost(self._tell_of_lost(trainer)) from error

    def end_others(self, error: BaseException) -> None:
        """This process leaves with an error: so do the others."""
        for process in self.children:
            process.kill()
        if self.is_child() and not isinstance(error, ProcessLost):
            # The first process meets most errors, too: it tells them, and ends this one.
            self._wait_for_lost()

    @staticmethod
    def is_child() -> bool:
        """Whether the run's first process has started this one."""
        return os.environ.get(STARTED_BY, str(os.getpid())) != str(os.getpid())

    def _tell(self, line: str) -> None:
        """One of the processes that are left tells the user."""
        if not self.is_child() or self.cluster_environment.local_rank() == 1:
            print(f"error: {line}", file=sys.stderr, flush=True)

    def _tell_of_lost(self, trainer: Any) -> str:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which torchrun sends to all others
        found = self._wait_for_lost()
        line = _describe(found or "the contact with another process was lost", trainer)
        if found or not self.is_child():  # else the first process is there, and sees more
            self._tell(line)
        return line

    def _lost(self) -> str | None:
        """Which process is gone, in words; None where all that can be seen are there."""
        if self.is_child():
            gone = os.environ[STARTED_BY] != str(os.getppid())
            return "process 0 was killed" if gone else None
        for rank, process in enumerate(self.children, start=1):
            if code := process.poll():  # None: running; 0: done
                killed = f"was killed by {signal.Signals(-code).name}" if code < 0 else None
                return f"process {rank} {killed or f'ended with exit status {code}'}"
        return None

    def _wait_for_lost(self) -> str | None:
        until = time.monotonic() + SAME
        while (found := self._lost()) is None and time.monotonic() < until:
            if not (self.children or self.is_child()):
                return None
            time.sleep(POLL / 10)
        return found

    @contextmanager
    def _watch(self, trainer: Any) -> Iterator[None]:
        over = threading.Event()

        def look() -> None:
            while not over.wait(POLL):
                found = self._lost()
                if found and not over.wait(GRACE):
                    self._tell(_describe(found, trainer))
                    self.end_others(ProcessLost())
                    os._exit(1)  # the main thread may be deep in a sum over processes

        if self.children or self.is_child():
            threading.Thread(target=look, name="watch", daemon=True).start()
        try:
            yield
        finally:
            over.set()


def _between_processes(error: RuntimeError) -> bool:
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error).lower()


@contextmanager
def told_of_signals(trainer: Any = None) -> Iterator[None]:
    """A signal that ends the run is one line and an exit status: Lightning says nothing.

    Raises:
        Ended: There was one.
    """
    try:
        yield
    except Ended:
        raise
    except (KeyboardInterrupt, SystemExit) as error:
        if isinstance(error, SIGTERMException):
            number = signal.SIGTERM
        # Lightning makes an ordinary exit of it.
        elif any(isinstance(e, KeyboardInterrupt) for e in (error, error.__context__)):
            number = signal.SIGINT
        else:
            raise
        if trainer is None or trainer.is_global_zero:
            line = _describe(f"ended by {number.name}", trainer)
            print(f"error: {line}", file=sys.stderr, flush=True)
        raise Ended(128 + number) from error


def _describe(what: str, trainer: Any) -> str:
    """What happened, in which round, and how to go on."""
    if trainer is None or trainer.state.fn != "fit":
        return what
    paths = [callback.best_model_path for callback in trainer.checkpoint_callbacks]
    path = next(filter(None, [*paths, trainer.ckpt_path]), None)
    go_on = f"go on from the last checkpoint with --ckpt_path {path}" if path else "start again"
    number, last = trainer.current_epoch + 1, trainer.max_epochs
    if last < 0:  # max_time or max_steps ends it
        return f"{what} in round {number}; {go_on}"
    return f"{what} in round {min(number, last)} of {last}; {go_on}"  # or after the last one
