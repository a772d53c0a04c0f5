"""Processes that make runs side by side end with the command that started them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
