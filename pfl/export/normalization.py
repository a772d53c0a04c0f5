"""The normalization of a run's samples, as the first step of an exported model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pfl.datamodules import (
    FederatedDataModule,
    HorizontalFlip,
    Normalize,
    Pipeline,
    RandomCrop,
    Transform,
)
from pfl.datamodules.transforms.target_scale import TargetScale
from pfl.datamodules.transforms.transform import NormalizeByClient

TRAINING_ONLY = (HorizontalFlip, RandomCrop)  # they change nothing in an evaluation


@dataclass
class Normalization:
    """The mean and the standard deviation of each channel that a run has used.

    Attributes:
        mean: What is subtracted from each channel [C]; None without a normalization.
        std: What each channel is then divided by [C].
        before: The transforms that come before, in order; they are not part of an exported model.
    """

    mean: list[float] | None
    std: list[float] | None
    before: list[Transform]


def normalization(transforms: Pipeline, client: int | None = None) -> Normalization:
    """Returns the normalization at the end of a data module's transforms.

    Args:
        transforms: The transforms.
        client: The client of the model, whose own numbers `Normalize(of="client")` has used; None
            for the global model, which has none of them.
    """
    before = list(transforms.transforms)
    if client is not None:
        for place, one in enumerate(before):
            if isinstance(one, NormalizeByClient):
                before[place] = one.of_client(client)
    mean: list[float] | None = None
    std: list[float] | None = None
    while before and type(before[-1]) in (Normalize, *TRAINING_ONLY):
        last = before.pop()
        if not isinstance(last, Normalize):
            continue
        assert last.mean is not None and last.std is not None
        own_std = [value or 1.0 for value in last.std]  # a constant channel is divided by 1
        if mean is None or std is None:
            mean = list(last.mean)
            std = own_std
        else:  # (x - m1) / s1 becomes (x - (m1 + s1 m2)) / (s1 s2)
            mean = [m1 + s1 * m2 for m1, s1, m2 in zip(last.mean, own_std, mean, strict=True)]
            std = [s1 * s2 for s1, s2 in zip(own_std, std, strict=True)]
    return Normalization(mean, std, before)


class Normalized(nn.Module):
    """A network behind a normalization of its inputs."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network((inputs - self.mean) / self.std)


class Filled(nn.Module):
    """A network that takes missing values, NaN, as others in their place."""

    values: Tensor

    def __init__(self, network: nn.Module, values: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("values", values)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(torch.where(inputs.isnan(), self.values, inputs))


def filled(network: nn.Module, values: Sequence[float] | None, inputs: Tensor) -> nn.Module:
    """Returns a network that takes missing values of `inputs` [n, F] as `values` [F]."""
    if values is None:
        return network
    return Filled(network, torch.tensor(values, dtype=inputs.dtype))


def gap_values(data: FederatedDataModule, client: int | None) -> list[float] | None:
    """Returns what missing values become in an exported model; None where they stay NaN.

    They stay NaN, too, where transforms come before the model, as these take samples without gaps.
    """
    values = data.gap_values(client)
    if values is None or not all(map(math.isfinite, values)):
        return None
    if normalization(data.transforms, client).before:
        return None
    return values


class InOwnUnit(nn.Module):
    """A network whose outputs are in the unit of the targets."""

    def __init__(self, network: nn.Module, scale: TargetScale) -> None:
        super().__init__()
        self.network = network
        self.scale = scale

    def forward(self, inputs: Tensor) -> Tensor:
        return self.scale.own_unit(self.network(inputs))


def in_own_unit(network: nn.Module, scale: TargetScale | None) -> nn.Module:
    """Returns a network whose outputs are in the unit of the targets."""
    if scale is None:
        return network
    return InOwnUnit(network, scale)


def normalized(network: nn.Module, used: Normalization, inputs: Tensor) -> nn.Module:
    """Returns a network that takes samples before the normalization, of the shape of `inputs`."""
    if used.mean is None or used.std is None:
        return network
    shape = (-1, *[1] * (inputs.ndim - 2))
    mean = torch.tensor(used.mean, dtype=inputs.dtype).view(shape)
    std = torch.tensor(used.std, dtype=inputs.dtype).view(shape)
    return Normalized(network, mean, std)
