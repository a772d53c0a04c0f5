"""How much arithmetic a network is, and how fast the device does arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.benchmark import Timer


def products(network: nn.Module, shape: tuple[int, ...]) -> int:
    """Multiplications and additions of the layers' products in one training step of one sample.

    Twice as many for the derivatives by weights and by inputs as forward, less the first layer's.
    """
    counts: list[int] = []

    def count(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        places = output[0].numel() // len(weight)
        counts.append(2 * places * weight.numel())

    layers = [m for m in network.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    with torch.no_grad():
        network(torch.zeros(1, *shape))
    for hook in hooks:
        hook.remove()
    return 3 * sum(counts) - counts[0]


def rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large matrix product, the best of several."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    clock = Timer("a @ b", globals={"a": a, "b": b})
    return 2 * size**3 / min(clock.timeit(5).mean for _ in range(3))
