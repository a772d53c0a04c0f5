"""The rows of one client state: stored whole, or as the values that are not zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from pfl.clients.memory_tiers import LARGEST, MemoryBlock, Tiers

# Bytes that are copied at a time, which stay in the processor's cache between two copies.
GROUP = 1 << 19
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Part = dict[str, Any]
"""Some rows as a checkpoint holds them: tensors and plain values by name."""
Reader = Callable[[], Tensor]
Index: TypeAlias = slice | Tensor


class Rows:
    """Whole rows in blocks of `tiers`, and an array of every client's place in the blocks.

    A row that was never written is `initial` [width]. Rows are stored in `dtype`, and read in that
    of `initial`.
    """

    def __init__(self, num_clients: int, initial: Tensor, dtype: torch.dtype, tiers: Tiers) -> None:
        self.initial = initial
        self.dtype = dtype
        self._tiers = tiers
        # 1 + the place; 0: never written. Zeros take no memory before they are changed.
        self._places = np.zeros(num_clients, np.int32)
        self._blocks: list[MemoryBlock] = []
        self._ends = np.zeros(0, np.int64)  # number of places up to the end of each block
        self._used = 0

    def seen(self) -> np.ndarray:
        """Returns the ids of the clients with a row of their own, ascending int64."""
        return np.flatnonzero(self._places)

    def has(self, ids: np.ndarray) -> np.ndarray:
        """Returns which of these clients have a row of their own, bool [C]."""
        return self._places[ids] > 0

    def reader(self, ids: np.ndarray, device: torch.device) -> Reader:
        """Returns a function that copies these clients' rows [C, width] to a device.

        Any thread may call the function.
        """
        places = self._places[ids] - 1
        pieces = self._pieces(places)
        unseen = torch.from_numpy(np.flatnonzero(places < 0))

        def read() -> Tensor:
            rows = self.initial.new_empty(len(ids), len(self.initial), device=device)
            rows[unseen.to(device)] = self.initial.to(device)
            for stored, at, places in pieces:
                rows[at] = _take(stored, places, device).to(rows.dtype)
            return rows

        return read

    def write(self, ids: np.ndarray, values: Tensor) -> None:
        """Keeps the rows [C, width] of these clients, whose ids must differ."""
        new = ids[self._places[ids] == 0]
        total = len(self._places)
        width = len(self.initial)
        while self._capacity < self._used + len(new):
            room = total - self._capacity
            block = self._tiers.block(len(self._blocks), width, self.dtype, 1, room)
            self._ends = np.append(self._ends, self._capacity + len(block.rows))
            self._blocks.append(block)
        self._places[new] = self._used + 1 + np.arange(len(new))
        self._used += len(new)
        for stored, at, places in self._pieces(self._places[ids] - 1):
            stored[places] = values[at].to(stored)

    def clear(self) -> None:
        """Deletes all rows."""
        for block in self._blocks:
            self._tiers.free(block)
        self._places[:] = 0
        self._blocks = []
        self._ends = self._ends[:0]
        self._used = 0

    def parts(self) -> Iterator[Part]:
        """Yields all rows, block by block; rows in host memory are not copied."""
        ids = self.seen()
        ids = ids[np.argsort(self._places[ids])]
        for block, end in zip(self._blocks, self._ends.tolist(), strict=True):
            own = ids[end - len(block.rows) : end]
            if len(own):
                yield {"ids": torch.from_numpy(own), "rows": _first_rows(block.rows, len(own))}

    @property
    def _capacity(self) -> int:
        if not len(self._ends):
            return 0
        return int(self._ends[-1])

    def _pieces(self, places: np.ndarray) -> list[tuple[Tensor, Index, Index]]:
        """Groups `places` by block: (block rows, positions in `places`, positions in the block)."""
        pieces = []
        numbers = np.searchsorted(self._ends, places, side="right")
        numbers[places < 0] = -1
        for number in np.unique(numbers[places >= 0]):
            stored = self._blocks[number].rows
            begin = self._ends[number] - len(stored)
            at = np.flatnonzero(numbers == number)
            group = len(at)
            if not stored.is_cuda:
                group = max(1, GROUP // stored[0].nbytes)
            for part in np.split(at, range(group, len(at), group)):
                pieces.append((stored, _index(part), _index(places[part] - begin)))
        return pieces


@dataclass(eq=False)
class _Log:
    """A block of bytes to which rows are appended."""

    block: MemoryBlock
    used: int = 0
    live: int = 0  # bytes of rows that are still in use
    clients: list[int] = field(default_factory=list)
    bytes: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.bytes = self.block.rows.view(-1).numpy()


class SparseRows(Rows):
    """Sparse rows in host memory: the values that are not zero, and their columns (int32).

    A row that would take more memory in this form is stored whole. A row that is written again is
    appended anew, and a block of which less than half is in use is emptied into the last block. All
    blocks together take at most about twice the bytes of the rows.
    """

    def __init__(self, num_clients: int, initial: Tensor, dtype: torch.dtype, tiers: Tiers) -> None:
        super().__init__(num_clients, initial, dtype, tiers)
        self._form = _Form(len(initial), dtype)
        self._logs: list[_Log] = []
        # By client: the log, the first byte, and the number of stored values.
        self._rows: dict[int, tuple[_Log, int, int]] = {}

    def seen(self) -> np.ndarray:
        return np.array(sorted(self._rows), np.int64)

    def has(self, ids: np.ndarray) -> np.ndarray:
        return np.array([client in self._rows for client in ids.tolist()], bool)

    def reader(self, ids: np.ndarray, device: torch.device) -> Reader:
        kept = [self._rows.get(client) for client in ids.tolist()]
        unseen = torch.tensor([n for n, row in enumerate(kept) if row is None], dtype=torch.int64)
        stored = [(n, row[0].bytes, *row[1:]) for n, row in enumerate(kept) if row is not None]

        def read() -> Tensor:
            rows = self._form.unpack(len(ids), stored, device).to(self.initial.dtype)
            rows[unseen.to(device)] = self.initial.to(device)
            return rows

        return read

    def write(self, ids: np.ndarray, values: Tensor) -> None:
        values = values.to("cpu", self.dtype).contiguous()
        # Values, not bits, are compared with 0: masks and products leave negative zeros.
        filled = values.ne(0).numpy()
        bits = values.view(self._form.bits).numpy()
        for client, row, where in zip(ids.tolist(), bits, filled, strict=True):
            columns = np.flatnonzero(where)
            count = self._form.count(len(columns))
            log, start = self._append(client, count)
            stored, at = self._form.view(log.bytes, start, count)
            if count < len(row):
                stored[:] = row[columns]
                at[:] = columns
            else:
                stored[:] = row
        self._clean()

    def clear(self) -> None:
        for log in self._logs:
            self._tiers.free(log.block)
        self._logs = []
        self._rows = {}

    def parts(self) -> Iterator[Part]:
        for log in self._logs:
            ids = self._clients(log)
            if ids:
                yield {
                    "ids": torch.tensor(ids),
                    "starts": torch.tensor([self._rows[client][1] for client in ids]),
                    "counts": torch.tensor([self._rows[client][2] for client in ids]),
                    "bytes": _first_rows(log.block.rows, log.used),
                    "dtype": str(self.dtype).removeprefix("torch."),
                }

    def _append(self, client: int, count: int) -> tuple[_Log, int]:
        """Returns room at the end of the last block; the client's old row is out of use."""
        size = self._form.size(count)
        if client in self._rows:
            old, _, before = self._rows[client]
            old.live -= self._form.size(before)
        if not self._logs or self._logs[-1].used + size > len(self._logs[-1].bytes):
            if self._logs:  # the rest of the last block is saved too: not with random bytes
                self._logs[-1].bytes[self._logs[-1].used :] = 0
                self._logs[-1].used = len(self._logs[-1].bytes)
            number = len(self._logs)
            block = self._tiers.block(number, 1, torch.uint8, size, LARGEST, host=True)
            self._logs.append(_Log(block))
        log = self._logs[-1]
        start = log.used
        log.used = start + size
        log.live = log.live + size
        log.clients.append(client)
        self._rows[client] = (log, start, count)
        return log, start

    def _clean(self) -> None:
        for log in self._logs[:-1]:
            if 2 * log.live < len(log.bytes):
                for client in self._clients(log):
                    _, start, count = self._rows[client]
                    size = self._form.size(count)
                    new, at = self._append(client, count)
                    new.bytes[at : at + size] = log.bytes[start : start + size]
                self._logs.remove(log)
                self._tiers.free(log.block)

    def _clients(self, log: _Log) -> list[int]:
        """Returns the clients whose rows lie in a block."""
        return [client for client in dict.fromkeys(log.clients) if self._rows[client][0] is log]


class _Form:
    """The packed form of a sparse row: the stored values, then their columns.

    A row whose values are all stored has no columns.
    """

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self.width = width
        self.dtype = dtype
        self.bits = _BITS[dtype.itemsize]
        self._bits = torch.empty(0, dtype=self.bits).numpy().dtype

    def count(self, filled: int) -> int:
        """Returns how many values are stored of a row with `filled` values that are not zero."""
        if self.size(filled) < self.size(self.width):
            return filled
        return self.width

    def size(self, count: int) -> int:
        """Returns the bytes of a row with `count` stored values."""
        values = _align(count * self.dtype.itemsize)
        if count >= self.width:  # of all columns
            return values
        return values + _align(4 * count)

    def view(self, raw: np.ndarray, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the stored values and their columns of the row that begins at byte `start`."""
        middle = start + _align(count * self.dtype.itemsize)
        values = raw[start : start + count * self.dtype.itemsize].view(self._bits)
        if count == self.width:
            return values, np.arange(self.width)
        return values, raw[middle : middle + 4 * count].view(np.int32)

    def unpack(
        self, rows: int, stored: list[tuple[int, np.ndarray, int, int]], device: torch.device
    ) -> Tensor:
        """Returns whole rows [rows, width] from packed ones: (row, bytes, start, count)."""
        whole = torch.zeros(rows, self.width, dtype=self.dtype, device=device)
        out = None
        if device.type == "cpu":
            out = whole.view(self.bits).numpy()
        for row, raw, start, count in stored:
            values, columns = self.view(raw, start, count)
            if out is not None:
                out[row, columns] = values
                continue
            # One row at a time goes to a device: pinned memory is never given back.
            one = torch.zeros(self.width, dtype=self.dtype, pin_memory=device.type == "cuda")
            one.view(self.bits).numpy()[columns] = values
            whole[row].copy_(one, non_blocking=True)
        return whole


def unpacked(part: Part, width: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids and rows of a part of a checkpoint, some at a time: it may be larger than memory."""
    ids = part["ids"]
    group = max(1, GROUP // (8 * width))
    for begin in range(0, len(ids), group):
        some = slice(begin, begin + group)
        if "rows" in part:
            rows = part["rows"][some]
        else:
            form = _Form(width, getattr(torch, part["dtype"]))
            raw = part["bytes"].view(-1).numpy()
            where = zip(part["starts"][some].tolist(), part["counts"][some].tolist(), strict=True)
            stored = [(n, raw, start, count) for n, (start, count) in enumerate(where)]
            rows = form.unpack(len(stored), stored, torch.device("cpu"))
        yield ids[some], rows


def _index(places: np.ndarray) -> Index:
    """Returns a slice if the places are consecutive, which saves a copy."""
    first = int(places[0])
    last = int(places[-1])
    if last - first == len(places) - 1 and (np.diff(places) == 1).all():
        return slice(first, last + 1)
    return torch.from_numpy(places)


def _take(stored: Tensor, places: Index, device: torch.device) -> Tensor:
    """Returns rows of a block on a device."""
    if stored.is_cuda or device.type != "cuda" or isinstance(places, slice):
        return stored[places].to(device, non_blocking=not stored.is_cuda)
    # The processor does not wait for a copy from pinned memory.
    rows = stored.new_empty(len(places), stored.shape[1], pin_memory=True)
    return torch.index_select(stored, 0, places, out=rows).to(device, non_blocking=True)


def _first_rows(rows: Tensor, count: int) -> Tensor:
    """Returns the first rows of a block in host memory.

    A part of a block is copied, because PyTorch saves the whole memory that a tensor is a part of.
    """
    rows = rows[:count].cpu()
    if rows.nbytes == rows.untyped_storage().nbytes():
        return rows
    return rows.clone()


def _align(size: int) -> int:
    return -(-size // 8) * 8
