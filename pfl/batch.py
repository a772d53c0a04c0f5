"""What the network is given: one mini-batch of each of several clients, and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Batch:
    """One mini-batch of each of A clients.

    Attributes:
        inputs, targets: [A, B, ...]; rows are padded at their end to B samples, with samples that
            have a finite loss (the client's own), since weight 0 does not cancel an infinite one.
        counts: How many samples of each row are real (integers on the host); B is the largest of
            them.
        seeds: One for each row, for what the network itself draws (dropout).
    """

    inputs: Tensor
    targets: Tensor
    counts: list[int]
    seeds: Callable[[int], int] = lambda row: 0

    @property
    def clients(self) -> int:
        """A, the number of rows."""
        return len(self.counts)

    @property
    def full(self) -> bool:
        """Whether no row is padded."""
        return min(self.counts) == self.inputs.shape[1]

    def only(self, row: int) -> Batch:
        """The batch of one client, without padding."""
        n, rows = self.counts[row], slice(row, row + 1)
        return Batch(self.inputs[rows, :n], self.targets[rows, :n], [n])

    def sample_weights(self, dtype: torch.dtype) -> Tensor:
        """[A, B]: 1 / count where the sample is real, else 0, so that rows sum to one."""
        width, device = self.inputs.shape[1], self.inputs.device
        if self.full:  # without a copy to the device
            return torch.full((self.clients, width), 1 / width, dtype=dtype, device=device)
        counts = torch.tensor(self.counts, device=device)[:, None]
        real = torch.arange(width, device=device) < counts
        return real.to(dtype) / counts.clamp_min(1)


def default_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy for integer targets, squared error for floating ones; one value a sample."""
    if targets.is_floating_point():
        return nn.functional.mse_loss(outputs.view(targets.shape), targets, reduction="none")
    return nn.functional.cross_entropy(outputs, targets, reduction="none")
