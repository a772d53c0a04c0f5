"""Commands that make or read several runs, each ended by a fault and then given once more."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from pfl.cli.main import main
from tests.faults.injected import Fault, Injector, differences
from tests.faults.several import ROOT, alive, children_of

NETWORK = {"class_path": "MLP", "init_args": {"in_features": 64, "hidden": [4]}}
PROTOCOL = {"class_path": "SplitOwn", "init_args": {"test": 0.3, "validation": 0.3}}
RUNS: dict[str, Any] = {
    "title": "Chaos",
    "seeds": 1,
    "common": {
        "trainer": {"max_epochs": 2, "accelerator": "cpu"},
        "model.init_args.network": NETWORK,
        "data": {
            "class_path": "DigitsDataModule",
            "init_args": {"num_clients": 4, "protocol": PROTOCOL},
        },
    },
    "runs": {name: {"model.class_path": name} for name in ("FedAvg", "LocalTrain")},
}
FILES = {
    "compare": RUNS,
    "tune": RUNS | {"tune": {"trials": 2, "space": {"model.init_args.lr": [0.1, 0.2]}}},
    "reproduce": RUNS | {"panels": [{"y": "test/global/loss"}]},
}
LAST = "runs/LocalTrain/seed0/checkpoints/last.ckpt"
RUN = {
    "trainer": {"max_epochs": 2, "accelerator": "cpu"},
    "model": {"class_path": "FedAvg", "init_args": {"network": NETWORK}},
    "data": {"class_path": "DigitsDataModule", "init_args": {"num_clients": 4}},
}
COMMANDS = {
    **{name: [name, f"{name}.yaml", "--out", "out"] for name in FILES},
    "report": ["report", "runs"],
    "export": ["export", "--ckpt_path", LAST, "--client", "all", "--out", "out"],
    "deploy": ["deploy", "--config", "run.yaml", "--out", "app"],
}
EXACT = (".safetensors", ".npy", ".py", ".sh")  # files that are compared byte by byte
MEASURED = ("seconds", "peak_memory")  # in the names of columns and keys
AT_A_CHANGE = {"kill": (-9,), "half": (-9,), "stop": (143,), "full": (2,)}
WORKERS, NONE = "workers", Fault()
KINDS = {  # what a trial is called, by command and fault
    (name, fault): f"`pfl {name}`: "
    + (
        "it, or one of its two workers, is killed at a random time"
        if fault == WORKERS
        else "a kill, SIGTERM or a full disk at the n-th change of a file"
    )
    for name in COMMANDS
    for fault in [*AT_A_CHANGE, *([WORKERS] if name in FILES else [])]
}
ENDS = (0, 1, 2, -9)  # a worker's death is told with 1; the command may have ended before


def drawn(rng: random.Random) -> tuple[str, str]:
    """Returns a command and a fault."""
    return rng.choice(list(KINDS))


def command(root: Path, words: list[str], fault: Fault) -> None:
    """Runs a command in `root`; the target of a process."""
    os.chdir(root)
    sys.stdout = sys.stderr = (root / "output").open("w", buffering=1)
    injector = Injector(root, fault)
    injector.install()
    status = main(words)
    injector.fault = NONE
    (root / "changes").write_text(str(injector.count))
    sys.exit(status)


def run(root: Path, words: list[str], fault: Fault = NONE) -> int:
    """Runs a command in a process of its own; returns the exit status, negative for a signal."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.faults.experiments"])
    process = context.Process(target=command, args=(root, words, fault))
    process.start()
    process.join()
    return process.exitcode or 0


def start(root: Path, name: str) -> subprocess.Popen:
    """Starts a command with two workers."""
    return subprocess.Popen(
        [sys.executable, "-m", "pfl", *words_of(name, jobs=2)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@cache
def runs() -> Path:
    """Finished runs with checkpoints, for the commands that read them."""
    root = Path(tempfile.mkdtemp(prefix="chaos-"))
    (root / "compare.yaml").write_text(json.dumps(RUNS))
    assert run(root, [*COMMANDS["compare"], "--jobs", "1", "--keep"]) == 0
    return root / "out"


def prepared(name: str) -> Path:
    """Returns a new folder with what a command reads."""
    root = Path(tempfile.mkdtemp(prefix="chaos-"))
    if name in FILES:
        (root / f"{name}.yaml").write_text(json.dumps(FILES[name]))
    elif name == "deploy":
        (root / "run.yaml").write_text(json.dumps(RUN))
    else:
        shutil.copytree(runs(), root / "runs")
    return root


def outcome(root: Path) -> dict[str, Any]:
    """Returns what a command leaves behind: its files, and of tables all that is not measured."""
    content: dict[str, Any] = {}
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        name = str(path.relative_to(root))
        if path.suffix == ".csv":
            rows = csv.DictReader(path.read_text().splitlines())
            content[name] = [{k: v for k, v in row.items() if is_exact(k)} for row in rows]
        elif path.suffix == ".yaml":
            content[name] = [line for line in path.read_text().splitlines() if is_exact(line)]
        elif path.suffix in EXACT:
            content[name] = path.read_bytes()
        elif name not in ("changes", "output"):
            content[name] = "is there"  # with measured times or versions in it
    return content


def is_exact(name: str) -> bool:
    """Whether a column of this name, or a line, has no measured times or sizes."""
    return not any(word in name for word in MEASURED)


@cache
def whole(name: str, jobs: int = 1) -> tuple[dict[str, Any], int]:
    """What a whole command leaves behind, and its changes of files in its own process."""
    root = prepared(name)
    try:
        assert run(root, words_of(name, jobs)) == 0, (root / "output").read_text()
        changes = int((root / "changes").read_text())
        return outcome(root), changes
    finally:
        shutil.rmtree(root)


def words_of(name: str, jobs: int = 1) -> list[str]:
    """Returns a command that makes its runs in its own process, or in workers if `jobs` > 1."""
    if name not in FILES:
        return COMMANDS[name]
    return [*COMMANDS[name], "--jobs", str(jobs)]


def end_a_command(name: str, kind: str, rng: random.Random) -> None:
    """Ends a command, gives it once more, and compares what it leaves with that of a whole one."""
    if kind == WORKERS:
        end_workers(name, rng)
        return
    expected, changes = whole(name)
    root, fault = prepared(name), Fault(kind, rng.randint(1, changes))
    try:
        status = run(root, words_of(name), fault)
        errors = [x for x in (root / "output").read_text().splitlines() if x.startswith("error: ")]
        assert status in AT_A_CHANGE[kind], f"{fault}: status {status}"
        assert len(errors) == (kind in ("stop", "full")), f"{fault}: {errors}"
        check_again(root, name, expected)
    finally:
        shutil.rmtree(root)


def end_workers(name: str, rng: random.Random) -> None:
    """Does the same with a kill of a command of two workers, or of one of them."""
    expected, _ = whole(name, jobs=2)  # with as many threads in each run: they round alike
    root, after, is_parent = prepared(name), rng.uniform(0, 20), rng.random() < 0.5
    try:
        process = start(root, name)
        time.sleep(after)
        children = children_of(process.pid)
        victim = process.pid if is_parent or not children else children[-1]
        if process.poll() is None:
            os.kill(victim, signal.SIGKILL)
        _, errors = process.communicate(timeout=120)
        assert process.returncode in ENDS and errors.count("\n") <= 1, errors
        end = time.monotonic() + 10
        while (left := [pid for pid in children if alive(pid)]) and time.monotonic() < end:
            time.sleep(0.05)
        assert not left, "a worker lives on"
        check_again(root, name, expected, jobs=2)
    finally:
        shutil.rmtree(root)


def check_again(root: Path, name: str, expected: dict[str, Any], jobs: int = 1) -> None:
    """Gives a command once more, and compares all that it leaves with `expected`."""
    status = run(root, words_of(name, jobs))
    assert status == 0, f"again: status {status}: {(root / 'output').read_text()[-500:]}"
    found = differences(outcome(root), expected)
    assert not found, f"other {', '.join(found)}"
