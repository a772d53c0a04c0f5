"""A small federation for the checks, its methods, and what a run of it leaves."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from datamodules import Natural, SplitOwn, TensorDataModule
from models import CIFAR10CNN, MLP, LeNet5, ResNet18
from pfl import FederatedLoop, Trainer
from pfl.algorithms import (
    APFL,
    MOON,
    SCAFFOLD,
    Ditto,
    FedACS,
    FedAgg,
    FedAvg,
    FedBABU,
    FedCLUP,
    FedDyn,
    FederatedAlgorithm,
    FedPD,
    FedProto,
    FedProx,
    FedRep,
    FedSLR,
    pFedMe,
)

SIDE = 16
CLASSES = 5
SIZES = (60, 47, 40, 33, 30, 21, 20, 11)
COMMON: dict[str, Any] = {"lr": 0.05, "batch_size": 10}


def data() -> TensorDataModule:
    """Images of 16x16 of eight clients of unequal size; a fifth is for tests."""
    generator = torch.Generator().manual_seed(0)
    owners = np.repeat(np.arange(len(SIZES)), SIZES)
    targets = torch.randint(CLASSES, (len(owners),), generator=generator)
    means = torch.randn(CLASSES, 1, SIDE, SIDE, generator=generator)
    inputs = means[targets] + torch.randn(len(owners), 1, SIDE, SIDE, generator=generator)
    return TensorDataModule(
        inputs,
        targets,
        client_ids=owners,
        partition=Natural(),
        protocol=SplitOwn(test=0.2, validation=0.0),
    )


def mlp() -> nn.Module:
    """P = 8,389."""
    return MLP(SIDE * SIDE, [32], CLASSES)


def lenet() -> nn.Module:
    """Convolutions, pooling and three linear layers."""
    return LeNet5(image_size=SIDE, num_classes=CLASSES)


def resnet(norm: Any = "group") -> nn.Module:
    """A ResNet-10 with 8 channels in its first stage."""
    return ResNet18(CLASSES, 1, norm, width=8, blocks=1)


def dropout() -> nn.Module:
    """Three convolutions and two layers with dropout."""
    return CIFAR10CNN(CLASSES, 1, SIDE)


Make = Callable[..., FederatedAlgorithm]
METHODS: dict[str, Make] = {
    "FedAvg": FedAvg,
    # With Adam's own eps the sign of a rounding error decides how a value without gradient moves.
    "FedAvg, Adam": partial(FedAvg, optimizer=partial(torch.optim.Adam, eps=1e-3)),
    "FedAvg, momentum": partial(FedAvg, optimizer=partial(torch.optim.SGD, momentum=0.9)),
    "FedProx": partial(FedProx, proximal_weight=0.5),
    "SCAFFOLD": SCAFFOLD,
    "FedDyn": partial(FedDyn, alpha=0.1),
    "Ditto": partial(Ditto, penalty=0.5),
    "pFedMe": partial(pFedMe, penalty=2.0, personal_steps=3, personal_lr=0.05),
    "APFL": partial(APFL, alpha=0.7),
    "FedBABU": FedBABU,
    "FedRep": FedRep,
    "MOON": partial(MOON, contrast=1.0),
    "FedProto": partial(FedProto, penalty=0.5),
    "FedCLUP": partial(FedCLUP, penalty=0.1),
    "FedSLR": FedSLR,
    "FedAgg": FedAgg,
    "FedACS": FedACS,
    "FedPD": FedPD,
    "FedPD, VR": partial(FedPD, variance_reduction=True),
}
# (method, network, whether convolutions are in it)
ITERATES: dict[str, tuple[Make, Callable[[], nn.Module], bool]] = {
    **{f"{name}, MLP": (make, mlp, False) for name, make in METHODS.items()},
    "FedAvg, LeNet-5": (FedAvg, lenet, True),
    "FedCLUP, LeNet-5": (METHODS["FedCLUP"], lenet, True),
    "FedSLR, LeNet-5": (FedSLR, lenet, True),
    "FedAvg, ResNet": (FedAvg, resnet, True),
    "FedCLUP, ResNet": (METHODS["FedCLUP"], resnet, True),
    "FedSLR, ResNet": (FedSLR, resnet, True),
    "FedAvg, BatchNorm": (FedAvg, partial(resnet, "batch"), True),
}
# The rounding of float32 decides these: on which side of 0 a unit before ReLU is, and what remains
# of a singular value near the threshold. They are compared in float64.
SENSITIVE = ("FedAvg, BatchNorm", "FedSLR, LeNet-5")


def method(make: Make, network: Callable[[], nn.Module], **settings: Any) -> FederatedAlgorithm:
    """Returns a method with a network that always begins alike."""
    torch.manual_seed(0)
    return make(network(), **{**COMMON, **settings})


def fit(
    algorithm: FederatedAlgorithm,
    device: torch.device,
    rounds: int = 2,
    *,
    root: Path | None = None,
    ckpt_path: Path | None = None,
    settings: dict[str, Any] | None = None,
    **loop: Any,
) -> FederatedAlgorithm:
    """Trains five of the eight clients a round; with `root` a checkpoint remains there.

    A method that needs all clients has all.
    """
    if algorithm.needs_all_clients:
        loop = {**loop, "clients_per_round": None}
    with tempfile.TemporaryDirectory() as temporary:
        trainer = Trainer(
            max_epochs=rounds,
            default_root_dir=root or temporary,
            enable_progress_bar=False,
            enable_checkpointing=root is not None,
            limit_val_batches=0,
            **{"accelerator": device.type, **(settings or {})},
        )
        federation = FederatedLoop(data(), **{"clients_per_round": 5, **loop})
        trainer.fit(algorithm, datamodule=federation, ckpt_path=ckpt_path)
    return algorithm


def left(algorithm: FederatedAlgorithm) -> dict[str, Tensor]:
    """Returns the global model, the server's states and all clients' rows, by name."""
    everyone = np.arange(algorithm.store.num_clients)
    values = {name: value.detach().cpu() for name, value in algorithm.state_dict().items()}
    for name in algorithm.store.names:
        with suppress(KeyError):
            values[f"client {name}"] = algorithm.store.read(name, everyone).cpu()
    return values
