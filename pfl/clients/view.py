"""A chunk of clients as the algorithms see it."""

from __future__ import annotations

import math
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from datamodules.partition import Ragged
from datamodules.samples import TensorSamples
from pfl.clients import sample_order
from pfl.engines.batch import Batch, StepBlock, cast
from pfl.randomness import key

if TYPE_CHECKING:
    from datamodules import FederatedDataModule

READ_AHEAD = 1 << 20  # floats of streamed samples


class ClientData:
    """A datamodule's samples and index arrays, on the device where the training happens.

    Args:
        datamodule: After `setup`.
        device: In-memory samples are moved there once; streamed ones when they are read.
        seed: Keys the order in which clients see their samples.
    """

    def __init__(
        self, datamodule: FederatedDataModule, device: torch.device | str = "cpu", seed: int = 0
    ) -> None:
        self.seed = seed
        self.device = torch.device(device)
        self.splits = datamodule.partition
        self.samples = datamodule.samples.to(device)
        self._stored: dict[str, Tensor] = {}

    def sizes(self, split: str, ids: np.ndarray) -> np.ndarray:
        """How many samples of a split these clients own, int64 [C]."""
        return getattr(self.splits, split).sizes[ids]

    def owned(self, split: str, ids: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """The samples of a split that these clients own.

        Returns:
            Indices of samples, int64 or int32, on the device: of all clients where they are stored,
            and of these clients only where they are drawn when asked for. And where in them each
            client's begin, int64 [C].
        """
        arrays = getattr(self.splits, split)
        if not isinstance(arrays, Ragged):
            sizes = arrays.sizes[ids]
            return torch.from_numpy(arrays.of(ids)).to(self.device), np.cumsum(sizes) - sizes
        if split not in self._stored:
            self._stored[split] = torch.from_numpy(arrays.indices).to(self.device)
        return self._stored[split], arrays.starts[ids]

    @property
    def in_memory(self) -> bool:
        """Whether the samples are there, as tensors."""
        return type(self.samples) is TensorSamples

    def shared(self, split: str) -> bool:
        """Whether all clients have the same samples of a split."""
        return getattr(self.splits, split).is_shared

    def gather(self, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Samples by index; floating inputs and targets take the model's dtype."""
        inputs, targets = self.samples.gather(index.long())
        return cast(inputs, dtype), cast(targets, dtype)

    def stored(self, picks: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Steps, stored samples, and where in these the picks [K, ...] of the steps are.

        Streamed samples are read for some steps at a time.
        """
        if self.in_memory:
            samples = typing.cast(TensorSamples, self.samples)
            yield slice(0, len(picks)), samples.inputs, samples.targets, picks
            return
        size = picks[0].numel()
        ahead = max(1, READ_AHEAD // (size * max(1, math.prod(self.samples.input_shape))))
        for first in range(0, len(picks), ahead):
            part = picks[first : first + ahead]
            inputs, targets = self.samples.gather(part.reshape(-1))
            places = torch.arange(part.numel(), device=part.device).view(part.shape)
            yield slice(first, first + ahead), inputs, targets, places


@dataclass
class Clients:
    """C clients that train, or are evaluated, together: the rows of every [C, P] matrix.

    Attributes:
        ids: int64 [C], by falling number of samples of `split`, so that those who still train are
            always the first rows.
        round: The round, from 0.
        data: Their samples.
        split: "train", "val" or "test".
        first, last: Whether the round (or the evaluation of the split) begins or ends with this
            chunk.
        state: What these clients remember, by name, [C, width]; what `client_update` leaves here is
            kept.
        buffers: [C, number of changing buffer values], or None where the network has none.
        dtype: Of the models.
    """

    ids: np.ndarray
    round: int
    data: ClientData
    split: str = "train"
    first: bool = True
    last: bool = True
    state: dict[str, Tensor] = field(default_factory=dict)
    buffers: Tensor | None = None
    dtype: torch.dtype = torch.float32

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def sizes(self) -> np.ndarray:
        """Number of samples of each client, int64 [C]."""
        return self.data.sizes(self.split, self.ids)

    @property
    def empty(self) -> slice:
        """The rows of clients without samples: the last ones."""
        return slice(int((self.sizes > 0).sum()), None)

    def groups(self, size: int) -> list[Clients]:
        """The same clients in groups of at most `size`, in their order; one group if empty."""
        begins = range(0, max(1, len(self)), size)
        return [self.rows(slice(begin, begin + size)) for begin in begins]

    def rows(self, rows: slice) -> Clients:
        """Some of the clients; their state and buffers are views."""
        state = {name: values[rows] for name, values in self.state.items()}
        buffers = None if self.buffers is None else self.buffers[rows]
        return replace(self, ids=self.ids[rows], state=state, buffers=buffers)

    def steps(self, batch_size: int | None, epochs: int, steps: int | None) -> np.ndarray:
        """How many local steps each client takes, int64 [C]; none without samples."""
        per_epoch = steps_per_epoch(self.sizes, batch_size)
        return per_epoch * epochs if steps is None else np.where(per_epoch > 0, steps, 0)

    def step_blocks(
        self,
        batch_size: int | None,
        epochs: int = 1,
        steps: int | None = None,
        purpose: str = "train",
    ) -> Iterator[StepBlock]:
        """Every client's mini-batches, some local steps of all clients at a time.

        Each epoch is a fresh shuffle, a function of (seed, purpose, round, client, epoch). Batches
        hold `batch_size` samples, the last one of an epoch what is left; a client whose steps are
        used up leaves, and the rows that remain are the first ones.

        Args:
            batch_size: None: all samples of the client, in their order.
            epochs: Passes over the client's own samples.
            steps: Where given, this many steps instead of `epochs`, over as many epochs as that
                takes.
            purpose: Names the use, so that two uses in one round see different orders.
        """
        sizes, wanted = self.sizes, self.steps(batch_size, epochs, steps)
        assert (np.diff(sizes) <= 0).all(), "clients must come largest first"
        if not wanted.any():
            return
        base = key(self.data.seed, purpose, self.round)
        indices, starts = self.data.owned(self.split, self.ids)
        owned = np.stack([self.ids, starts, sizes])
        per_epoch = steps_per_epoch(sizes, batch_size)
        size = int(sizes[0]) if batch_size is None else batch_size
        for first, last, A in sample_order.step_ranges(wanted, per_epoch, size):
            epoch, place = np.divmod(np.arange(first, last)[:, None], per_epoch[:A])
            place *= size
            counts = np.minimum(sizes[:A] - place, size)
            if batch_size is None:
                picks = sample_order.full_batch_indices(indices, owned[:, :A], last - first)
            else:
                whose = owned[:, :A]
                picks = sample_order.shuffled_indices(
                    indices, whose, base, epoch, place, counts, size
                )
            for part, inputs, targets, found in self.data.stored(picks):
                origin = partial(
                    StepOrigin, base, self.ids, self.round, per_epoch, first + part.start
                )
                yield StepBlock(inputs, targets, found, counts[part], self.dtype, origin)

    def batches(
        self,
        batch_size: int | None,
        epochs: int = 1,
        steps: int | None = None,
        purpose: str = "train",
    ) -> Iterator[Batch]:
        """The batches of `step_blocks`, one local step of all clients at a time."""
        for block in self.step_blocks(batch_size, epochs, steps, purpose):
            yield from block

    def samples(self, limit: int = 512) -> Iterator[tuple[slice, Batch]]:
        """Every sample once, in order, at most `limit` of each client at a time (for evaluation).

        Yields the rows that still have samples, and their batch.
        """
        sizes = self.sizes
        if not len(self) or not sizes.any():
            return
        indices, begins = self.data.owned(self.split, self.ids)
        starts = torch.from_numpy(begins).to(indices.device)
        for begin in range(0, int(sizes.max()), limit):
            active = int((sizes > begin).sum())
            counts = np.minimum(sizes[:active] - begin, limit)
            columns = begin + torch.arange(int(counts.max()), device=starts.device)
            last = torch.from_numpy(sizes[:active] - 1).to(starts.device)[:, None]
            index = indices[starts[:active, None] + torch.minimum(columns, last)]
            yield slice(0, active), Batch(*self.data.gather(index, self.dtype), counts.tolist())

    def pooled(self, limit: int) -> Iterator[tuple[np.ndarray, Tensor]]:
        """All clients' samples one after another, at most `limit` at a time.

        Yields the rows that own the samples, and the samples' indices.
        """
        indices, starts = self.data.owned(self.split, self.ids)
        owners, nth = sample_order.ragged_arange(self.sizes)
        places = starts[owners] + nth
        for begin in range(0, len(owners), limit):
            part = slice(begin, begin + limit)
            yield owners[part], indices[torch.from_numpy(places[part]).to(indices.device)]


def steps_per_epoch(sizes: np.ndarray, batch_size: int | None) -> np.ndarray:
    """Local steps of clients of these sizes; one, if they have samples, without a batch size."""
    return np.minimum(sizes, 1) if batch_size is None else -(-sizes // batch_size)


@dataclass(frozen=True)
class StepOrigin:
    """The clients, the round and the local step of a batch; made in every step, used rarely.

    Attributes:
        base: The key of the draws of this round and purpose.
        ids: Ids of the clients, int64 [C].
        round: The round, from 0.
        per_epoch: Local steps in an epoch, int64 [C].
        first, step: The local step is `first + step`, from 0.
    """

    base: int
    ids: np.ndarray
    round: int
    per_epoch: np.ndarray
    first: int
    step: int

    def seed(self, row: int) -> int:
        """Returns the seed of what the network draws for a client in this step."""
        return key(self.base, int(self.ids[row]), self.first + self.step)

    def describe(self, row: int) -> str:
        """Returns client, round, epoch and step in words; all but the client's id count from 1."""
        epoch, step = divmod(self.first + self.step, int(self.per_epoch[row]))
        return (
            f"client {self.ids[row]} in round {self.round + 1}, epoch {epoch + 1}, step {step + 1}"
        )
