"""Which engine runs a network: candidates in order of speed, each checked before it is used."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import cast

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from pfl.engines.base import Engine, EngineName
from pfl.engines.batch import Batch, Buffers
from pfl.engines.chain import Chain
from pfl.engines.chain_engine import ChainEngine, CompiledChainEngine
from pfl.engines.debug import DebugEngine
from pfl.engines.probe import MISFITS, first_line
from pfl.engines.runner import ModelRunner, Transform, keep_layers
from pfl.engines.sequential import SequentialEngine
from pfl.engines.shared_body import SharedBodyEngine
from pfl.engines.vmap import VmapEngine
from pfl.engines.winograd import use_winograd
from pfl.errors import ConfigError


def select_transform(requested: EngineName, device: torch.device) -> Transform:
    """Returns the transform for the layers of a network: Winograd's convolutions on CPUs."""
    if device.type != "cpu" or requested in ("vmap", "debug"):
        return keep_layers
    return use_winograd


def select_engine(requested: EngineName, runner: ModelRunner, batch: Batch) -> Engine:
    """Returns the requested engine, or with "auto" the fastest one that can run the network.

    A candidate is used only if its gradient of a few samples of one client, padded, equals that of
    the sequential engine.

    Raises:
        ConfigError: "vmap" was requested and cannot run this network.
    """
    sequential = SequentialEngine(runner)
    if requested == "sequential":
        return sequential
    if requested == "debug":
        return DebugEngine(runner)
    reason = obstacle(runner)
    may_be_chain = (
        requested == "auto"
        and runner.buffers.size > 0
        and not runner.is_stochastic
        and Chain.of(runner.network, runner.space, batch.inputs[0], runner.buffers) is not None
    )
    if reason is None or may_be_chain:
        w = runner.space.vector.detach().clone()[None]
        if _has_body(runner):  # two models that differ, as adapters begin at 0
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
        expected = sequential.gradient(w, copied, moved)[1]
        runner.buffers.write(runner.network, start[0])
        for engine in _candidates(requested, runner, batch, reason is None):
            buffers = start.clone()
            fault = _fault(engine, w, batch, expected, requested == "auto", buffers)
            if fault is None and torch.allclose(buffers, moved, rtol=1e-3, atol=1e-6):
                return engine
            reason = fault or "running statistics move otherwise"
    if requested == "vmap":
        name = type(runner.network).__name__
        raise ConfigError(f"engine: vmap cannot train {name}: {reason}; use engine: sequential")
    return sequential


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


def _candidates(
    requested: EngineName, runner: ModelRunner, batch: Batch, is_plain: bool = True
) -> Iterator[Engine]:
    """Yields engines that may run the network, the fastest first.

    Chains alone may run a network that is not `is_plain`: that has an `obstacle`.
    """
    convolves = any(isinstance(m, CONVOLUTIONS) for m in runner.network.modules())
    on_cpu = requested == "auto" and runner.device.type == "cpu"
    one_by_one = on_cpu and convolves
    # The kernels of chains are written for one precision.
    chain = None
    if not runner.is_mixed_precision:
        chain = Chain.of(runner.network, runner.space, batch.inputs[0], runner.buffers)
    if chain is not None and (chain.batched or on_cpu):
        if CompiledChainEngine.supports(runner, batch.targets[0]):
            yield CompiledChainEngine(runner, chain)
        yield ChainEngine(runner, chain)
    if not is_plain:
        return
    if requested == "auto" and _has_body(runner):
        yield SharedBodyEngine(runner)
    if not one_by_one:
        yield VmapEngine(runner)


def _has_body(runner: ModelRunner) -> bool:
    """Whether a part of the network is frozen."""
    return any(not p.requires_grad for p in runner.original.parameters())


CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


def obstacle(runner: ModelRunner) -> str | None:
    """Returns why only the sequential engine can run a network; None if nothing is known."""
    if runner.buffers.size:
        return f"it keeps running statistics ({runner.buffers.names[0]})"  # chains may, too
    if runner.is_stochastic:
        return "it draws random numbers (dropout elsewhere than in a chain of layers)"
    modules = runner.network.named_modules(remove_duplicate=False)
    having = [module for _, module in modules if any(True for _ in module.parameters())]
    if len(having) > len(set(having)):  # `functional_call` runs such a module with other parameters
        return "it uses a module with parameters twice"
    return None


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
    return "samples of a batch change each other"
