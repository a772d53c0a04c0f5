"""One pass through a frozen body for the samples of several clients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from pfl.engines.base import Engine, EngineName
from pfl.engines.batch import Batch, Buffers
from pfl.engines.objective import Objective
from pfl.engines.runner import ModelRunner
from pfl.engines.sequential import SequentialEngine
from pfl.models.adapters import linear

FULL = 1024
"""How many rows a layer's matrix product gets at once; with more a CPU core is no faster."""


class SharedBodyEngine(Engine):
    """Runs a network whose most values are frozen once for several clients.

    The trained parameters have one axis more, [C, ...], and the rows of a batch belong to them in
    turn, as the layers of `pfl.models.adapters` know; `linear` and layer normalization of PyTorch
    get the same form here. The frozen layers see one large batch. Clients whose batches are large
    run one after another, which takes less memory and no more time.

    Attributes:
        places: In how many places of a sample (tokens) the layers are applied, as far as seen.
    """

    name = "shared body"
    batched = True

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.sequential = SequentialEngine(runner)
        self.places = 1

    @classmethod
    def obstacle(cls, runner: ModelRunner, batch: Batch, asked: EngineName) -> str | None:
        if not runner.has_frozen_part:
            return "no part of it is frozen"
        return runner.obstacle_to_batches()

    def gradient(
        self, w: Tensor, batch: Batch, buffers: Buffers = None, objective: Objective | None = None
    ) -> tuple[Tensor, Tensor]:
        width = batch.inputs.shape[1]
        size = FULL // (width * self.places)
        if size <= 1:
            return self.sequential.gradient(w, batch)
        g = torch.empty_like(w)
        loss = w.new_empty(len(w))
        weights = self.runner.weights(batch, w.dtype)
        for first in range(0, batch.clients, size):
            rows = slice(first, first + size)
            targets = batch.targets[rows].flatten(0, 1)
            with torch.enable_grad(), self.runner.precision():
                places = self.runner.space.split(w[rows].detach())
                for values in places.values():
                    values.requires_grad_()
                outputs = self._run(places, batch.inputs[rows], training=True)
                losses = self.runner.per_sample(outputs, targets)
                means = (losses.view(-1, width) * weights[rows]).sum(1)
                parts = torch.autograd.grad(means.sum(), [*places.values()], materialize_grads=True)
            loss[rows] = means.detach()
            torch.cat([part.flatten(1) for part in parts], 1, out=g[rows])
        return loss, g

    def outputs(self, w: Tensor, batch: Batch, buffers: Buffers = None) -> Tensor:
        size = max(1, FULL // (batch.inputs.shape[1] * self.places))
        parts = []
        for first in range(0, batch.clients, size):
            rows = slice(first, first + size)
            inputs = batch.inputs[rows]
            outputs = self._run(self.runner.space.split(w[rows]), inputs, training=False)
            parts.append(outputs.unflatten(0, inputs.shape[:2]))
        return torch.cat(parts)

    def _run(self, parameters: dict[str, Tensor], inputs: Tensor, *, training: bool) -> Tensor:
        """Returns what models [C, ...] by parameter give for inputs [C, B, ...], [C B, ...]."""
        network, _ = self.runner.replica(training=training)
        flat = self.runner.laid_out(inputs.flatten(0, 1))
        with _Stacked() as mode:
            outputs: Tensor = functional_call(network, parameters, (flat,))
        self.places = max(self.places, mode.rows // len(flat))
        return outputs


class _Stacked(TorchFunctionMode):
    """Inside, layers of PyTorch take parameters [C, ...]; `rows` is the most that a layer got."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.linear:
            self.rows = max(self.rows, args[0].shape[:-1].numel())
            return linear(*args, **kwargs)
        if func is nn.functional.layer_norm:
            return _layer_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _layer_norm(
    x: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Returns the normalization by one model, or by C models that have the rows in turn."""
    axes = len(normalized_shape)
    if all(p is None or p.ndim == axes for p in (weight, bias)):
        return nn.functional.layer_norm(x, normalized_shape, weight, bias, eps)
    y = nn.functional.layer_norm(x, normalized_shape, eps=eps)
    for p, change in ((weight, torch.mul), (bias, torch.add)):
        if p is not None and p.ndim == axes:
            y = change(y, p)
        elif p is not None:
            turns = y.unflatten(0, (len(p), -1))
            between = [1] * (turns.ndim - 1 - axes)
            y = change(turns, p.reshape(len(p), *between, *normalized_shape)).flatten(0, 1)
    return y
