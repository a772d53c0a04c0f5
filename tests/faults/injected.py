"""Runs in processes of their own that a fault ends at a chosen change of a file."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import signal
import sys
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from datamodules import DigitsDataModule, Dirichlet
from models import MLP
from pfl import FederatedLoop, Trainer, files
from pfl.callbacks import LocalBaseline, RoundCheckpoint, RunFigure, round_checkpoint
from pfl.clients.state_rows import unpacked
from pfl.configuration.messages import quiet
from pfl.errors import ConfigError
from pfl.report import matplotlib_drawer
from tests.algorithms.entries_baselines import WITH_PUBLIC, normals
from tests.algorithms.methods import METHODS

ROUNDS, CLIENTS = 3, 6
MEASURED = {"name", "folder", "wall_seconds", "samples_per_second", "peak_memory_bytes"}
REFUSED = 3  # exit status of a run that a ConfigError ended
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True)
class Fault:
    """What happens at the n-th change of a file in the run's folder.

    Attributes:
        kind: "kill" (SIGKILL before the change), "half" (SIGKILL within it: half of the bytes are
            written), "stop" (SIGTERM), "full" (from this change on the disk is full), or "none".
        number: n, from 1.
    """

    kind: str = "none"
    number: int = 0


class Injector:
    """Counts the changes of files below a folder, and lets a fault strike at one of them."""

    def __init__(self, folder: Path, fault: Fault) -> None:
        self.folder, self.fault, self.count = str(folder), fault, 0
        self.append, self.save = files.append, torch.save

    def install(self) -> None:
        """Installs the hooks in this process, for good."""
        sys.addaudithook(self.audit)
        torch.save = self.save_checkpoint  # type: ignore[assignment]
        files.append = self.append_bytes

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Sees every file that Python opens for writing, renames or links."""
        writes = event == "open" and isinstance(args[2], int) and args[2] & WRITES
        if writes or event in ("os.rename", "os.link"):
            self.change(str(args[0]))

    def change(self, path: str, half: Any = None) -> None:
        """Counts a change, and strikes."""
        if not os.path.abspath(path).startswith(self.folder) or path.endswith(".lock"):
            return
        self.count += 1
        fault = self.fault
        if fault.kind == "full" and self.count >= fault.number:
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.count != fault.number:
            return
        if fault.kind == "half" and half is not None:
            half()
        if fault.kind in ("kill", "half"):
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGTERM)

    def append_bytes(self, path: Path, content: bytes) -> None:
        """Stands for `files.append`, whose write may be cut in the middle."""
        if self.fault == Fault("half", self.count + 1):
            with path.open("ab") as file:
                file.write(content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        self.append(path, content)

    def save_checkpoint(self, content: Any, path: str) -> None:
        """Stands for `torch.save`, whose writes Python does not see."""

        def half() -> None:
            self.save(content, path)
            os.truncate(path, os.path.getsize(path) // 2)

        self.change(str(path), half)
        self.save(content, path)


def train(root: Path, method: str, fault: Fault, state_memory: float | None) -> None:
    """Trains, or goes on where a process before was ended; the target of a process."""
    folder = root / "run"
    torch.set_num_threads(1)
    injector = Injector(folder, fault)
    injector.install()
    quiet()
    # Drawing the figures takes longer than the run; their files are written all the same.
    matplotlib_drawer.draw = lambda figure: Figure()
    # The number of changes must not depend on how long the baseline's saves take.
    round_checkpoint.COST_SHARE = math.inf
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
    # A continued run begins elsewhere: all that counts is in the checkpoint.
    torch.manual_seed(0 if newest(folder) is None else random.getrandbits(30))
    arguments = {"local_epochs": 1, **METHODS[method].arguments}
    if method in WITH_PUBLIC:
        arguments["public"] = normals(5, (1, 8, 8))
    algorithm = METHODS[method].kind(MLP(64, [4]), **arguments)
    trainer = Trainer(
        max_epochs=ROUNDS,
        accelerator="cpu",
        default_root_dir=root,
        enable_progress_bar=False,
        callbacks=[RoundCheckpoint(every_seconds=0), LocalBaseline(), RunFigure()],
    )
    trainer.recorder.config = "a: 1\n"
    loop = FederatedLoop(
        DigitsDataModule(CLIENTS, Dirichlet(1.0)), clients_per_round=None, state_memory=state_memory
    )
    try:
        trainer.fit(algorithm, datamodule=loop, ckpt_path="auto")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        os._exit(REFUSED)
    finally:
        (root / "changes").write_text(str(injector.count))


def newest(folder: Path) -> Path | None:
    """Returns the checkpoint from which a run goes on."""
    paths = [folder / "checkpoints" / f"{name}.ckpt" for name in ("last", "previous")]
    return next((path for path in paths if path.is_file()), None)


def run(
    root: Path,
    method: str,
    fault: Fault = Fault(),
    memory: float | None = None,
    kill_after: float | None = None,
) -> int:
    """Runs `train` in a process of its own; returns the exit status, negative for a signal.

    Args:
        root: The folder of the run's folder.
        method: The name of the method's entry in `METHODS`.
        fault: What strikes in the process.
        memory: `loop.state_memory`; 0 puts client states into files.
        kill_after: Seconds after which the process is killed, wherever it is.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.faults.injected"])
    process = context.Process(target=train, args=(root, method, fault, memory))
    process.start()
    process.join(kill_after)
    process.kill()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def strike_and_resume(
    root: Path, method: str, faults: list[Fault], memory: float | None = None
) -> list[int]:
    """Runs until each fault has struck, then to the end; returns the exit statuses."""
    statuses = []
    for fault in [*faults, Fault()]:
        statuses.append(run(root, method, fault, memory))
    return statuses


def outcome(folder: Path) -> dict[str, Any]:
    """Returns everything that a run leaves behind and that is not a measured time."""
    content: dict[str, Any] = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in (".ckpt", ".lock", ".json") and path.name[0] != "."
    }
    for path in folder.glob("*.json"):
        values = json.loads(path.read_text())
        content[path.name] = {k: v for k, v in values.items() if k not in MEASURED}
    saved = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    saved["federated"]["clients"] = {
        name: _rows(state) for name, state in saved["federated"]["clients"].items()
    }
    for part in ("federated", "state_dict", "optimizer_states"):
        content[f"last.ckpt {part}"] = plain(saved[part])
    content["files"] = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    return content


def _rows(state: dict[str, Any]) -> list[Any]:
    """Returns the clients' rows by id; where they lie in the store depends on what was killed."""
    width = len(state["initial"])
    pieces = [piece for part in state["parts"] for piece in unpacked(part, width)]
    rows = [(int(i), row) for ids, values in pieces for i, row in zip(ids, values, strict=True)]
    return [state["initial"], *sorted(rows, key=lambda row: row[0])]


def plain(value: Any) -> Any:
    """Returns nested values with tensors as bytes, so that `==` compares them bit by bit."""
    if isinstance(value, torch.Tensor):
        whole = value.reshape(-1).clone(memory_format=torch.contiguous_format)
        return whole.view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Returns the names of what two runs left behind differently."""
    return sorted(k for k in one.keys() | other.keys() if one.get(k) != other.get(k))
