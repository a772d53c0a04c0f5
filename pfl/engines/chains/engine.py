"""Engines for networks that are chains of common layers: no autograd through the layers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from pfl.engines.base import Engine, EngineName
from pfl.engines.batch import Batch, Buffers, StepBlock, default_loss, some_rows
from pfl.engines.chains.chain import Chain, Models
from pfl.engines.chains.kernels import train
from pfl.engines.local_step import TAKE_GRADIENT, Step
from pfl.engines.objective import BatchSamples, Objective, Outputs
from pfl.engines.runner import ModelRunner
from pfl.torchscript import is_scripted


class ChainEngine(Engine):
    """Runs a chain's layers forward and backward itself; autograd differentiates only the loss.

    Chains of linear layers run all clients at once, chains with convolutions or BatchNorm one after
    another.
    """

    name = "chain"
    keeps_inputs = True

    def __init__(self, runner: ModelRunner, chain: Chain) -> None:
        super().__init__(runner)
        self.chain = chain
        self.batched = chain.batched
        ends_in_head = chain.steps[-1] is runner.network.get_submodule(runner.head)
        self.serves_objectives = ends_in_head and not chain.statistics

    @classmethod
    def obstacle(cls, runner: ModelRunner, batch: Batch, asked: EngineName) -> str | None:
        if runner.is_mixed_precision:
            return "the kernels of chains have one precision"
        if runner.is_stochastic:
            return "it draws random numbers (dropout elsewhere than in a chain of layers)"
        chain = _chain_of(runner, batch)
        if chain is None:
            return "it is not a chain of common layers"
        if not chain.batched and (asked == "vmap" or runner.device.type != "cpu"):
            return "chains with convolutions or BatchNorm run client after client, on CPUs alone"
        return None

    @classmethod
    def of(cls, runner: ModelRunner, batch: Batch) -> Engine:
        chain = _chain_of(runner, batch)
        assert chain is not None
        return cls(runner, chain)

    def gradient(
        self, w: Tensor, batch: Batch, buffers: Buffers = None, objective: Objective | None = None
    ) -> tuple[Tensor, Tensor]:
        g = torch.empty_like(w)
        models = self.chain.models(w, buffers=self._statistics(w, buffers))
        into = self.chain.models(g)
        block = StepBlock.of(batch, w.dtype)
        return self.train(models, block, into, g, TAKE_GRADIENT, objective), g

    def descend(
        self,
        v: Tensor,
        blocks: Iterable[StepBlock],
        step: Step,
        buffers: Buffers = None,
        objective: Objective | None = None,
    ) -> tuple[Tensor, list[int]]:
        active = 0
        losses = [v.new_empty(0)]
        counts: list[int] = []
        for block in blocks:
            clients = block.counts.shape[1]
            rows = v
            own = step
            if clients < len(v):
                rows = v[:clients]
                own = step.rows(slice(clients))
            counts += block.counts.ravel().tolist()
            if clients != active:
                active = clients
                place = rows
                if own.rule is not None:
                    place = own.rule.gradient
                statistics = None
                if self.chain.statistics:
                    statistics = self._statistics(rows, buffers)
                into = self.chain.models(place, step.moving, statistics)
                models = into
                if own.offset is not None:
                    models = self.chain.models(torch.empty_like(rows), None, statistics)
                elif own.moving is not None or own.rule is not None:
                    models = self.chain.models(rows, None, statistics)
            losses.append(self.train(models, block, into, rows, own, objective))
        return torch.cat(losses), counts

    def outputs(self, w: Tensor, batch: Batch, buffers: Buffers = None) -> Tensor:
        if not self.batched:
            return super().outputs(w, batch, buffers)
        outputs = Models(self.chain, w).forward(batch.inputs, keep=False)[0][0]
        if len(w) == 1:
            return outputs[None]
        return outputs

    def predict(self, w: Tensor, inputs: Tensor, buffers: Tensor | None = None) -> Tensor:
        rows = buffers
        if rows is not None:
            rows = rows[None]
        statistics = self._statistics(w[None], rows)
        models = Models(self.chain, w[None], None, statistics)
        return models.forward(inputs[None], keep=False)[0][0]

    def _statistics(self, w: Tensor, buffers: Buffers) -> Buffers:
        """Returns the running statistics of models w [A, P]; None for a chain that has none.

        Where none are given, copies of the network's own.
        """
        if not self.chain.statistics:
            return None
        if buffers is not None:
            return buffers[: len(w)]
        runner = self.runner
        return runner.buffers.read(runner.network, w).expand(len(w), -1).clone()

    def train(
        self,
        models: list[Models],
        block: StepBlock,
        into: list[Models],
        v: Tensor,
        step: Step,
        objective: Objective | None = None,
    ) -> Tensor:
        """Moves v [A, P] batch by batch along the gradients of `models`; returns the losses [K A].

        `into` are the models v, or the gradient of a rule (`Step.toward`).
        """
        losses = []
        for batch in block:
            seeds = None
            if self.chain.has_dropout:
                seeds = batch.seeds()
            if len(models) < batch.clients:  # one object holds all clients' models
                f = objective and objective.rows(slice(batch.clients))
                losses.append(self._train_part(models[0], batch, seeds, into[0], v, step, f))
                continue
            for c, model in enumerate(models):
                client = slice(c, c + 1)
                own = step.rows(client)
                f = objective and objective.rows(client)
                alone = batch.select(c)
                seed = some_rows(seeds, client)
                losses.append(self._train_part(model, alone, seed, into[c], v[client], own, f))
        return torch.cat(losses)

    def _train_part(
        self,
        model: Models,
        batch: Batch,
        seeds: Tensor | None,
        into: Models,
        v: Tensor,
        step: Step,
        objective: Objective | None,
    ) -> Tensor:
        """Takes one step of v along the gradient of `model`; returns the losses [A]."""
        if step.offset is not None:
            model.w.copy_(step.gradient_point(v))
        kept = model.forward(batch.inputs, training=True, seeds=seeds)
        with torch.enable_grad(), self.runner.precision():
            features, outputs = (x.detach().requires_grad_() for x in kept[0][-2:])
            if objective is None:
                flat = outputs
                if not model.is_single:
                    flat = outputs.flatten(0, 1)
                losses = self.runner.per_sample(flat, batch.targets.flatten(0, 1))
            else:
                losses = self._losses(objective, Outputs(outputs, features), batch)
            weights = self.runner.weights(batch, losses.dtype)
            loss = (losses.view_as(weights) * weights).sum(1)
            ends = (outputs, features)
            found: Sequence[Any] = torch.autograd.grad(loss.sum(), ends, allow_unused=True)
        d, also = found
        if d is None:  # the objective uses the features alone
            d = torch.zeros_like(outputs)
        model.backward(kept, d, into, step, also)
        step.apply_after_gradient(v, model.w)
        return loss.detach()

    def _losses(self, objective: Objective, result: Outputs, batch: Batch) -> Tensor:
        """Returns the objective of each sample, [A, B], or [B] for a single model's `result`."""
        own: dict[str, Any] = dict(objective.own)
        samples = BatchSamples(batch.inputs, batch.targets)
        single = batch.clients == 1
        if single:
            own = {name: values[0] for name, values in own.items()}
            samples = BatchSamples(batch.inputs[0], batch.targets[0])
        for name, w in objective.older.items():
            own[name] = self._run(torch.atleast_2d(w), batch.inputs)
        if single:
            return objective.losses(result, samples, own)
        losses: Tensor = vmap(objective.losses)(result, samples, own)
        return losses

    @torch.no_grad()
    def _run(self, w: Tensor, inputs: Tensor) -> Outputs:
        """Returns what models [A, P], or one for all, give for inputs [A, B, ...]."""
        A = len(inputs)
        models = Models(self.chain, w)
        if len(w) == A:
            kept = models.forward(inputs)[0]
            return Outputs(kept[-1], kept[-2])
        kept = models.forward(inputs.flatten(0, 1)[None])[0]
        return Outputs(kept[-1].unflatten(0, (A, -1)), kept[-2].unflatten(0, (A, -1)))


def _chain_of(runner: ModelRunner, batch: Batch) -> Chain | None:
    return Chain.of(runner.network, runner.space, batch.inputs[0], runner.buffers)


class CompiledChainEngine(ChainEngine):
    """Runs all steps of a block with cross entropy as one compiled call, without the interpreter.

    Where TorchScript is missing or fails, the same code runs as plain Python (the "eager chain"),
    which holds the interpreter's lock.
    """

    def __init__(self, runner: ModelRunner, chain: Chain) -> None:
        super().__init__(runner, chain)
        self.name = "eager chain"
        if self.releases_gil():
            self.name = "compiled chain"

    @classmethod
    def obstacle(cls, runner: ModelRunner, batch: Batch, asked: EngineName) -> str | None:
        if not cls.supports(runner, batch.targets[0]):
            return "its loss is not cross entropy"
        return super().obstacle(runner, batch, asked)

    @staticmethod
    def supports(runner: ModelRunner, targets: Tensor) -> bool:
        """Whether the loss is the default one and each sample has one class: targets [n]."""
        classes = targets.ndim == 1 and not targets.is_floating_point()
        return runner.loss is default_loss and classes

    def releases_gil(self) -> bool:
        return is_scripted(train)

    def scores(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        columns = outputs.mT.contiguous()  # over the first axis it takes a third of the time
        losses = columns.log_softmax(0).gather(0, targets[None])[0].neg()
        return losses, (columns.max(0).indices == targets).to(losses.dtype)

    def train(
        self,
        models: list[Models],
        block: StepBlock,
        into: list[Models],
        v: Tensor,
        step: Step,
        objective: Objective | None = None,
    ) -> Tensor:
        if objective is not None:
            return super().train(models, block, into, v, step, objective)
        x = block.inputs
        y = block.targets
        seeds = None
        if self.chain.has_dropout:
            seeds = block.seeds()
        if len(models) == 1 and not self.chain.statistics:
            weights = block.sample_weights()
            return models[0].train(x, y, block.picks, weights, seeds, into[0], v, step).flatten()
        # A call takes all consecutive steps of equal size of one client: BatchNorm sees no padding.
        means = torch.empty(block.counts.shape, dtype=block.dtype)
        for c, model in enumerate(models):
            changes = np.flatnonzero(np.diff(block.counts[:, c])) + 1
            client = slice(c, c + 1)
            own = step.rows(client)
            for first, last in itertools.pairwise([0, *changes.tolist(), len(block.counts)]):
                steps = slice(first, last)
                picks = block.picks[steps, client, : block.counts[first, c]]
                seed = None
                if seeds is not None:
                    seed = seeds[steps, client]
                means[steps, client] = model.train(x, y, picks, None, seed, into[c], v[client], own)
        return means.flatten()
