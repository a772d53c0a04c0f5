"""The same rounds of FedAvg by PyTorch alone, in the ways in which one would write them for a GPU.

All sides begin with the same weights and take the same samples in the same order (`order.py`).
Short batches are padded by samples of weight 0 where a side needs fixed shapes.
"""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks.gpu.order import Order
from benchmarks.gpu.round_clock import trained

Autocast = Callable[[], AbstractContextManager[Any]]
FIRST_STEPS = 3
UNSURE = 0.5  # seconds after which the length of a round can be guessed


class TooSlow(Exception):
    """A round would take longer than there is time."""


class NeedsGPU(Exception):
    """A side that records kernels, on a CPU."""


def autocast(device: torch.device, precision: str) -> Autocast:
    """Returns what opens the precision context of the forward pass."""
    if precision != "bf16":
        return nullcontext
    return partial(torch.autocast, device.type, torch.bfloat16, cache_enabled=False)


def per_sample(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross entropy of each sample; of a text, the mean over its tokens."""
    losses = nn.functional.cross_entropy(outputs, targets, reduction="none")
    if losses.ndim > 1:
        losses = losses.flatten(1).mean(1)
    return losses


class Side(ABC):
    """A loop by hand.

    Args:
        network: The network with the first weights, on the device.
        inputs, targets: All samples, on the device.
        rate: Of SGD.
        autocast: Opens the precision context.
        limit: The longest round, in seconds.
    """

    def __init__(
        self,
        network: nn.Module,
        inputs: Tensor,
        targets: Tensor,
        rate: float,
        autocast: Autocast,
        limit: float,
    ) -> None:
        self.network = network
        self.inputs = inputs
        self.targets = targets
        self.rate = rate
        self.autocast = autocast
        self.limit = limit
        self.device = inputs.device
        self.parameters: list[Tensor] = [p for p in network.parameters() if p.requires_grad]
        self._steps = 0  # of the round
        self._begun = 0.0  # when the first steps of the round were over
        self._share = 0.0  # of the round, at that time

    @abstractmethod
    def train(self, order: Order) -> None:
        """Trains the network for a round."""

    def round(self, order: Order) -> None:
        """Trains the network for a round, unless it would take too long."""
        self._steps = 0
        self.train(order)

    def weights(self) -> Tensor:
        """Returns the network's trainable parameters as one vector."""
        return trained(self.network)

    def watch(self, share: float) -> None:
        """Ends a round whose first `share` shows that it would take too long.

        The first steps do not count: in them libraries choose kernels, and steps are recorded.
        """
        now = time.perf_counter()
        self._steps += 1
        if self._steps <= FIRST_STEPS:
            self._begun = now
            self._share = share
            return
        passed = now - self._begun
        whole = passed / (share - self._share)
        if passed > UNSURE and whole > self.limit:
            raise TooSlow(f"a round would take about {whole:.0f} s")

    def loss(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Returns the mean loss of the real samples."""
        return (per_sample(outputs, targets) * weights).sum()


class Plain(Side):
    """A copy of the network and a torch.optim.SGD for each client, as in tutorials."""

    def train(self, order: Order) -> None:
        total = [torch.zeros_like(p) for p in self.parameters]
        for c, share in enumerate(order.shares):
            own = copy.deepcopy(self.network)
            parameters = [p for p in own.parameters() if p.requires_grad]
            optimizer = torch.optim.SGD(parameters, lr=self.rate)
            for k, count in enumerate(order.counts[:, c].tolist()):
                if count == 0:
                    break
                chosen = order.picks[k, c, :count]
                optimizer.zero_grad()
                with self.autocast():
                    outputs = own(self.inputs[chosen])
                    loss = nn.functional.cross_entropy(outputs, self.targets[chosen])
                loss.backward()
                optimizer.step()
                self.watch((c + (k + 1) / len(order.counts)) / len(order.shares))
            for place, p in zip(total, parameters, strict=True):
                place.add_(p.detach(), alpha=share)
        with torch.no_grad():
            for mine, mean in zip(self.parameters, total, strict=True):
                mine.copy_(mean)


class OneByOne(Side):
    """One client after another, on the parameters of one network; subclasses take the steps."""

    def train(self, order: Order) -> None:
        start = [p.detach().clone() for p in self.parameters]
        total = [torch.zeros_like(p) for p in self.parameters]
        for c, share in enumerate(order.shares):
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, start)
            for k, count in enumerate(order.counts[:, c].tolist()):
                if count == 0:
                    break
                self.step(order, k, c, count)
                self.watch((c + (k + 1) / len(order.counts)) / len(order.shares))
            with torch.no_grad():
                torch._foreach_add_(total, self.parameters, alpha=share)
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, total)

    @abstractmethod
    def step(self, order: Order, k: int, c: int, count: int) -> None:
        """Takes the local step k of the client c, of `count` samples."""


class Foreach(OneByOne):
    """Gradients by autograd.grad, and one call for the update of all parameters."""

    def step(self, order: Order, k: int, c: int, count: int) -> None:
        chosen = order.picks[k, c, :count]
        with self.autocast():
            outputs = self.network(self.inputs[chosen])
            loss = nn.functional.cross_entropy(outputs, self.targets[chosen])
        gradients = torch.autograd.grad(loss, self.parameters)
        with torch.no_grad():
            torch._foreach_add_(self.parameters, gradients, alpha=-self.rate)


class Captured(OneByOne):
    """One local step, recorded as a CUDA graph and replayed for every step of every client."""

    replay: Callable[[], None] | None = None

    def step(self, order: Order, k: int, c: int, count: int) -> None:
        if self.replay is None:
            self._record(order.picks[k, c], order.weights[k, c])
        assert self.replay is not None
        self.picks.copy_(order.picks[k, c])
        self.of_sample.copy_(order.weights[k, c])
        self.replay()

    def _record(self, picks: Tensor, weights: Tensor) -> None:
        self.picks = picks.clone()
        self.of_sample = weights.clone()
        before = [p.detach().clone() for p in self.parameters]
        self.replay = record(self._work, self.device)
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, before)

    def _work(self) -> None:
        with self.autocast():
            outputs = self.network(self.inputs.index_select(0, self.picks))
            targets = self.targets.index_select(0, self.picks)
            loss = self.loss(outputs, targets, self.of_sample)
        gradients = torch.autograd.grad(loss, self.parameters)
        with torch.no_grad():
            torch._foreach_add_(self.parameters, gradients, alpha=-self.rate)


class Compiled(OneByOne):
    """The network by torch.compile(mode="reduce-overhead"), which records CUDA graphs itself."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if self.device.type != "cuda":
            raise NeedsGPU("needs a GPU")
        self.compiled = torch.compile(self.network, mode="reduce-overhead", dynamic=False)

    def step(self, order: Order, k: int, c: int, count: int) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        chosen = order.picks[k, c]
        with self.autocast():
            outputs = self.compiled(self.inputs.index_select(0, chosen))
            loss = self.loss(outputs, self.targets.index_select(0, chosen), order.weights[k, c])
        gradients = torch.autograd.grad(loss, self.parameters)
        with torch.no_grad():
            torch._foreach_add_(self.parameters, gradients, alpha=-self.rate)


class Batched(Side):
    """All clients at once, by torch.func: vmap over the gradient of one client's loss."""

    def train(self, order: Order) -> None:
        clients = len(order.shares)
        self._begin(clients)
        active = (order.counts > 0).sum(1).tolist()
        for k, count in enumerate(active):
            self.step(order, k, count)
            self.watch((k + 1) / len(active))
        shares = torch.tensor(order.shares, device=self.device)
        with torch.no_grad():
            for p, own in zip(self.parameters, self.own.values(), strict=True):
                of_client = shares.view(-1, *[1] * p.ndim)
                p.copy_(own.mul_(of_client).sum(0))

    def _begin(self, clients: int) -> None:
        """Gives every client the global parameters, [clients, ...] by name."""
        named = {n: p for n, p in self.network.named_parameters() if p.requires_grad}
        self.own = {n: p.detach().expand(clients, *p.shape).contiguous() for n, p in named.items()}

    def step(self, order: Order, k: int, count: int) -> None:
        """Takes the local step k of the first `count` clients."""
        rows = {name: values[:count] for name, values in self.own.items()}
        self._move(rows, order.picks[k, :count], order.weights[k, :count])

    def _move(self, rows: dict[str, Tensor], picks: Tensor, weights: Tensor) -> None:
        x = self.inputs.index_select(0, picks.flatten()).unflatten(0, picks.shape)
        y = self.targets.index_select(0, picks.flatten()).unflatten(0, picks.shape)
        gradients = vmap(grad(self._loss_of))(rows, x, y, weights)
        torch._foreach_add_(
            list(rows.values()), [gradients[name] for name in rows], alpha=-self.rate
        )

    def _loss_of(self, values: dict[str, Tensor], x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        with self.autocast():
            outputs = functional_call(self.network, values, (x,))
            return self.loss(outputs, y, w)


class BatchedCaptured(Batched):
    """That step, recorded as a CUDA graph; clients whose steps are used up have weights of 0."""

    replay: Callable[[], None] | None = None

    def _begin(self, clients: int) -> None:
        if self.replay is None:
            super()._begin(clients)
            return
        for p, own in zip(self.parameters, self.own.values(), strict=True):
            own.copy_(p.detach().expand_as(own))

    def step(self, order: Order, k: int, count: int) -> None:
        if self.replay is None:
            self.picks = order.picks[k].clone()
            self.of_sample = order.weights[k].clone()
            before = {name: own.clone() for name, own in self.own.items()}
            self.replay = record(self._work, self.device)
            for name, own in self.own.items():
                own.copy_(before[name])
        self.picks.copy_(order.picks[k])
        self.of_sample.copy_(order.weights[k])
        self.replay()

    def _work(self) -> None:
        self._move(self.own, self.picks, self.of_sample)


def record(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Records what a function starts on the GPU; returns what starts it again."""
    if device.type != "cuda":
        raise NeedsGPU("needs a GPU")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    replay: Callable[[], None] = graph.replay
    return replay


SIDES: dict[str, type[Side]] = {
    "plain": Plain,
    "foreach": Foreach,
    "graph": Captured,
    "func": Batched,
    "func-graph": BatchedCaptured,
    "compile": Compiled,
}
