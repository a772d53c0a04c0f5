"""The oracle: the only place where the network runs.

Everything else in a method is algebra on [C, P] matrices whose rows are clients' models.
Two engines with one meaning: `loop` takes one client after another and runs any module; `vmap`
runs all clients in one batched call (torch.func).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from pfl.dense import DenseChain, cross_entropy
from pfl.errors import ConfigError
from pfl.parameters import BufferSpace, ParameterSpace

Engine = Literal["auto", "loop", "vmap"]


@dataclass
class Batch:
    """One mini-batch of each of A clients.

    Attributes:
        inputs, targets: [A, B, ...]; rows are padded at their end to B samples, with samples that
            have a finite loss (the client's own), since weight 0 does not cancel an infinite one.
        counts: How many samples of each row are real (integers on the host); B is the largest of
            them.
        seeds: One for each row, for what the network itself draws (dropout).
    """

    inputs: Tensor
    targets: Tensor
    counts: list[int]
    seeds: Callable[[int], int] = lambda row: 0

    @property
    def clients(self) -> int:
        """A, the number of rows."""
        return len(self.counts)

    def sample_weights(self) -> Tensor:
        """[A, B]: 1 / count where the sample is real, else 0, so that rows sum to one."""
        width, device = self.inputs.shape[1], self.inputs.device
        if all(count == width for count in self.counts):
            return torch.full((len(self.counts), width), 1 / width, device=device)
        counts = torch.tensor(self.counts, device=device)[:, None]
        real = torch.arange(width, device=device) < counts
        return real / counts.clamp_min(1)


class Oracle:
    """Losses and gradients of many clients' models.

    Args:
        network: The architecture; a private copy is used, the original is never run or changed.
        space: Maps its parameters to vectors.
        loss: Of output and target, averaged over a client's samples: a module such as
            `torch.nn.CrossEntropyLoss`, or a function. It must return one value (or one tensor)
            per sample; `reduction` is set to "none" where it exists.
        engine: "loop", "vmap", or "auto": vmap where it works for this network and pays. It pays on
            GPUs, and on CPUs for networks without convolutions.

    Note:
        `inspect` must be called once with a few samples before anything else: it finds out which
        buffers training changes, whether the network draws random numbers, and settles the engine.
    """

    def __init__(
        self,
        network: nn.Module,
        space: ParameterSpace,
        loss: Callable[[Tensor, Tensor], Tensor],
        engine: Engine = "auto",
    ) -> None:
        if engine not in ("auto", "loop", "vmap"):
            raise ConfigError(f"engine: {engine!r} is unknown; choose auto, loop or vmap")
        self.space = space
        self.network = copy.deepcopy(network)
        self.loss = copy.deepcopy(loss)
        if hasattr(self.loss, "reduction"):
            self.loss.reduction = "none"
        self.engine = engine
        self.buffers = BufferSpace(self.network)
        self.random = False
        self.chain: DenseChain | None = None
        self.precision: Callable[[], AbstractContextManager[None]] = nullcontext
        self._networks = [(self.network, space.parameters_of(self.network))]
        self._pool: ThreadPoolExecutor | None = None

    # ---- what is asked of it ------------------------------------------------------------------

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
        engine = self._gradient_vmap if self.engine == "vmap" else self._gradient_loop
        if not self.network.training:
            self.network.train()
        with torch.enable_grad(), self.precision():
            return engine(w.detach(), batch, buffers)

    @torch.no_grad()
    def evaluate(
        self, w: Tensor, batch: Batch, buffers: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Loss and correctness of each sample, w [A, P]: both [A, B], zero for padding.

        `correct` is the share of right predictions (0 or 1 for one label a sample); NaN for
        regression. Row c is evaluated with its own model w[c].
        """
        self.network.eval()
        with self.precision():
            outputs = self._outputs(w, batch, buffers)
            losses, correct = self._scores(outputs.flatten(0, 1), batch.targets.flatten(0, 1))
        real = batch.sample_weights() > 0
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
        self.network.eval()
        with self.precision():
            self._load(w, buffers)
            return self.network(inputs)

    # ---- engines ------------------------------------------------------------------------------

    def _gradient_loop(
        self, w: Tensor, batch: Batch, buffers: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        g = torch.zeros_like(w) if batch.clients < len(w) else torch.empty_like(w)
        losses = w.new_empty(batch.clients)
        work = (w, batch, buffers, g, losses)
        if self._pool is None or batch.clients == 1:
            with _isolated_randomness(w.device) if self.random else nullcontext():
                self._every_nth_gradient(0, 1, *work)
        else:
            count = len(self._networks)
            running = [
                self._pool.submit(self._every_nth_gradient, k, count, *work) for k in range(count)
            ]
            for one in running:
                one.result()
        return losses, g

    def _every_nth_gradient(
        self,
        first: int,
        n: int,
        w: Tensor,
        batch: Batch,
        buffers: Tensor | None,
        g: Tensor,
        losses: Tensor,
    ) -> None:
        """Clients first, first + n, ..., one after another, with the network number `first`."""
        network, parameters = self._networks[first]
        with torch.enable_grad(), self.precision():  # they hold for one thread only
            for c in range(first, batch.clients, n):
                count = batch.counts[c]
                if self.random:
                    torch.manual_seed(batch.seeds(c))
                self._load(w[c], None if buffers is None else buffers[c], first)
                outputs = network(batch.inputs[c, :count])
                loss = self._per_sample(outputs, batch.targets[c, :count]).mean()
                pieces = torch.autograd.grad(loss, parameters, materialize_grads=True)
                torch.cat([p.detach().reshape(-1) for p in pieces], out=g[c])
                losses[c] = loss.detach()
                if buffers is not None and self.buffers.size:
                    buffers[c] = self.buffers.read(network, buffers)

    def _gradient_vmap(
        self, w: Tensor, batch: Batch, buffers: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        active = w[: batch.clients]
        weights = batch.sample_weights().to(w.dtype)
        if self.chain is not None and not torch.is_autocast_enabled(w.device.type):
            return self._gradient_dense(self.chain, w, batch, weights)
        g, loss = vmap(grad_and_value(self._weighted_loss))(
            active, batch.inputs, batch.targets, weights
        )
        if batch.clients < len(w):
            g = torch.cat([g, g.new_zeros(len(w) - batch.clients, w.shape[1])])
        return loss.detach(), g.detach()

    @torch.no_grad()
    def _gradient_dense(
        self, chain: DenseChain, w: Tensor, batch: Batch, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        active = w[: batch.clients]
        values = chain.forward(active, batch.inputs)
        outputs, targets = values[-1], batch.targets
        if self.loss is default_loss and targets.ndim == 2 and not targets.is_floating_point():
            loss, d = cross_entropy(outputs, targets, weights)
        else:
            with torch.enable_grad():
                outputs.requires_grad_()
                losses = self._per_sample(outputs.flatten(0, 1), targets.flatten(0, 1))
                loss = (losses.view_as(weights) * weights).sum(1)
                (d,) = torch.autograd.grad(loss.sum(), outputs)
        g = torch.empty_like(w)
        g[batch.clients :] = 0
        chain.backward(active, values, d, g[: batch.clients])
        return loss.detach(), g

    def _weighted_loss(self, w: Tensor, inputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        outputs = functional_call(self.network, self.space.split(w), (inputs,))
        return (self._per_sample(outputs, targets) * weight).sum()

    def _outputs(self, w: Tensor, batch: Batch, buffers: Tensor | None) -> Tensor:
        if self.engine == "vmap":
            if self.chain is not None:
                return self.chain.forward(w, batch.inputs)[-1]
            return vmap(lambda row, x: functional_call(self.network, self.space.split(row), (x,)))(
                w, batch.inputs
            )
        rows = [
            self.predict(w[c], batch.inputs[c, :count], None if buffers is None else buffers[c])
            for c, count in enumerate(batch.counts)
        ]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def _load(self, w: Tensor, buffers: Tensor | None, number: int = 0) -> None:
        network, parameters = self._networks[number]
        self.space.point(parameters, w)
        if buffers is not None and self.buffers.size:
            with torch.no_grad():
                self.buffers.write(network, buffers)

    # ---- losses and scores --------------------------------------------------------------------

    def _per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = self.loss(outputs, targets)
        if losses.ndim == 0 or len(losses) != len(targets):
            raise ConfigError(
                f"loss: {_name(self.loss)} returns shape {list(losses.shape)} for a batch of "
                f"{len(targets)}; it must return one value per sample (reduction='none')"
            )
        return losses.flatten(1).mean(1) if losses.ndim > 1 else losses

    def _scores(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        losses = self._per_sample(outputs, targets)
        if targets.is_floating_point():
            return losses, torch.full_like(losses, torch.nan)
        hits = (outputs.argmax(1) == targets).to(losses.dtype)
        return losses, hits.flatten(1).mean(1) if hits.ndim > 1 else hits

    # ---- inspection ---------------------------------------------------------------------------

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the network, and a loss that has tensors of its own (class weights)."""
        self.network.to(device, dtype)
        if isinstance(self.loss, nn.Module):
            self.loss.to(device, dtype)

    def share_out(self, threads: int) -> None:
        """Let `loop` train several clients at the same time, each on one thread of its own.

        Layers of small batches use two threads badly, clients use them well. After `inspect`; 1
        ends it. Networks that draw random numbers share one generator and stay with one thread.
        """
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        del self._networks[1:]
        if threads > 1 and self.engine == "loop" and not self.random:
            for _ in range(threads - 1):
                network = copy.deepcopy(self.network).train()
                self._networks.append((network, self.space.parameters_of(network)))
            # The number of threads is one of each thread: OpenMP would start as many for each.
            self._pool = ThreadPoolExecutor(threads, "client", torch.set_num_threads, (1,))

    def inspect(self, inputs: Tensor, targets: Tensor, num_classes: int | None = None) -> None:
        """Run a few samples [n, ...] once and settle what depends on the network.

        Raises:
            ConfigError: Where the network cannot take these inputs, its output does not fit the
                targets, the loss is not per sample, or the chosen engine cannot run this network.
        """
        self.to(inputs.device, self.space.vector.dtype)
        w = self.space.vector.detach().clone()[None]
        batch = Batch(inputs[None], targets[None], [len(inputs)])
        before = {n: b.clone() for n, b in self.network.named_buffers()}
        wanted, self.engine = self.engine, "loop"
        with _isolated_randomness(inputs.device):
            state = _random_state(inputs.device)
            self._try(w, batch, num_classes)
            self.random = not all(
                torch.equal(a, b) for a, b in zip(state, _random_state(inputs.device), strict=True)
            )
        # All buffers of a module of which one changed: another may have kept its value by chance.
        now = dict(self.network.named_buffers())
        moved = {n.rpartition(".")[0] for n, b in now.items() if not torch.equal(b, before[n])}
        changed = [n for n in now if n.rpartition(".")[0] in moved]
        with torch.no_grad():
            for name, buffer in self.network.named_buffers():
                buffer.copy_(before[name])
        self.buffers = BufferSpace(self.network, changed)
        self.chain = DenseChain.of(self.network, self.space, inputs[0].numel())
        self.engine = self._settle(wanted, w, batch)

    def _try(self, w: Tensor, batch: Batch, num_classes: int | None) -> None:
        network, shape = type(self.network).__name__, list(batch.inputs.shape[2:])
        try:
            self.network.train()
            with torch.no_grad(), self.precision():
                self._load(w[0], None)
                outputs = self.network(batch.inputs[0])
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise ConfigError(
                f"network: {network} cannot process inputs of shape {shape}: {_line(error)}"
            ) from error
        if num_classes is not None and (outputs.ndim < 2 or outputs.shape[1] < num_classes):
            raise ConfigError(
                f"network: {network} gives outputs of shape {list(outputs.shape[1:])} for data "
                f"with {num_classes} classes; give it num_classes={num_classes}"
            )
        try:
            self.gradient(w, batch)
            self._check_alone(outputs, batch.targets[0])
        except ConfigError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise ConfigError(
                f"loss: {_name(self.loss)} cannot compare outputs {list(outputs.shape)} of "
                f"{network} with targets {list(batch.targets.shape[1:])} "
                f"({batch.targets.dtype}): {_line(error)}"
            ) from error

    def _check_alone(self, outputs: Tensor, targets: Tensor) -> None:
        """A loss that broadcasts [n, 1] against [n] compares every sample with every other."""
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns of the same
            outputs, targets = (t.repeat_interleave(2, 0) for t in (outputs, targets))
            together, alone = (self.loss(outputs[:n], targets[:n]) for n in (len(targets), 1))
        if together.shape[1:] != alone.shape[1:]:
            raise ConfigError(
                f"loss: {_name(self.loss)} compares outputs {list(outputs.shape)} with targets "
                f"{list(targets.shape)} all against all; give both the same shape"
            )

    def _settle(self, wanted: Engine, w: Tensor, batch: Batch) -> Engine:
        """The engine that runs: what was asked for if it can, what pays if that was left open."""
        if wanted == "loop":
            return "loop"
        network, reason = type(self.network).__name__, None
        if self.buffers.size:
            reason = f"it keeps running statistics ({self.buffers.names[0]})"
        elif self.random:
            reason = "it draws random numbers (dropout)"
        elif wanted == "auto" and w.device.type == "cpu" and self._convolves():
            return "loop"
        else:
            try:
                self._gradient_vmap(w, batch, None)
            except RuntimeError as error:
                reason = _line(error)
        if reason is None:
            return "vmap"
        if wanted == "auto":
            return "loop"
        raise ConfigError(f"engine: vmap cannot train {network}: {reason}; use engine: loop")

    def _convolves(self) -> bool:
        return any(isinstance(m, nn.modules.conv._ConvNd) for m in self.network.modules())


def default_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy for integer targets, squared error for floating ones; one value a sample."""
    if targets.is_floating_point():
        return nn.functional.mse_loss(outputs.view(targets.shape), targets, reduction="none")
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def _random_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


@contextmanager
def _isolated_randomness(device: torch.device) -> Iterator[None]:
    """What is drawn inside leaves no trace in torch's global generators."""
    # `torch.manual_seed` seeds every GPU, not only the one in use.
    gpus = range(torch.cuda.device_count()) if device.type == "cuda" else []
    with torch.random.fork_rng(gpus):
        yield


def _name(thing: object) -> str:
    return getattr(thing, "__name__", type(thing).__name__)


def _line(error: Exception) -> str:
    """The first line of an error that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
