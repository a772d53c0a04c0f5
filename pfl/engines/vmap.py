"""All clients in one batched call of `torch.func`."""

from __future__ import annotations

from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from pfl.engines.base import Engine, EngineName
from pfl.engines.batch import Batch, Buffers
from pfl.engines.dropout import drawing
from pfl.engines.local_step import Step
from pfl.engines.objective import BatchSamples, Objective, Outputs, run_watched
from pfl.engines.runner import ModelRunner

Parameters = dict[str, Tensor]
CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


class VmapEngine(Engine):
    """Runs all clients at once, for networks without running statistics or a generator's draws."""

    name = "vmap"
    batched = True
    serves_objectives = True

    @classmethod
    def obstacle(cls, runner: ModelRunner, batch: Batch, asked: EngineName) -> str | None:
        reason = runner.obstacle_to_batches()
        convolves = any(isinstance(m, CONVOLUTIONS) for m in runner.network.modules())
        if reason is None and asked == "auto" and convolves and runner.device.type == "cpu":
            return "on CPUs convolutions run client after client, with a thread for each"
        return reason

    @classmethod
    def to_record(cls, engine: Engine, clients: int) -> Engine | None:
        if not engine.batched or isinstance(engine, VmapEngine):
            return None
        return cls(engine.runner)

    def gradient(
        self, w: Tensor, batch: Batch, buffers: Buffers = None, objective: Objective | None = None
    ) -> tuple[Tensor, Tensor]:
        runner = self.runner
        given: dict[str, Any] = {}
        if objective is not None:
            given = self._batch_arguments(batch, objective)
        network, _ = runner.replica(training=True)

        def weighted(
            w: Tensor,
            inputs: Tensor,
            targets: Tensor,
            weights: Tensor,
            seed: Tensor,
            own: dict[str, Any],
        ) -> Tensor:
            call = partial(functional_call, network, runner.space.split(w), (inputs,))
            if objective is None:
                with drawing(seed):
                    outputs = call()
                return (runner.per_sample(outputs, targets) * weights).sum()
            with drawing(seed):
                result = run_watched(network, runner.head, call)
            return (objective.losses(result, BatchSamples(inputs, targets), own) * weights).sum()

        weights = runner.weights(batch, w.dtype)
        gradients = vmap(grad_and_value(weighted))
        with torch.enable_grad(), runner.precision():
            seeds = self.seeds_of(batch)[:, None]
            g, loss = gradients(w.detach(), batch.inputs, batch.targets, weights, seeds, given)
        return loss.detach(), g.detach()

    def _batch_arguments(self, batch: Batch, objective: Objective) -> dict[str, Any]:
        """Returns the tensors of the batch's clients, and what their older models give."""
        A = batch.clients
        runner = self.runner
        given: dict[str, Any] = {name: rows[:A] for name, rows in objective.own.items()}
        network, _ = runner.replica(training=False)

        def run(w: Tensor, inputs: Tensor) -> Outputs:
            call = partial(functional_call, network, runner.space.split(w), (inputs,))
            return run_watched(network, runner.head, call)

        with torch.no_grad(), runner.precision():
            for name, models in objective.older.items():
                rows = models[:A]
                if models.dim() == 1:
                    rows = models.expand(A, -1)
                given[name] = vmap(run)(rows, batch.inputs)
        return given

    def take_step(
        self, v: Tensor, batch: Batch, step: Step, buffers: Buffers, objective: Objective | None
    ) -> Tensor:
        if step.moving is None or objective is not None or step.rule is not None:
            return super().take_step(v, batch, step, buffers, objective)
        # Only the gradient of the parameters that move is computed.
        runner = self.runner
        u = step.gradient_point(v)
        network, _ = runner.replica(training=True)
        places = runner.space.split(v)
        at = runner.space.split(u.detach())
        names = list(compress(at, step.moving))
        chosen = {name: at.pop(name) for name in names}

        def weighted(
            chosen: Parameters,
            fixed: Parameters,
            inputs: Tensor,
            targets: Tensor,
            weights: Tensor,
            seed: Tensor,
        ) -> Tensor:
            with drawing(seed):
                outputs = functional_call(network, {**fixed, **chosen}, (inputs,))
            return (runner.per_sample(outputs, targets) * weights).sum()

        weights = runner.weights(batch, v.dtype)
        gradients = vmap(grad_and_value(weighted))
        with torch.enable_grad(), runner.precision():
            seeds = self.seeds_of(batch)[:, None]
            g, loss = gradients(chosen, at, batch.inputs, batch.targets, weights, seeds)
        for name in names:
            places[name].mul_(step.shrink).sub_(g[name].detach(), alpha=step.lr)
        step.apply_after_gradient(v, u)
        return loss.detach()

    def outputs(self, w: Tensor, batch: Batch, buffers: Buffers = None) -> Tensor:
        network, _ = self.runner.replica(training=False)

        def run(w: Tensor, inputs: Tensor) -> Tensor:
            return functional_call(network, self.runner.space.split(w), (inputs,))

        return vmap(run)(w, batch.inputs)
