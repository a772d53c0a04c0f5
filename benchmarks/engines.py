"""Loop against vmap: time of one local step of 10 clients, batch 20, by network.

    python benchmarks/engines.py > benchmarks/results/engines.md

Both engines run in turn in one process, so that the ratio holds where the machine's speed drifts.
"""

import platform
import statistics
import time

import torch
from torch import nn

from models import CNN, MLP, LeNet5, LogisticRegression, SmallCNN
from pfl.oracle import Batch, Engine, Oracle, default_loss
from pfl.parameters import ParameterSpace

CLIENTS, SAMPLES, REPEATS = 10, 20, 15
NETWORKS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "logistic 784-10": (LogisticRegression(784, 10), (784,)),
    "MLP 784-200-10": (MLP(784, (200,), 10), (784,)),
    "SmallCNN 8x8": (SmallCNN(), (1, 8, 8)),
    "LeNet-5 28x28": (LeNet5(), (1, 28, 28)),
    "CNN 28x28": (CNN(), (1, 28, 28)),
}


def milliseconds(network: nn.Module, shape: tuple[int, ...]) -> dict[Engine, float]:
    """Median time of one gradient of all clients, by engine."""
    space = ParameterSpace(network)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(CLIENTS, SAMPLES, *shape, generator=generator)
    targets = torch.randint(10, (CLIENTS, SAMPLES), generator=generator)
    batch = Batch(inputs, targets, [SAMPLES] * CLIENTS)
    w = space.vector.detach().repeat(CLIENTS, 1)
    times: dict[Engine, list[float]] = {"loop": [], "vmap": []}
    oracles = {engine: Oracle(network, space, default_loss, engine) for engine in times}
    for oracle in oracles.values():
        oracle.inspect(inputs[0], targets[0])
    for _ in range(REPEATS + 1):
        for engine, oracle in oracles.items():
            begin = time.perf_counter()
            oracle.gradient(w, batch)
            times[engine].append(1000 * (time.perf_counter() - begin))
    return {engine: statistics.median(t[1:]) for engine, t in times.items()}


def main() -> None:
    device = platform.processor() or platform.machine()
    print(f"PyTorch {torch.__version__}, {torch.get_num_threads()} thread(s), {device}\n")
    print("| network | parameters | loop, ms | vmap, ms | loop / vmap |")
    print("|---|---|---|---|---|")
    for name, (network, shape) in NETWORKS.items():
        ms = milliseconds(network, shape)
        count = sum(p.numel() for p in network.parameters())
        ratio = ms["loop"] / ms["vmap"]
        print(f"| {name} | {count:,} | {ms['loop']:.2f} | {ms['vmap']:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
