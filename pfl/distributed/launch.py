"""Starts the processes of one machine together, and ends them together if one of them dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from pfl._private import ScriptLauncher
from pfl.distributed.orphan import STARTED_BY, die_with_parent, is_child
from pfl.errors import ConfigError
from pfl.machine import free_cores

POLL_SECONDS = 0.2  # between two checks that the other processes are alive
GRACE_SECONDS = 0.5  # for the main thread to end by an error of its own before the watch ends it
COMMON_ERROR_SECONDS = 2.0  # all processes meet an error that concerns all within this time
# Signals that end a run: SLURM announces the end of a job by SIGUSR1, which Windows does not have.
ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]


class ProcessLost(RuntimeError):
    """Another process of the run has died; its message, one line, is already printed."""


class EndedBySignal(SIGTERMException):
    """One of the signals `ENDING` ends the run; Lightning treats it like SIGTERM."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = signal.Signals(number)


class Ended(SystemExit):
    """A signal ended the run; the message is printed, and the exit status is 128 + signal."""


class Launcher(ScriptLauncher):
    """Launches one process per device and watches over the processes.

    The first process starts the others. A thread in the first process checks that the others are
    alive, and a thread in each of the others checks the first one. Without these threads a process
    that trains clients would not notice a lost process before the end of the round, and a process
    that waits for a GPU would never notice it. (Lightning's own watch kills the first process
    without a message, and nothing watches the first process.) torchrun and SLURM watch the
    processes that they start themselves.
    """

    children: ClassVar[list[subprocess.Popen]] = []  # outlive the Trainer that started them

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        """Starts the other processes, unless they run already, and calls `function` in all.

        Raises:
            ConfigError: If torchrun or SLURM runs another number of processes.
            ProcessLost: If another process died meanwhile.
        """
        environment = self.cluster_environment
        try:
            environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        except ValueError as error:
            raise ConfigError(f"trainer.devices: {error}") from error
        if not environment.creates_processes_externally:
            os.environ[STARTED_BY] = str(os.getpid())
            self.start_other_processes()
            Launcher.children = self.procs
        _share_cores(self.num_processes)
        with self._watch(trainer) as end_watch:
            try:
                result = function(*args, **kwargs)
                if trainer is not None:
                    # A process that left while others still write would seem to have died.
                    trainer.strategy.barrier()
                return result
            except RuntimeError as error:
                if not is_lost_contact(error):
                    raise
                end_watch()  # this thread reports the lost process
                raise ProcessLost(self._report_lost_process(trainer)) from error

    def end_others(self, error: BaseException) -> None:
        """Ends the other processes because `error` ends this one."""
        for process in self.children:
            process.kill()
        if is_child() and not isinstance(error, ProcessLost):
            # The first process meets most errors, too: it prints the error and ends this process.
            self._wait_for_lost_process()

    def _print_error(self, line: str) -> None:
        """Prints an error once: in the first process, or in the next one if the first is gone."""
        if not is_child() or self.cluster_environment.local_rank() == 1:
            print(f"error: {line}", file=sys.stderr, flush=True)

    def _report_lost_process(self, trainer: Any) -> str:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends SIGTERM to all others
        lost = self._wait_for_lost_process()
        line = _describe(lost or "the contact with another process was lost", trainer)
        if lost or not is_child():  # otherwise the first process is alive and reports more
            self._print_error(line)
        return line

    def _lost_process(self) -> str | None:
        """Returns which process died, in words; None if all visible processes are alive."""
        if is_child():
            if os.environ[STARTED_BY] != str(os.getppid()):
                return "process 0 was killed"
            return None
        for rank, process in enumerate(self.children, start=1):
            code = process.poll() or 0  # None: the process runs; 0: it is done
            if code < 0:
                return f"process {rank} was killed by {signal.Signals(-code).name}"
            if code > 0:
                return f"process {rank} ended with exit status {code}"
        return None

    def _wait_for_lost_process(self) -> str | None:
        until = time.monotonic() + COMMON_ERROR_SECONDS
        while (lost := self._lost_process()) is None and time.monotonic() < until:
            if not (self.children or is_child()):
                return None
            time.sleep(POLL_SECONDS / 10)
        return lost

    @contextmanager
    def _watch(self, trainer: Any) -> Iterator[Callable[[], None]]:
        """Watches over the other processes in a thread; yields a function that ends the watch."""
        done = threading.Event()
        # Whoever has it ends this process. Python aborts if a thread prints while it shuts down.
        ending = threading.Lock()

        def poll() -> None:
            while not done.wait(POLL_SECONDS):
                lost = self._lost_process()
                if lost and not done.wait(GRACE_SECONDS):
                    with ending:
                        if not done.is_set():
                            self._print_error(_describe(lost, trainer))
                            self.end_others(ProcessLost())
                            os._exit(1)  # the main thread may be deep in a sum over processes

        def end() -> None:
            with ending:
                done.set()

        if self.children or is_child():
            threading.Thread(target=poll, name="watch", daemon=True).start()
        die_with_parent(False)
        try:
            yield end
        finally:
            die_with_parent()
            end()


def _share_cores(processes: int) -> None:
    """Gives this process its share of the free cores, unless `OMP_NUM_THREADS` is set."""
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, free_cores() // processes)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)


def is_lost_contact(error: Exception) -> bool:
    """Returns whether an error says that another process of the run is gone."""
    # Gloo raises plain RuntimeErrors: only the text tells them from errors of another kind.
    lost = isinstance(error, torch.distributed.DistError) or "gloo" in str(error).lower()
    return isinstance(error, RuntimeError) and lost


@contextmanager
def report_signals(trainer: Any = None, go_on: str | None = None) -> Iterator[None]:
    """Prints one line if SIGTERM, SIGUSR1 or Ctrl-C ends the block; Lightning prints nothing.

    `go_on` says how a run continues; None: by `--ckpt_path`.

    Raises:
        Ended: If a signal ended the block.
    """
    try:
        with _signals_raise(trainer):
            yield
    except Ended:
        raise
    except (KeyboardInterrupt, SystemExit) as error:
        if isinstance(error, EndedBySignal):
            number = error.number
        elif isinstance(error, SIGTERMException):
            number = signal.SIGTERM
        # Lightning turns a KeyboardInterrupt into an ordinary exit.
        elif any(isinstance(e, KeyboardInterrupt) for e in (error, error.__context__)):
            number = signal.SIGINT
        else:
            raise
        if trainer is None or trainer.is_global_zero:
            line = _describe(f"ended by {number.name}", trainer, go_on)
            print(f"error: {line}", file=sys.stderr, flush=True)
        raise Ended(128 + number) from error


@contextmanager
def _signals_raise(trainer: Any) -> Iterator[None]:
    """Lets signals raise an exception, as Ctrl-C does, in set-up and after the last round too."""

    def end(number: int, frame: Any) -> None:
        # Among several processes Lightning ends a round for all of them between two chunks.
        within = trainer is not None and trainer.world_size > 1 and trainer.training
        if number != signal.SIGTERM or not within:
            raise EndedBySignal(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {}
    for number in ENDING:
        # Another program that has started this one may have a handler of its own for SIGUSR1.
        if number == signal.SIGTERM or signal.getsignal(number) == signal.SIG_DFL:
            before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _describe(event: str, trainer: Any, go_on: str | None = None) -> str:
    """Returns one line: what happened, in which round, and how the run can continue."""
    if trainer is None or trainer.state.fn != "fit":
        return event
    paths = [callback.best_model_path for callback in trainer.checkpoint_callbacks]
    paths.sort(key=lambda path: Path(path).name != "last.ckpt")  # others may be of an earlier round
    path = next(filter(None, [*paths, trainer.ckpt_path]), None)
    if go_on is None and path:
        go_on = f"go on from the last checkpoint with --ckpt_path {path}"
    elif go_on is None:
        go_on = "start again"
    number = trainer.current_epoch + 1
    last = trainer.max_epochs
    if last < 0:  # max_time or max_steps ends the run
        return f"{event} in round {number}; {go_on}"
    return f"{event} in round {min(number, last)} of {last}; {go_on}"  # all rounds may be over
