"""Forward and backward of networks that are chains of common layers, without autograd.

What automatic differentiation costs is more than the arithmetic of small layers; and here a step of
gradient descent can go right into the model. For chains of linear layers and activations a layer of
many models is one batched matrix product.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from models.classifier import Classifier
from pfl.parameters import ParameterSpace

aten = torch.ops.aten
FORWARD: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    nn.ReLU: torch.relu,
    nn.Tanh: torch.tanh,
    nn.Sigmoid: torch.sigmoid,
}
# The derivative of an activation by its output y: d -> d * f'(x).
BACKWARD: dict[type[nn.Module], Callable[[Tensor, Tensor], Tensor]] = {
    nn.ReLU: lambda d, y: aten.threshold_backward.default(d, y, 0),
    nn.Tanh: aten.tanh_backward.default,
    nn.Sigmoid: aten.sigmoid_backward.default,
}


class Chain:
    """A network that is a chain of layers.

    Attributes:
        batched: Whether many models run at once: if there are no convolutions.
    """

    def __init__(self, steps: list[nn.Module], spans: dict[nn.Module, list[slice]]) -> None:
        self.steps, self.spans = _pool_first(steps), spans
        self.batched = not any(isinstance(step, nn.Conv2d) for step in steps)
        self.first = next(n for n, step in enumerate(steps) if spans[step])  # that has parameters

    @classmethod
    def of(cls, network: nn.Module, space: ParameterSpace, inputs: Tensor) -> Chain | None:
        """The chain that a network is, for inputs [n, ...]; None where it is something else."""
        steps = [step for step in _steps(network) if not isinstance(step, nn.Identity)]
        if not all(_known(step) for step in steps) or _hooked(network):
            return None
        names = {parameter: name for name, parameter in network.named_parameters()}
        layers = {layer.name: layer.span for layer in space.layers}
        spans: dict[nn.Module, list[slice]] = {}
        for step in steps:
            own = [layers.get(names[parameter]) for parameter in step.parameters()]
            spans[step] = [span for span in own if span is not None]
            if len(own) > len(spans[step]):  # a frozen parameter
                return None
        if sum(len(spans[step]) for step in steps) != len(space.layers):  # shared ones
            return None
        chain = cls(steps, spans)
        if chain.batched:  # its samples are flat throughout
            chain = cls([step for step in steps if not isinstance(step, nn.Flatten)], spans)
            return chain if _features(chain.steps[chain.first]) == inputs[0].numel() else None
        return chain if inputs.ndim == 4 else None

    def models(self, w: Tensor) -> list[Models]:
        """The network with the models w [C, P]: all at once, or one by one."""
        return [Models(self, w)] if self.batched else [Models(self, row) for row in w.split(1)]


class Models:
    """C models of a chain, which are views of w [C, P]: they move when w does.

    A single model has plain matrices instead of batches of them, which cost less to set up.
    """

    def __init__(self, chain: Chain, w: Tensor) -> None:
        self.steps, self.first = chain.steps, chain.first
        self.flat = chain.batched
        self.clients, self.alone = len(w), len(w) == 1
        self.parameters: dict[nn.Module, list[Tensor]] = {}
        for step in chain.steps:
            views = [
                w[:, span].unflatten(1, _shape(step, parameter))
                for span, parameter in zip(chain.spans[step], step.parameters(), strict=True)
            ]
            self.parameters[step] = [view[0] for view in views] if self.alone else views
        self._ones = w.new_empty(0)
        self._mm = torch.mm if self.alone else torch.bmm
        self._addmm = torch.addmm if self.alone else torch.baddbmm

    def forward(self, inputs: Tensor) -> list[tuple[Tensor, Any]]:
        """Every step's input, and what its derivative needs besides; then the output, [C, B, K].

        Args:
            inputs: [C, B, ...].

        All without the first axis for a single model.
        """
        x = inputs[0] if self.alone else inputs
        if self.flat:
            x = x.flatten(1 if self.alone else 2)
        trace: list[tuple[Tensor, Any]] = []
        for step in self.steps:
            y, kept = self._forward(step, x)
            trace.append((x, kept))
            x = y
        return [*trace, (x, None)]

    def _forward(self, step: Any, x: Tensor) -> tuple[Tensor, Any]:
        kind = type(step)
        if kind is nn.Linear:
            return self._product(step, x), None
        if kind is nn.Conv2d:
            weight, *bias = self.parameters[step]
            return torch.conv2d(x, weight, bias[0] if bias else None, *_window(step)), None
        if kind is nn.MaxPool2d:
            return aten.max_pool2d_with_indices.default(x, *_pooling(step))
        if kind is nn.Flatten:
            return x.flatten(1), None
        y = FORWARD[kind](x)
        return y, y

    def _product(self, step: nn.Linear, x: Tensor) -> Tensor:
        weight, *bias = self.parameters[step]
        if weight.shape[-2] < x.shape[-2]:  # the longer side last: twice as fast on CPUs
            y = self._mm(weight, x.mT).mT
            return y.add_(bias[0]) if bias else y
        return self._addmm(bias[0], x, weight.mT) if bias else self._mm(x, weight.mT)

    def backward(
        self, trace: list[tuple[Tensor, Any]], d: Tensor, into: Models, beta: float, alpha: float
    ) -> None:
        """Put the gradients g into other models: into <- beta into + alpha g.

        `into` may be this: with beta 1 and alpha -lr that is a step of gradient descent.

        Args:
            trace: Of `forward`.
            d: The loss's derivative by the output, of its shape.
        """
        for number in range(len(self.steps) - 1, self.first - 1, -1):
            step: Any = self.steps[number]
            x, kept = trace[number]
            kind, on = type(step), number > self.first
            if kind is nn.Linear:
                before = self._mm(d, self.parameters[step][0]) if on else d
                pairs = ((d.mT, x), (self._ones_like(d), d))  # make the gradients
                for parameter, pair in zip(into.parameters[step], pairs, strict=False):
                    self._addmm(parameter, *pair, beta=beta, alpha=alpha, out=parameter)
                d = before
            elif kind is nn.Conv2d:
                d = self._convolution_backward(step, x, d, into, beta, alpha, on)
            elif kind is nn.MaxPool2d:
                d = aten.max_pool2d_with_indices_backward.default(d, x, *_pooling(step), kept)
            elif kind is nn.Flatten:
                d = d.view(x.shape)
            else:
                d = BACKWARD[kind](d, kept)

    def _convolution_backward(
        self,
        step: nn.Conv2d,
        x: Tensor,
        d: Tensor,
        into: Models,
        beta: float,
        alpha: float,
        on: bool,
    ) -> Tensor:
        weight, *bias = self.parameters[step]
        stride, padding, dilation, groups = _window(step)
        before, *gradients = aten.convolution_backward.default(
            d,
            x,
            weight,
            [len(weight)] if bias else None,
            stride,
            padding,
            dilation,
            False,
            [0, 0],
            groups,
            [on, True, bool(bias)],
        )
        for parameter, gradient in zip(into.parameters[step], gradients, strict=False):
            if beta == 0:
                torch.mul(gradient, alpha, out=parameter)
            else:
                parameter.mul_(beta).add_(gradient, alpha=alpha)
        return before

    def _ones_like(self, d: Tensor) -> Tensor:
        """[1, B], or [C, 1, B]."""
        if self._ones.shape[-1] != d.shape[-2]:
            ones = d.new_ones(1, d.shape[-2])
            self._ones = ones if self.alone else ones.expand(self.clients, -1, -1)
        return self._ones


def _steps(network: nn.Module) -> list[nn.Module]:
    if type(network) is nn.Sequential:
        return [step for child in network for step in _steps(child)]
    if isinstance(network, Classifier) and type(network).forward is Classifier.forward:
        return [*_steps(network.body), network.head]
    return [network]


def _pool_first(steps: list[nn.Module]) -> list[nn.Module]:
    """Max pooling before ReLU: the same values and derivatives, with a quarter of the work."""
    steps = list(steps)
    for n, (one, two) in enumerate(itertools.pairwise(steps)):
        if type(one) is nn.ReLU and type(two) is nn.MaxPool2d:
            steps[n : n + 2] = two, one
    return steps


def _known(step: nn.Module) -> bool:
    if type(step) is nn.Conv2d:
        return step.padding_mode == "zeros" and not isinstance(step.padding, str)
    if type(step) is nn.MaxPool2d:
        return not step.return_indices
    if type(step) is nn.Flatten:
        return (step.start_dim, step.end_dim) == (1, -1)
    return type(step) in (nn.Linear, *FORWARD)


def _features(step: Any) -> int:
    return int(step.in_features)


def _shape(step: nn.Module, parameter: Tensor) -> tuple[int, ...]:
    """A linear layer's bias is a row."""
    row = isinstance(step, nn.Linear) and parameter.ndim == 1
    return (1, *parameter.shape) if row else tuple(parameter.shape)


def _window(step: nn.Conv2d) -> tuple[Any, Any, Any, int]:
    return step.stride, step.padding, step.dilation, step.groups


def _pooling(step: nn.MaxPool2d) -> tuple[Any, ...]:
    sizes = (step.kernel_size, step.stride, step.padding, step.dilation)
    return *([n, n] if isinstance(n, int) else list(n) for n in sizes), step.ceil_mode


def _hooked(network: nn.Module) -> bool:
    return any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())


def cross_entropy(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The samples' cross entropies [..., B], and their derivatives by the outputs [..., B, K].

    Args:
        outputs: [..., B, K].
        targets: int64 [..., B].
    """
    # Over the last axis, when it is short, PyTorch takes seven times as long.
    log, chosen = outputs.mT.log_softmax(-2), targets.unsqueeze(-2)
    losses = log.gather(-2, chosen).neg_().squeeze(-2)
    d = log.exp_()
    minus_one = _constant(-1.0, d.dtype, d.device).expand_as(chosen)
    return losses, d.scatter_add_(-2, chosen, minus_one).mT


@functools.lru_cache
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)
