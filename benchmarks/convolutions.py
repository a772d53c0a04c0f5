"""Convolutions by tiles and as one product with their pooling, beside PyTorch's, on one core.

    python -m benchmarks.convolutions > benchmarks/results/convolutions.md

`pfl.engines.winograd` has the tiles, and `pfl.engines.chains.pooled_convolution` the products with
pooling. Times of output and derivatives together, in turn, the medians of seven; float32.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

import models
from benchmarks.clock import medians
from benchmarks.compare import machine
from pfl.engines.chains.pooled_convolution import pooled_convolution, pooled_convolution_backward
from pfl.engines.winograd import Convolution, tile_size, use_winograd

FIRST, LAST = torch.contiguous_format, torch.channels_last
REPEATS = 7

LAYERS = [  # channels in, out, height and width: of ResNet-18, VGG-11, and narrower ones
    (32, 32, 32),
    (64, 64, 32),
    (64, 128, 16),
    (128, 128, 16),
    (128, 256, 8),
    (256, 256, 8),
    (256, 512, 4),
    (512, 512, 4),
    (512, 512, 2),
]
SAMPLES = (4, 10, 20, 50)
POOLED = [(1, 6, 28), (6, 16, 12), (3, 6, 32), (1, 8, 28), (1, 16, 28), (16, 32, 12)]


def step(
    convolve: Callable[[Tensor], Tensor],
    parameters: Iterable[Tensor],
    shape: tuple[int, ...],
    layout: torch.memory_format,
) -> Callable[[], object]:
    """A function that computes the derivatives of some output by input and parameters."""
    x = torch.randn(shape).to(memory_format=layout).requires_grad_()
    d, by = torch.randn_like(convolve(x)), [x, *parameters]
    return lambda: torch.autograd.grad(convolve(x), by, d)


def layer(C: int, K: int, side: int, n: int) -> str:
    """A row of the table of layers."""
    direct, shape = nn.Conv2d(C, K, 3, padding=1, bias=False), (n, C, side, side)
    w = direct.weight
    runs = {
        "directly": step(direct, [w], shape, FIRST),
        "channels last": step(direct, [w], shape, LAST),
        "m = 2": step(lambda x: Convolution.apply(x, w, 2), [w], shape, LAST),
        "m = 4": step(lambda x: Convolution.apply(x, w, 4), [w], shape, LAST),
    }
    cells = " | ".join(f"{ms:.1f}" for ms in medians(runs, REPEATS).values())
    best = tile_size(n, (C, K), side, side)
    choice = f"m = {best}" if best else "directly"
    return f"| {C}, {K}, {side} x {side} | {n} | {cells} | {choice} |"


def pooled(C: int, K: int, side: int, n: int) -> str:
    """A row of the table of 5x5 convolutions with pooling; images have no derivative if C < 4."""
    x, w, bias = torch.randn(n, C, side, side), torch.randn(K, C, 5, 5), torch.randn(K)
    pools, rest = ([2, 2], [2, 2]), ([1, 1], [0, 0], [1, 1])
    wanted = [C > 3, True, True]
    d = torch.randn(n, K, (side - 4) // 2, (side - 4) // 2)
    aten = torch.ops.aten

    def apart(layout: torch.memory_format) -> object:
        images = x.to(memory_format=layout)
        y = torch.conv2d(images, w, bias)
        places = aten.max_pool2d_with_indices(y, *pools)[1]
        back = aten.max_pool2d_with_indices_backward(d, y, *pools, *rest[1:], False, places)
        return aten.convolution_backward(back, images, w, [K], *rest, False, [0, 0], 1, wanted)

    def together() -> object:
        kept = pooled_convolution(x, w, bias, [0, 0])[1]
        return pooled_convolution_backward(d, x, w, kept, [0, 0], wanted)

    ms = medians({"first": lambda: apart(FIRST), "last": lambda: apart(LAST), "one": together}, 50)
    cells = " | ".join(f"{time:.2f}" for time in ms.values())
    return f"| {C}, {K}, {side} x {side} | {n} | {cells} |"


def network(name: str, n: int) -> str:
    """A row of the table of networks."""
    own, tiled, shape = getattr(models, name)(), getattr(models, name)(), (n, 3, 32, 32)
    use_winograd(tiled)
    layout = LAST if name == "VGG11" else FIRST  # as they run without tiles: it has max pooling
    runs = {
        "directly": step(own, own.parameters(), shape, layout),
        "by tiles": step(tiled, tiled.parameters(), shape, LAST),
    }
    directly, by_tiles = medians(runs, REPEATS).values()
    return f"| {name} | {n} | {directly:.0f} | {by_tiles:.0f} | {directly / by_tiles:.2f} |"


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{machine()} Milliseconds on one core.\n")
    print("| network | samples | directly | by tiles | ratio |\n|---|---|---|---|---|")
    for name in ("ResNet18", "VGG11"):
        for n in SAMPLES:
            print(network(name, n), flush=True)
    print("\n| channels, image | samples | directly | channels last | m = 2 | m = 4 | the rule |")
    print("|---|---|---|---|---|---|---|")
    for C, K, side in LAYERS:
        for n in SAMPLES:
            print(layer(C, K, side, n), flush=True)
    print("\n| channels, image; 5x5, pooled | samples | directly | channels last | one product |")
    print("|---|---|---|---|---|")
    for C, K, side in POOLED:
        for n in SAMPLES[1:]:
            print(pooled(C, K, side, n), flush=True)


if __name__ == "__main__":
    main()
