"""The reference engine: one client after another, for any network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from pfl.engines.base import Engine
from pfl.engines.batch import Batch, Buffers, some_rows
from pfl.engines.dropout import drawing
from pfl.engines.local_step import Step
from pfl.engines.objective import BatchSamples, Objective, run_watched
from pfl.randomness import isolated, seed_generators

Consume = Callable[[int, Sequence[Tensor], Sequence[Tensor]], None]


class SequentialEngine(Engine):
    """Runs client after client with PyTorch's autograd.

    Random numbers of a network depend on the client and the step, not on who else trains.
    """

    name = "sequential"
    serves_objectives = True

    def gradient(
        self, w: Tensor, batch: Batch, buffers: Buffers = None, objective: Objective | None = None
    ) -> tuple[Tensor, Tensor]:
        g = torch.empty_like(w)

        def keep(c: int, _: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
            torch.cat([piece.reshape(-1) for piece in pieces], out=g[c])

        return self._each_client(w, batch, buffers, keep, objective=objective), g

    def take_step(
        self, v: Tensor, batch: Batch, step: Step, buffers: Buffers, objective: Objective | None
    ) -> Tensor:
        if step.rule is not None:
            return super().take_step(v, batch, step, buffers, objective)
        # Parameter by parameter: no gradient vector is written.
        u = step.gradient_point(v)

        def move(c: int, places: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
            if step.offset is not None:  # without an offset the parameters are views of the row
                places = chosen(list(self.runner.space.split(v[c]).values()), step.moving)
            if step.shrink != 1 and step.moving is None:
                v[c].mul_(step.shrink)
            for place, piece in zip(places, pieces, strict=True):
                if step.shrink != 1 and step.moving is not None:
                    place.mul_(step.shrink)
                place.sub_(piece, alpha=step.lr)

        loss = self._each_client(u, batch, buffers, move, step.moving, objective)
        step.apply_after_gradient(v, u)
        return loss

    def _each_client(
        self,
        w: Tensor,
        batch: Batch,
        buffers: Buffers,
        consume: Consume,
        moving: list[bool] | None = None,
        objective: Objective | None = None,
    ) -> Tensor:
        """Returns the losses [A]; `consume` gets each row, its parameters and their gradients."""
        runner = self.runner
        losses = []
        randomness: AbstractContextManager[None] = nullcontext()
        if runner.is_stochastic:
            randomness = isolated(w.device)
        with torch.enable_grad(), runner.precision(), randomness:
            for c in range(batch.clients):
                own = some_rows(buffers, c)
                loss, parameters, pieces = self.run_client(c, w[c], batch, own, moving, objective)
                with torch.no_grad():
                    consume(c, parameters, pieces)
                losses.append(loss)
        return torch.stack(losses).to(w.dtype)

    def run_client(
        self,
        c: int,
        w: Tensor,
        batch: Batch,
        buffers: Buffers,
        moving: list[bool] | None = None,
        objective: Objective | None = None,
    ) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
        """Returns loss, parameters and gradients of row c of a batch, at the model w [P].

        Only the `moving` parameters are returned and differentiated; None for all.
        """
        runner = self.runner
        count = batch.counts[c]
        targets = batch.targets[c, :count]
        given: dict[str, Any] = {}
        if objective is not None:
            given = self._batch_arguments(c, batch, buffers, objective)
        if runner.is_stochastic:
            seed_generators(w.device, batch.origin.seed(c))
        network, loaded = runner.load(w, buffers, training=True)
        parameters = chosen(loaded, moving)
        inputs = runner.laid_out(batch.inputs[c, :count])
        keys: AbstractContextManager[None] = nullcontext()
        if runner.has_keys:
            keys = drawing(torch.tensor([batch.origin.seed(c)], device=w.device))
        if objective is None:
            with keys:
                outputs = network(inputs)
            losses = runner.per_sample(outputs, targets)
        else:
            with keys:
                result = run_watched(network, runner.head, lambda: network(inputs))
            losses = objective.losses(result, BatchSamples(batch.inputs[c, :count], targets), given)
        loss = runner.mean_of(losses, targets)
        pieces = torch.autograd.grad(loss, parameters, materialize_grads=True)
        if buffers is not None and runner.buffers.size:
            buffers.copy_(runner.buffers.read(network, buffers))
        return loss.detach(), parameters, pieces

    def _batch_arguments(
        self, c: int, batch: Batch, buffers: Buffers, objective: Objective
    ) -> dict[str, Any]:
        """Returns the tensors of the objective's client c, and what its older models give."""
        given: dict[str, Any] = {name: rows[c] for name, rows in objective.own.items()}
        inputs = self.runner.laid_out(batch.inputs[c, : batch.counts[c]])
        for name, models in objective.older.items():
            w = models
            if models.dim() == 2:
                w = models[c]
            with torch.no_grad():
                network, _ = self.runner.load(w, buffers, training=False)
                given[name] = run_watched(network, self.runner.head, partial(network, inputs))
        return given


def chosen(parameters: Sequence[Tensor], moving: list[bool] | None) -> Sequence[Tensor]:
    """Returns the parameters that move: all of them for None."""
    if moving is None:
        return parameters
    return list(compress(parameters, moving))
