"""Times a loop by hand, and compares its weights with ours."""

from __future__ import annotations

import gc
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.hand import SIDES, autocast
from benchmarks.gpu.measuring import (
    FIRST_ROUNDS,
    MARKS,
    PROFILED,
    Kernels,
    Memory,
    distance,
    launch_microseconds,
    planned,
    synchronize,
)
from benchmarks.gpu.numbers import times
from benchmarks.gpu.order import Order, order_of
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.work import products
from datamodules import TensorDataModule
from pfl.clients import ClientData

TOLERANCE = {"fp32": 1e-3, "tf32": 3e-2, "bf16": 1e-1}  # after the first round
GROWTH = 10  # until the last one, as rounding grows with the steps of deep networks


class Rounds:
    """The samples of a shape on a device, and the orders of its rounds.

    The orders are drawn on the CPU, by our own code; a check says whether a GPU draws the same.
    """

    def __init__(self, shape: Shape, data: TensorDataModule, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        self.loop = shape.loop(data)
        self.loop.setup()
        self.drawn = ClientData(data, "cpu", self.loop.seed)
        inputs, targets = data.samples.gather(torch.arange(shape.samples))
        self.inputs = inputs.to(device)
        self.targets = targets.to(device)
        self._orders: dict[int, Order] = {}

    def order(self, round_index: int) -> Order:
        """Returns the order of a round, from 0, on the device."""
        if round_index not in self._orders:
            drawn = order_of(self.loop, self.drawn, self.shape, round_index)
            self._orders[round_index] = drawn.to(self.device)
        return self._orders[round_index]


def run(
    name: str,
    rounds: Rounds,
    *,
    precision: str = "fp32",
    seconds: float = 1.5,
    limit: float = 4.0,
    weights: Path,
) -> dict[str, Any]:
    """Times a side of `hand.SIDES`; raises ValueError where its weights are not ours."""
    device = rounds.device
    shape = rounds.shape
    saved = {int(path.stem) for path in weights.glob("*.pt")}
    if not saved:
        raise ValueError("our own weights are missing, with which it would be compared")
    gc.collect()
    memory = Memory(device)
    launch = launch_microseconds(device)
    side = SIDES[name](
        shape.make().to(device),
        rounds.inputs,
        rounds.targets,
        shape.rate,
        autocast(device, precision),
        limit,
    )
    passed = [_timed(side, rounds.order(0), device)]
    total = max(mark for mark in MARKS if mark in saved and mark <= 2)
    apart = {"distance_first": _distance(side, weights, 1)}
    if total > 1:
        passed.append(_timed(side, rounds.order(1), device))
        if passed[1] < seconds:
            wanted = FIRST_ROUNDS + planned(seconds, passed[1])
            total = max(mark for mark in saved if mark <= wanted)
    for r in range(2, total):
        passed.append(_timed(side, rounds.order(r), device))
    apart["distance"] = _distance(side, weights, total)
    first = apart["distance_first"]
    limit_of_first = TOLERANCE[precision]
    if not (first <= limit_of_first and apart["distance"] <= GROWTH * limit_of_first):
        raise ValueError(
            f"after {total} rounds its weights are {apart['distance']:.1e} from ours "
            f"({first:.1e} after the first)"
        )
    counted = passed[FIRST_ROUNDS:] or passed[-1:]
    first_counted = total - len(counted)
    samples = statistics.mean(rounds.order(r).samples for r in range(first_counted, total))
    work = None
    if shape.counted:
        work = products(shape.make(), shape.input)
    result = times(counted, samples, work)
    result["first_s"] = passed[0]
    result["launch_us"] = launch
    result |= apart | memory.peak()
    middle = statistics.median(counted)
    if middle < PROFILED:
        kernels = Kernels(device)
        kernels.start()
        side.round(rounds.order(total))
        kernels.stop()
        result |= kernels.found(middle)
    return result


def _timed(side: Any, order: Order, device: torch.device) -> float:
    synchronize(device)
    begun = time.perf_counter()
    side.round(order)
    synchronize(device)
    return time.perf_counter() - begun


def _distance(side: Any, weights: Path, rounds: int) -> float:
    ours = torch.load(weights / f"{rounds}.pt", weights_only=True)
    return distance(side.weights(), ours)
