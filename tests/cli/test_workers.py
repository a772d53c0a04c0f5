"""Processes that make runs side by side end with the command that started them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pfl.cli.jobs import spread
from tests.commands import ROOT

COMMAND = """
from pfl.cli.jobs import spread
from tests.cli.test_workers import sleep

if __name__ == "__main__":
    list(spread(sleep, {tasks}, 2))
"""


def sleep(path: str) -> None:
    """Writes the id of this process, and takes ten minutes."""
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)


def fail_first(task: str) -> None:
    """Refuses the first task, and records each of the others."""
    if task.endswith("0"):
        raise ValueError(task)
    Path(task).touch()
    time.sleep(0.5)


def wait_for(done, seconds=60):
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.1)
    assert done()


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_workers_end_with_the_process_that_started_them(tmp_path):
    tasks = [tmp_path / "a", tmp_path / "b"]
    script = tmp_path / "work.py"
    script.write_text(COMMAND.format(tasks=[str(task) for task in tasks]))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, script], env=environment)
    try:
        wait_for(lambda: all(task.exists() and task.read_text() for task in tasks))
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    workers = [int(task.read_text()) for task in tasks]
    wait_for(lambda: not any(map(is_running, workers)))


@pytest.mark.slow
def test_tasks_do_not_begin_after_one_has_failed(tmp_path):
    """Two processes may have begun two tasks each, and the queue between them holds one more."""
    tasks = [str(tmp_path / str(number)) for number in range(20)]
    with pytest.raises(ValueError, match="0"):
        list(spread(fail_first, tasks, 2))
    assert len(list(tmp_path.iterdir())) <= 6
