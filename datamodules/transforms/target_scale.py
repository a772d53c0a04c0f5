"""The unit in which the values of a regression are trained."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..partitions.partition import Partition
from .transform import channel_statistics


class TargetScale(nn.Module):
    """The mean and the standard deviation of each target, between which and 1 losses are taken.

    Args:
        mean: What is subtracted from each target [L], or one number for all.
        std: What each target is then divided by, likewise.

    Example:
        >>> scale = TargetScale([250_000.0], [80_000.0])
        >>> scale(torch.tensor([330_000.0]))
        tensor([1.])
        >>> scale.own_unit(torch.tensor([[1.0]]))
        tensor([[330000.]])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: list[float], std: list[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("std", torch.tensor(std))

    @classmethod
    def of(cls, targets: Tensor) -> "TargetScale":
        """Returns the scale of targets [n], [n, L] or [n, ...], where all places have one number.

        A constant target is divided by 1.

        Raises:
            ConfigError: The targets are classes.
        """
        if not targets.is_floating_point():
            raise ConfigError(
                "data.scale_targets: True, but the targets are classes; it must be false, or "
                "target_kind: numbers makes values of a table's whole numbers"
            )
        rows = targets
        if targets.ndim != 2:
            rows = targets.reshape(len(targets), 1, -1)
        mean, std = channel_statistics(rows)
        return cls(mean, [value or 1.0 for value in std])

    def forward(self, targets: Tensor) -> Tensor:
        """Returns targets in the unit of the training."""
        return (targets - self.mean.to(targets.device)) / self.std.to(targets.device)

    def own_unit(self, outputs: Tensor) -> Tensor:
        """Returns outputs [n, ...] of a network in the unit of the targets."""
        return outputs * self.std.to(outputs.device) + self.mean.to(outputs.device)

    def describe(self) -> str:
        """Returns a line about the numbers."""
        numbers = []
        for values in (self.mean, self.std):
            numbers.append(", ".join(f"{value:.7g}" for value in values.tolist()))
        return (
            f"targets: standardized for training by mean {numbers[0]} and standard deviation "
            f"{numbers[1]}; metrics and predictions are in the targets' own unit, losses are not"
        )


def scales_of_clients(targets: Tensor, partition: Partition) -> list[TargetScale]:
    """Returns the scale of each client's training targets; that of all where it has none."""
    everyone = TargetScale.of(targets[torch.from_numpy(np.unique(partition.train.flat))])
    scales = []
    for client in range(len(partition)):
        scale = everyone
        if partition.train.sizes[client]:
            scale = TargetScale.of(targets[torch.from_numpy(partition.train[client])])
        scales.append(scale)
    return scales


def scaled_by_client(
    targets: Tensor, partition: Partition, scales: Sequence[TargetScale]
) -> Tensor:
    """Returns targets [N, ...] in the unit of the client that owns them.

    Samples that nobody owns keep their values.

    Raises:
        ConfigError: A sample has several owners.
    """
    owner = np.full(len(targets), -1)
    for arrays in partition.splits.values():
        for client in range(len(arrays)):
            mine = arrays[client]
            if ((owner[mine] >= 0) & (owner[mine] != client)).any():
                raise ConfigError(
                    "data.scale_targets: 'client', but clients share samples, which would have the "
                    "unit of each of them; it must be true, or clients must not share"
                )
            owner[mine] = client
    result = targets.clone()
    for client in np.unique(owner[owner >= 0]).tolist():
        places = torch.from_numpy(np.flatnonzero(owner == client))
        result[places] = scales[client](targets[places])
    return result
