"""What is timed: networks, client data and rounds of published set-ups, with random samples.

Images are x ~ N(mean of the class, 1). The first samples are repeated where a data set has more
than `DISTINCT`, since drawing them would take longer than the case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import models
from benchmarks.gpu import networks
from benchmarks.gpu.networks import Transformer, adapted
from benchmarks.workloads import WORKLOADS
from datamodules import (
    Dirichlet,
    LogNormal,
    Partitioner,
    PFLlibDirichlet,
    SplitOwn,
    TensorDataModule,
)
from pfl import FederatedLoop
from pfl.algorithms import Ditto, FedAvg, FedCLUP, FederatedAlgorithm, FedSLR

DISTINCT = 20_000
EQUAL = partial(Dirichlet, 0.3, over="labels")  # the same number of samples to every client


@dataclass(frozen=True)
class Shape:
    """A network, and what its clients have and do.

    Args:
        title: In words, with its source.
        network: A class in `models` or in `benchmarks.gpu.networks`.
        arguments: Of that class.
        input: The shape of a sample.
        clients: All of them.
        per_round: Those of a round.
        samples: Of all clients together.
        epochs, batch, rate: Of a client in a round.
        classes: Of the targets.
        tokens: The size of the vocabulary if samples are texts; 0: they are images.
        every_token: Whether each token has a target.
        partition: Deals the samples to the clients.
        test: The share of each client's samples that is for evaluation.
        method: What trains.
        settings: Arguments of the method besides those above.
        lora: Whether only adapters and the head are trained.
        counted: Whether the products of the network's layers are known (`work.products`).
    """

    title: str
    network: str
    arguments: dict[str, Any]
    input: tuple[int, ...]
    clients: int
    per_round: int
    samples: int
    epochs: int = 1
    batch: int = 20
    rate: float = 0.05
    classes: int = 10
    tokens: int = 0
    every_token: bool = False
    partition: Callable[[], Partitioner] = EQUAL
    test: float = 0.0
    method: type[FederatedAlgorithm] = FedAvg
    settings: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    counted: bool = True

    def make(self) -> nn.Module:
        """The network with the weights that every side begins with."""
        torch.manual_seed(0)
        kind = getattr(models, self.network, None) or getattr(networks, self.network)
        network: nn.Module = kind(**self.arguments)
        if self.lora:
            assert isinstance(network, Transformer)
            network = adapted(network)
        return network

    def data(self) -> TensorDataModule:
        """Every client's samples."""
        generator = torch.Generator().manual_seed(0)
        targets = torch.arange(self.samples) % self.classes
        distinct = min(self.samples, DISTINCT - DISTINCT % self.classes)
        if self.tokens:
            some = torch.randint(self.tokens, (distinct, *self.input), generator=generator)
        else:
            means = torch.randn(self.classes, *self.input, generator=generator)
            some = torch.randn(distinct, *self.input, generator=generator)
            some += means[targets[:distinct]]
        if self.every_token:
            targets = repeated(some.roll(-1, 1), self.samples)
        return TensorDataModule(
            repeated(some, self.samples),
            targets,
            num_clients=self.clients,
            partition=self.partition(),
            protocol=SplitOwn(test=self.test, validation=0.0),
        )

    def loop(self, data: TensorDataModule, evaluate: bool = False) -> FederatedLoop:
        """The cohorts."""
        splits = []
        if evaluate:
            splits = ["test"]
        return FederatedLoop(data, clients_per_round=self.per_round, evaluate=splits)  # type: ignore[arg-type]

    def algorithm(self, engine: Any = "auto") -> FederatedAlgorithm:
        """The method with a new network."""
        return self.method(
            self.make(),
            lr=self.rate,
            local_epochs=self.epochs,
            batch_size=self.batch,
            engine=engine,
            **self.settings,
        )


def repeated(values: Tensor, count: int) -> Tensor:
    """Returns `count` rows, the given ones again and again."""
    if count <= len(values):
        return values[:count]
    times = -(-count // len(values))
    return values.repeat(times, *[1] * (values.ndim - 1))[:count]


def _workload(key: str, **changes: Any) -> Shape:
    """One of `benchmarks.workloads`, perhaps changed."""
    w = WORKLOADS[key]
    values: dict[str, Any] = {
        "title": w.title,
        "network": w.network,
        "arguments": w.arguments,
        "input": w.shape,
        "clients": w.clients,
        "per_round": w.per_round,
        "samples": w.clients * w.samples,
        "epochs": w.epochs,
    }
    return Shape(**{**values, **changes})


def _many(per_round: int) -> Shape:
    title = f"LeNet-5, {per_round:,} of 1,000 clients with 60 samples"
    return _workload("W3", title=title, clients=1000, per_round=per_round, samples=60_000, epochs=1)


# Song et al., "pfl-research", NeurIPS 2024: 1,000 clients with 50 samples, 50 of them a round, one
# epoch in batches of 10; its network has two convolutions.
CIFAR = Shape(
    "pfl-research's CIFAR-10 protocol",
    "CNN",
    {"in_channels": 3, "image_size": 32, "kernel_size": 3},
    (3, 32, 32),
    clients=1000,
    per_round=50,
    samples=50_000,
    batch=10,
)
# PFLlib's quick start; its issue 253 says 17 to 18 s a round on an RTX 5090.
PFLLIB = Shape(
    "PFLlib's quick start: MNIST's sizes, FedAvgCNN, all of 20 clients, Dirichlet 0.1",
    "FedAvgCNN",
    {},
    (1, 28, 28),
    clients=20,
    per_round=20,
    samples=70_000,
    batch=10,
    rate=0.005,
    partition=partial(PFLlibDirichlet, 0.1),
    test=0.25,
)
# FLUTE's README: four shapes against FedML. Numbers of samples are those of the data sets that
# FedML has (MNIST of 1,000 clients, federated EMNIST, federated CIFAR-100, TFF's Shakespeare);
# sizes of clients are log-normal around their means. Images of CIFAR-100 are whole, not cropped.
FLUTE_LR = Shape(
    "FLUTE's lr_mnist: 1,000 clients of 62 on average (log-normal, sigma 1)",
    "LogisticRegression",
    {"in_features": 784},
    (1, 28, 28),
    clients=1000,
    per_round=10,
    samples=61_664,
    batch=10,
    rate=0.03,
    partition=partial(LogNormal, 1.0),
)
FLUTE_FEMNIST = Shape(
    "FLUTE's cnn_femnist: 3,400 clients of 198 on average (log-normal, sigma 0.4)",
    "FemnistCNN",
    {},
    (1, 28, 28),
    clients=3400,
    per_round=10,
    samples=671_585,
    classes=62,
    partition=partial(LogNormal, 0.4),
)
FLUTE_CIFAR100 = Shape(
    "FLUTE's resnet_fedcifar100: 500 clients of 100, ImageNet's ResNet-18 with GroupNorm",
    "ResNet18",
    {"num_classes": 100, "small_images": False},
    (3, 32, 32),
    clients=500,
    per_round=10,
    samples=50_000,
    classes=100,
    partition=partial(LogNormal, 0.0),
)
FLUTE_SHAKESPEARE = Shape(
    "FLUTE's rnn_shakespeare: 715 clients of 22 texts of 80 on average (log-normal, sigma 1)",
    "CharLSTM",
    {"num_classes": 90, "every_token": True},
    (80,),
    clients=715,
    per_round=10,
    samples=16_068,
    batch=4,
    classes=90,
    tokens=90,
    every_token=True,
    partition=partial(LogNormal, 1.0, min_size=4),
    counted=False,
)
LORA = Shape(
    "LoRA of rank 8 on a transformer of MiniLM's size, 10 clients of 128 texts of 64 tokens",
    "Transformer",
    {},
    (64,),
    clients=10,
    per_round=10,
    samples=1280,
    batch=32,
    classes=2,
    tokens=30522,
    partition=partial(LogNormal, 0.0),
    lora=True,
    counted=False,
)
STATES = _workload(
    "W1",
    title="FedCLUP on logistic regression, 1,000 of 10,000 clients with 20 samples, all stateful",
    clients=10_000,
    per_round=1000,
    samples=200_000,
    epochs=1,
    method=FedCLUP,
    settings={"penalty": 0.1},
)
EVALUATION = _workload(
    "W2",
    title="Ditto on an MLP, 100 of 1,000 clients with 60 samples; all are evaluated",
    clients=1000,
    per_round=100,
    samples=60_000,
    epochs=1,
    test=0.2,
    method=Ditto,
    settings={"penalty": 0.5},
)
SHAPES: dict[str, Shape] = {
    **{key: _workload(key) for key in WORKLOADS},
    "W5-BatchNorm": _workload(
        "W5",
        title="ResNet-18 with BatchNorm",
        arguments={**WORKLOADS["W5"].arguments, "norm": "batch"},
    ),
    "PFLlib": PFLLIB,
    "CIFAR": CIFAR,
    "FLUTE-LR": FLUTE_LR,
    "FLUTE-FEMNIST": FLUTE_FEMNIST,
    "FLUTE-CIFAR100": FLUTE_CIFAR100,
    "FLUTE-SHAKESPEARE": FLUTE_SHAKESPEARE,
    "W3x100": _many(100),
    "W3x1000": _many(1000),
    "FedSLR": _workload("W5", title="FedSLR on ResNet-18", method=FedSLR),
    "FedCLUP": STATES,
    "EVALUATION": EVALUATION,
    "LoRA": LORA,
}


def shape_of(key: str, tiny: bool) -> Shape:
    """A shape; `tiny`: with few clients, samples and channels, for a rehearsal."""
    shape = SHAPES[key]
    if not tiny:
        return shape
    clients = min(shape.clients, 6)
    arguments = dict(shape.arguments)
    if shape.network == "ResNet18":
        arguments |= {"width": 8, "blocks": 1}
    if shape.network == "Transformer":
        arguments |= {"vocabulary": 100, "width": 48, "blocks": 2, "heads": 4}
    if shape.network == "CharLSTM":
        arguments |= {"hidden": 16}
    tokens = min(shape.tokens, 100)
    each = 25
    if key == "PFLlib":
        each = 100
    return replace(
        shape,
        arguments=arguments,
        clients=clients,
        per_round=min(shape.per_round, 3),
        samples=clients * each,
        epochs=1,
        tokens=tokens,
    )
