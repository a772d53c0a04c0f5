"""The engines: time of a local step of 10 clients with batches of 20, by network.

    python -m benchmarks.engines > benchmarks/results/engines.md

`sequential` is one client after another with autograd, `vmap` all at once (chains of linear layers
as batched matrix products), `auto` what a run takes: on CPUs a chain's own forward and backward
where there is one. They run in turn in one process with one thread, so that the ratios hold where
the machine's speed drifts.
"""

import platform
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from benchmarks.clock import medians
from models import CNN, MLP, LeNet5, LogisticRegression, SmallCNN
from pfl.engines import EngineName, Oracle
from pfl.engines.batch import Batch, StepBlock, default_loss
from pfl.engines.local_step import Step
from pfl.parameters import ParameterSpace

CLIENTS, SAMPLES, STEPS, REPEATS = 10, 20, 5, 7
NETWORKS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "logistic 784-10": (LogisticRegression(784, 10), (784,)),
    "MLP 784-200-10": (MLP(784, (200,), 10), (784,)),
    "SmallCNN 8x8": (SmallCNN(), (1, 8, 8)),
    "LeNet-5 28x28": (LeNet5(), (1, 28, 28)),
    "CNN 28x28": (CNN(), (1, 28, 28)),
}


def milliseconds(network: nn.Module, shape: tuple[int, ...]) -> dict[EngineName, float]:
    """Median time of a step of gradient descent of all clients, by engine."""
    space = ParameterSpace(network)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(CLIENTS, SAMPLES, *shape, generator=generator)
    targets = torch.randint(10, (CLIENTS, SAMPLES), generator=generator)
    w = space.vector.detach().repeat(CLIENTS, 1)
    blocks = [StepBlock.of(Batch(inputs, targets, [SAMPLES] * CLIENTS), w.dtype)] * STEPS
    engines: list[EngineName] = ["sequential", "vmap", "auto"]
    runs: dict[EngineName, Callable[[], object]] = {}
    for engine in engines:
        oracle = Oracle(network, space, default_loss, engine)
        oracle.inspect(inputs[0], targets[0])
        runs[engine] = partial(oracle.descend, w, blocks, Step(1e-6))
    return {engine: ms / STEPS for engine, ms in medians(runs, REPEATS).items()}


def main() -> None:
    torch.set_num_threads(1)
    device = platform.processor() or platform.machine()
    print(f"PyTorch {torch.__version__}, one thread, {device}\n")
    print("| network | parameters | sequential, ms | vmap, ms | auto, ms | sequential / auto |")
    print("|---|---|---|---|---|---|")
    for name, (network, shape) in NETWORKS.items():
        ms = milliseconds(network, shape)
        count = sum(p.numel() for p in network.parameters())
        cells = " | ".join(f"{ms[engine]:.2f}" for engine in ms)
        print(f"| {name} | {count:,} | {cells} | {ms['sequential'] / ms['auto']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
