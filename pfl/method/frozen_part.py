"""The frozen part of a network before all that is trained runs once for each different sample."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from pfl.clients import ClientData
from pfl.clients.memory_tiers import mapped
from pfl.datamodules.samples.samples import TensorSamples, scaled
from pfl.engines.batch import Batch, cast
from pfl.engines.oracle import Oracle
from pfl.engines.probe import MISFITS
from pfl.engines.runner import ModelRunner
from pfl.engines.sequential import SequentialEngine
from pfl.machine import free_memory
from pfl.models.adapters import block_names
from pfl.parameters import checksum, frozen_parameters, private_copy

AT_ONCE = 32  # samples of one forward pass of the frozen part


def store_frozen_part(oracle: Oracle, data: ClientData, batch: Batch) -> nn.Module | None:
    """Replaces samples by what the frozen part of a network makes of them, where that is possible.

    It ends before the head, where nothing else is trained, or before the first of the blocks that
    has a trained parameter. What it makes of each different sample is kept in memory, or, where
    that is short, in a mapped file. Samples stay as they are if no parameter is frozen, if they are
    streamed, transformed or poisoned, if the network draws random numbers, keeps running statistics
    or mixes the samples of a batch, and under an engine that was chosen by name. A run in 64-true
    whose network is float64 only later stores nothing.

    Args:
        oracle: The network, after `inspect`.
        data: The samples; `data.samples` is replaced.
        batch: Some of them.

    Returns:
        The network that gives for the new samples what the whole network gives for the old ones;
        None: nothing is replaced.

    Raises:
        ConfigError: There is not enough room.
    """
    runner = oracle.runner
    samples = data.samples
    plain = data.in_memory and not (data.transforms or data.poison)
    changes = runner.is_stochastic or runner.mixes_samples
    at = _first_trained(runner)
    nothing = not frozen_parameters(runner.original)  # a flattening layer is no work worth memory
    if oracle.requested != "auto" or changes or not plain or at is None or nothing:
        return None
    assert isinstance(samples, TensorSamples)
    few = batch.inputs[0]
    try:
        part = _FrozenPart(runner, at, few)
        if not _is_exact(runner, part.rest, batch, part.inputs(torch.arange(len(few)))):
            return None
    except MISFITS:
        return None
    # Equal samples, of the same bytes, are one.
    raw = np.ascontiguousarray(samples.inputs.cpu().numpy()).reshape(len(samples), -1)
    keys = raw.view(np.dtype((np.void, raw.itemsize * raw.shape[1])))[:, 0]
    _, first, place = np.unique(keys, return_index=True, return_inverse=True)
    different = samples.inputs[torch.from_numpy(first).to(samples.inputs.device)]
    part = _FrozenPart(runner, at, different, data.frozen)
    data.frozen = part.key, part.rows
    inputs = part.inputs(torch.from_numpy(place).to(samples.inputs.device))
    data.show(TensorSamples(inputs, samples.targets))
    rank_zero_info(
        f"engine: what comes before {at!r} is not trained, and runs once for each of "
        f"{len(first)} different samples"
    )
    return part.rest


def _first_trained(runner: ModelRunner) -> str | None:
    """Returns the head's name, if it alone is trained, or that of the first block that is, too."""
    names = [layer.name for layer in runner.space.layers]
    if runner.head and all(name.startswith(f"{runner.head}.") for name in names):
        return runner.head
    blocks = block_names(runner.original)
    trained = [b for b in blocks if any(name.startswith(f"{b}.") for name in names)]
    return trained[0] if trained and trained[0] != blocks[0] else None


def _is_exact(runner: ModelRunner, rest: nn.Module, batch: Batch, inputs: Tensor) -> bool:
    """Whether the rest gives the loss and the gradient of the whole network, at another model."""
    own = replace(runner, original=rest, network=private_copy(rest), channels_last=False)
    w = runner.space.vector.detach()
    noise = torch.randn(w.shape, generator=torch.Generator().manual_seed(0), dtype=w.dtype)
    w = (w + 0.02 * noise.to(w.device))[None]
    short = Batch(inputs[None], batch.targets, batch.counts)
    copied = Batch(batch.inputs.clone(), batch.targets, batch.counts)
    whole = SequentialEngine(runner).gradient(w, copied)
    pairs = zip(whole, SequentialEngine(own).gradient(w, short), strict=True)
    return all(bool((one - other).norm() <= 1e-3 * one.norm()) for one, other in pairs)


class _Reached(Exception):
    """Ends a forward pass at a module, with what the module is given."""


class _FrozenPart:
    """What a network computes before a module `at`, for some samples; and the rest of the network.

    `rows` [U, ...] are what `at`, the head or a block, is given for each of the samples [U, ...];
    `known` are the checksum and the rows of another frozen part, which may be the same.
    """

    def __init__(
        self, runner: ModelRunner, at: str, samples: Tensor, known: tuple[str, Tensor] | None = None
    ) -> None:
        self.runner = runner
        self.at = at
        self.samples = samples
        network = runner.original
        self.rows = known[1] if known and known[0] == self.key else self._run()
        if at == runner.head:
            self.rest = private_copy(network.get_submodule(at))
            for name in reversed(at.split(".")):
                self.rest = nn.Sequential(OrderedDict({name: self.rest}))
            return
        self.rest = private_copy(network)
        for name in block_names(network):
            if name == at:
                break
            self.rest.get_submodule(name).forward = self._skip
        self.rest.register_forward_pre_hook(self._begin)
        self.rest.get_submodule(at).register_forward_pre_hook(self._give)

    @cached_property
    def key(self) -> str:
        """A checksum of the frozen parameters, the buffers and the samples."""
        network = self.runner.original
        tensors = {**frozen_parameters(network), **dict(network.named_buffers())}
        return checksum({**tensors, self.at: self.samples})

    def __deepcopy__(self, memo: Any) -> _FrozenPart:
        return self  # the copies of a network share the rows

    def inputs(self, places: Tensor) -> Tensor:
        """Returns the inputs of `rest` for the samples at these places."""
        return self.rows[places] if self.at == self.runner.head else places

    @torch.no_grad()
    def _run(self) -> Tensor:
        """Returns the rows, for which the frozen part runs."""
        runner = self.runner
        rows = None
        network, _ = runner.load(runner.space.vector.detach(), None, training=False)
        hook = network.get_submodule(self.at).register_forward_pre_hook(self._stop)
        try:
            for begin in range(0, len(self.samples), AT_ONCE):
                places = slice(begin, begin + AT_ONCE)
                value = self._reached(network, self._whole(places))
                if rows is None:
                    rows = _room((len(self.samples), *value.shape[1:]), value)
                rows[places] = value
        finally:
            hook.remove()
        assert rows is not None
        return rows

    def _reached(self, network: nn.Module, inputs: Tensor) -> Tensor:
        try:
            with self.runner.precision():
                network(self.runner.laid_out(inputs))
        except _Reached as reached:
            value = reached.args[0]
            if len(value) == len(inputs):
                return value
        raise TypeError(f"{self.at} is not given a row of each sample")

    def _whole(self, places: Tensor | slice) -> Tensor:
        """Returns the samples themselves."""
        samples = self.samples[places].clone()  # a network may change them in place
        return cast(scaled(samples), self.runner.space.vector.dtype)

    # ---- hooks --------------------------------------------------------------------------------

    def _stop(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        raise _Reached(*args[:1])

    def _begin(self, network: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        network.get_submodule(self.at).places = args[0]  # each copy of the network has its own
        return (self._whole(args[0]),)

    def _give(self, block: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return self.rows[block.places], *args[1:]

    def _skip(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x


def _room(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Returns an empty tensor, in a mapped file if it would take half of the free memory."""
    size = prod(shape)
    if like.device.type != "cpu" or size * like.element_size() <= free_memory() // 2:
        return like.new_empty(shape)
    return mapped(size, like.dtype, "what a network's frozen layers give").view(shape)
