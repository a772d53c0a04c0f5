"""3x3 convolutions by Winograd's minimal filtering, with fewer multiplications.

Lavin, Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016. An output tile of m x m
needs an input tile of t x t, t = m + 2; with d, g and y an input tile, a filter and an output tile,
y = A' [(G g G') * (B' d B)] A, where * is elementwise. Over channels, the t^2 entries are t^2
matrix products, of 36 / (9 * 16) = 1/4 (m = 4) or 4/9 (m = 2) of the multiplications. Each
transform is one matrix product too: B' d B is (B (x) B)' vec(d).

PyTorch's own convolutions on CPUs are direct. The rounding errors here are ten times as large for
m = 4, and not larger for m = 2. Until the backward pass the transformed inputs stay in memory: 9/4
(m = 4) or 4 (m = 2) times the inputs.

Only `pfl.engines.select` uses this file. Without it, those convolutions run as PyTorch has them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_MATRICES: dict[int, tuple[list[list[float]], ...]] = {  # m: B', G and A' of the paper
    2: (
        [[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]],
        [[1, 0, 0], [1 / 2, 1 / 2, 1 / 2], [1 / 2, -1 / 2, 1 / 2], [0, 0, 1]],
        [[1, 1, 1, 0], [0, 1, -1, -1]],
    ),
    4: (
        [
            [4, 0, -5, 0, 1, 0],
            [0, -4, -4, 1, 1, 0],
            [0, 4, -4, -1, 1, 0],
            [0, -2, -1, 2, 1, 0],
            [0, 2, -1, -2, 1, 0],
            [0, 4, 0, -5, 0, 1],
        ],
        [
            [1 / 4, 0, 0],
            [-1 / 6, -1 / 6, -1 / 6],
            [-1 / 6, 1 / 6, -1 / 6],
            [1 / 24, 1 / 12, 1 / 6],
            [1 / 24, -1 / 12, 1 / 6],
            [0, 0, 1],
        ],
        [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]],
    ),
}

LEAST = 64  # channels, below which the direct way is faster
_BLOCK = 3 << 19  # floats of transformed tiles at a time, about 6 MiB


@functools.cache
def _matrices(m: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Returns B' (x) B' [t t, t t], G (x) G [t t, 9] and A' (x) A' [m m, t t]."""
    exact = (torch.tensor(rows, dtype=torch.float64) for rows in _MATRICES[m])
    return tuple(torch.kron(one, one).to(dtype) for one in exact)


def _tiles(x: Tensor, size: Sequence[int], m: int, side: tuple[int, int]) -> Tensor:
    """Returns tiles of x [N, H, W, C] that begin m apart: [*size, N, *side, C], a view."""
    n, h, w, c = x.stride()
    shape = (*size, len(x), *side, x.size(3))
    return x.as_strided(shape, (h, w, n, m * h, m * w, c), x.storage_offset())


def _blocks(images: int, floats: int) -> list[slice]:
    """Returns slices of the images, for `floats` values of transformed tiles in each image."""
    size = max(1, _BLOCK // floats)
    return [slice(i, i + size) for i in range(0, images, size)]


class Convolution(torch.autograd.Function):
    """The convolution of x [N, C, H, W] with w [K, C, 3, 3]: [N, K, H, W], padding 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, m: int, keep: bool = True) -> Tensor:
        # U, V and M are the paper's transforms, [t t, ., .]; `keep`: a backward pass follows.
        B, G, A = _matrices(m, x.dtype)
        N, C, H, W = x.shape
        K = len(w)
        t = m + 2
        side = -(-H // m), -(-W // m)
        high = m * side[0]
        wide = m * side[1]
        blocks = _blocks(N, t * t * side[0] * side[1] * max(C, K))
        padded = x.new_zeros(N, high + 2, wide + 2, C)
        padded[:, 1 : H + 1, 1 : W + 1] = x.permute(0, 2, 3, 1)
        U = (G @ w.reshape(K * C, 9).mT).view(-1, K, C)
        kept = []
        y = x.new_empty(N, high, wide, K)
        for block in blocks:
            V = B @ _tiles(padded[block], (t, t), m, side).reshape(t * t, -1)
            V = V.view(t * t, -1, C)
            if keep:
                kept.append(V)
            place = _tiles(y[block], (m, m), m, side)
            place.copy_((A @ torch.bmm(V, U.mT).flatten(1)).view(place.shape))
        ctx.save_for_backward(U, *kept)
        ctx.m = m
        ctx.shape = x.shape
        ctx.side = side
        ctx.blocks = blocks
        return y[:, :H, :W].permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        # The transposed steps of `forward`, in the opposite order.
        U, *kept = ctx.saved_tensors
        m = ctx.m
        N, C, H, W = ctx.shape
        side = ctx.side
        K = dy.size(1)
        t = ctx.m + 2
        B, G, A = _matrices(m, dy.dtype)
        high = m * side[0]
        wide = m * side[1]
        dy = dy.permute(0, 2, 3, 1)
        if (high, wide) != (H, W):
            dy = nn.functional.pad(dy, (0, 0, 0, wide - W, 0, high - H))
        dU = torch.empty_like(U)
        dx = dy.new_zeros(N, high + 2, wide + 2, C)
        for block, V in zip(ctx.blocks, kept, strict=True):
            dM = A.mT @ _tiles(dy[block], (m, m), m, side).reshape(m * m, -1)
            dM = dM.view(t * t, -1, K)
            dU.baddbmm_(dM.mT, V, beta=float(block.start > 0))
            d = (B.mT @ torch.bmm(dM, U).flatten(1)).view(t, t, -1, *side, C)
            # Tiles overlap by two rows and columns; each of these four parts has no overlap.
            for i, j in ((0, 0), (m, 0), (0, m), (m, m)):
                part = d[i : i + m, j : j + m]
                _tiles(dx[block, i:, j:], part.shape[:2], m, side).add_(part)
        dw = (dU.view(t * t, K * C).mT @ G).view(K, C, 3, 3)
        return dx[:, 1 : H + 1, 1 : W + 1].permute(0, 3, 1, 2), dw, None, None


def tile_size(images: int, channels: tuple[int, int], height: int, width: int) -> int | None:
    """Returns the tiles' m where Winograd's way is faster than the direct one; else None.

    With few channels the inputs' transforms, and with few tiles the filters', cost more than
    they save (benchmarks/convolutions.py).
    """
    few, many = sorted(channels)
    tiles = images * -(-height // 4) * -(-width // 4)
    if few >= LEAST and tiles * few >= 5000 and tiles * 8 >= many:
        return 4
    if few >= 256 and images >= 8:
        return 2
    return None


class WinogradConv2d(nn.Conv2d):
    """A 3x3 convolution of stride 1 and padding 1, computed in the faster of two ways."""

    def forward(self, x: Tensor) -> Tensor:
        channels = (self.in_channels, self.out_channels)
        m = None
        plain = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
        if plain and x.ndim == 4 and not torch.is_autocast_enabled("cpu"):
            m = tile_size(len(x), channels, *x.shape[2:])
        if m is None:  # with many channels the direct way is faster if the channels come first
            if min(channels) >= 256:
                x = x.contiguous()
            return super().forward(x)
        y: Tensor = Convolution.apply(x, self.weight, m, torch.is_grad_enabled())
        if self.bias is None:
            return y
        return y + self.bias.view(-1, 1, 1)


def use_winograd(network: nn.Module) -> bool:
    """Replaces every eligible `nn.Conv2d` of a network, in place; True if there was one."""
    window = ((3, 3), (1, 1), (1, 1), (1, 1))
    eligible = [
        m
        for m in network.modules()
        if type(m) is nn.Conv2d
        and (m.kernel_size, m.stride, m.padding, m.dilation) == window
        and m.groups == 1
        and m.padding_mode == "zeros"
        and min(m.weight.shape[:2]) >= LEAST
    ]
    for module in eligible:
        module.__class__ = WinogradConv2d  # keeps its parameters and its place in the network
    return bool(eligible)
