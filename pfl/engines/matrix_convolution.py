"""Convolutions as matrix products, which have one axis more for many clients' kernels.

With a kernel of its own for each client, PyTorch's convolution becomes a grouped one, which cuDNN
runs slowly, above all its derivative by the kernels. As a product of each client's kernels with the
windows of its images it is one batched matrix product, forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class MatrixConv2d(nn.Conv2d):
    """A convolution whose windows are written down and multiplied with the kernels."""

    def forward(self, x: Tensor) -> Tensor:
        settings: Any = (self.kernel_size, self.dilation, self.padding, self.stride)
        windows = nn.functional.unfold(x, *settings)  # [B, C h w, places]
        kernels = self.weight.flatten(1)
        # One product for all samples: the samples' places are columns.
        y = torch.einsum("kc,bcp->bkp", kernels, windows)
        if self.bias is not None:
            y = y + self.bias[:, None]
        sizes = zip(x.shape[-2:], *settings, strict=True)
        sides = [
            (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, dilation, padding, stride in sizes
        ]
        return y.unflatten(-1, sides)


def use_matrix_products(network: nn.Module) -> bool:
    """Replaces every eligible `nn.Conv2d` of a network, in place; True if there was one."""
    eligible = [
        m
        for m in network.modules()
        if type(m) is nn.Conv2d
        and m.groups == 1
        and m.padding_mode == "zeros"
        and not isinstance(m.padding, str)
    ]
    for module in eligible:
        module.__class__ = MatrixConv2d  # keeps its parameters and its place in the network
    return bool(eligible)
