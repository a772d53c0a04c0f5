"""The oracle: the only place where the network runs.

Everything else in a method is algebra on [C, P] matrices whose rows are clients' models.
Two engines with one meaning: `sequential` takes one client after another and runs any module; `vmap`
runs all clients in one batched call (torch.func, or batched matrix products of our own).
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from pfl.engines.batch import Batch, StepBlock, default_loss
from pfl.engines.chain import Chain, Models
from pfl.engines.local_step import TAKE_GRADIENT, Step
from pfl.engines.select import Engine, inspect, name_of
from pfl.engines.winograd import install
from pfl.errors import ConfigError
from pfl.parameters import BufferSpace, ParameterSpace
from pfl.randomness import isolated

OwnNetwork = tuple[nn.Module, list[nn.Parameter]]


class Oracle:
    """Losses and gradients of many clients' models.

    Threads may ask at the same time, after `allocate_replicas`.

    Args:
        network: The architecture; a private copy is used, the original is never run or changed.
        space: Maps its parameters to vectors.
        loss: Of output and target, averaged over a client's samples: a module such as
            `torch.nn.CrossEntropyLoss`, or a function. It must return one value (or one tensor)
            per sample; `reduction` is set to "none" where it exists.
        engine: "sequential", "vmap", or "auto": vmap where it works for this network and pays. It pays on
            GPUs, and on CPUs for networks without convolutions.

    Attributes:
        buffers: Those that training changes.
        random: Whether the network draws random numbers.
        channels_last: Whether images are laid out with their channels last.
        tiles: Whether convolutions are computed by tiles where that is faster.

    Note:
        `inspect` must be called once with a few samples before anything else: it settles the
        engine and the attributes above.
    """

    def __init__(
        self,
        network: nn.Module,
        space: ParameterSpace,
        loss: Callable[[Tensor, Tensor], Tensor],
        engine: Engine = "auto",
    ) -> None:
        if engine not in ("auto", "sequential", "vmap"):
            raise ConfigError(f"engine: {engine!r} is unknown; choose auto, loop or vmap")
        self.space = space
        self._original = network
        self.network = copy.deepcopy(network)
        self.loss = copy.deepcopy(loss)
        if hasattr(self.loss, "reduction"):
            self.loss.reduction = "none"
        self.wanted, self.engine = engine, engine
        self.buffers = BufferSpace(self.network)
        self.random = self.channels_last = self.tiles = False
        self.chain: Chain | None = None
        self.precision: Callable[[], AbstractContextManager[None]] = nullcontext
        # Both engines give a network's parameters other values, so each thread needs its own.
        self._main: OwnNetwork = (self.network, space.parameters_of(self.network))
        self._spare: list[OwnNetwork] = []
        self._of_thread: dict[int, OwnNetwork] = {}

    # ---- what is asked of it ------------------------------------------------------------------

    @torch.no_grad()
    def gradient(
        self, w: Tensor, batch: Batch, buffers: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean loss and its gradient for each row of a batch.

        Args:
            w: [C, P] with C >= A: row c is the model of the batch's row c.
            buffers: [C, number of changing buffer values]; changed in place, as the network does
                it.

        Returns:
            loss [A] and g [C, P]; rows of g from A on are zero.
        """
        A = batch.clients
        g = torch.empty_like(w)
        g[A:] = 0
        if (chain := self._chain_for(w)) is not None:
            models, into = chain.models(w[:A]), chain.models(g[:A])
            loss = self._chained(models, StepBlock.of(batch, w.dtype), into, TAKE_GRADIENT)
        elif self.engine == "sequential":

            def keep(c: int, _: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
                torch.cat([piece.reshape(-1) for piece in pieces], out=g[c])

            loss = self._each(w, batch, buffers, keep)
        else:
            loss, g[:A] = self._vmapped(w, batch)
        return loss, g

    @torch.no_grad()
    def descend(
        self, v: Tensor, blocks: Iterable[StepBlock], step: Step, buffers: Tensor | None = None
    ) -> tuple[Tensor, list[int]]:
        """Plain steps in place, batch by batch.

        The same as `gradient` and the line that `Step` says, but faster: g is not written down
        where the engine can do without. Rows of v [C, P] that a batch does not have keep their
        place.

        Returns:
            The mean losses of all rows of all batches, one after another, and their counts.
        """
        chain, active = self._chain_for(v), 0
        losses, counts = [v.new_empty(0)], []
        for block in blocks:
            rows, taken = v[: block.clients], step.rows(slice(block.clients))
            counts += block.counts.ravel().tolist()
            if chain is None:
                losses += [self._descend(rows, batch, step, buffers) for batch in block]
                continue
            if block.clients != active:
                active, into = block.clients, chain.models(rows)
                apart = taken.offset is not None
                models = chain.models(torch.empty_like(rows)) if apart else into
            losses.append(self._chained(models, block, into, taken))
        return torch.cat(losses), counts

    def _descend(self, rows: Tensor, batch: Batch, step: Step, buffers: Tensor | None) -> Tensor:
        """One batch for the first rows of v; the batch may have fewer than they are."""
        rows, step = rows[: batch.clients], step.rows(slice(batch.clients))
        w = step.place(rows)

        def move(c: int, places: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
            if step.offset is not None:  # else they are views of the row already
                places = list(self.space.split(rows[c]).values())
            if step.shrink != 1:
                rows[c].mul_(step.shrink)
            for place, piece in zip(places, pieces, strict=True):
                place.sub_(piece, alpha=step.lr)

        if self.engine == "sequential":
            loss = self._each(w, batch, buffers, move)
        else:
            loss, g = self._vmapped(w, batch)
            rows.mul_(step.shrink).sub_(g, alpha=step.lr)
        step.finish(rows, w)
        return loss

    @torch.no_grad()
    def evaluate(
        self, w: Tensor, batch: Batch, buffers: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Loss and correctness of each sample, w [A, P]: both [A, B], zero for padding.

        `correct` is the share of right predictions (0 or 1 for one label a sample); NaN for
        regression. Row c is evaluated with its own model w[c].
        """
        with self.precision():
            outputs = self._outputs(w, batch, buffers)
            losses, correct = self._scores(outputs.flatten(0, 1), batch.targets.flatten(0, 1))
        real = batch.sample_weights(losses.dtype) > 0
        shape = real.shape
        zero = losses.new_zeros(())
        return (
            torch.where(real, losses.view(shape), zero),
            torch.where(real, correct.view(shape), zero),
        )

    @torch.no_grad()
    def evaluate_one(
        self, w: Tensor, inputs: Tensor, targets: Tensor, buffers: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `evaluate`, for one model w [P] and pooled samples [n, ...]: both [n]."""
        return self._scores(self.predict(w, inputs, buffers), targets)

    @torch.no_grad()
    def predict(self, w: Tensor, inputs: Tensor, buffers: Tensor | None = None) -> Tensor:
        """Outputs [n, ...] of one model w [P] for inputs [n, ...]."""
        with self.precision():
            return self._load(w, buffers, training=False)[0](self._laid_out(inputs))

    # ---- engines ------------------------------------------------------------------------------

    def _each(
        self,
        w: Tensor,
        batch: Batch,
        buffers: Tensor | None,
        take: Callable[[int, Sequence[Tensor], Sequence[Tensor]], None],
    ) -> Tensor:
        """Client after client; `take` gets its row, its parameters and their gradients."""
        losses, own_randomness = [], isolated if self.random else nullcontext
        with torch.enable_grad(), self.precision(), own_randomness(w.device):
            for c, count in enumerate(batch.counts):
                if self.random:
                    torch.manual_seed(batch.seeds(c))
                own = None if buffers is None else buffers[c]
                network, parameters = self._load(w[c], own, training=True)
                outputs = network(self._laid_out(batch.inputs[c, :count]))
                loss = self.per_sample(outputs, batch.targets[c, :count]).mean()
                pieces = torch.autograd.grad(loss, parameters, materialize_grads=True)
                with torch.no_grad():
                    take(c, parameters, pieces)
                losses.append(loss.detach())
                if buffers is not None and self.buffers.size:
                    buffers[c] = self.buffers.read(network, buffers)
        return torch.stack(losses).to(w.dtype)

    def _vmapped(self, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Losses [A] and gradients [A, P], all clients in one call."""
        network, _ = self._own(training=True)

        def weighted(w: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            outputs = functional_call(network, self.space.split(w), (inputs,))
            return (self.per_sample(outputs, targets) * weight).sum()

        weights = batch.sample_weights(w.dtype)
        with torch.enable_grad(), self.precision():
            g, loss = vmap(grad_and_value(weighted))(
                w[: batch.clients].detach(), batch.inputs, batch.targets, weights
            )
        return loss.detach(), g.detach()

    def scripted(self, targets: Tensor | None) -> bool:
        """Whether blocks with such targets [n, ...] run without the interpreter.

        So do those of chains with cross entropy.
        """
        if targets is None or targets.ndim != 1 or targets.is_floating_point():
            return False
        return self.loss is default_loss and self._chain_for(self.space.vector) is not None

    def _chained(
        self,
        models: list[Models],
        block: StepBlock,
        into: list[Models],
        step: Step,
    ) -> Tensor:
        """Move `into` batch by batch, by the gradients of `models`; the losses, [K A]."""
        if not self.scripted(block.targets):
            return torch.cat([self._by_loss(models, batch, into, step) for batch in block])
        stored = (block.inputs, block.targets)
        if len(models) == 1:
            weights = block.sample_weights()
            return models[0].train(*stored, block.picks, weights, into[0], step).flatten()
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

    def _by_loss(
        self,
        models: list[Models],
        batch: Batch,
        into: list[Models],
        step: Step,
    ) -> Tensor:
        """The same for one batch and any loss; losses [A]."""
        if len(models) < batch.clients:  # all at once
            parts = [(models[0], batch, into[0], step)]
        else:
            parts = [
                (model, batch.only(c), into[c], step.rows(slice(c, c + 1)))
                for c, model in enumerate(models)
            ]
        means = []
        for model, part, place, own in parts:
            if own.offset is not None:
                model.w.copy_(own.place(place.w))
            kept = model.forward(part.inputs)
            with torch.enable_grad(), self.precision():
                outputs = kept[0][-1].requires_grad_()
                flat = outputs if model.alone else outputs.flatten(0, 1)
                losses = self.per_sample(flat, part.targets.flatten(0, 1))
                weights = part.sample_weights(losses.dtype)
                loss = (losses.view_as(weights) * weights).sum(1)
                (d,) = torch.autograd.grad(loss.sum(), outputs)
            model.backward(kept, d, place, own)
            own.finish(place.w, model.w)
            means.append(loss.detach())
        return torch.cat(means)

    def _chain_for(self, w: Tensor) -> Chain | None:
        """Its layers are written for one precision: not under autocast."""
        with self.precision():
            mixed = torch.is_autocast_enabled(w.device.type)
        return None if mixed else self.chain

    def _outputs(self, w: Tensor, batch: Batch, buffers: Tensor | None) -> Tensor:
        if self.engine == "vmap":
            if self.chain is not None:
                outputs = Models(self.chain, w).forward(batch.inputs)[0][-1]
                return outputs[None] if len(w) == 1 else outputs
            network, _ = self._own(training=False)
            return vmap(lambda row, x: functional_call(network, self.space.split(row), (x,)))(
                w, batch.inputs
            )
        rows = [
            self.predict(w[c], batch.inputs[c, :count], None if buffers is None else buffers[c])
            for c, count in enumerate(batch.counts)
        ]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def _load(self, w: Tensor, buffers: Tensor | None, *, training: bool) -> OwnNetwork:
        """This thread's network, with the model w [P]."""
        network, parameters = self._own(training=training)
        self.space.point(parameters, w)
        if buffers is not None and self.buffers.size:
            with torch.no_grad():
                self.buffers.write(network, buffers)
        return network, parameters

    def _own(self, *, training: bool) -> OwnNetwork:
        """This thread's network and its parameters, which running it changes for a moment."""
        thread = threading.get_ident()
        if thread not in self._of_thread:
            self._of_thread[thread] = self._spare.pop() if self._spare else self._main
        network, parameters = self._of_thread[thread]
        if network.training != training:
            network.train(training)
        return network, parameters

    def _laid_out(self, inputs: Tensor) -> Tensor:
        return inputs.to(memory_format=torch.channels_last) if self.channels_last else inputs

    # ---- losses and scores --------------------------------------------------------------------

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each of n samples, [n]."""
        losses = self.loss(outputs, targets)
        if losses.ndim == 0 or len(losses) != len(targets):
            raise ConfigError(
                f"loss: {name_of(self.loss)} returns shape {list(losses.shape)} for a batch of "
                f"{len(targets)}; it must return one value per sample (reduction='none')"
            )
        return losses.flatten(1).mean(1) if losses.ndim > 1 else losses

    def _scores(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        losses = self.per_sample(outputs, targets)
        if targets.is_floating_point():
            return losses, torch.full_like(losses, torch.nan)
        hits = (outputs.argmax(1) == targets).to(losses.dtype)
        return losses, hits.flatten(1).mean(1) if hits.ndim > 1 else hits

    # ---- set-up -------------------------------------------------------------------------------

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the network, and a loss that has tensors of its own (class weights)."""
        self.network.to(device, dtype)
        if isinstance(self.loss, nn.Module):
            self.loss.to(device, dtype)

    def inspect(self, inputs: Tensor, targets: Tensor, num_classes: int | None = None) -> None:
        """Run a few samples [n, ...] once and settle what depends on the network.

        Raises:
            ConfigError: Where the network cannot take these inputs, its output does not fit the
                targets, the loss is not per sample, or the chosen engine cannot run this network.
        """
        inspect(self, inputs, targets, num_classes)

    def release(self) -> None:
        """Keep no model alive that was run."""
        self.space.point(self._main[1], self.space.vector.data)

    def allocate_replicas(self, threads: int) -> None:
        """Let this many other threads ask at the same time; after `inspect`. 0 ends it."""
        self._of_thread = {threading.get_ident(): self._main}
        # Copies of what was never run: a network may keep what it has computed.
        networks = [copy.deepcopy(self._original) for _ in range(threads)]
        for network in networks:
            if self.tiles:
                install(network)
            network.to(self.space.vector)
        self._spare = [(network, self.space.parameters_of(network)) for network in networks]
