"""One FedAvg round through the Trainer against a plain PyTorch loop, by network.

    python benchmarks/rounds.py > benchmarks/results/rounds.md
    python benchmarks/rounds.py logistic MLP          # only these

A round is 10 of 100 clients with 300 samples each, 2 local epochs, batch size 20, SGD with rate
0.05, float32, without evaluation. Samples are 28x28 images around a mean of their class, dealt by
Dirichlet(0.3). Both sides have the same cohorts, and run in turn in one process, so that the ratio
holds where the machine's speed drifts; the accuracy afterwards shows that they did the same work.
"""

import copy
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn

from datamodules import Dirichlet, SplitOwn, TensorDataModule
from models import CNN, MLP, LeNet5, LogisticRegression
from pfl import FederatedLoop, Trainer
from pfl.algorithms import FedAvg

CLIENTS, PER_ROUND, SAMPLES, EPOCHS, BATCH, RATE = 100, 10, 300, 2, 20, 0.05
WORKLOADS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {  # network, rounds, repetitions
    "logistic 784-10": (lambda: LogisticRegression(784), 20, 5),
    "MLP 784-200-10": (lambda: MLP(784, (200,)), 10, 5),
    "LeNet-5": (LeNet5, 5, 3),
    "CNN": (CNN, 2, 3),
}


class Clock(pl.Callback):
    """When each round began."""

    def __init__(self) -> None:
        self.begun: list[float] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.begun.append(time.perf_counter())


def data() -> TensorDataModule:
    """300 samples for each of 100 clients."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(CLIENTS * SAMPLES) % 10
    means = torch.randn(10, 1, 28, 28, generator=generator)
    inputs = means[targets] + torch.randn(len(targets), 1, 28, 28, generator=generator)
    return TensorDataModule(
        inputs,
        targets,
        num_clients=CLIENTS,
        partition=Dirichlet(0.3, over="labels"),
        protocol=SplitOwn(test=0.0, validation=0.0),
    )


def ours(network: nn.Module, federated: TensorDataModule, rounds: int) -> list[float]:
    """Seconds of each round but the first; the network is trained in place."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as root:
        trainer = Trainer(
            max_epochs=rounds + 1,
            accelerator="cpu",
            default_root_dir=root,
            callbacks=[clock],
            enable_progress_bar=False,
            enable_checkpointing=False,
            limit_val_batches=0,
        )
        method = FedAvg(network, lr=RATE, local_epochs=EPOCHS, batch_size=BATCH)
        trainer.fit(method, datamodule=FederatedLoop(federated, clients_per_round=PER_ROUND))
    return list(np.diff(clock.begun)[1:])


def plain(network: nn.Module, federated: TensorDataModule, rounds: int) -> list[float]:
    """The same with a copy of the network and a torch.optim.SGD for each client."""
    loop, seconds = FederatedLoop(federated, clients_per_round=PER_ROUND), []
    samples, owned = federated.samples, federated.partition.train
    for round in range(rounds + 1):
        begun = time.perf_counter()
        cohort = loop.cohort(round)
        mean = [torch.zeros_like(p) for p in network.parameters()]
        for client in cohort:
            model = copy.deepcopy(network)
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
            inputs, targets = samples.gather(torch.from_numpy(owned[client]))
            for _ in range(EPOCHS):
                for chosen in torch.randperm(len(targets)).split(BATCH):
                    optimizer.zero_grad()
                    output = model(inputs[chosen])
                    nn.functional.cross_entropy(output, targets[chosen]).backward()
                    optimizer.step()
            for total, p in zip(mean, model.parameters(), strict=True):
                total += p.detach() / PER_ROUND
        with torch.no_grad():
            for p, total in zip(network.parameters(), mean, strict=True):
                p.copy_(total)
        seconds.append(time.perf_counter() - begun)
    return seconds[1:]


def accuracy(network: nn.Module, federated: TensorDataModule) -> float:
    """On every seventh sample."""
    with torch.no_grad():
        inputs, targets = federated.samples.gather(torch.arange(0, CLIENTS * SAMPLES, 7))
        return float((network(inputs).argmax(1) == targets).float().mean())


def main() -> None:
    federated = data()
    assert (federated.client_sizes == SAMPLES).all()
    threads = torch.get_num_threads()
    print(f"PyTorch {torch.__version__}, {threads} thread(s), {platform.machine()}\n")
    print(
        "| network | ours, ms (min - max) | plain loop, ms (min - max) | plain / ours | accuracy |"
    )
    print("|---|---|---|---|---|")
    for name, (make, rounds, repetitions) in WORKLOADS.items():
        if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
            continue
        times: dict[str, list[float]] = {"ours": [], "plain": []}
        for _ in range(repetitions):
            torch.manual_seed(0)
            networks = {"ours": make()}
            networks["plain"] = copy.deepcopy(networks["ours"])
            times["ours"] += ours(networks["ours"], federated, rounds)
            times["plain"] += plain(networks["plain"], federated, rounds)
        cells, medians = [], []
        for values in times.values():
            ms = [1000 * value for value in values]
            medians.append(statistics.median(ms))
            cells.append(f"{medians[-1]:.0f} ({min(ms):.0f} - {max(ms):.0f})")
        scores = " / ".join(f"{accuracy(n, federated):.3f}" for n in networks.values())
        ratio = medians[1] / medians[0]
        print(f"| {name} | {cells[0]} | {cells[1]} | {ratio:.2f} | {scores} |", flush=True)


if __name__ == "__main__":
    main()
