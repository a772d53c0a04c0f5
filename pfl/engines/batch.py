"""Mini-batches of several clients, the order of their steps, and the default loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from pfl.datamodules.samples.samples import scaled

Buffers: TypeAlias = Tensor | None
"""Running statistics of each row's model, [A, number of values]; None: the network has none."""


class Origin:
    """Where the rows of a batch come from; here from no known client and local step."""

    def seed(self, row: int) -> int:
        """Returns the seed of what the network draws for this row (dropout)."""
        return 0

    def describe(self, row: int) -> str:
        """Returns the place of this row in words, for error messages."""
        return f"row {row} of a batch"


@dataclass
class Batch:
    """One mini-batch of each of A clients.

    Attributes:
        inputs, targets: [A, B, ...]. Rows are padded at their end to B samples, by samples with a
            finite loss (the client's own), since a weight of 0 does not cancel an infinite loss.
        counts: Number of real samples of each row (integers on the host); B is the largest count.
        origin: The clients and the step of the rows.
        weights: The samples' weights [A, B] in place of those that the counts define; None: none
            are given. A step that is recorded and replayed has its weights on the device alone.
        row_seeds: What `seeds` returns, int64 [A], in place of the origin's seeds.

    Example:
        >>> batch = Batch(torch.zeros(2, 3, 5), torch.zeros(2, 3), counts=[3, 1])
        >>> batch.clients, batch.is_full
        (2, False)
        >>> batch.sample_weights(torch.float32).sum(1)
        tensor([1., 1.])
    """

    inputs: Tensor
    targets: Tensor
    counts: list[int]
    origin: Origin = field(default_factory=Origin)
    weights: Tensor | None = None
    row_seeds: Tensor | None = None

    @cached_property
    def sizes(self) -> Tensor:
        """The counts on the device of the inputs, int64 [A]."""
        return torch.tensor(self.counts, device=self.inputs.device)

    @property
    def clients(self) -> int:
        """A, the number of rows."""
        return len(self.counts)

    @property
    def is_full(self) -> bool:
        """Whether no row is padded."""
        return self.weights is None and min(self.counts) == self.inputs.shape[1]

    def seeds(self) -> Tensor:
        """Returns the seed of what the network draws for each row, int64 [A]."""
        if self.row_seeds is not None:
            return self.row_seeds
        rows = [self.origin.seed(row) for row in range(self.clients)]
        return torch.tensor(rows).to(self.inputs.device, non_blocking=True)

    def select(self, row: int) -> Batch:
        """Returns the batch of one client, without padding (and without its origin)."""
        n = self.counts[row]
        rows = slice(row, row + 1)
        return Batch(self.inputs[rows, :n], self.targets[rows, :n], [n])

    def sample_weights(self, dtype: torch.dtype) -> Tensor:
        """Returns [A, B]: 1 / count for real samples, 0 for padding; each row sums to 1."""
        if self.weights is not None:
            return self.weights
        width = self.inputs.shape[1]
        device = self.inputs.device
        if self.is_full:  # without a copy to the device
            return torch.full((self.clients, width), 1 / width, dtype=dtype, device=device)
        return _weights(self.sizes, width, dtype)


@dataclass
class StepBlock:
    """The batches of K local steps that the same A clients take.

    Attributes:
        inputs, targets: Samples [N, ...] as the data set stores them. `scaled` of `datamodules`
            and the conversion of floating values to `dtype` are applied when a batch is gathered.
        picks: Indices of the samples of each batch, int64 [K, A, B], padded like a `Batch`.
        counts: Number of real samples, integers [K, A].
        dtype: The models' dtype.
        origin: The origin of the batch of each step (from 0).
        weights: The samples' weights [K, A, B] in place of those that the counts define.
        row_seeds: What `seeds` returns, int64 [K, A], in place of the origin's seeds.
        lasting: Whether the samples stay where they are in memory for the whole run.
    """

    inputs: Tensor
    targets: Tensor
    picks: Tensor
    counts: np.ndarray
    dtype: torch.dtype
    origin: Callable[[int], Origin] = lambda step: Origin()
    weights: Tensor | None = None
    row_seeds: Tensor | None = None
    lasting: bool = False

    @classmethod
    def of(cls, batch: Batch, dtype: torch.dtype) -> StepBlock:
        """Returns a block of one step."""
        inputs = batch.inputs.flatten(0, 1)
        targets = batch.targets.flatten(0, 1)
        picks = torch.arange(len(inputs), device=inputs.device)
        counts = np.array([batch.counts])
        picks = picks.view(1, *batch.inputs.shape[:2])
        block = cls(inputs, targets, picks, counts, dtype, lambda step: batch.origin)
        block.sizes = batch.sizes[None]
        if batch.weights is not None:
            block.weights = batch.weights[None]
        if batch.row_seeds is not None:
            block.row_seeds = batch.row_seeds[None]
        return block

    @cached_property
    def sizes(self) -> Tensor:
        """The counts on the device of the picks, int64 [K, A]."""
        return torch.from_numpy(self.counts).to(self.picks.device, non_blocking=True)

    @property
    def clients(self) -> int:
        """A, the number of clients."""
        return self.counts.shape[1]

    @property
    def is_full(self) -> bool:
        """Whether no batch is padded."""
        return self.weights is None and bool((self.counts == self.picks.shape[2]).all())

    def cut_where_full(self) -> Iterator[StepBlock]:
        """Yields blocks of consecutive steps, in turns steps whose batches are full and others.

        A step is full if all clients have as many samples.
        """
        widths = self.counts.max(1)
        full = (self.counts == widths[:, None]).all(1)
        kinds = np.where(full, widths, 0)
        starts = [0, *(np.flatnonzero(kinds[1:] != kinds[:-1]) + 1).tolist(), len(kinds)]
        for start, stop in itertools.pairwise(starts):
            yield self.steps(start, stop)

    def steps(self, start: int, stop: int) -> StepBlock:
        """Returns some of the steps, with no more padding than they need."""
        part = slice(start, stop)
        counts = self.counts[part]
        width = int(counts.max())
        block = replace(
            self,
            picks=self.picks[part, :, :width],
            counts=counts,
            origin=lambda step: self.origin(start + step),
        )
        if self.weights is not None:
            block.weights = self.weights[part, :, :width]
        if self.row_seeds is not None:
            block.row_seeds = self.row_seeds[part]
        return block

    def __iter__(self) -> Iterator[Batch]:
        """Yields the batch of each step, with no more padding than the step needs."""
        for k, counts in enumerate(self.counts.tolist()):
            index = self.picks[k, :, : max(counts)]
            flat = index.reshape(-1)
            inputs = scaled(self.inputs.index_select(0, flat)).unflatten(0, index.shape)
            targets = self.targets.index_select(0, flat).unflatten(0, index.shape)
            inputs = cast(inputs, self.dtype)
            targets = cast(targets, self.dtype)
            batch = Batch(inputs, targets, counts, self.origin(k))
            if self.weights is not None:
                batch.weights = self.weights[k, :, : max(counts)]
            if self.row_seeds is not None:
                batch.row_seeds = self.row_seeds[k]
            batch.sizes = self.sizes[k]  # a copy to a GPU in each step would wait for it
            yield batch

    def seeds(self) -> Tensor:
        """Returns the seed of what the network draws for each row of each batch, int64 [K, A]."""
        if self.row_seeds is not None:
            return self.row_seeds
        origins = [self.origin(k) for k in range(len(self.counts))]
        rows = [[origin.seed(row) for row in range(self.clients)] for origin in origins]
        return torch.tensor(rows).to(self.picks.device, non_blocking=True)

    def sample_weights(self) -> Tensor | None:
        """Returns [K, A, B]: 1 / count for real samples, 0 for padding; None without padding."""
        if self.weights is not None:
            return self.weights
        width = self.picks.shape[2]
        if (self.counts == width).all():
            return None
        return _weights(self.sizes, width, self.dtype)


def _weights(counts: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Returns [..., width] for counts [...]: 1 / count in the first `count` places, then 0."""
    counts = counts[..., None]
    real = torch.arange(width, device=counts.device) < counts
    return real.to(dtype) / counts.clamp_min(1)


def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns floating values in `dtype`, and others (classes, tokens) unchanged."""
    if values.is_floating_point():
        return values.to(dtype)
    return values


def some_rows(values: Tensor | None, rows: slice | int | Tensor) -> Tensor | None:
    """Returns some rows of a tensor, or None where there is no tensor."""
    if values is None:
        return None
    return values[rows]


def default_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns cross entropy for integer targets, squared error for floating ones, per sample."""
    if targets.is_floating_point():
        return nn.functional.mse_loss(outputs.view(targets.shape), targets, reduction="none")
    return nn.functional.cross_entropy(outputs, targets, reduction="none")
