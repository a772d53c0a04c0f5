"""What the network is given: one mini-batch of each of several clients, and a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from datamodules.samples import scaled


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

    @cached_property
    def sizes(self) -> Tensor:
        """The counts where the inputs are, int64 [A]."""
        return torch.tensor(self.counts, device=self.inputs.device)

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
        return _weights(self.sizes, width, dtype)


@dataclass
class StepBlock:
    """The batches of K local steps that the same A clients take.

    Attributes:
        inputs, targets: Samples [N, ...] as the data set stores them: what `datamodules.samples`
            scales is scaled when it is used, and floating values take `dtype` then.
        picks: Which of them, int64 [K, A, B], padded as a `Batch`'s.
        counts: How many are real, integers [K, A].
        dtype: Of the models.
        seeds: Those of the batches, by step.
    """

    inputs: Tensor
    targets: Tensor
    picks: Tensor
    counts: np.ndarray
    dtype: torch.dtype
    seeds: Callable[[int], Callable[[int], int]] = lambda step: lambda row: 0

    @classmethod
    def of(cls, batch: Batch, dtype: torch.dtype) -> StepBlock:
        """A single batch."""
        inputs, targets = batch.inputs.flatten(0, 1), batch.targets.flatten(0, 1)
        picks = torch.arange(len(inputs), device=inputs.device)
        counts = np.array([batch.counts])
        picks = picks.view(1, *batch.inputs.shape[:2])
        block = cls(inputs, targets, picks, counts, dtype, lambda step: batch.seeds)
        block.sizes = batch.sizes[None]
        return block

    @cached_property
    def sizes(self) -> Tensor:
        """The counts where the picks are, int64 [K, A]."""
        return torch.from_numpy(self.counts).to(self.picks.device, non_blocking=True)

    @property
    def clients(self) -> int:
        """A."""
        return self.counts.shape[1]

    def __iter__(self) -> Iterator[Batch]:
        """The batches, step by step, as narrow as each can be."""
        for k, counts in enumerate(self.counts.tolist()):
            index = self.picks[k, :, : max(counts)]
            flat = index.reshape(-1)
            inputs = scaled(self.inputs.index_select(0, flat)).unflatten(0, index.shape)
            targets = self.targets.index_select(0, flat).unflatten(0, index.shape)
            inputs, targets = cast(inputs, self.dtype), cast(targets, self.dtype)
            batch = Batch(inputs, targets, counts, self.seeds(k))
            batch.sizes = self.sizes[k]  # or a GPU would be waited for in each step
            yield batch

    def sample_weights(self) -> Tensor | None:
        """[K, A, B]: 1 / count where the sample is real, else 0; None if no batch is padded."""
        width = self.picks.shape[2]
        if (self.counts == width).all():
            return None
        return _weights(self.sizes, width, self.dtype)


def _weights(counts: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """[..., width] for counts [...]: 1 / count in the first places, else 0."""
    counts = counts[..., None]
    real = torch.arange(width, device=counts.device) < counts
    return real.to(dtype) / counts.clamp_min(1)


def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Floating values in the model's dtype; others, such as classes and tokens, as they are."""
    return values.to(dtype) if values.is_floating_point() else values


def default_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy for integer targets, squared error for floating ones; one value a sample."""
    if targets.is_floating_point():
        return nn.functional.mse_loss(outputs.view(targets.shape), targets, reduction="none")
    return nn.functional.cross_entropy(outputs, targets, reduction="none")
