"""A round of 20 clients with five networks, beside the five homogeneous rounds of four clients.

    python -m benchmarks.families > benchmarks/results/families.md

Each client has 200 images of 28x28 and takes an epoch with batches of 10. The runs take turns in
one process with one thread; seconds are those of the processor, which other processes change less
than they change time. A ratio is that of one turn: the round of the family over the sum of the
five; the table has the smallest, the median and the largest one.
"""

import copy
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
import torch
from torch import nn

from benchmarks.clock import seconds_of, stamps_of
from benchmarks.compare import machine
from pfl import FederatedLoop
from pfl.algorithms import FederatedAlgorithm, FedProto, LGFedAvg, LocalTrain
from pfl.datamodules import IID, TensorDataModule
from pfl.method import Network
from pfl.models import CNN, MLP, Family, LeNet5, SmallCNN

CLIENTS, SAMPLES, FEATURES = 20, 200, 32
ROUNDS, TURNS = 3, 3


def _mlp(width: int) -> nn.Module:
    return MLP(784, (width, FEATURES))


SETS: dict[str, dict[str, Callable[[], nn.Module]]] = {
    "five MLPs": {f"MLP {width}": partial(_mlp, width) for width in (16, 32, 64, 128, 256)},
    "MLPs and CNNs": {
        "MLP 64": partial(_mlp, 64),
        "MLP 256": partial(_mlp, 256),
        "SmallCNN": partial(SmallCNN, width=8),
        "LeNet5": LeNet5,
        "CNN": CNN,
    },
}
METHODS = {"LocalTrain": LocalTrain, "FedProto": FedProto, "LGFedAvg": LGFedAvg}


def data(clients: int) -> TensorDataModule:
    """Images of random numbers, as many of each class."""
    rng = np.random.default_rng(0)
    count = clients * SAMPLES
    inputs = torch.from_numpy(rng.normal(size=(count, 1, 28, 28)).astype(np.float32))
    return TensorDataModule(
        inputs, torch.arange(count) % 10, num_clients=clients, partition=IID(), seed=0
    )


def seconds(network: Network, kind: type[FederatedAlgorithm], clients: int) -> float:
    """Processor seconds of a round, the median of some."""
    method = kind(network, lr=0.01, batch_size=10)
    loop = FederatedLoop(data(clients))
    return median(seconds_of(stamps_of(method, loop, 1 + ROUNDS, now=time.process_time)))


def main() -> None:
    torch.set_num_threads(1)
    print(f"{machine()} One thread, {TURNS} turns.\n")
    print("| networks | method | family, ms | sum of five, ms | ratio: least | median | most |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for key, makers in SETS.items():
        for name, kind in METHODS.items():
            families = []
            sums = []
            for turn in range(1 + TURNS):
                torch.manual_seed(turn)
                made = {one: make() for one, make in makers.items()}
                family = seconds(Family(copy.deepcopy(made), features=FEATURES), kind, CLIENTS)
                parts = Family(made, features=FEATURES).networks.values()
                total = sum(seconds(part, kind, CLIENTS // len(parts)) for part in parts)
                if turn:  # the first one warms up
                    families.append(1000 * family)
                    sums.append(1000 * total)
            ratios = [one / other for one, other in zip(families, sums, strict=True)]
            numbers = f"{median(families):.0f} | {median(sums):.0f}"
            spread = f"{min(ratios):.2f} | {median(ratios):.2f} | {max(ratios):.2f}"
            print(f"| {key} | {name} | {numbers} | {spread} |", flush=True)


if __name__ == "__main__":
    main()
