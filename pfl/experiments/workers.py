"""Tasks side by side, in processes that end with the process that started them, even if killed."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, TypeVar, cast

import torch

from pfl.configuration.messages import quiet
from pfl.configuration.user_code import mistake
from pfl.current_folder import add_current_folder
from pfl.distributed.launch import Ended
from pfl.errors import ConfigError
from pfl.experiments.room import VISIBLE, Room
from pfl.machine import RUNS_HERE, RUNS_ON_CARD

T = TypeVar("T")
R = TypeVar("R")
END_SECONDS = 5.0  # for a process without tasks to end by itself


class WorkerLost(RuntimeError):
    """A process that worked on a task has died; the message is one line."""


class _Worker(NamedTuple):
    """A process, its task, and the GPU that it sees; None: all."""

    process: BaseProcess
    task: Any
    card: str | None


def side_by_side(work: Callable[[T], R], tasks: Sequence[T], room: Room) -> Iterator[tuple[T, R]]:
    """Yields each task with its result when it has ended; a process that dies raises WorkerLost.

    The executors of the standard library do not say which task a killed process worked on, and wait
    for the other tasks when a signal ends their process.

    Args:
        work: What is done with each task.
        tasks: The tasks.
        room: How many of them are worked on at the same time, and on which GPU, whenever one has
            ended. If there is never more than one, that is in this process.
    """
    if room.most == 1:
        for task in tasks:
            yield task, work(task)
        return
    context = get_context("spawn")
    waiting = list(tasks)
    processes: list[BaseProcess] = []
    running: dict[Connection, _Worker] = {}

    def begin(pipe: Connection, process: BaseProcess, card: str | None) -> None:
        task = waiting.pop(0)
        running[pipe] = _Worker(process, task, card)
        places = room.places
        threads = max(1, room.cores // places.total)
        with suppress(OSError):  # a process that has died is met below
            pipe.send((task, threads, places.total, places.on.get(card, 1)))

    def is_free(card: str | None) -> bool:
        busy = sum(worker.card == card for worker in running.values())
        return bool(waiting) and busy < room.places.on.get(card, 0)

    def start() -> None:
        for card in room.places.on:
            while is_free(card):
                ours, theirs = context.Pipe()
                process: BaseProcess = context.Process(target=_serve, args=(theirs, work))
                with _sees(card):
                    process.start()
                processes.append(process)
                theirs.close()  # so that our end closes when the process dies
                begin(ours, process, card)

    try:
        start()
        while running:
            for pipe in cast(list[Connection], connection.wait(list(running))):
                process, task, card = running.pop(pipe)
                yield task, _receive(pipe, process, task)
                if is_free(card):
                    begin(pipe, process, card)
                else:
                    pipe.close()  # the process ends
                start()
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


def _serve(pipe: Connection, work: Callable[[Any], Any]) -> None:
    """Works on the tasks of a pipe, one after another, until the pipe is closed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the parent ends this process
    add_current_folder()
    quiet()
    while True:
        try:
            task, threads, here, on_card = pipe.recv()
        except EOFError:
            return
        torch.set_num_threads(threads)
        os.environ[RUNS_HERE] = str(here)
        os.environ[RUNS_ON_CARD] = str(on_card)
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
