"""Training of networks that are chains of common layers, without autograd and without Python.

Automatic differentiation and the interpreter cost more than the arithmetic of small layers. Here
several local steps are one call that holds no lock, so threads train different clients at the same
time, and a step of gradient descent goes right into the model. For chains of linear layers and
activations a layer of many small models is one batched matrix product.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from models.classifier import Classifier
from pfl.local import Step
from pfl.parameters import ParameterSpace
from pfl.scripting import scripted

KINDS: dict[type[nn.Module], str] = {
    nn.Linear: "linear",
    nn.Conv2d: "convolution",
    nn.MaxPool2d: "pooling",
    nn.Flatten: "flatten",
    nn.ReLU: "relu",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
}


# Of larger models a core's cache (1 to 2 MiB) does not hold many: one after another is then faster
# than one product for all, since each stays there for all of its steps.
SMALL = 1 << 18  # bytes


class Chain:
    """A network that is a chain of layers.

    Attributes:
        batched: Whether many models can run at once: if there are no convolutions.
    """

    def __init__(self, steps: list[nn.Module], spans: dict[nn.Module, list[slice]]) -> None:
        self.steps, self.spans = _pool_first(steps), spans
        self.kinds = [KINDS[type(step)] for step in self.steps]
        self.settings = [_settings(step) for step in self.steps]
        self.batched = "convolution" not in self.kinds
        self.channels_last = not self.batched and "pooling" in self.kinds
        self.first = next(n for n, step in enumerate(self.steps) if spans[step])  # with parameters

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
            first: Any = chain.steps[chain.first]
            return chain if first.in_features == inputs[0].numel() else None
        return chain if inputs.ndim == 4 else None

    def models(self, w: Tensor) -> list[Models]:
        """The network with the models w [C, P]: all at once where that is faster, or one by one."""
        together = self.batched and (w.is_cuda or w[:1].nbytes <= SMALL)
        return [Models(self, w)] if together else [Models(self, row) for row in w.split(1)]


class Models:
    """C models of a chain, which are views of w [C, P]: they move when w does.

    A single model has plain matrices instead of batches of them, and its samples no axis for the
    client.
    """

    def __init__(self, chain: Chain, w: Tensor) -> None:
        self.chain, self.w, self.alone = chain, w, len(w) == 1
        self.parameters: list[list[Tensor]] = []
        for step in chain.steps:
            views = [
                w[:, span].unflatten(1, _shape(step, parameter))
                for span, parameter in zip(chain.spans[step], step.parameters(), strict=True)
            ]
            self.parameters.append([view[0] for view in views] if self.alone else views)

    def forward(self, inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Every step's input and then the output, [C, B, K]; and what derivatives need besides.

        Args:
            inputs: [C, B, ...].
        """
        chain, x = self.chain, inputs[0] if self.alone else inputs
        if chain.batched:
            x = x.flatten(1 if self.alone else 2)
        if chain.channels_last:
            x = x.to(memory_format=torch.channels_last)
        return forward(x, chain.kinds, chain.settings, self.parameters)

    def backward(
        self,
        kept: tuple[list[Tensor], list[Tensor]],
        d: Tensor,
        into: Models,
        step: Step,
    ) -> None:
        """Move other models by the gradients here, as a step does before it is finished.

        Args:
            kept: Of `forward`.
            d: The loss's derivative by the output, of its shape.
        """
        chain = self.chain
        first, here, there = chain.first, self.parameters, into.parameters
        factors = (step.shrink, -step.lr)
        backward(*kept, d, chain.kinds, chain.settings, first, here, there, *factors)

    def train(
        self,
        inputs: Tensor,
        targets: Tensor,
        picks: Tensor,
        weights: Tensor | None,
        into: Models,
        step: Step,
    ) -> Tensor:
        """Steps of `into` by K batches, one after another, along gradients of cross entropies.

        `into` is this if the step has no offset.

        Args:
            inputs: Samples as a `Block` has them, [N, ...].
            targets: int64 [N].
            picks: Which of them each batch takes, int64 [K, C, B].
            weights: Of samples, [K, C, B]; None for 1 / B.

        Returns:
            The batches' weighted mean losses, [K, C].
        """
        chain = self.chain
        if self.alone:
            picks, weights = picks[:, 0], None if weights is None else weights[:, 0]
        losses = train(
            inputs,
            targets,
            picks,
            weights,
            chain.batched,
            chain.channels_last,
            chain.kinds,
            chain.settings,
            chain.first,
            self.parameters,
            into.parameters,
            self.w,
            into.w,
            step.lr,
            step.shrink,
            step.shift,
            step.offset,
            step.threshold,
        )
        return losses.view(len(losses), -1)


# ---- TorchScript --------------------------------------------------------------------------------


def cross_entropy(outputs: Tensor, targets: Tensor, minus_one: Tensor) -> tuple[Tensor, Tensor]:
    """Minus the samples' cross entropies [..., 1, B], and the derivatives of these [..., K, B].

    Args:
        outputs: [..., B, K].
        targets: int64 [..., 1, B].
        minus_one: -1 [..., 1, B], made once for many batches.
    """
    # Over the last axis, when it is short, PyTorch takes seven times as long.
    log = outputs.mT.log_softmax(-2)
    return log.gather(-2, targets), log.exp_().scatter_add_(-2, targets, minus_one)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Of two matrices or of two batches of them; `matmul` would look for more."""
    return torch.mm(left, right) if left.dim() == 2 else torch.bmm(left, right)


def linear(x: Tensor, parameters: list[Tensor]) -> Tensor:
    """x W' + b of one model or of each."""
    weight = parameters[0]
    if weight.size(-2) < x.size(-2):  # the longer side last: twice as fast on CPUs
        y = product(weight, x.mT).mT
        return y.add_(parameters[1]) if len(parameters) > 1 else y
    if len(parameters) == 1:
        return product(x, weight.mT)
    if x.dim() == 2:
        return torch.addmm(parameters[1], x, weight.mT)
    return torch.baddbmm(parameters[1], x, weight.mT)


def add_product(into: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> None:
    """into <- beta into + alpha left right."""
    if into.dim() == 2:
        into.addmm_(left, right, beta=beta, alpha=alpha)
    else:
        into.baddbmm_(left, right, beta=beta, alpha=alpha)


def forward(
    x: Tensor, kinds: list[str], settings: list[list[int]], parameters: list[list[Tensor]]
) -> tuple[list[Tensor], list[Tensor]]:
    """See `Models.forward`."""
    values, kept = [x], [x]
    for n, kind in enumerate(kinds):
        x, s, extra = values[-1], settings[n], x
        if kind == "linear":
            y = linear(x, parameters[n])
        elif kind == "convolution":
            bias = parameters[n][1] if len(parameters[n]) > 1 else None
            y = torch.conv2d(x, parameters[n][0], bias, s[:2], s[2:4], s[4:6], s[6])
        elif kind == "pooling":
            y, extra = torch.ops.aten.max_pool2d_with_indices(
                x, s[:2], s[2:4], s[4:6], s[6:8], s[8] != 0
            )
        elif kind == "flatten":
            y = x.flatten(1)
        elif kind == "relu":
            y = torch.relu(x)
        elif kind == "tanh":
            y = torch.tanh(x)
        else:
            y = torch.sigmoid(x)
        values.append(y)
        kept.append(extra)
    return values, kept


def backward(
    values: list[Tensor],
    kept: list[Tensor],
    d: Tensor,
    kinds: list[str],
    settings: list[list[int]],
    first: int,
    parameters: list[list[Tensor]],
    into: list[list[Tensor]],
    beta: float,
    alpha: float,
) -> None:
    """See `Models.backward`: into <- beta into + alpha g."""
    for k in range(len(kinds) - first):
        n = len(kinds) - 1 - k
        kind, s, x, y, on = kinds[n], settings[n], values[n], values[n + 1], n > first
        if kind == "linear":
            before = product(d, parameters[n][0]) if on else d
            add_product(into[n][0], d.mT, x, beta, alpha)
            if len(into[n]) > 1:
                bias = into[n][1]
                ones = torch.ones([1, d.size(-2)], dtype=d.dtype, device=d.device)
                left = ones if d.dim() == 2 else ones.expand(d.size(0), 1, d.size(1))
                add_product(bias, left, d, beta, alpha)
            d = before
        elif kind == "convolution":
            sizes = [d.size(1)] if len(into[n]) > 1 else None
            before, g, of_bias = torch.ops.aten.convolution_backward(
                d,
                x,
                parameters[n][0],
                sizes,
                s[:2],
                s[2:4],
                s[4:6],
                False,
                [0, 0],
                s[6],
                [on, True, len(into[n]) > 1],
            )
            for place, gradient in zip(into[n], [g, of_bias]):  # noqa: B905 (unknown to TorchScript)
                if beta == 0.0:
                    torch.mul(gradient, alpha, out=place)
                else:
                    place.mul_(beta).add_(gradient, alpha=alpha)
            d = before
        elif kind == "pooling":
            d = torch.ops.aten.max_pool2d_with_indices_backward(
                d, x, s[:2], s[2:4], s[4:6], s[6:8], s[8] != 0, kept[n + 1]
            )
        elif kind == "flatten":
            d = d.reshape(x.shape)
        elif kind == "relu":
            d = torch.ops.aten.threshold_backward(d, y, 0)
        elif kind == "tanh":
            d = torch.ops.aten.tanh_backward(d, y)
        else:
            d = torch.ops.aten.sigmoid_backward(d, y)


def train(
    inputs: Tensor,
    targets: Tensor,
    picks: Tensor,
    weights: Tensor | None,
    flat: bool,
    channels_last: bool,
    kinds: list[str],
    settings: list[list[int]],
    first: int,
    parameters: list[list[Tensor]],
    into: list[list[Tensor]],
    w: Tensor,
    v: Tensor,
    lr: float,
    shrink: float,
    shift: Tensor | None,
    offset: Tensor | None,
    threshold: float,
) -> Tensor:
    """See `Models.train`; w and v are what `parameters` and `into` are views of."""
    chosen: list[Tensor] = []
    dtype = parameters[first][0].dtype
    if flat:
        inputs = inputs.flatten(1)
    # What can be done for all batches at once is: with small models every call counts.
    y = targets[picks].unsqueeze(-2)
    minus_one = torch.full([1], -1.0, dtype=w.dtype, device=w.device).expand_as(y[0])
    scale = -lr if weights is not None else -lr / picks.size(-1)
    factors = None if weights is None else weights.unsqueeze(-2)
    shape = picks.size()[1:] + inputs.size()[1:]
    picks = picks.flatten(1)
    # One place for all batches: memory that is returned in every step costs page faults.
    stored = torch.empty(picks.size()[1:] + inputs.size()[1:], dtype=inputs.dtype, device=w.device)
    for k in range(picks.size(0)):
        if offset is not None:
            torch.add(v, offset, out=w)
        x = torch.index_select(inputs, 0, picks[k], out=stored)
        if x.dtype == torch.uint8:  # as datamodules.samples.scaled
            x = x.to(torch.float32).div_(255)
        if x.is_floating_point():
            x = x.to(dtype)
        x = x.view(shape)
        if channels_last:  # max pooling is several times faster so, on CPUs
            x = x.clone(memory_format=torch.channels_last)  # last: a view forgets it
        values, kept = forward(x, kinds, settings, parameters)
        log, d = cross_entropy(values[-1], y[k], minus_one)
        chosen.append(log)
        if factors is not None:
            d.mul_(factors[k])
        backward(values, kept, d.mT, kinds, settings, first, parameters, into, shrink, scale)
        if shift is not None:
            v.add_(shift)
        if threshold > 0.0:
            v.copy_(torch.nn.functional.softshrink(v, threshold))
    losses = torch.stack(chosen).neg_().squeeze(-2)
    return losses.mean(-1) if weights is None else (losses * weights).sum(-1)


forward, backward, train = scripted(forward), scripted(backward), scripted(train)


# ---- which networks are chains ------------------------------------------------------------------


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
    return type(step) in KINDS


def _shape(step: nn.Module, parameter: Tensor) -> tuple[int, ...]:
    """A linear layer's bias is a row."""
    row = isinstance(step, nn.Linear) and parameter.ndim == 1
    return (1, *parameter.shape) if row else tuple(parameter.shape)


def _settings(step: nn.Module) -> list[int]:
    """Sizes of a layer's window, all in one list."""
    window: tuple[Any, ...] = ()
    last: list[int] = []
    if isinstance(step, nn.Conv2d):
        window, last = (step.stride, step.padding, step.dilation), [step.groups]
    elif isinstance(step, nn.MaxPool2d):
        window = (step.kernel_size, step.stride, step.padding, step.dilation)
        last = [int(step.ceil_mode)]
    pairs = ([n, n] if isinstance(n, int) else list(n) for n in window)
    return [*itertools.chain.from_iterable(pairs), *last]


def _hooked(network: nn.Module) -> bool:
    return any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())
