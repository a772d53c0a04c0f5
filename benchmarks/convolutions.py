"""3x3 convolutions by tiles (`pfl.winograd`) and directly, on one core: why the rule is as it is.

    python benchmarks/convolutions.py > benchmarks/results/convolutions.md

Times of output and derivatives together, in turn, the medians of seven; float32.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn

import models
from benchmarks.compare import machine
from pfl import winograd
from pfl.winograd import install, tile_size

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


def medians(runs: list[Callable[[], object]]) -> list[float]:
    """Milliseconds of each, which take turns."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(8):
        for run, own in zip(runs, times, strict=True):
            begun = time.perf_counter()
            run()
            own.append((time.perf_counter() - begun) * 1e3)
    return [median(own[1:]) for own in times]


def step(network: nn.Module, shape: tuple[int, ...], layout: torch.memory_format) -> Callable:
    """A function that computes the derivatives of some output by input and parameters."""
    x = torch.randn(shape).to(memory_format=layout).requires_grad_()
    d = torch.randn_like(network(x))
    return lambda: torch.autograd.grad(network(x), [x, *network.parameters()], d)


def layer(C: int, K: int, side: int, n: int) -> str:
    """A row of the table of layers."""
    convolution = nn.Conv2d(C, K, 3, padding=1, bias=False)
    shape = n, C, side, side
    runs = [step(convolution, shape, f) for f in (torch.contiguous_format, torch.channels_last)]
    for m in (2, 4):
        tiled = nn.Module()
        tiled.weight = convolution.weight
        tiled.forward = lambda x, m=m: winograd.Convolution.apply(x, convolution.weight, m)
        runs.append(step(tiled, shape, torch.channels_last))
    cells = " | ".join(f"{ms:.1f}" for ms in medians(runs))
    best = tile_size(n, (C, K), side, side)
    choice = f"m = {best}" if best else "directly"
    return f"| {C}, {K}, {side} x {side} | {n} | {cells} | {choice} |"


def network(name: str, n: int) -> str:
    """A row of the table of networks."""
    own, tiled = getattr(models, name)(), getattr(models, name)()
    install(tiled)
    layout = torch.channels_last if name == "VGG11" else torch.contiguous_format
    shape = n, 3, 32, 32
    directly, by_tiles = medians(
        [step(own, shape, layout), step(tiled, shape, torch.channels_last)]
    )
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
