"""A chunk of clients as the algorithms see it, and the store that keeps what clients remember."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pfl.oracle import Batch
from pfl.randomness import fold, key, permutations

if TYPE_CHECKING:
    from datamodules import FederatedDataModule


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
        self._indices: dict[str, Tensor] = {}

    def sizes(self, split: str, ids: np.ndarray) -> np.ndarray:
        """How many samples of a split these clients own, int64 [C]."""
        return getattr(self.splits, split).sizes[ids]

    def index(self, split: str, ids: np.ndarray) -> tuple[Tensor, Tensor]:
        """The split's sample indices [total], and where these clients' begin [C]; on the device."""
        owned = getattr(self.splits, split)
        if split not in self._indices:
            self._indices[split] = torch.from_numpy(owned.indices).to(self.device)
        return self._indices[split], torch.from_numpy(owned.starts[ids]).to(self.device)

    def shared(self, split: str) -> bool:
        """Whether all clients have the same samples of a split."""
        return getattr(self.splits, split).is_shared

    def gather(self, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Samples by index; floating inputs and targets take the model's dtype."""
        inputs, targets = self.samples.gather(index.long())
        return _cast(inputs, dtype), _cast(targets, dtype)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


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

    def steps(self, batch_size: int | None, epochs: int, steps: int | None) -> np.ndarray:
        """How many local steps each client takes, int64 [C]; none without samples."""
        per_epoch = self._steps_per_epoch(batch_size)
        return per_epoch * epochs if steps is None else np.where(per_epoch > 0, steps, 0)

    def _steps_per_epoch(self, batch_size: int | None) -> np.ndarray:
        return np.minimum(self.sizes, 1) if batch_size is None else -(-self.sizes // batch_size)

    def batches(
        self,
        batch_size: int | None,
        epochs: int = 1,
        steps: int | None = None,
        purpose: str = "train",
    ) -> Iterator[Batch]:
        """Every client's mini-batches, one local step of all clients at a time.

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
        sizes, per_epoch = self.sizes, self._steps_per_epoch(batch_size)
        assert (np.diff(sizes) <= 0).all(), "clients must come largest first"
        wanted = self.steps(batch_size, epochs, steps)
        if not wanted.any():
            return
        base = key(self.data.seed, purpose, self.round)
        indices, starts = self.data.index(self.split, self.ids)
        device = starts.device
        keys = fold(torch.tensor(base, device=device), torch.from_numpy(self.ids).to(device))
        lengths = torch.from_numpy(sizes).to(device)
        width = int(sizes.max())
        order = torch.arange(width, device=device).expand(len(self), width)
        order = _located(indices, starts, lengths, order)
        for step in range(int(wanted.max())):
            active = int((wanted > step).sum())
            epoch, place = np.divmod(step, per_epoch[:active])
            if batch_size is not None and (new := np.flatnonzero(place == 0)).size:
                rows = torch.from_numpy(new).to(device)
                epochs_keys = fold(keys[rows], torch.from_numpy(epoch[new]).to(device))
                shuffled = permutations(epochs_keys, lengths[rows], width)
                order[rows] = _located(indices, starts[rows], lengths[rows], shuffled)
            size = width if batch_size is None else batch_size
            counts = np.minimum(sizes[:active] - place * size, size)
            most, begin = int(counts.max()), int(place[0]) * size
            if (place == place[0]).all():
                picked = order[:active, begin : begin + most]
            else:
                begins = torch.from_numpy(place * size).to(device)[:, None]
                columns = begins + torch.arange(most, device=device)
                picked = order[:active].gather(1, columns.clamp_max(width - 1))
            inputs, targets = self.data.gather(picked, self.dtype)
            seeds = _Seeds(base, self.ids, step)
            yield Batch(inputs, targets, counts.tolist(), seeds)

    def samples(self, limit: int = 512) -> Iterator[tuple[slice, Batch]]:
        """Every sample once, in order, at most `limit` of each client at a time (for evaluation).

        Yields the rows that still have samples, and their batch.
        """
        sizes = self.sizes
        if not len(self) or not sizes.any():
            return
        indices, starts = self.data.index(self.split, self.ids)
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
        indices, starts = self.data.index(self.split, self.ids)
        sizes = self.sizes
        owners = np.repeat(np.arange(len(self)), sizes)
        first = np.repeat(np.cumsum(sizes) - sizes, sizes)
        places = np.repeat(starts.cpu().numpy(), sizes) + np.arange(len(owners)) - first
        for begin in range(0, len(owners), limit):
            part = slice(begin, begin + limit)
            yield owners[part], indices[torch.from_numpy(places[part]).to(indices.device)]


def _located(indices: Tensor, starts: Tensor, lengths: Tensor, order: Tensor) -> Tensor:
    """Indices of the samples that stand at places `order` [C, n] of the clients' own samples.

    A place behind the last sample is the last sample's.
    """
    return indices[starts[:, None] + torch.minimum(order, lengths[:, None] - 1)]


@dataclass(frozen=True)
class _Seeds:
    """Seeds for what the network draws in one step, made only for networks that draw."""

    base: int
    ids: np.ndarray
    step: int

    def __call__(self, row: int) -> int:
        return key(self.base, int(self.ids[row]), self.step)


class ClientStore:
    """What clients remember between rounds: rows of named states, made when first written.

    A client that was never written reads as the state's initial value, so memory grows with the
    clients that took part, not with the population. Rows live in memory; a state that would not
    fit there if every client took part is kept in a memory-mapped file instead.

    Args:
        num_clients: The population, M.
        directory: Where memory-mapped files go; None for the system's temporary folder.
        memory: Bytes that all states may take in memory; None for half of what is free now.
    """

    def __init__(
        self, num_clients: int, directory: str | None = None, memory: int | None = None
    ) -> None:
        self.num_clients = num_clients
        self.memory = _free_memory() // 2 if memory is None else memory
        self._parent = directory
        self._directory: str | None = None
        self._rows: dict[str, dict[int, Tensor]] = {}
        self._mapped: dict[str, Tensor] = {}
        self.initial: dict[str, Tensor] = {}

    def declare(self, name: str, initial: Tensor) -> None:
        """Add a state that starts as `initial` [width] for every client."""
        self.initial[name] = initial.detach().clone()
        self._rows[name] = {}
        need = self.num_clients * initial.numel() * initial.element_size()
        if need > self.memory:
            # A sparse file: the system gives it pages only where rows are written.
            path = os.path.join(self._folder(), f"{name}.bin")
            self._mapped[name] = torch.from_file(
                path,
                shared=True,
                size=self.num_clients * initial.numel(),
                dtype=initial.dtype,
            ).view(self.num_clients, initial.numel())
        else:
            self.memory -= need

    def _folder(self) -> str:
        if self._directory is None:
            self._directory = tempfile.mkdtemp(dir=self._parent, prefix="pfl-clients-")
            weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        return self._directory

    @property
    def names(self) -> list[str]:
        """The declared states."""
        return list(self.initial)

    def mapped(self, name: str) -> bool:
        """Whether a state is kept in a file."""
        return name in self._mapped

    def seen(self, name: str) -> np.ndarray:
        """Ids of the clients with a row of their own, ascending."""
        return np.array(sorted(self._rows[name]), np.int64)

    def read(self, name: str, ids: np.ndarray, device: torch.device | str = "cpu") -> Tensor:
        """A copy of these clients' rows, [C, width]."""
        rows, initial = self._rows[name], self.initial[name]
        if len(ids) == 0:
            return initial.new_zeros(0, initial.numel(), device=device)
        return torch.stack([rows.get(int(i), initial) for i in ids]).to(device)

    def write(self, name: str, ids: np.ndarray, values: Tensor) -> None:
        """Keep rows [C, width] of these clients."""
        values = values.detach().to(self.initial[name])
        for i, row in zip(ids.tolist(), values, strict=True):
            kept = self._rows[name].get(i)
            if kept is None:
                kept = self._mapped[name][i] if name in self._mapped else torch.empty_like(row)
                self._rows[name][i] = kept
            kept.copy_(row)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Rows and initial values, as tensors."""
        return {
            name: {
                "ids": torch.from_numpy(self.seen(name)),
                "rows": self.read(name, self.seen(name)),
                "initial": self.initial[name].cpu(),
            }
            for name in self.names
        }

    def load_state_dict(
        self,
        state: dict[str, dict[str, Tensor]],
        keep: Callable[[Tensor], Tensor] = torch.ones_like,
    ) -> None:
        """The inverse of `state_dict`; the same states must have been declared.

        Args:
            keep: Of ids (int64 [n]): which of them to take.
        """
        for name, entry in state.items():
            self.initial[name] = entry["initial"].to(self.initial[name])
            self._rows[name].clear()
            kept = keep(entry["ids"]).bool()
            self.write(name, entry["ids"][kept].numpy(), entry["rows"][kept])


def merge_rows(states: list[dict[str, dict[str, Tensor]]]) -> dict[str, dict[str, Tensor]]:
    """One `ClientStore.state_dict` out of those of several processes with different clients."""
    return {
        name: {
            "ids": torch.cat([state[name]["ids"] for state in states]),
            "rows": torch.cat([state[name]["rows"] for state in states]),
            "initial": first["initial"],
        }
        for name, first in states[0].items()
    }


def _free_memory() -> int:
    # macOS does not say how much is free: count half of what there is.
    free = "SC_AVPHYS_PAGES" in os.sysconf_names
    pages = os.sysconf("SC_AVPHYS_PAGES") if free else os.sysconf("SC_PHYS_PAGES") // 2
    return pages * os.sysconf("SC_PAGE_SIZE")
