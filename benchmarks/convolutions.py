"""3x3 convolutions by tiles (`pfl.engines.winograd`) and directly, on one core.

    python -m benchmarks.convolutions > benchmarks/results/convolutions.md

Times of output and derivatives together, in turn, the medians of seven; float32.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

import models
from benchmarks.clock import medians
from benchmarks.compare import machine
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


if __name__ == "__main__":
    main()
