"""Whether the card computes what the CPU does: each check returns numbers and a verdict."""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
import yaml
from torch import Tensor

from benchmarks.gpu import world
from benchmarks.gpu.measuring import distance, set_precision
from models import MLP
from pfl import FederatedLoop
from pfl.algorithms import SCAFFOLD, FedAvg, FedCLUP
from pfl.clients import ClientData, Clients, LocalSchedule

Found = dict[str, Any]
Deterministic = bool | Literal["warn"]
LINEAR = 1e-4  # the largest relative distance from the CPU's values
CONVOLUTIONS = 1e-3
FLOAT64 = 1e-9
ROOT = Path(__file__).parents[2]


def iterates(name: str, device: torch.device) -> Found:
    """Two rounds on the card against the CPU: global model, server states, clients' rows."""
    make, network, convolves = world.ITERATES[name]
    tolerance = LINEAR
    settings: dict[str, Any] = {}
    if convolves:
        tolerance = CONVOLUTIONS
    if name in world.SENSITIVE:
        tolerance = FLOAT64
        settings["precision"] = "64-true"
    cpu = torch.device("cpu")
    on_card = world.fit(world.method(make, network), device, settings=settings)
    on_cpu = world.fit(world.method(make, network), cpu, settings=settings)
    found = distances(world.left(on_card), world.left(on_cpu))
    found |= {"engine": on_card.oracle.engine.name, "limit": tolerance}
    if found["distance"] <= tolerance:
        return found | {"ok": True}
    # Which side is it? Each again, and in float64.
    for side, where, first in (("card", device, on_card), ("cpu", cpu, on_cpu)):
        again = world.left(world.fit(world.method(make, network), where, settings=settings))
        exact = world.fit(world.method(make, network), where, settings={"precision": "64-true"})
        one = world.left(first)
        double = {name: value.to(one[name]) for name, value in world.left(exact).items()}
        found[f"{side}_again"] = distances(again, one)["distance"]
        found[f"{side}_float64"] = distances(one, double)["distance"]
    return found | {"ok": False}


def distances(one: dict[str, Tensor], other: dict[str, Tensor]) -> Found:
    """Returns the largest relative distance of the floating values, and whose it is."""
    assert one.keys() == other.keys()
    each = {}
    for name, value in other.items():
        if value.is_floating_point() and value.numel():
            each[name] = distance(one[name].nan_to_num(), value.nan_to_num())
    worst = max(each, key=lambda name: each[name])
    return {"distance": each[worst], "of": worst, "compared": len(each)}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Returns the names of values that are not the same bit for bit."""
    names = one.keys() | other.keys()
    return sorted(
        name
        for name in names
        if name not in one
        or name not in other
        or not np.array_equal(one[name], other[name], equal_nan=one[name].is_floating_point())
    )


def bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> Found:
    """Returns whether values are the same bit for bit, and how far apart they are if not."""
    names = differing(one, other)
    found: Found = {"ok": not names, "differ": names[:5]}
    if names:
        found |= distances(one, other)
    return found


def dropout(device: torch.device) -> Found:
    """A network with dropout draws other numbers on a GPU: it must run, and repeat itself."""
    runs = [world.left(world.fit(world.method(FedAvg, world.dropout), device)) for _ in range(2)]
    found = bits(*runs)
    if device.type == "cuda":
        found["ok"] = found["ok"] or found["distance"] <= CONVOLUTIONS
    return found


def draws(device: torch.device) -> Found:
    """The samples of each local step, drawn on the card and on the CPU."""
    loop = FederatedLoop(world.data(), clients_per_round=5)
    loop.setup()
    sides = [ClientData(loop.datamodule, where, loop.seed) for where in (device, "cpu")]
    equal = 0
    for r in range(20):
        cohort = loop.cohort(r)
        ids = cohort[np.argsort(-sides[0].sizes("train", cohort), kind="stable")]
        picks = []
        for own in sides:
            blocks = Clients(ids, r, own).step_blocks(LocalSchedule(7, 3))
            picks.append([block.picks.cpu() for block in blocks])
        equal += all(torch.equal(a, b) for a, b in zip(*picks, strict=True))
    return {"ok": equal == 20, "rounds": 20, "equal": equal}


def resume(
    make: world.Make, network: Any, deterministic: Deterministic, device: torch.device
) -> Found:
    """Four rounds, and two and two more from a checkpoint, bit for bit.

    Runs that are compared so are deterministic ones, or each might take the engine that a
    measurement of its own finds fastest.
    """
    settings = {"deterministic": deterministic}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        straight = world.method(make, network)
        world.fit(straight, device, 4, root=root / "straight", settings=settings)
        world.fit(world.method(make, network), device, 2, root=root / "parts", settings=settings)
        last = root / "parts" / "run" / "checkpoints" / "last.ckpt"
        torch.manual_seed(7)
        resumed = make(network(), **world.COMMON)
        parts = root / "parts"
        world.fit(resumed, device, 4, root=parts, ckpt_path=last, settings=settings)
    return bits(world.left(resumed), world.left(straight))


def repeat(network: Any, deterministic: Deterministic, device: torch.device) -> Found:
    """The same run twice, bit for bit."""
    settings = {"deterministic": deterministic}
    runs = [
        world.left(world.fit(world.method(FedAvg, network), device, 3, settings=settings))
        for _ in range(2)
    ]
    return bits(*runs)


def tiers(device: torch.device) -> Found:
    """Client states on the card, in pinned memory and in files: the same numbers."""
    make = world.METHODS["FedCLUP"]
    places = {"device": None, "memory": None, "file": 0.0}
    kept = {}
    used = {}
    for place, memory in places.items():
        share = 0.25
        if place == "memory":
            share = 0.0
        with mock.patch("pfl.clients.memory_tiers.DEVICE_SHARE", share):
            done = world.fit(world.method(make, world.mlp), device, 3, state_memory=memory)
        used[place] = {tier: n for tier, n in done.store.tiers.used.items() if n}
        kept[place] = world.left(done)
    found = bits(kept["device"], kept["memory"])
    other = bits(kept["device"], kept["file"])
    right = device.type != "cuda" or all(list(used[place]) == [place] for place in places)
    names = found["differ"] + other["differ"]
    return {"ok": found["ok"] and other["ok"] and right, "used": used, "differ": names}


def two_processes(device: torch.device) -> Found:
    """Two processes on one card, by gloo, against one process."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "weights.pt"
        command = [sys.executable, "-m", "benchmarks.gpu.two_processes", str(file), device.type]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
        if done.returncode or not file.is_file():
            return {"ok": False, "says": (done.stderr or done.stdout).strip().splitlines()[-4:]}
        together = torch.load(file, weights_only=True)
    alone = world.left(world.fit(world.method(SCAFFOLD, world.mlp), device))
    found = distances({"model": together}, {"model": alone["network.body.linear1.weight"]})
    return found | {"ok": found["distance"] <= 1e-5}


def out_of_memory(device: torch.device) -> Found:
    """A card whose memory holds a part of the clients: groups are halved, the numbers remain."""
    if device.type != "cuda":
        return {"ok": True, "skipped": "needs a GPU"}
    network = partial(MLP, world.SIDE * world.SIDE, [4096, 2048], world.CLASSES)
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    room = 600 * 2**20  # a model has 38 MiB
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            many = world.fit(
                world.method(FedAvg, network), device, clients_at_once=8, clients_per_round=8
            )
            capped = world.left(many)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    few = world.left(
        world.fit(world.method(FedAvg, network), device, clients_at_once=1, clients_per_round=8)
    )
    said = [str(w.message) for w in caught if "does not hold" in str(w.message)]
    found = distances(capped, few)
    return found | {"ok": bool(said) and found["distance"] <= LINEAR, "says": said, "free": free}


def command_line(device: torch.device) -> Found:
    """The quick start by `python -m pfl fit`, for three rounds."""
    if importlib.util.find_spec("jsonargparse") is None:
        return {"ok": True, "skipped": "jsonargparse is not installed"}
    accelerator = "cpu"
    if device.type == "cuda":
        accelerator = "gpu"
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        missing = _quick_start(config)
        command = [sys.executable, "-m", "pfl", "fit", "--config", str(config)]
        command += ["--trainer.accelerator", accelerator, "--trainer.max_epochs", "3"]
        command += ["--trainer.default_root_dir", f"{folder}/runs"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
        written = sorted(path.name for path in Path(folder).glob("runs/*/*"))
    lines = (done.stdout + done.stderr).strip().splitlines()
    found: Found = {"ok": done.returncode == 0 and "summary.json" in written, "says": lines[-4:]}
    return found | {"written": written, "without": missing}


def _quick_start(config: Path) -> list[str]:
    """Writes the quick start's file, without what needs packages that are missing: these."""
    settings = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    missing = [name for name in ("sklearn", "matplotlib") if importlib.util.find_spec(name) is None]
    if "matplotlib" in missing:
        callbacks = settings["trainer"]["callbacks"]
        settings["trainer"]["callbacks"] = callbacks[:1]  # the other one draws a figure
    if "sklearn" in missing:
        rng = np.random.default_rng(0)
        digits = config.with_name("digits.npz")
        inputs = rng.normal(size=(1797, 1, 8, 8)).astype(np.float32)
        np.savez(digits, inputs=inputs, targets=np.arange(1797) % 10)
        settings["data"]["class_path"] = "ArrayDataModule"
        settings["data"]["init_args"]["file"] = str(digits)
    config.write_text(yaml.safe_dump(settings))
    return missing


Check = Callable[[torch.device], Found]
CHECKS: dict[str, Check] = {
    **{f"iterates/{name}": partial(iterates, name) for name in world.ITERATES},
    "dropout": dropout,
    "draws": draws,
    "resume/FedAvg, MLP": partial(resume, FedAvg, world.mlp, True),
    "resume/FedCLUP, MLP": partial(resume, FedCLUP, world.mlp, True),
    "resume/SCAFFOLD, MLP": partial(resume, SCAFFOLD, world.mlp, True),
    "resume/FedAvg, ResNet": partial(resume, FedAvg, world.resnet, True),
    "repeat/FedAvg, MLP": partial(repeat, world.mlp, True),
    "repeat/FedAvg, ResNet": partial(repeat, world.resnet, True),
    # PyTorch has no deterministic gradient of max pooling on a GPU, and warns.
    "repeat/FedAvg, LeNet-5": partial(repeat, world.lenet, "warn"),
    "states": tiers,
    "out-of-memory": out_of_memory,
    "two-processes": two_processes,
    "command-line": command_line,
}


def run(name: str, device: torch.device) -> Found:
    """Makes a check."""
    set_precision("fp32")
    try:
        return CHECKS[name](device)
    finally:
        torch.use_deterministic_algorithms(False)
