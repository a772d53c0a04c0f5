"""Our side: rounds of a shape by the Trainer, with nothing on but its own CSV files."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.gpu.measuring import MOST, PRECISIONS, Memory, launch_microseconds
from benchmarks.gpu.numbers import times
from benchmarks.gpu.round_clock import RoundClock
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.work import products
from benchmarks.peers.task import Task
from datamodules import TensorDataModule
from pfl import Trainer
from pfl.algorithms import FederatedAlgorithm


def run(
    shape: Shape,
    data: TensorDataModule,
    device: torch.device,
    *,
    precision: str = "fp32",
    engine: str = "auto",
    evaluate: bool = False,
    seconds: float = 1.5,
    weights: Path | None = None,
) -> dict[str, Any]:
    """Times rounds; writes the weights after some of them into the folder `weights`."""
    gc.collect()  # a Trainer is in cycles: the last case would count as memory of this one
    memory = Memory(device)
    clock = RoundClock(device, seconds, weights)
    algorithm = shape.algorithm(engine)
    work = None
    if shape.counted:
        work = products(shape.make(), shape.input)
    launch = launch_microseconds(device)
    fit(algorithm, shape, data, device, precision, clock, evaluate)
    result = times(clock.seconds, clock.samples, work)
    result["first_s"] = clock.first
    result["engine"] = algorithm.oracle.engine.name
    timing = algorithm.oracle.timing
    if timing is not None:
        result["timed"] = timing.milliseconds
        result["refused"] = timing.refused
    result["launch_us"] = launch
    result["loss"] = algorithm.row.get("train/loss")
    return result | clock.kernels | memory.peak()


def fit(
    algorithm: FederatedAlgorithm,
    shape: Shape,
    data: TensorDataModule,
    device: torch.device,
    precision: str,
    clock: RoundClock,
    evaluate: bool,
) -> None:
    """Trains until the clock ends the run."""
    settings: dict[str, Any] = {}
    if not evaluate:
        settings["limit_val_batches"] = 0
    with tempfile.TemporaryDirectory() as root:
        trainer = Trainer(
            max_epochs=MOST + 3,
            accelerator=device.type,
            precision=PRECISIONS[precision],
            default_root_dir=root,
            callbacks=[clock],
            enable_progress_bar=False,
            enable_checkpointing=False,
            **settings,
        )
        trainer.fit(algorithm, datamodule=shape.loop(data, evaluate))


def evaluation(
    shape: Shape, data: TensorDataModule, device: torch.device, seconds: float
) -> dict[str, Any]:
    """Times rounds with an evaluation of all clients after each, and without."""
    bare = run(shape, data, device, seconds=seconds / 2)
    result = run(shape, data, device, seconds=seconds / 2, evaluate=True)
    result["bare_ms"] = bare["ms"]
    result["evaluation"] = (result["ms"] - bare["ms"]) / bare["ms"]
    return result


def task(shape: Shape, data: TensorDataModule, key: str, rounds: int) -> Task:
    """Returns the shape as arrays for another framework: a first round and `rounds` more."""
    loop = shape.loop(data)
    inputs, targets = data.samples.gather(torch.arange(shape.samples))
    return Task(
        key=key,
        network=shape.network,
        arguments=shape.arguments,
        epochs=shape.epochs,
        batch=shape.batch,
        rate=shape.rate,
        inputs=inputs.numpy(),
        targets=targets.numpy(),
        owned=[np.asarray(data.partition.train[i]) for i in range(shape.clients)],
        cohorts=np.stack([loop.cohort(r) for r in range(rounds + 1)]),
        weights=[p.detach().numpy() for p in shape.make().parameters()],
    )


def moved(network: nn.Module, folder: Path, rounds: int) -> float:
    """Returns how far our weights are from the first ones after a number of rounds."""
    ours = torch.load(folder / f"{rounds}.pt", weights_only=True)
    first = torch.cat([p.detach().flatten() for p in network.parameters()])
    return float((ours - first).double().norm())
