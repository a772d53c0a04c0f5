"""Convolutions as matrix products, which have one axis more for many clients' kernels.

With a kernel of its own for each client, PyTorch's convolution becomes a grouped one, which cuDNN
runs slowly, above all its derivatives. As a product of each client's kernels with the windows of
its images it is one batched matrix product, forward and backward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pfl.engines.base import Engine
from pfl.engines.runner import ModelRunner
from pfl.engines.vmap import VmapEngine
from pfl.parameters import private_copy


def windows(x: Tensor, height: int, width: int) -> Tensor:
    """Returns what a kernel reads at each place of images x [B, C, H, W]: [B n m, C h w]."""
    view = x.unfold(2, height, 1).unfold(3, width, 1)  # [B, C, n, m, h, w]
    return view.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(0, 2)


def products(x: Tensor, w: Tensor) -> Tensor:
    """Returns the convolution of images x [B, C, H, W] with kernels w [K, C, h, w], unpadded."""
    height, width = w.shape[2:]
    y = windows(x, height, width) @ w.flatten(1).T
    rows = x.shape[2] - height + 1
    columns = x.shape[3] - width + 1
    return y.unflatten(0, (len(x), rows, columns)).permute(0, 3, 1, 2)


class Convolution(torch.autograd.Function):
    """The convolution of images x [B, C, H, W] with kernels w [K, C, h, w], of stride 1, unpadded.

    The derivative by the images is a convolution, too, with the kernels turned around.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return products(x, w)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        height, width = w.shape[2:]
        dx = None
        dw = None
        if ctx.needs_input_grad[0]:
            around = (width - 1, width - 1, height - 1, height - 1)
            dx = products(nn.functional.pad(dy, around), w.flip(2, 3).transpose(0, 1))
        if ctx.needs_input_grad[1]:
            of_outputs = dy.permute(0, 2, 3, 1).flatten(0, 2)
            dw = (of_outputs.T @ windows(x, height, width)).view_as(w)
        return dx, dw


class MatrixConv2d(nn.Conv2d):
    """A convolution of stride 1 whose windows are written down and multiplied with the kernels."""

    def forward(self, x: Tensor) -> Tensor:
        padding: Any = self.padding
        above, left = padding
        if above or left:
            x = nn.functional.pad(x, (left, left, above, above))
        y: Tensor = Convolution.apply(x, self.weight)
        if self.bias is None:
            return y
        return y + self.bias[:, None, None].to(y.dtype)  # bfloat16 under autocast


def use_matrix_products(network: nn.Module) -> bool:
    """Replaces every eligible `nn.Conv2d` of a network, in place; True if there was one."""
    eligible = [
        m
        for m in network.modules()
        if type(m) is nn.Conv2d
        and (m.stride, m.dilation, m.groups) == ((1, 1), (1, 1), 1)
        and m.padding_mode == "zeros"
        and not isinstance(m.padding, str)
    ]
    for module in eligible:
        module.__class__ = MatrixConv2d  # keeps its parameters and its place in the network
    return bool(eligible)


def with_matrix_products(runner: ModelRunner) -> ModelRunner | None:
    """Returns the same network with convolutions as matrix products; None if it has none."""
    network = private_copy(runner.original)
    network.train()
    if not use_matrix_products(network):
        return None
    runner.transform(network)
    changed = replace(runner, network=network)
    changed.to(runner.device, runner.space.vector.dtype)
    return changed


class MatrixVmapEngine(VmapEngine):
    """Runs all clients at once, with convolutions as matrix products."""

    name = "vmap of matrix products"

    @classmethod
    def to_record(cls, engine: Engine, clients: int) -> Engine | None:
        if not engine.batched:
            return None
        products = with_matrix_products(engine.runner)
        if products is None:
            return None
        return cls(products)
