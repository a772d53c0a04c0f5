"""Networks that are chains of common layers, as `pfl.engines.chains.kernels` trains them.

In chains of linear layers and activations, a layer of many models is one batched matrix product.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pfl.engines.batch import Buffers, some_rows
from pfl.engines.chains.kernels import Layers, backward, forward, pools_pairs, train
from pfl.engines.common_layers import layers_in_turn
from pfl.engines.dropout import KeyedDropout, kept_of
from pfl.engines.local_step import Step
from pfl.parameters import BufferSpace, ParameterSpace

KINDS: dict[type[nn.Module], str] = {
    nn.Linear: "linear",
    nn.Conv2d: "convolution",
    nn.MaxPool2d: "pooling",
    nn.GroupNorm: "group norm",
    nn.BatchNorm1d: "batch norm",
    nn.BatchNorm2d: "batch norm",
    nn.Flatten: "flatten",
    nn.ReLU: "relu",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
    nn.Dropout: "dropout",
    KeyedDropout: "dropout",
}
Kept = tuple[list[Tensor], list[list[Tensor]]]  # what a forward pass keeps for the backward pass


class Chain:
    """A network that is a chain of layers, `steps`; `spans` are their parameters' in the vector.

    Attributes:
        batched: Whether many models run at once: true for chains of linear layers and activations.
        statistics: The place of each layer's running statistics among the model's buffers.
        has_dropout: Whether training draws.
    """

    def __init__(
        self,
        steps: list[nn.Module],
        spans: dict[nn.Module, list[slice]],
        statistics: dict[nn.Module, slice],
        sides: Sequence[int] = (),
    ) -> None:
        steps = _pool_first(steps)
        pooled = _pools_narrow_convolutions(steps, sides)
        if pooled:  # one kernel for a convolution and its pooling
            steps = [step for step in steps if type(step) is not nn.MaxPool2d]
        self.steps = steps
        self.spans = spans
        starts = sorted(span.start for own in spans.values() for span in own)
        self.order = {start: n for n, start in enumerate(starts)}  # their order in the space
        self.shapes = [[_shape(step, p) for p in step.parameters()] for step in self.steps]
        kinds = [KINDS[type(step)] for step in self.steps]
        flat = "convolution" not in kinds
        self.batched = flat and "batch norm" not in kinds
        self.statistics = statistics
        self.has_dropout = "dropout" in kinds
        if pooled:
            kinds = _pooled_kinds(kinds)
        self.layers = Layers(
            kinds,
            settings=_all_settings(self.steps),
            epsilons=[float(getattr(step, "eps", 0)) for step in self.steps],
            first=next(n for n, step in enumerate(self.steps) if spans[step]),
            momenta=[_momentum(step) for step in self.steps],
            flat=flat,
            channels_last=pooled or "pooling" in kinds,
        )

    @classmethod
    def of(
        cls,
        network: nn.Module,
        space: ParameterSpace,
        inputs: Tensor,
        buffers: BufferSpace | None = None,
    ) -> Chain | None:
        """Returns the chain that a network is, for inputs [n, ...]; None for any other network.

        The buffers are those that training changes; without them a chain with running statistics
        cannot be run.
        """
        found = layers_in_turn(network, space, inputs)
        if found is None:
            return None
        steps, spans, of_vectors = found
        statistics = {}
        if buffers is not None:
            statistics = _statistics(network, buffers)
            size = sum(span.stop - span.start for span in statistics.values())
            if size < buffers.size:  # others move, too
                return None
        if not of_vectors:
            return cls(steps, spans, statistics, inputs.shape[2:])
        layers_of_vectors = [step for step in steps if not isinstance(step, nn.Flatten)]
        return cls(layers_of_vectors, spans, statistics)

    def models(
        self, w: Tensor, moving: list[bool] | None = None, buffers: Buffers = None
    ) -> list[Models]:
        """Returns the models w [C, P]: in one object, or one object each if they are not batched.

        Only the `moving` parameters can be changed; None for all. Running them changes `buffers`.
        """
        if self.batched:
            return [Models(self, w, moving)]
        rows = [slice(c, c + 1) for c in range(len(w))]
        return [Models(self, w[row], moving, some_rows(buffers, row)) for row in rows]


class Models:
    """C models of a chain, whose parameters are views of w [C, P]: they change when w does.

    A single model has matrices instead of batches of matrices, and its samples have no axis for
    the client.

    Args:
        chain: The layers.
        w: The models' values, [C, P].
        moving: For each parameter whether it moves where these models are the ones to move; None:
            all do. The others are empty tensors here.
        buffers: The running statistics of a single model, [1, S], changed in training.
    """

    def __init__(
        self,
        chain: Chain,
        w: Tensor,
        moving: list[bool] | None = None,
        buffers: Buffers = None,
    ) -> None:
        self.chain = chain
        self.w = w
        self.is_single = len(w) == 1
        self.parameters: list[list[Tensor]] = []
        for step, shapes in zip(chain.steps, chain.shapes, strict=True):
            parts = zip(chain.spans[step], shapes, strict=True)
            if self.is_single:
                views = [w[0, span].view(shape) for span, shape in parts]
            else:
                views = [w[:, span].unflatten(1, shape) for span, shape in parts]
            if moving is not None:
                on = [moving[chain.order[span.start]] for span in chain.spans[step]]
                views = [v if moves else v.new_empty(0) for v, moves in zip(views, on, strict=True)]
            self.parameters.append(views)
        self.statistics: list[list[Tensor]] = [[] for _ in chain.steps]
        if buffers is not None and chain.statistics:
            self.statistics = [_parts(step, chain.statistics, buffers[0]) for step in chain.steps]
        self.layers = chain.layers
        if moving is not None:  # the backward pass ends at the first layer that moves
            moves = [n for n, own in enumerate(self.parameters) if any(p.numel() for p in own)]
            self.layers = chain.layers._replace(first=moves[0])

    def forward(
        self,
        inputs: Tensor,
        *,
        keep: bool = True,
        training: bool = False,
        seeds: Tensor | None = None,
    ) -> Kept:
        """Runs the layers on inputs [C, B, ...].

        In training, dropout draws from `seeds`, int64 [C], and BatchNorm uses the batch's means.

        Returns:
            The input of every layer followed by the output of the last, [C, B, K], or that output
            alone if nothing is to `keep`; and what the layers' derivatives need besides.
        """
        chain = self.chain
        x = inputs
        axes = 2  # of clients and samples
        if self.is_single:
            x = inputs[0]
            axes = 1
        if chain.layers.flat:
            x = x.flatten(axes)
        if chain.layers.channels_last:
            x = x.to(memory_format=torch.channels_last)
        own = self.parameters
        return forward(x, chain.layers, own, self.statistics, keep, training, seeds)

    def backward(
        self, kept: Kept, d: Tensor, into: Models, step: Step, also: Tensor | None = None
    ) -> None:
        """Takes the part of a step before `Step.apply_after_gradient`, along these gradients.

        `forward` returned `kept`; d is the derivative of the loss by the output, and `also` its
        further derivative by the input of the last layer. `into` are the models that move, in the
        same memory if the step has no offset, or the gradient of a rule (`Step.toward`).
        """
        values, extra = kept
        _, toward = step.toward(into.w)
        beta = toward.shrink
        alpha = -toward.lr
        own = self.parameters
        backward(
            values,
            extra,
            d,
            into.layers,
            own,
            self.statistics,
            into.parameters,
            beta,
            alpha,
            also,
        )

    def train(
        self,
        inputs: Tensor,
        targets: Tensor,
        picks: Tensor,
        weights: Tensor | None,
        seeds: Tensor | None,
        into: Models,
        v: Tensor,
        step: Step,
    ) -> Tensor:
        """Takes K steps of v [C, P], along the gradients of cross entropies.

        `into` are the models v, or the gradient of a rule (`Step.toward`). Samples, classes and
        `picks` come from a `StepBlock`; `weights` [K, C, B] are the samples' own, None for 1 / B;
        `seeds` [K, C] are those of dropout.
        Returns the batches' weighted mean losses, [K, C].
        """
        if self.is_single:
            picks = picks[:, 0]
            if weights is not None:
                weights = weights[:, 0]
        losses: Tensor = train(
            inputs,
            targets,
            picks,
            weights,
            seeds,
            into.layers,
            self.parameters,
            self.statistics,
            into.parameters,
            self.w,
            v,
            step,
        )
        return losses.view(len(losses), -1)


# ---- the kernels' settings ----------------------------------------------------------------------


def _pool_first(steps: list[nn.Module]) -> list[nn.Module]:
    """Puts max pooling before ReLU: equal values and derivatives with a quarter of the work."""
    steps = list(steps)
    for n, (one, two) in enumerate(itertools.pairwise(steps)):
        if type(one) is nn.ReLU and type(two) is nn.MaxPool2d:
            steps[n : n + 2] = two, one
    return steps


def _pools_narrow_convolutions(steps: list[nn.Module], sides: Sequence[int]) -> bool:
    """Whether all pooling is 2x2 and follows a convolution, and the first has few channels.

    With more than eight, the kernels of PyTorch fill the vector units and are faster. BatchNorm may
    be in between, where the squares cover all outputs of the convolution for images of these sides.
    """
    places = [n for n, step in enumerate(steps) if type(step) is nn.Conv2d]
    pools = [n for n, step in enumerate(steps) if type(step) is nn.MaxPool2d]
    norms = [type(step) is nn.BatchNorm2d for step in [*steps[1:], None]]
    if not places or pools != [n + 1 + norms[n] for n in places]:
        return False
    convolutions: list[Any] = [steps[n] for n in places]
    for n, step in zip(places, convolutions, strict=True):
        pads = _settings(step)[2:4]
        kernel = step.kernel_size
        sides = [side + 2 * p - k + 1 for side, p, k in zip(sides, pads, kernel, strict=True)]
        if norms[n] and any(side % 2 for side in sides):
            return False
        sides = [side // 2 for side in sides]
    return (
        convolutions[0].out_channels <= 8
        and all(pools_pairs(_settings(steps[n])) for n in pools)
        and all(side % 2 == 1 for step in convolutions for side in step.kernel_size)
        # stride, dilation and groups, without the padding
        and all({*_settings(step)[:2], *_settings(step)[4:]} == {1} for step in convolutions)
    )


def _pooled_kinds(kinds: list[str]) -> list[str]:
    """Returns the kinds of layers where convolutions have 2x2 pooling as a part of them."""
    kinds = [*kinds]
    for n, kind in enumerate(kinds):
        if kind != "convolution":
            continue
        if kinds[n + 1 : n + 2] == ["batch norm"]:
            kinds[n] = "convolution of squares"
            kinds[n + 1] = "batch norm of squares"
        else:
            kinds[n] = "pooled convolution"
    return kinds


def _statistics(network: nn.Module, buffers: BufferSpace) -> dict[nn.Module, slice]:
    """Returns the places of BatchNorm's running statistics among the buffers."""
    places: dict[nn.Module, slice] = {}
    start = 0
    for name in buffers.names:
        module = network.get_submodule(name.rpartition(".")[0])
        size = network.get_buffer(name).numel()
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            begin = places.get(module, slice(start, start)).start
            places[module] = slice(begin, start + size)
        start += size
    return places


def _parts(step: nn.Module, places: dict[nn.Module, slice], row: Tensor) -> list[Tensor]:
    """Returns a layer's running mean, running variance, and number of batches, views of a row."""
    if not isinstance(step, nn.BatchNorm1d | nn.BatchNorm2d):
        return []
    n = step.num_features
    return list(row[places[step]].split([n, n, 1]))


def _momentum(step: nn.Module) -> float:
    """Returns how fast running statistics follow; -1 for means of all batches."""
    momentum = getattr(step, "momentum", 0.0)
    if momentum is None:
        return -1.0
    return float(momentum)


def _shape(step: nn.Module, parameter: Tensor) -> tuple[int, ...]:
    """Returns the shape of a parameter's view; the bias of a linear layer is a row."""
    row = isinstance(step, nn.Linear) and parameter.ndim == 1
    if row:
        return (1, *parameter.shape)
    return tuple(parameter.shape)


def _all_settings(steps: list[nn.Module]) -> list[list[int]]:
    """Returns the sizes of all layers' windows; for dropout its rate and its number."""
    settings = []
    number = 0
    for step in steps:
        if isinstance(step, nn.Dropout):
            settings.append([kept_of(step), number])
            number += 1
        else:
            settings.append(_settings(step))
    return settings


def _settings(step: nn.Module) -> list[int]:
    """Returns the sizes of a layer's window, in one list."""
    window: tuple[Any, ...] = ()
    last: list[int] = []
    if isinstance(step, nn.Conv2d):
        window = (step.stride, step.padding, step.dilation)
        last = [step.groups]
    elif isinstance(step, nn.GroupNorm):
        last = [step.num_groups]
    elif isinstance(step, nn.MaxPool2d):
        window = (step.kernel_size, step.stride, step.padding, step.dilation)
        last = [int(step.ceil_mode)]
    pairs = ([n, n] if isinstance(n, int) else list(n) for n in window)
    return [*itertools.chain.from_iterable(pairs), *last]
