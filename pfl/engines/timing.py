"""The choice between engines on a GPU, where only a measurement tells which one is fastest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from lightning.pytorch.utilities.memory import garbage_collection_cuda, is_oom_error
from torch import Tensor

from pfl.engines.base import Engine
from pfl.engines.batch import StepBlock
from pfl.engines.graph import GraphEngine, recording_of
from pfl.engines.local_step import Step
from pfl.engines.probe import MISFITS, first_line
from pfl.engines.registry import all_engines
from pfl.engines.sequential import SequentialEngine

COMPARED = 2
"""How many clients' steps are compared with those of the sequential engine."""
RATE = 0.01
CLEARLY = 0.8
"""A later candidate must take this share of the best time so far, as times vary."""
ENOUGH = 0.1
"""Seconds after which a candidate has been timed often enough."""
NO_MEMORY = "no memory"


@dataclass
class Timing:
    """What was found out about the engines that may run a network.

    Attributes:
        engine: The fastest engine that agrees with the sequential one.
        milliseconds: The time of a local step of `clients` clients, by the engine's name.
        refused: Why another engine cannot be used, by its name.
        clients: How many clients took the step.
    """

    engine: Engine
    clients: int
    milliseconds: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def describe(self) -> str:
        """Returns the choice and the times in one line."""
        times = sorted(self.milliseconds.items(), key=lambda item: item[1])
        found = ", ".join(f"{name} {ms:.3g}" for name, ms in times)
        return (
            f"engine: {self.engine.name}; milliseconds of a local step of {self.clients} "
            f"client(s): {found}"
        )


def candidates(engine: Engine, clients: int) -> Iterator[Engine]:
    """Yields the engines that are compared on a GPU, the one in use last.

    Args:
        engine: The engine that `select_engine` has chosen.
        clients: How many clients train together.
    """
    if engine.batched:
        yield GraphEngine(engine, engine)
    for kind in all_engines():
        recorded = kind.to_record(engine, clients)
        if recorded is not None:
            yield GraphEngine(recorded, engine)
    yield engine


def engine_named(name: str, engine: Engine, clients: int) -> Engine | None:
    """Returns the engine of this name that `fastest_engine` may choose; None if there is none."""
    for one in candidates(engine, clients):
        if one.name == name:
            return one
    sequential = SequentialEngine(engine.runner)
    if sequential.name == name:
        return sequential
    return None


def fastest_engine(engine: Engine, block: StepBlock) -> Timing:
    """Times the candidates on some local steps, and returns the fastest one that is right.

    With deterministic algorithms (`trainer.deterministic`) it is the first one that is right, so
    that a repeated run has the same one. Where the memory holds no candidate, half of the clients
    take the steps.

    Args:
        engine: The engine that `select_engine` has chosen.
        block: Local steps of as many clients, and on as many samples, as the run's.
    """
    runner = engine.runner
    found = Timing(engine, block.clients)
    sequential = SequentialEngine(runner)
    w = runner.space.vector.detach()
    few = _some_clients(block, COMPARED)
    try:
        seconds = _time(sequential, w, few)
        expected = _move(sequential, w, few)
    except RuntimeError as error:  # also of a backward pass
        if not is_oom_error(error):
            raise
        found.refused[sequential.name] = NO_MEMORY
        garbage_collection_cuda()
        return found
    found.milliseconds["sequential"] = 1000 * seconds * block.clients / few.clients
    best: Engine = sequential
    takes_first = torch.are_deterministic_algorithms_enabled()
    recording = recording_of(engine)
    for one in candidates(engine, block.clients):
        if one is engine and best is not sequential and recording in found.milliseconds:
            break  # its own recording is faster than it is
        try:
            limit = found.milliseconds[best.name] / 1000
            milliseconds = 1000 * _time(one, w, block, 2 * limit)
            agrees = all(
                _agree(actual[: few.clients], right, runner.is_mixed_precision)
                for actual, right in zip(_move(one, w, block), expected, strict=True)
            )
        except (*MISFITS, torch.OutOfMemoryError) as error:
            found.refused[one.name] = first_line(error)
            if is_oom_error(error):
                found.refused[one.name] = NO_MEMORY
        else:
            if agrees:
                found.milliseconds[one.name] = milliseconds
            else:
                found.refused[one.name] = "its steps are not those of the sequential engine"
        if one.name in found.refused:
            one.release()
            garbage_collection_cuda()
        elif takes_first or milliseconds < CLEARLY * found.milliseconds[best.name]:
            best.release()
            best = one
            if takes_first:
                break
        else:
            one.release()
    if best is sequential and NO_MEMORY in found.refused.values() and block.clients > 1:
        return fastest_engine(engine, _some_clients(block, -(-block.clients // 2)))
    found.engine = best
    return found


def _some_clients(block: StepBlock, clients: int) -> StepBlock:
    """Returns the first clients' steps of a block."""
    return replace(block, picks=block.picks[:, :clients], counts=block.counts[:, :clients])


def _time(engine: Engine, w: Tensor, block: StepBlock, slow: float = 0.0) -> float:
    """Takes the steps of a block a few times, from w [P]; returns the seconds of one of them.

    The first time warms up. One time is enough for an engine that takes longer than `slow`.
    """
    v = w.repeat(block.clients, 1)
    buffers = _buffers(engine, v)
    engine.descend(v, [block], Step(RATE), buffers)
    seconds: list[float] = []
    first = time.perf_counter()
    while len(seconds) < 8 and time.perf_counter() - first < ENOUGH:
        _wait(v.device)
        begun = time.perf_counter()
        engine.descend(v, [block], Step(RATE), buffers)
        _wait(v.device)
        seconds.append((time.perf_counter() - begun) / len(block.counts))
        if seconds[-1] > slow:
            break
    return min(seconds)


def _move(engine: Engine, w: Tensor, block: StepBlock) -> tuple[Tensor, Tensor]:
    """Returns how each client's first step moves a model w, [C, P], and its statistics, [C, Q].

    Later steps tell less, since deep networks make large differences of the rounding in the first.
    """
    v = w.repeat(block.clients, 1)
    start = _buffers(engine, v)
    buffers = start.clone()
    engine.descend(v, [block.steps(0, 1)], Step(RATE), buffers)
    return v.sub_(w), buffers.sub_(start)


def _buffers(engine: Engine, v: Tensor) -> Tensor:
    """Returns the running statistics of the untrained network for each of some models, [C, Q]."""
    runner = engine.runner
    return runner.buffers.read(runner.original, v).repeat(len(v), 1)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _agree(actual: Tensor, expected: Tensor, is_mixed_precision: bool) -> bool:
    """Whether moves of models are equal to the rounding of a GPU, which may be TF32's."""
    if not expected.isfinite().all():  # then nothing can be compared
        return True
    tolerance = 0.1
    if is_mixed_precision:
        tolerance = 0.3
    return bool((actual - expected).norm() <= tolerance * expected.norm())
