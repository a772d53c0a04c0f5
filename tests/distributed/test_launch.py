"""A killed process or a signal ends the run with one line, and the run can continue."""

import csv
import os
import re
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint

from pfl import Trainer
from pfl.cli import main
from pfl.distributed.launch import (
    COMMON_ERROR_SECONDS,
    STARTED_BY,
    Launcher,
    ProcessLost,
    _describe,
    report_signals,
)
from tests.commands import ROOT, TWO_PROCESSES, free_port
from tests.forks import Popen

# One process sends a signal to itself, or to all processes, in the middle of the third round or
# while that round is saved; the other processes are busy for some time.
DYING = """
import os, signal, time
from pathlib import Path
from pfl.algorithms import LocalTrain

# Where pytest runs in the background, programs begin with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

class Dying(LocalTrain):
    def client_update(self, clients, w):
        if clients.round == 2:
            self.now("training")
        return super().client_update(clients, w)

    def on_save_checkpoint(self, checkpoint):
        if self.rounds == 3:
            self.now("saving")
        super().on_save_checkpoint(checkpoint)

    def setup(self, stage):
        super().setup(stage)
        self.now("setting up")

    def on_fit_end(self):
        super().on_fit_end()
        self.now("ending")

    def now(self, what):
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if os.environ.get("WHEN") == what and first:
            Path(os.environ["PIDS"], str(os.getpid())).write_text(os.environ.get("GROUP_RANK", ""))
            if self.trainer.global_rank == int(os.environ["VICTIM"]):
                to = 0 if "GROUP" in os.environ else os.getpid()
                os.kill(to, int(os.environ["SIGNAL"]))
            time.sleep(float(os.environ["BUSY"]))
"""
CONFIG = """
trainer:
  name: killed
  max_epochs: 4
  accelerator: cpu
  precision: 64-true
  enable_progress_bar: false
  callbacks:
    class_path: RoundCheckpoint
    init_args: {every_seconds: 0}
model:
  class_path: dying.Dying
  init_args:
    network: {class_path: MLP, init_args: {in_features: 64, hidden: [8]}}
data: {class_path: DigitsDataModule, init_args: {num_clients: 6}}
"""
# Two processes on one device, instead of two devices.
SHARED = ["--trainer.strategy", "pfl.ClientParallelStrategy"]
SHARED += ["--trainer.strategy.processes_per_device", "2"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def prepare(folder, monkeypatch):
    """Writes the configuration and its method into a folder, from where they can be imported."""
    (folder / "dying.py").write_text(DYING)
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "pids").mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "argv", ["pfl"])
    monkeypatch.delitem(sys.modules, "dying", raising=False)
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return prepare(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def in_one(tmp_path_factory):
    """The folder of a run that is not interrupted, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        folder = prepare(tmp_path_factory.mktemp("in_one"), patch)
        assert main(arguments(folder)) == 0
    return folder / "runs" / "killed"


@pytest.fixture(scope="module")
def in_two(tmp_path_factory):
    """The folder of such a run under torchrun, in two processes."""
    with pytest.MonkeyPatch.context() as patch:
        folder = prepare(tmp_path_factory.mktemp("in_two"), patch)
    assert killed(folder, 1, "never", 0, TORCHRUN, TWO_PROCESSES)[0] == 0
    return folder / "runs" / "killed"


def arguments(folder, *more):
    config = str(folder / "config.yaml")
    return ["fit", "--config", config, "--trainer.default_root_dir", str(folder / "runs"), *more]


def killed(folder, victim, when, busy, starter, more, number=signal.SIGKILL, **environment):
    """Returns exit status, error lines and the seconds after the kill of a run."""
    process = Popen(
        [sys.executable, *starter, "-m", "pfl", *arguments(folder, *more)],
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}",
            "GLOO_SOCKET_IFNAME": "lo",
            "VICTIM": str(victim),
            "WHEN": when,
            "SIGNAL": str(int(number)),
            **environment,
            "BUSY": str(busy),
            "PIDS": str(folder / "pids"),
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # its processes are one group
    )
    with process:  # until the last process that could write is gone
        error = process.communicate(timeout=300)[1]
    ended = [path.stat().st_mtime for path in (folder / "pids").iterdir()]
    seconds = time.time() - max(ended, default=0)
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    return process.returncode, lines, seconds


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.cli
@pytest.mark.parametrize("when", ["setting up", "training", "saving"])
def test_the_same_command_goes_on_where_torchrun_starts_it_again(folder, in_two, when):
    """Process 1 of two dies before the first checkpoint, in round 3, or while round 3 is saved.

    The second attempt ends the run, whose files equal an uninterrupted run's. A last
    command of one process, as after a requeue on another machine, finds nothing left to do.
    """
    again = [*TORCHRUN, "--max-restarts", "1"]
    status, _, _ = killed(folder, 1, when, 0, again, [*TWO_PROCESSES, "--ckpt_path", "auto"])
    assert status == 0
    for _ in range(2):
        for file in ("metrics.csv", "clients.csv"):
            run = folder / "runs" / "killed"
            assert (run / file).read_bytes() == (in_two / file).read_bytes(), file
        assert main(arguments(folder, "--ckpt_path", "auto")) == 0
    assert [path.name for path in (folder / "runs").iterdir()] == ["killed"]


def two_machines(folder, **environment):
    """Starts the command of each of two machines, which meet at a port of this one."""
    nodes = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    nodes += ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    more = ["--trainer.strategy", "client_parallel", "--trainer.devices", "1"]
    more += ["--trainer.num_nodes", "2", "--ckpt_path", "auto"]
    path = f"{ROOT}{os.pathsep}{folder}"
    environment |= {"PIDS": str(folder / "pids"), "VICTIM": "-1"}
    environment = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", **environment}
    started = []
    for rank in "01":
        command = [*nodes, "--node_rank", rank, "-m", "pfl", *arguments(folder, *more)]
        with (folder / f"err{rank}").open("w") as err:
            command = [sys.executable, *command]
            started.append(Popen(command, env=environment, stdout=err, stderr=err))
    return started


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.cli
def test_the_same_commands_go_on_after_one_of_two_machines_is_gone(folder, in_two):
    """All processes of the second machine are killed in round 3, torchrun's own among them."""
    first, second = two_machines(folder, WHEN="training", BUSY="2")
    while len(pids := {int(p.name): p.read_text() for p in (folder / "pids").iterdir()}) < 2:
        assert first.poll() is None and second.poll() is None
        time.sleep(0.05)
    second.kill()
    for pid, machine in pids.items():
        if machine == "1":
            os.kill(pid, signal.SIGKILL)
    assert (first.wait(120), second.wait()) == (1, -9)
    lines = [n for n in (folder / "err0").read_text().splitlines() if n.startswith("error: ")]
    assert len(lines) == 1 and "in round 3 of 4; go on from the last checkpoint" in lines[0]
    assert [node.wait(240) for node in two_machines(folder, WHEN="never")] == [0, 0]
    for file in ("metrics.csv", "clients.csv"):
        done = folder / "runs" / "killed" / file
        assert done.read_bytes() == (in_two / file).read_bytes(), file


def rows(path):
    with path.open(newline="") as file:
        return [{k: float(v or "nan") for k, v in row.items()} for row in csv.DictReader(file)]


def alive(pid):
    """Whether a process still runs; a zombie does not."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def ends(pid):
    """Whether a process ends soon; it closes its output before it is gone."""
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.cli
@pytest.mark.parametrize(
    ("victim", "when", "busy", "starter", "more", "status", "says"),
    [
        (1, "training", 60, [], TWO_PROCESSES, 1, "process 1 was killed by SIGKILL"),
        (0, "training", 60, [], SHARED, -9, "process 0 was killed"),
        (1, "saving", 0, [], TWO_PROCESSES, 1, "process 1 was killed by SIGKILL"),
    ],
    ids=["the second", "the first", "while saving"],
)
def test_a_killed_process_ends_the_run_which_can_go_on(
    folder, in_one, victim, when, busy, starter, more, status, says
):
    returned, lines, seconds = killed(folder, victim, when, busy, starter, more)
    assert returned == status and seconds < 30
    assert len(lines) == 1, lines
    expected = f"error: ({says}) in round 3 of 4; go on from the last checkpoint"
    assert re.match(expected, lines[0]), lines
    for path in (folder / "pids").iterdir():
        assert ends(path.name)
    run, checkpoint = folder / "runs" / "killed", re.search(r"--ckpt_path (\S+)", lines[0])[1]
    assert torch.load(checkpoint, weights_only=True)["federated"]["rounds"] == 2
    assert main(arguments(folder, "--ckpt_path", checkpoint)) == 0
    for file in ("metrics.csv", "clients.csv"):
        actual, expected = rows(run / file), rows(in_one / file)
        for row, other in zip(actual, expected, strict=True):
            assert row == pytest.approx(other, rel=1e-9, abs=1e-9, nan_ok=True)
    assert len(rows(run / "metrics.csv")) == 4


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.cli
@pytest.mark.parametrize(
    ("number", "environment", "status"),
    [(signal.SIGTERM, {}, 143), (signal.SIGUSR1, {}, 138), (signal.SIGINT, {"GROUP": ""}, 130)],
    ids=["SIGTERM", "SIGUSR1", "Ctrl-C"],
)
def test_a_signal_to_two_processes_is_one_line_and_the_exit_status(
    folder, number, environment, status
):
    returned, lines, _ = killed(folder, 0, "training", 0, [], TWO_PROCESSES, number, **environment)
    assert returned == status
    (line,) = lines
    says = f"error: ended by {number.name} in round 3 of 4; go on from the last checkpoint with "
    assert line.startswith(says + "--ckpt_path ")
    checkpoint = torch.load(line.split()[-1], weights_only=True)
    assert checkpoint["federated"]["rounds"] == 2
    for path in (folder / "pids").iterdir():
        assert ends(path.name)


def test_a_handler_of_another_program_stays():
    """submitit, for example, has its own, which puts a job back into the queue."""
    calls = []
    before = signal.signal(signal.SIGUSR1, lambda *_: calls.append(1))
    try:
        with report_signals():
            os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert calls == [1]


def command(folder, environment):
    """The target of a process that runs the command line."""
    os.environ.update(environment)
    sys.path.insert(0, str(folder))
    sys.stdout = sys.stderr = (folder / "output").open("w", buffering=1)
    sys.exit(main(arguments(folder)))


@pytest.mark.slow
@pytest.mark.cli
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
@pytest.mark.parametrize(
    ("moment", "says"),
    [
        ("setting up", "in round 1 of 4; start again"),
        ("training", "in round 3 of 4; go on from the last checkpoint with --ckpt_path "),
        ("ending", "in round 4 of 4; go on from the last checkpoint with --ckpt_path "),
    ],
)
def test_a_signal_at_any_moment_is_one_line(folder, number, moment, says):
    """In a process that is forked from one which has imported everything: that takes seconds."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.faults.injected"])
    environment = {"WHEN": moment, "VICTIM": "0", "SIGNAL": str(int(number)), "BUSY": "0"}
    environment["PIDS"] = str(folder / "pids")
    process = context.Process(target=command, args=(folder, environment))
    process.start()
    process.join(120)
    assert process.exitcode == 128 + number
    output = (folder / "output").read_text().splitlines()
    (line,) = [line for line in output if line.startswith("error: ")]
    assert line.startswith(f"error: ended by {number.name} {says}")
    if moment == "training":
        assert torch.load(line.split()[-1], weights_only=True)["federated"]["rounds"] == 2


# The second process imports, or both leave Python, when the first one is killed.
LATE = """
import atexit, os, time
from pathlib import Path
from pfl.algorithms import FedAvg
from pfl.distributed.orphan import is_child

def wait():
    Path(os.environ["PIDS"], str(os.getpid())).touch()
    time.sleep(120)

if os.environ["WHEN"] == "importing" and is_child():
    wait()
atexit.register(wait)

class Late(FedAvg):
    pass
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.cli
@pytest.mark.skipif(sys.platform != "linux", reason="the system call is Linux's")
@pytest.mark.parametrize("moment", ["importing", "leaving Python"])
def test_the_others_are_gone_within_a_second_outside_of_the_run_too(folder, moment):
    (folder / "dying.py").write_text(LATE.replace("Late", "Dying"))
    pids = folder / "pids"
    needed = 1 if moment == "importing" else 2
    first = Popen(
        [
            sys.executable,
            "-m",
            "pfl",
            *arguments(folder, *TWO_PROCESSES, "--trainer.max_epochs", "1"),
        ],
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}",
            "GLOO_SOCKET_IFNAME": "lo",
            "WHEN": moment,
            "PIDS": str(pids),
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while len(list(pids.iterdir())) < needed and time.monotonic() < deadline:
            assert first.poll() is None
            time.sleep(0.05)
        (other,) = {path.name for path in pids.iterdir()} - {str(first.pid)}
        assert alive(other)
        first.kill()
        begun = time.monotonic()
        assert ends(other) and time.monotonic() - begun < 1
    finally:
        first.kill()
        first.wait()


# ---- without processes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rounds", "where"), [(4, "round 3 of 4"), (2, "round 2 of 2"), (-1, "round 3")]
)
def test_the_line_names_the_round(tmp_path, rounds, where):
    """Two rounds are over. Without `max_epochs`, max_time or max_steps ended the run."""
    trainer = Trainer(max_epochs=rounds, default_root_dir=tmp_path, enable_checkpointing=False)
    trainer.state.fn, trainer.fit_loop.epoch_progress.current.completed = "fit", 2
    assert _describe("ended", trainer) == f"ended in {where}; start again"


def test_the_line_names_the_last_checkpoint_and_not_the_best(tmp_path):
    best = ModelCheckpoint(monitor="train/loss")
    trainer = Trainer(default_root_dir=tmp_path, callbacks=[best], enable_progress_bar=False)
    trainer.state.fn = "fit"
    for callback, name in zip(trainer.checkpoint_callbacks, ("best", "last"), strict=True):
        callback.best_model_path = f"a/{name}.ckpt"
    expected = "go on from the last checkpoint with --ckpt_path a/last.ckpt"
    assert _describe("ended", trainer) == f"ended in round 1 of 100; {expected}"


@pytest.fixture
def launcher(monkeypatch):
    """The launcher of one of four processes that were started externally."""
    for name, value in {"LOCAL_RANK": "0", "OMP_NUM_THREADS": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(Launcher, "children", [])
    environment = LightningEnvironment()
    environment.set_world_size(4)
    return Launcher(environment, num_processes=4, num_nodes=1)


def test_processes_share_the_cores(launcher, monkeypatch):
    """9 cores for 4 processes are 2 threads for each, the first process included."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(9), raising=False)
    try:
        assert launcher.launch(torch.get_num_threads) == 2
    finally:
        torch.set_num_threads(1)
        os.environ.pop("OMP_NUM_THREADS", None)


def fail(error):
    raise error


def test_errors_of_this_process_keep_their_type(launcher):
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        launcher.launch(fail, RuntimeError("out of memory"))
    assert caught.type is RuntimeError
    with pytest.raises(ProcessLost, match="the contact with another process was lost"):
        launcher.launch(fail, RuntimeError("[gloo/transport/tcp/pair.cc] closed by peer"))


class Child:
    """A child process that has ended with `code`."""

    def __init__(self, code):
        self.code, self.was_killed = code, False

    def poll(self):
        return self.code

    def kill(self):
        self.was_killed = True


@pytest.mark.parametrize(
    ("codes", "says"),
    [
        ([0, None, -15], "process 3 was killed by SIGTERM"),
        ([None, 2, None], "process 2 ended with exit status 2"),
    ],
)
def test_the_first_process_says_who_is_gone_and_ends_the_others(launcher, monkeypatch, codes, says):
    monkeypatch.setattr(Launcher, "children", [Child(code) for code in codes])
    with pytest.raises(ProcessLost, match=says) as caught:
        launcher.launch(fail, torch.distributed.DistBackendError("NCCL"))
    launcher.end_others(caught.value)
    assert all(child.was_killed for child in Launcher.children)


@pytest.mark.parametrize("first", ["watch", "main"])
def test_one_thread_ends_the_process(launcher, monkeypatch, first):
    """The watch or the main thread, whoever comes first; the other one waits, and says nothing.

    Python aborts if the watch still prints while the main thread leaves the interpreter.
    """
    events, begun = [], threading.Event()

    def say(line):
        if (threading.current_thread() is threading.main_thread()) == (first == "main"):
            begun.set()
            time.sleep(0.1)  # for the other thread to interfere
        events.append(line)

    def train():
        if first == "watch":
            assert begun.wait(10)
        fail(RuntimeError("[gloo/transport/tcp/pair.cc] closed by peer"))

    monkeypatch.setattr("pfl.distributed.launch.POLL_SECONDS", 0.01)
    monkeypatch.setattr("pfl.distributed.launch.GRACE_SECONDS", 0.0 if first == "watch" else 0.05)
    monkeypatch.setattr(os, "_exit", events.append)  # the watch then goes on as if nothing was
    monkeypatch.setattr(Launcher, "children", [Child(-9)])
    monkeypatch.setattr(launcher, "_print_error", say)
    with pytest.raises(ProcessLost):
        launcher.launch(train)
    says = "process 1 was killed by SIGKILL"
    if first == "watch":  # where the main thread goes on in this test, the process is gone
        assert events[:2] == [says, 1]
    else:
        time.sleep(0.2)
        assert events == [says]


@pytest.mark.slow
def test_the_others_leave_an_error_to_the_first_process(launcher, monkeypatch):
    """The other processes wait for the first one to end them: all have the same error."""
    monkeypatch.setenv(STARTED_BY, str(os.getppid()))
    begun = time.monotonic()
    launcher.end_others(ValueError("wrong"))
    assert time.monotonic() - begun >= COMMON_ERROR_SECONDS
