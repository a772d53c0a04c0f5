"""Tasks side by side, in processes that end with the process that started them, even if killed."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar, cast

import torch

from pfl.configuration.messages import quiet
from pfl.configuration.user_code import mistake
from pfl.distributed.launch import Ended
from pfl.errors import ConfigError
from pfl.machine import free_cores, free_memory

T = TypeVar("T")
R = TypeVar("R")
END_SECONDS = 5.0  # for a process without tasks to end by itself
VISIBLE = "CUDA_VISIBLE_DEVICES"
RUN_MEMORY = 2 << 30  # bytes that a run on a CPU may take, where nothing more is known


class WorkerLost(RuntimeError):
    """A process that worked on a task has died; the message is one line."""


def side_by_side(
    work: Callable[[T], R],
    tasks: Sequence[T],
    workers: int,
    cards: Sequence[str] = (),
) -> Iterator[tuple[T, R]]:
    """Yields each task with its result when it has ended; a process that dies raises WorkerLost.

    The executors of the standard library do not say which task a killed process worked on, and wait
    for the other tasks when a signal ends their process.

    Args:
        work: What is done with each task.
        tasks: The tasks.
        workers: Number of processes; one is this process.
        cards: The GPUs as `CUDA_VISIBLE_DEVICES` names them; each process sees one of them, and
            processes beyond their number share them. None of them: each process sees all.
    """
    if workers == 1:
        for task in tasks:
            yield task, work(task)
        return
    context = get_context("spawn")
    waiting = list(tasks)
    threads = max(1, free_cores() // workers)
    processes: list[BaseProcess] = []
    running: dict[Connection, tuple[BaseProcess, T]] = {}

    def begin(pipe: Connection, process: BaseProcess) -> None:
        task = waiting.pop(0)
        running[pipe] = process, task
        with suppress(OSError):  # a process that has died is met below
            pipe.send(task)

    try:
        for number in range(min(workers, len(tasks))):
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(target=_serve, args=(theirs, work, threads))
            with _sees(cards[number % len(cards)] if cards else None):
                process.start()
            processes.append(process)
            theirs.close()  # so that our end closes when the process dies
            begin(ours, process)
        while running:
            for pipe in cast(list[Connection], connection.wait(list(running))):
                process, task = running.pop(pipe)
                yield task, _receive(pipe, process, task)
                if waiting:
                    begin(pipe, process)
                else:
                    pipe.close()  # the process ends
        for process in processes:
            process.join(END_SECONDS)
    finally:  # an error or a signal ends all tasks
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


@contextmanager
def _sees(card: str | None) -> Iterator[None]:
    """Lets the processes that the block starts see one GPU only; None: all."""
    before = os.environ.get(VISIBLE)
    if card is not None:
        os.environ[VISIBLE] = card
    try:
        yield
    finally:
        if card is not None:
            del os.environ[VISIBLE]
        if before is not None:
            os.environ[VISIBLE] = before


def _receive(pipe: Connection, process: BaseProcess, task: Any) -> Any:
    try:
        succeeded, result = pipe.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        code = process.exitcode or 0
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with {code}"
        raise WorkerLost(f"{task}: its process {how}; the same command continues") from None
    if not succeeded:
        raise result
    return result


def _serve(pipe: Connection, work: Callable[[Any], Any], threads: int) -> None:
    """Works on the tasks of a pipe, one after another, until the pipe is closed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the parent ends this process
    sys.path.append(os.getcwd())  # for classes of the user
    torch.set_num_threads(threads)
    quiet()
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            answer: tuple[bool, Any] = True, work(task)
        except Ended as error:  # SIGTERM came in a round; the line is printed
            answer = False, error
        except (Exception, SystemExit) as error:  # without its traceback, which cannot be sent
            if os.environ.get("PFL_TRACEBACK"):
                line = None
            else:
                line = mistake(error)
            everything = "".join(traceback.format_exception(error))
            answer = False, RuntimeError(everything) if line is None else ConfigError(line)
        pipe.send(answer)


def _end_with_parent() -> None:
    """Ends this process when the one that started it is gone; else its tasks would continue."""
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)


def workers_that_fit(tasks: int, cards: int = 0) -> int:
    """Returns how many runs fit on this machine: one on each card, or else by cores and memory."""
    if cards:
        return max(1, min(tasks, cards))
    return max(1, min(tasks, free_cores(), free_memory() // RUN_MEMORY))


def visible_cards() -> list[str]:
    """Returns the GPUs that this process sees, as `CUDA_VISIBLE_DEVICES` names them."""
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
    else:
        count = 0
    named = os.environ.get(VISIBLE)
    if named:
        names = named.split(",")
    else:
        names = [str(number) for number in range(count)]
    return names[:count]
