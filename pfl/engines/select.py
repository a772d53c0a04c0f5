"""Which engine runs a network: those of the registry in turn, each checked before it is used."""

from __future__ import annotations

import warnings
from typing import cast

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from pfl.engines.base import Engine, EngineName
from pfl.engines.batch import Batch, Buffers
from pfl.engines.probe import MISFITS, first_line
from pfl.engines.registry import engines_for
from pfl.engines.runner import ModelRunner, Transform, keep_layers
from pfl.engines.sequential import SequentialEngine
from pfl.engines.vmap import VmapEngine
from pfl.engines.winograd import use_winograd
from pfl.errors import ConfigError


def select_transform(requested: EngineName, device: torch.device) -> Transform:
    """Returns the transform for the layers of a network: Winograd's convolutions on CPUs."""
    if device.type == "cpu" and requested in ("auto", "sequential"):
        return use_winograd
    return keep_layers


def select_engine(asked: EngineName, runner: ModelRunner, batch: Batch) -> Engine:
    """Returns the first engine of those for which the user asks that can run the network.

    An engine is used only if its gradient of a few samples of one client, padded, equals that of
    the sequential engine.

    Raises:
        ConfigError: None of them can run this network.
    """
    reason: str | None = None
    trial: Trial | None = None
    for kind in engines_for(asked):
        reason = kind.obstacle(runner, batch, asked)
        if reason is not None:
            continue
        engine = kind.of(runner, batch)
        if isinstance(engine, SequentialEngine):
            return engine
        if trial is None:
            trial = Trial(runner, batch)
        reason = trial.fault(engine, is_auto=asked == "auto")
        if reason is None:
            return engine
    name = type(runner.network).__name__
    raise ConfigError(f"model.engine: {asked} cannot train {name}: {reason}; use sequential")


def select_objective_engine(engine: Engine, batch: Batch) -> Engine:
    """Returns the engine that takes the gradients of a method's objectives, and reports a change.

    It is the engine of all other gradients if that one serves objectives.
    """
    if engine.serves_objectives:
        return engine
    runner = engine.runner
    chosen = cast(Engine, SequentialEngine(engine.runner))
    if engine.batched:
        w = runner.space.vector.detach().clone()[None]
        expected = chosen.gradient(w, Batch(batch.inputs.clone(), batch.targets, batch.counts))[1]
        vmap = VmapEngine(runner)
        if _fault(vmap, w, batch, expected, is_auto=True) is None:
            chosen = vmap
    rank_zero_info(
        f"engine: {chosen.name} takes the gradients of the method's objective, which sees "
        f"features; {engine.name} sees the outputs alone"
    )
    return chosen


class Trial:
    """The gradient of a few samples by the sequential engine, with which others are compared."""

    def __init__(self, runner: ModelRunner, batch: Batch) -> None:
        w = runner.space.vector.detach().clone()[None]
        if runner.has_frozen_part:  # two models that differ, as adapters begin at 0
            w = torch.cat([w, 1.1 * w + 0.01])
            x = batch.inputs
            y = batch.targets
            batch = Batch(torch.cat([x, x]), torch.cat([y, y]), 2 * batch.counts)
        if runner.buffers.size:
            batch = _with_more_samples(batch)
        # A copy of the inputs, since a network may change what it is given.
        copied = Batch(batch.inputs.clone(), batch.targets, batch.counts)
        start = runner.buffers.read(runner.network, w).expand(len(w), -1)
        moved = start.clone()
        self.expected = SequentialEngine(runner).gradient(w, copied, moved)[1]
        runner.buffers.write(runner.network, start[0])
        self.w = w
        self.batch = batch
        self.start = start
        self.moved = moved

    def fault(self, engine: Engine, is_auto: bool) -> str | None:
        """Returns why an engine gives another gradient or other running statistics; else None."""
        buffers = self.start.clone()
        fault = _fault(engine, self.w, self.batch, self.expected, is_auto, buffers)
        if fault is None and not torch.allclose(buffers, self.moved, rtol=1e-3, atol=1e-6):
            return "running statistics move otherwise"
        return fault


def _with_more_samples(batch: Batch) -> Batch:
    """Returns a batch of four times as many samples: the given ones and changed copies.

    BatchNorm of two samples is nearly a sign, whose rounding errors would hide what is equal.
    """
    x = batch.inputs
    if not x.is_floating_point():
        return batch
    inputs = torch.cat([(1 + k / 4) * x.roll(k, -1) for k in range(4)], 1)
    targets = torch.cat([batch.targets] * 4, 1)
    return Batch(inputs, targets, [4 * count for count in batch.counts])


def _fault(
    engine: Engine,
    w: Tensor,
    batch: Batch,
    expected: Tensor,
    is_auto: bool,
    buffers: Buffers = None,
) -> str | None:
    """Returns why an engine does not give the gradients `expected` [A, P]; None if it does.

    The batch is padded for the trial, by a changed copy of its last sample: the sequential engine
    never sees padding, and a network whose samples influence each other gives another gradient.
    With `is_auto` an engine is refused, too, that PyTorch warns is slow for this network.
    """
    padding = batch.inputs[:, -1:].flip(tuple(range(2, batch.inputs.ndim)))
    if padding.is_floating_point():  # tokens stay tokens
        padding = 2 * padding + 1
    inputs = torch.cat([batch.inputs, padding], 1)
    targets = torch.cat([batch.targets, batch.targets[:, -1:]], 1)
    padded = Batch(inputs, targets, batch.counts)
    runner = engine.runner
    try:
        with warnings.catch_warnings():
            if is_auto:  # vmap is slower than the sequential engine where it warns of this
                warnings.filterwarnings("error", "There is a performance drop", UserWarning)
            actual = engine.gradient(w, padded, buffers)[1]
            with torch.no_grad(), runner.precision():
                outputs = engine.outputs(w, batch, buffers)
                engine.scores(outputs.flatten(0, 1), batch.targets.flatten(0, 1))
    except (*MISFITS, UserWarning) as error:
        return first_line(error)
    tolerance = 0.001
    if runner.device.type != "cpu" or runner.is_mixed_precision:
        tolerance = 0.1
    error_norm = (actual - expected).norm()
    is_equal = error_norm <= tolerance * expected.norm() + 1e-6
    # A gradient that is not finite cannot be compared.
    if is_equal or not expected.isfinite().all():
        return None
    return (
        "its gradient for padded samples is not that of the sequential engine, as samples of a "
        "batch change each other, or the engine is wrong"
    )
