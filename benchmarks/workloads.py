"""The workloads of the benchmarks: rounds of FedAvg on synthetic images, the same for everybody.

Samples are x ~ N(mean of the class, 1), dealt by Dirichlet(0.3), the same number to every client;
SGD with rate 0.05, batches of 20, float32, nothing is evaluated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.peers.task import Task
from benchmarks.peers.with_torch import build
from datamodules import Dirichlet, SplitOwn, TensorDataModule
from pfl import FederatedLoop

BATCH, RATE, CLASSES = 20, 0.05, 10


@dataclass(frozen=True)
class Workload:
    """A network, and what its clients have and do.

    Args:
        title: In words.
        network: A class in `models`, or in `benchmarks.peers.networks`.
        arguments: Of that class.
        rounds: That are timed in one run, after a first one.
        repetitions: Runs of every framework, in turn.
    """

    title: str
    network: str
    arguments: dict[str, Any]
    rounds: int
    repetitions: int
    shape: tuple[int, int, int] = (1, 28, 28)
    clients: int = 100
    per_round: int = 10
    samples: int = 300
    epochs: int = 2

    def make(self) -> nn.Module:
        """The network with the weights that everybody begins with."""
        torch.manual_seed(0)
        return build(self.network, self.arguments)

    def data(self, task: Task | None = None) -> TensorDataModule:
        """Every client's samples, in the memory of a task's if one is given."""
        if task is not None:
            return self._dealt(torch.from_numpy(task.inputs), torch.from_numpy(task.targets))
        generator = torch.Generator().manual_seed(0)
        targets = torch.arange(self.clients * self.samples) % CLASSES
        means = torch.randn(CLASSES, *self.shape, generator=generator)
        inputs = means[targets] + torch.randn(len(targets), *self.shape, generator=generator)
        return self._dealt(inputs, targets)

    def _dealt(self, inputs: Tensor, targets: Tensor) -> TensorDataModule:
        return TensorDataModule(
            inputs,
            targets,
            num_clients=self.clients,
            partition=Dirichlet(0.3, over="labels"),
            protocol=SplitOwn(test=0.0, validation=0.0),
        )

    def loop(self, task: Task | None = None) -> FederatedLoop:
        """The cohorts."""
        return FederatedLoop(self.data(task), clients_per_round=self.per_round)

    def task(self, key: str, rounds: int) -> Task:
        """The workload as arrays: a first round and `rounds` more."""
        loop = self.loop()
        data = loop.datamodule
        inputs, targets = data.samples.gather(torch.arange(self.clients * self.samples))
        return Task(
            key=key,
            network=self.network,
            arguments=self.arguments,
            epochs=self.epochs,
            batch=BATCH,
            rate=RATE,
            inputs=inputs.numpy(),
            targets=targets.numpy(),
            owned=[data.partition.train[i] for i in range(self.clients)],
            cohorts=np.stack([loop.cohort(r) for r in range(rounds + 1)]),
            weights=[p.detach().numpy() for p in self.make().parameters()],
        )


WORKLOADS: dict[str, Workload] = {
    "W1": Workload("logistic 784-10", "LogisticRegression", {"in_features": 784}, 20, 2),
    "W2": Workload("MLP 784-200-10", "MLP", {"in_features": 784, "hidden": [200]}, 10, 2),
    "W3": Workload("LeNet-5", "LeNet5", {}, 5, 2),
    "W4": Workload("CNN", "CNN", {}, 1, 2),
    "W5": Workload(
        "ResNet-18 with GroupNorm",
        "ResNet18",
        {},
        rounds=2,
        repetitions=1,
        shape=(3, 32, 32),
        clients=20,
        per_round=4,
        samples=100,
        epochs=1,
    ),
}
