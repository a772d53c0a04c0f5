"""Engines for networks that are chains of common layers: no autograd through the layers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from pfl.engines.base import Engine
from pfl.engines.batch import Batch, Buffers, StepBlock, default_loss
from pfl.engines.chain import Chain, Models
from pfl.engines.chain_kernels import train
from pfl.engines.local_step import TAKE_GRADIENT, Step
from pfl.engines.objective import Objective
from pfl.engines.runner import ModelRunner
from pfl.torchscript import is_scripted


class ChainEngine(Engine):
    """Runs a chain's layers forward and backward itself; autograd differentiates only the loss.

    Chains of linear layers run all clients at once, chains with convolutions one after another.
    """

    name = "chain"

    def __init__(self, runner: ModelRunner, chain: Chain) -> None:
        super().__init__(runner)
        self.chain, self.batched = chain, chain.batched

    def gradient(
        self, w: Tensor, batch: Batch, buffers: Buffers = None, objective: Objective | None = None
    ) -> tuple[Tensor, Tensor]:
        g = torch.empty_like(w)
        models, into = self.chain.models(w), self.chain.models(g)
        return self.train(models, StepBlock.of(batch, w.dtype), into, TAKE_GRADIENT), g

    def descend(
        self, v: Tensor, blocks: Iterable[StepBlock], step: Step, buffers: Buffers = None
    ) -> tuple[Tensor, list[int]]:
        active, losses, counts = 0, [v.new_empty(0)], []
        for block in blocks:
            rows, own = v[: block.clients], step.rows(slice(block.clients))
            counts += block.counts.ravel().tolist()
            if block.clients != active:
                active, into = block.clients, self.chain.models(rows, step.moving)
                models = into
                if own.offset is not None:
                    models = self.chain.models(torch.empty_like(rows))
                elif own.moving is not None:
                    models = self.chain.models(rows)
            losses.append(self.train(models, block, into, own))
        return torch.cat(losses), counts

    def outputs(self, w: Tensor, batch: Batch, buffers: Buffers = None) -> Tensor:
        if not self.batched:
            return super().outputs(w, batch, buffers)
        outputs = Models(self.chain, w).forward(batch.inputs, keep=False)[0][0]
        return outputs[None] if len(w) == 1 else outputs

    def predict(self, w: Tensor, inputs: Tensor, buffers: Tensor | None = None) -> Tensor:
        return Models(self.chain, w[None]).forward(inputs[None], keep=False)[0][0]

    def train(
        self, models: list[Models], block: StepBlock, into: list[Models], step: Step
    ) -> Tensor:
        """Moves `into` batch by batch along the gradients of `models`; returns the losses [K A]."""
        losses = []
        for batch in block:
            if len(models) < batch.clients:  # one object holds all clients' models
                losses.append(self._train_part(models[0], batch, into[0], step))
                continue
            for c, model in enumerate(models):
                own = step.rows(slice(c, c + 1))
                losses.append(self._train_part(model, batch.select(c), into[c], own))
        return torch.cat(losses)

    def _train_part(self, model: Models, batch: Batch, into: Models, step: Step) -> Tensor:
        """Takes one step of `into` along the gradient of `model`; returns the losses [A]."""
        if step.offset is not None:
            model.w.copy_(step.gradient_point(into.w))
        kept = model.forward(batch.inputs)
        with torch.enable_grad(), self.runner.precision():
            outputs = kept[0][-1].requires_grad_()
            flat = outputs if model.is_single else outputs.flatten(0, 1)
            losses = self.runner.per_sample(flat, batch.targets.flatten(0, 1))
            weights = self.runner.weights(batch, losses.dtype)
            loss = (losses.view_as(weights) * weights).sum(1)
            (d,) = torch.autograd.grad(loss.sum(), outputs)
        model.backward(kept, d, into, step)
        step.apply_after_gradient(into.w, model.w)
        return loss.detach()


class CompiledChainEngine(ChainEngine):
    """Runs all steps of a block with cross entropy as one compiled call, without the interpreter.

    Where TorchScript is missing or fails, the same code runs as plain Python (the "eager chain"),
    which holds the interpreter's lock.
    """

    def __init__(self, runner: ModelRunner, chain: Chain) -> None:
        super().__init__(runner, chain)
        self.name = "compiled chain" if self.releases_gil() else "eager chain"

    @staticmethod
    def supports(runner: ModelRunner, targets: Tensor) -> bool:
        """Whether the loss is the default one and each sample has one class: targets [n]."""
        classes = targets.ndim == 1 and not targets.is_floating_point()
        return runner.loss is default_loss and classes

    def releases_gil(self) -> bool:
        return is_scripted(train)

    def train(
        self, models: list[Models], block: StepBlock, into: list[Models], step: Step
    ) -> Tensor:
        stored = (block.inputs, block.targets)
        if len(models) == 1:
            weights = block.sample_weights()
            return models[0].train(*stored, block.picks, weights, into[0], step).flatten()
        # With convolutions, a call takes all consecutive steps of equal size of one client.
        means = torch.empty(block.counts.shape, dtype=block.dtype)
        for c, model in enumerate(models):
            changes = np.flatnonzero(np.diff(block.counts[:, c])) + 1
            client = slice(c, c + 1)
            own = step.rows(client)
            for first, last in itertools.pairwise([0, *changes.tolist(), len(block.counts)]):
                steps = slice(first, last)
                picks = block.picks[steps, client, : block.counts[first, c]]
                means[steps, client] = model.train(*stored, picks, None, into[c], own)
        return means.flatten()
