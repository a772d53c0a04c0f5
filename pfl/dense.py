"""Forward and backward of many models at once, for chains of linear layers and activations.

What `torch.func.vmap` does for any network costs more than the arithmetic of small ones: here a
layer of all clients is one batched matrix product, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from models.classifier import Classifier
from pfl.parameters import ParameterSpace

aten = torch.ops.aten
# The derivative of an activation by its output y: d -> d * f'(x).
BACKWARD: dict[type[nn.Module], Callable[[Tensor, Tensor], Tensor]] = {
    nn.ReLU: lambda d, y: aten.threshold_backward(d, y, 0),
    nn.Tanh: aten.tanh_backward,
    nn.Sigmoid: aten.sigmoid_backward,
}


class DenseChain:
    """The models w [C, P] of a network that is a chain of linear layers and activations."""

    def __init__(self, steps: list[nn.Module], spans: dict[nn.Module, list[slice]]) -> None:
        self.steps, self.spans = steps, spans

    @classmethod
    def of(cls, network: nn.Module, space: ParameterSpace, width: int) -> DenseChain | None:
        """The chain that a network is, for inputs of `width` values; None where it is another."""
        steps = [step for step in _steps(network) if not isinstance(step, nn.Flatten | nn.Identity)]
        if not all(type(step) in (nn.Linear, *BACKWARD) for step in steps) or _hooked(network):
            return None
        names = {parameter: name for name, parameter in network.named_parameters()}
        layers = {layer.name: layer.span for layer in space.layers}
        spans: dict[nn.Module, list[slice]] = {}
        for step in steps:
            own = [layers.get(names[parameter]) for parameter in step.parameters()]
            spans[step] = [span for span in own if span is not None]
            if len(own) > len(spans[step]):  # a frozen parameter
                return None
        linear = [step for step in steps if isinstance(step, nn.Linear)]
        whole = sum(len(spans[step]) for step in steps) == len(space.layers)  # none shared
        return cls(steps, spans) if whole and linear[0].in_features == width else None

    def forward(self, w: Tensor, inputs: Tensor) -> list[Tensor]:
        """The flat inputs [C, B, F] and what every step makes of them; the last is the output."""
        values = [inputs.flatten(2)]
        for step in self.steps:
            if isinstance(step, nn.Linear):
                weight, *bias = self._parameters(w, step)
                product = (values[-1], weight.transpose(1, 2))
                values.append(torch.baddbmm(bias[0], *product) if bias else torch.bmm(*product))
            else:
                values.append(step(values[-1]))
        return values

    def backward(self, w: Tensor, values: list[Tensor], d: Tensor, g: Tensor) -> None:
        """Write the gradients into g [C, P].

        Args:
            values: Of `forward`.
            d: The loss's derivative by the output, [C, B, K].
        """
        for number, step in reversed(list(enumerate(self.steps))):
            if not isinstance(step, nn.Linear):
                d = BACKWARD[type(step)](d, values[number + 1])
                continue
            weight, *bias = self._parameters(g, step)
            weight.baddbmm_(d.transpose(1, 2), values[number], beta=0)
            if bias:
                torch.sum(d, 1, keepdim=True, out=bias[0])
            if number:
                d = torch.bmm(d, self._parameters(w, step)[0])

    def _parameters(self, w: Tensor, step: nn.Linear) -> list[Tensor]:
        """Weight [C, o, i] and bias [C, 1, o], views of w."""
        shapes = [(step.out_features, step.in_features), (1, step.out_features)]
        spans = self.spans[step]
        return [w[:, span].unflatten(1, shape) for span, shape in zip(spans, shapes, strict=False)]


def _steps(network: nn.Module) -> list[nn.Module]:
    if type(network) is nn.Sequential:
        return [step for child in network for step in _steps(child)]
    if isinstance(network, Classifier) and type(network).forward is Classifier.forward:
        return [*_steps(network.body), network.head]
    return [network]


def _hooked(network: nn.Module) -> bool:
    return any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())


def cross_entropy(outputs: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted sums of the samples' cross entropies [C], and their derivative by the outputs.

    Args:
        outputs: [C, B, K].
        targets: int64 [C, B].
        weights: [C, B].
    """
    log = outputs.log_softmax(2)
    chosen = targets[..., None]
    losses = -log.gather(2, chosen).squeeze(2)
    d = log.exp_().scatter_add_(2, chosen, -torch.ones_like(chosen, dtype=log.dtype))
    return (losses * weights).sum(1), d.mul_(weights[..., None])
