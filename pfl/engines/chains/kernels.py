"""Training of chains of common layers, without autograd and without Python.

Automatic differentiation and the interpreter cost more than the arithmetic of small layers. Here
several local steps are one compiled call that releases the interpreter's lock, so threads train
different clients at the same time, and each step of gradient descent goes right into the model.
`pfl.engines.chains.chain` defines which networks are chains, and what the arguments mean.
"""

# No annotations from __future__: TorchScript reads the annotations of named tuples as they are.
from typing import NamedTuple

import torch
from torch import Tensor

from pfl.engines.chains.pooled_convolution import (
    greatest,
    greatest_backward,
    height_of_squares,
    pooled_convolution,
    pooled_convolution_backward,
    squares,
    squares_backward,
)
from pfl.engines.dropout import dropout_factors
from pfl.engines.local_step import Step, follow
from pfl.torchscript import scripted


class Layers(NamedTuple):
    """The layers of a chain.

    Attributes:
        kinds: Their names in `pfl.engines.chains.chain.KINDS`.
        settings: The sizes of their windows; the number of groups of a normalization; of dropout
            how many of 65,536 values are kept, and how many layers draw before it.
        epsilons: What normalizations add to variances; 0 for other layers.
        momenta: How fast BatchNorm's running statistics follow; -1 for means of all batches.
        first: The index of the first layer with parameters.
        flat: Whether samples are vectors.
        channels_last: Whether images are stored with their channels last.
    """

    kinds: list[str]
    settings: list[list[int]]
    epsilons: list[float]
    momenta: list[float]
    first: int
    flat: bool
    channels_last: bool


def cross_entropy(outputs: Tensor, targets: Tensor, minus_one: Tensor) -> tuple[Tensor, Tensor]:
    """Returns minus the samples' cross entropies [..., 1, B], and their derivatives [..., K, B].

    Of outputs [..., B, K] and targets [..., 1, B]; `minus_one` is -1 of their shape.
    """
    # PyTorch takes seven times as long over the last axis when that axis is short.
    log = outputs.mT.log_softmax(-2)
    return log.gather(-2, targets), log.exp_().scatter_add_(-2, targets, minus_one)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Returns the product of two matrices, or of two batches of matrices."""
    if left.dim() == 2:
        return torch.mm(left, right)
    return torch.bmm(left, right)


def linear_layer(x: Tensor, parameters: list[Tensor]) -> Tensor:
    """Returns x W' + b, for one model or for each of several."""
    weight = parameters[0]
    rows = x.size(-2)
    outputs = weight.size(-2)
    # Twice as fast on CPUs with the longer side last, but for few outputs of many rows.
    if outputs < rows and (rows <= 512 or outputs > 32):
        y = product(weight, x.mT).mT
        if len(parameters) > 1:
            y.add_(parameters[1])
        return y
    if len(parameters) == 1:
        return product(x, weight.mT)
    if x.dim() == 2:
        return torch.addmm(parameters[1], x, weight.mT)
    return torch.baddbmm(parameters[1], x, weight.mT)


def add_product(into: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> None:
    """Computes into <- beta into + alpha left right, in place."""
    if into.dim() == 2:
        into.addmm_(left, right, beta=beta, alpha=alpha)
    else:
        into.baddbmm_(left, right, beta=beta, alpha=alpha)


def mean_size(x: Tensor) -> int:
    """Returns how many values BatchNorm takes a mean of, for x [B, K, ...] or by squares."""
    channels = x.size(1)
    if x.dim() == 6:
        channels = x.size(2)
    return x.numel() // max(1, channels)


def map_sizes(x: Tensor) -> tuple[int, int, int]:
    """Returns the numbers of samples, channels, and values in a channel, of x [B, K, ...]."""
    return x.size(0), x.size(1), x.numel() // max(1, x.size(0) * x.size(1))


def move_parameters(into: list[Tensor], gradients: list[Tensor], beta: float, alpha: float) -> None:
    """Computes into <- beta into + alpha g, in place, for the parameters that move."""
    for place, gradient in zip(into, gradients):  # noqa: B905 (not in TorchScript)
        if place.numel() == 0:
            continue
        if beta == 0.0:
            torch.mul(gradient, alpha, out=place)
        else:
            place.mul_(beta).add_(gradient, alpha=alpha)


def pools_pairs(settings: list[int]) -> bool:
    """Whether a layer of pooling with these settings takes squares of four pixels."""
    return settings == [2, 2, 2, 2, 0, 0, 1, 1, 0]


def pool_pairs(x: Tensor) -> Tensor:
    """Returns the maxima of squares of four pixels, of images [B, K, H, W].

    PyTorch's pooling, which also finds the place of each maximum, takes five times as long.
    """
    h = x.size(2) // 2 * 2
    w = x.size(3) // 2 * 2
    rows = torch.maximum(x[:, :, 0:h:2, :w], x[:, :, 1:h:2, :w])
    return torch.maximum(rows[:, :, :, 0::2], rows[:, :, :, 1::2])


def forward(
    x: Tensor,
    layers: Layers,
    parameters: list[list[Tensor]],
    statistics: list[list[Tensor]],
    keep: bool,
    training: bool,
    seeds: Tensor | None,
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Runs the layers; see `pfl.engines.chains.chain.Models.forward`."""
    values = [x]
    kept: list[list[Tensor]] = [[]]
    for n, kind in enumerate(layers.kinds):
        x = values[-1]
        s = layers.settings[n]
        extra: list[Tensor] = []
        if kind == "linear":
            y = linear_layer(x, parameters[n])
        elif kind == "relu":
            y = torch.relu(x)
        elif kind == "convolution" or kind == "pooled convolution":
            w = parameters[n][0]
            bias = parameters[n][1] if len(parameters[n]) > 1 else None
            if kind == "pooled convolution" and keep:
                y, extra = pooled_convolution(x, w, bias, s[2:4])
            else:
                y = torch.conv2d(x, w, bias, s[:2], s[2:4], s[4:6], s[6])
                if kind == "pooled convolution":  # faster with the large batches of evaluations
                    y = pool_pairs(y)
        elif kind == "convolution of squares":
            w = parameters[n][0]
            bias = parameters[n][1] if len(parameters[n]) > 1 else None
            if training:
                four, read, matrix = squares(x, w, s[2:4])
                if bias is not None:
                    four.add_(bias.unsqueeze(1))
                rows = height_of_squares(x, w, s[2:4])
                y = four.view(2, 2, w.size(0), rows, -1, x.size(0))
                extra = [read, matrix]
            else:
                y = torch.conv2d(x, w, bias, s[:2], s[2:4], s[4:6], s[6])
        elif kind == "pooling" and not keep and pools_pairs(s):
            y = pool_pairs(x)
        elif kind == "pooling":
            y, places = torch.ops.aten.max_pool2d_with_indices(
                x, s[:2], s[2:4], s[4:6], s[6:8], s[8] != 0
            )
            extra = [places]
        elif kind == "group norm":
            own = parameters[n]
            scale, shift = (own[0], own[1]) if len(own) > 0 else (None, None)
            b, c, pixels = map_sizes(x)
            y, mean, inverse = torch.native_group_norm(
                x, scale, shift, b, c, pixels, s[0], layers.epsilons[n]
            )
            extra = [mean, inverse]
        elif kind == "batch norm" or kind == "batch norm of squares":
            own = parameters[n]
            scale, shift = (own[0], own[1]) if len(own) > 0 else (None, None)
            running = statistics[n]
            momentum = layers.momenta[n]
            if training:
                assert mean_size(x) > 1, "BatchNorm: more than one value per channel"
                running[2].round_().add_(1)  # a mean of clients' numbers may be no integer
                if momentum < 0.0:
                    momentum = 1.0 / float(running[2].item())
            normalized = x
            if x.dim() == 6:
                normalized = x.flatten(0, 1).flatten(2)
            y, mean, inverse = torch.native_batch_norm(
                normalized,
                scale,
                shift,
                running[0],
                running[1],
                training,
                momentum,
                layers.epsilons[n],
            )
            extra = [mean, inverse]
            if x.dim() == 6:
                z, differences = greatest(y)
                y = z.view(x.size(2), x.size(3), x.size(4), x.size(5)).permute(3, 0, 1, 2)
                extra = [mean, inverse, differences[0], differences[1], differences[2]]
            elif kind == "batch norm of squares":
                y = pool_pairs(y)
        elif kind == "flatten":
            y = x.flatten(1)
        elif kind == "dropout":
            y = x
            if seeds is not None:
                samples = x.size(0)
                if x.dim() == 3:
                    samples = x.size(1)
                size = x.numel() // max(1, seeds.size(0) * samples)
                factors = dropout_factors(seeds, s[1], s[0], samples, size, x.dtype).view(x.size())
                y = x * factors
                extra = [factors]
        elif kind == "tanh":
            y = torch.tanh(x)
        else:
            y = torch.sigmoid(x)
        if keep:
            values.append(y)
            kept.append(extra)
        else:
            values = [y]
    return values, kept


def backward(
    values: list[Tensor],
    kept: list[list[Tensor]],
    d: Tensor,
    layers: Layers,
    parameters: list[list[Tensor]],
    statistics: list[list[Tensor]],
    into: list[list[Tensor]],
    beta: float,
    alpha: float,
    also: Tensor | None,
) -> None:
    """Computes into <- beta into + alpha g; see `pfl.engines.chains.chain.Models.backward`.

    Parameters that do not move are empty tensors in `into`, and their gradients are not computed.
    `also` is what the loss adds to the derivative by the input of the last layer.
    """
    for k in range(len(layers.kinds) - layers.first):
        n = len(layers.kinds) - 1 - k
        kind = layers.kinds[n]
        s = layers.settings[n]
        x = values[n]
        y = values[n + 1]
        on = n > layers.first
        if kind == "linear":
            before = d
            if on:
                before = product(d, parameters[n][0])
            if into[n][0].numel() > 0:
                add_product(into[n][0], d.mT, x, beta, alpha)
            if len(into[n]) > 1 and into[n][1].numel() > 0:
                bias = into[n][1]
                ones = torch.ones([1, d.size(-2)], dtype=d.dtype, device=d.device)
                if d.dim() == 3:
                    ones = ones.expand(d.size(0), 1, d.size(1))
                add_product(bias, ones, d, beta, alpha)
            d = before
        elif kind == "relu":
            d = torch.ops.aten.threshold_backward(d, y, 0)
        elif kind == "convolution" or kind == "pooled convolution":
            w = parameters[n][0]
            sizes = [d.size(1)] if len(into[n]) > 1 else None
            bias_moves = len(into[n]) > 1 and into[n][-1].numel() > 0
            wanted = [on, into[n][0].numel() > 0, bias_moves]
            if kind == "pooled convolution":
                before, g, of_bias = pooled_convolution_backward(
                    d, x, w, kept[n + 1], s[2:4], wanted
                )
            else:
                before, g, of_bias = torch.ops.aten.convolution_backward(
                    d, x, w, sizes, s[:2], s[2:4], s[4:6], False, [0, 0], s[6], wanted
                )
            move_parameters(into[n], [g, of_bias], beta, alpha)
            d = before
        elif kind == "convolution of squares":
            w = parameters[n][0]
            four = d.flatten(0, 1).flatten(2)
            of_bias = four
            if len(into[n]) > 1 and into[n][1].numel() > 0:
                of_bias = four.sum([0, 2])
            wanted = [on, into[n][0].numel() > 0]
            before, g = squares_backward(four, x, w, kept[n + 1][0], kept[n + 1][1], s[2:4], wanted)
            move_parameters(into[n], [g, of_bias], beta, alpha)
            d = before
        elif kind == "group norm":
            scale = parameters[n][0] if len(parameters[n]) > 0 else None
            moving = [len(into[n]) > 0 and into[n][i].numel() > 0 for i in range(2)]
            # The kernel reads d in the layout of x.
            if x.is_contiguous():
                d = d.contiguous()
            else:
                d = d.contiguous(memory_format=torch.channels_last)
            b, c, pixels = map_sizes(x)
            mean, inverse = kept[n + 1]
            before, g, of_bias = torch.ops.aten.native_group_norm_backward(
                d, x, mean, inverse, scale, b, c, pixels, s[0], [on, moving[0], moving[1]]
            )
            move_parameters(into[n], [g, of_bias], beta, alpha)
            d = before
        elif kind == "batch norm" or kind == "batch norm of squares":
            scale = parameters[n][0] if len(parameters[n]) > 0 else None
            moving = [len(into[n]) > 0 and into[n][i].numel() > 0 for i in range(2)]
            mean = kept[n + 1][0]
            inverse = kept[n + 1][1]
            running = statistics[n]
            normalized = x
            if x.dim() == 6:
                normalized = x.flatten(0, 1).flatten(2)
                d = d.permute(1, 2, 3, 0).reshape(x.size(2), -1)
                d = greatest_backward(d, kept[n + 1][2:])
            before, g, of_bias = torch.ops.aten.native_batch_norm_backward(
                d,
                normalized,
                scale,
                running[0],
                running[1],
                mean,
                inverse,
                True,
                layers.epsilons[n],
                [on, moving[0], moving[1]],
            )
            move_parameters(into[n], [g, of_bias], beta, alpha)
            d = before
            if on:  # else there is none
                d = before.view(x.size())
        elif kind == "pooling":
            d = torch.ops.aten.max_pool2d_with_indices_backward(
                d, x, s[:2], s[2:4], s[4:6], s[6:8], s[8] != 0, kept[n + 1][0]
            )
        elif kind == "flatten":
            d = d.reshape(x.shape)
        elif kind == "dropout":
            if len(kept[n + 1]) > 0:
                d = d * kept[n + 1][0]
        elif kind == "tanh":
            d = torch.ops.aten.tanh_backward(d, y)
        else:
            d = torch.ops.aten.sigmoid_backward(d, y)
        if k == 0 and on and also is not None:
            d = d + also


def train(
    inputs: Tensor,
    targets: Tensor,
    picks: Tensor,
    weights: Tensor | None,
    seeds: Tensor | None,
    layers: Layers,
    parameters: list[list[Tensor]],
    statistics: list[list[Tensor]],
    into: list[list[Tensor]],
    w: Tensor,
    v: Tensor,
    step: Step,
) -> Tensor:
    """Takes K steps; see `pfl.engines.chains.chain.Models.train`.

    `parameters` are views of w, and `into` of v; both are the same if the step has no offset. With
    a rule, `into` are views of its gradient. What does not move is empty in `into` (`backward`).
    """
    chosen: list[Tensor] = []
    dtype = parameters[layers.first][0].dtype
    offset = step.offset
    scale = step.scale
    shift = step.shift
    part = step.part
    mask = step.mask
    rule = step.rule
    beta = step.shrink
    rate = -step.lr
    if rule is not None:  # as TAKE_GRADIENT
        beta = 0.0
        rate = 1.0
    still = v
    if part is not None:
        still = v.clone()
    are_images = inputs.dim() > 2
    if layers.flat:
        inputs = inputs.flatten(1)
    # Done once for all batches: with small models every call costs time.
    y = targets[picks].unsqueeze(-2)
    minus_one = torch.full([1], -1.0, dtype=w.dtype, device=w.device).expand_as(y[0])
    if weights is None:
        rate = rate / picks.size(-1)
    factors = None if weights is None else weights.unsqueeze(-2)
    shape = picks.size()[1:] + inputs.size()[1:]
    picks = picks.flatten(1)
    # One buffer for all batches: memory that is freed in every step costs page faults.
    stored = torch.empty(picks.size()[1:] + inputs.size()[1:], dtype=inputs.dtype, device=w.device)
    for k in range(picks.size(0)):
        if offset is not None:
            if scale is None:
                torch.add(v, offset, out=w)
            else:
                torch.addcmul(offset, scale, v, out=w)
        x = torch.index_select(inputs, 0, picks[k], out=stored)
        if x.dtype == torch.uint8:  # as `scaled` of datamodules
            x = x.to(torch.float32)
            if are_images:
                x = x.div_(255)
        if x.is_floating_point():
            x = x.to(dtype)
        x = x.view(shape)
        if layers.channels_last:  # max pooling on CPUs is several times faster with it
            x = x.clone(memory_format=torch.channels_last)  # after `view`, which drops the layout
        own_seeds = seeds
        if seeds is not None:
            own_seeds = seeds[k]
        values, kept = forward(x, layers, parameters, statistics, True, True, own_seeds)
        log, d = cross_entropy(values[-1], y[k], minus_one)
        chosen.append(log)
        if factors is not None:
            d.mul_(factors[k])
        backward(values, kept, d.mT, layers, parameters, statistics, into, beta, rate, None)
        if rule is not None:
            follow(rule, v, step.lr, step.shrink)
        if step.decay > 0.0:
            v.sub_(w, alpha=step.lr * step.decay)
        if shift is not None:
            v.add_(shift)
        if step.threshold > 0.0:
            v.copy_(torch.nn.functional.softshrink(v, step.threshold))
        if mask is not None:
            v.mul_(mask)
        others = shift is not None or mask is not None or rule is not None
        if part is not None and (others or step.decay > 0.0 or step.threshold > 0.0):
            v.copy_(torch.where(part, v, still))
    losses = torch.stack(chosen).neg_().squeeze(-2)
    if weights is None:
        return losses.mean(-1)
    return (losses * weights).sum(-1)


forward = scripted(forward)
backward = scripted(backward)
train = scripted(train)
