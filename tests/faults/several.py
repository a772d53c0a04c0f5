"""A run of two processes, one of which is killed at a random time."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

from tests.faults.injected import differences, outcome

KILLED = "one of two processes is killed at a random time"
ROOT = Path(__file__).parents[2]
CONFIG = """
trainer:
  max_epochs: 3
  accelerator: cpu
  devices: 2
  strategy: client_parallel
  enable_progress_bar: false
  callbacks: {class_path: RoundCheckpoint, init_args: {every_seconds: 0}}
model:
  class_path: SCAFFOLD
  init_args: {network: {class_path: MLP, init_args: {in_features: 64, hidden: [4]}}}
data: {class_path: DigitsDataModule, init_args: {num_clients: 6}}
"""


def start(root: Path) -> subprocess.Popen:
    """Starts the run, or goes on with it: the command is the same."""
    (root / "run.yaml").write_text(CONFIG)
    words = ["fit", "--config", "run.yaml", "--trainer.default_root_dir", "."]
    words += ["--ckpt_path", "auto"]
    return subprocess.Popen(
        [sys.executable, "-m", "pfl", *words],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def children_of(pid: int) -> list[int]:
    """Returns the ids of the processes that another one started (Linux)."""
    path = Path("/proc", str(pid), "task", str(pid), "children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


@cache
def whole() -> tuple[dict[str, Any], float]:
    """What a whole run leaves behind, and its seconds."""
    root, begun = Path(tempfile.mkdtemp(prefix="chaos-")), time.monotonic()
    try:
        _, errors = (process := start(root)).communicate()
        assert process.returncode == 0, errors
        return outcome(root / "run"), time.monotonic() - begun
    finally:
        shutil.rmtree(root)


def end_one_of_two(rng: random.Random) -> str:
    """Kills one of the processes at a random time, resumes, and compares with a whole run."""
    expected, seconds = whole()
    root, after, second = Path(tempfile.mkdtemp(prefix="chaos-")), rng.random(), rng.random() < 0.5
    try:
        process = start(root)
        time.sleep(after * seconds)
        child = next(iter(children_of(process.pid)), None)
        victim, other = (child, process.pid) if second else (process.pid, child)
        if victim is not None and process.poll() is None:
            os.kill(victim, signal.SIGKILL)
            deadline = time.monotonic() + 5
            while other is not None and alive(other) and time.monotonic() < deadline:
                process.poll()
                time.sleep(0.05)
            assert other is None or not alive(other), "the other process lives on"
        process.communicate()
        _, errors = (process := start(root)).communicate()
        assert process.returncode == 0, errors
        found = differences(outcome(root / "run"), expected)
        assert not found, f"after {after:.3f} of the time: other {', '.join(found)}"
        return f"process {int(second)} after {after:.3f} of the time"
    finally:
        shutil.rmtree(root)


def alive(pid: int) -> bool:
    """Returns whether a process runs; a zombie does not."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
