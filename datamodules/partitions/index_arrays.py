"""The indices of every client's samples, stored in a few flat arrays."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_BLOCK = 1 << 16  # entries of a block of clients: arrays of half a MiB stay in the cache


class IndexArrays(ABC):
    """For each of M clients the indices of its samples; `sizes` int64 [M] are their numbers.

    `Ragged` stores the arrays, `Drawn` computes them on access.

    Example:
        >>> from pfl.datamodules import Ragged
        >>> arrays = Ragged.from_sizes(np.array([4, 0, 7]), np.array([2, 1]))
        >>> len(arrays), arrays[0].tolist(), arrays.owners.tolist()
        (2, [4, 0], [0, 0, 1])
    """

    sizes: np.ndarray

    @abstractmethod
    def of(self, clients: np.ndarray | slice) -> np.ndarray:
        """Returns the arrays of some clients (ids or a slice), int64 or int32, concatenated.

        Raises:
            IndexError: A client id is out of range.
        """

    @abstractmethod
    def definition(self) -> tuple[np.ndarray, ...]:
        """Returns the integers that determine all index arrays, for `Partition.hash`."""

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, client: int) -> np.ndarray:
        return self.of(np.array([range(len(self))[client]]))

    @property
    def is_shared(self) -> bool:
        """Whether all clients share one array, which is stored once."""
        return False

    @property
    def owners(self) -> np.ndarray:
        """The client of each entry of `flat`, int64 [sizes.sum()]."""
        return np.repeat(np.arange(len(self)), self.sizes)

    @property
    def flat(self) -> np.ndarray:
        """The arrays of all clients, concatenated, [sizes.sum()]."""
        return self.of(slice(None))

    def select(self, keep: np.ndarray) -> "Ragged":
        """Returns the entries of `flat` where `keep` (bool) is true, for the same M clients."""
        sizes = np.bincount(self.owners[keep], minlength=len(self))
        return Ragged.from_sizes(self.flat[keep], sizes)

    def blocks(self, clients: slice = slice(None)) -> Iterator[slice]:
        """Cuts clients (a slice of step 1) into blocks whose arrays fit into the processor's cache.

        Work on 30 million entries takes several times as long in one piece as block by block. The
        clients of a block have at most 65,536 entries, not counting the last client.
        """
        first, last, _ = clients.indices(len(self))
        ends = np.cumsum(self.sizes[clients])
        cuts = np.searchsorted(ends, np.arange(_BLOCK, ends[-1] if len(ends) else 0, _BLOCK)) + 1
        begin = first
        for end in (first + np.unique(np.append(cuts, last - first))).tolist():
            yield slice(begin, end)
            begin = end


@dataclass(frozen=True, eq=False)
class Ragged(IndexArrays):
    """Index arrays of M clients, stored in one flat array without a Python object per client.

    Client `i` has the samples `indices[starts[i] : starts[i] + sizes[i]]`. Either these slices
    follow one another in the order of the clients, or the slice of every client is the whole of
    `indices`, so that a test set shared by all clients is stored once. `indices` are int64 or
    int32, `starts` and `sizes` int64 [M].

    Example:
        >>> arrays = Ragged.from_owners(np.array([1, 0, -1, 1]), num_clients=2)
        >>> arrays[0].tolist(), arrays[1].tolist()
        ([1], [0, 3])
    """

    indices: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray

    @classmethod
    def from_sizes(cls, indices: np.ndarray, sizes: np.ndarray) -> "Ragged":
        """Builds index arrays from the clients' arrays, concatenated, and their sizes [M]."""
        sizes = sizes.astype(np.int64)
        return cls(indices, np.cumsum(sizes) - sizes, sizes)

    @classmethod
    def from_owners(cls, owners: np.ndarray, num_clients: int) -> "Ragged":
        """Builds ascending arrays for M clients from the owner [N] of every sample, -1: nobody."""
        # Each pair (owner, sample) is packed into one integer, because sorting values is several
        # times faster than an argsort of the owners. M and N are both far below 2^31. One array
        # is reused for all steps, because new memory costs more than the arithmetic.
        bits = len(owners).bit_length()
        packed = np.empty(len(owners), np.int64)
        for begin in range(0, len(owners), _BLOCK):
            end = min(begin + _BLOCK, len(owners))
            high = owners[begin:end].astype(np.int64) << bits
            np.bitwise_or(high, np.arange(begin, end), out=packed[begin:end])
        packed.sort()
        starts = np.searchsorted(packed, np.arange(num_clients + 1) << bits)
        indices = packed[starts[0] :]  # samples without a client are negative and come first
        indices &= (1 << bits) - 1
        return cls.from_sizes(indices, np.diff(starts))

    @classmethod
    def shared(cls, indices: np.ndarray, num_clients: int) -> "Ragged":
        """Builds index arrays in which all clients have the same array, stored once."""
        start = np.int64(0)
        size = np.int64(len(indices))
        starts, sizes = (np.broadcast_to(number, num_clients) for number in (start, size))
        return cls(indices.astype(np.int64), starts, sizes)

    def of(self, clients: np.ndarray | slice) -> np.ndarray:
        starts = self.starts[clients]
        sizes = self.sizes[clients]
        total = int(sizes.sum())
        adjacent = not total or starts[-1] + sizes[-1] == starts[0] + total
        if isinstance(clients, slice) and adjacent:
            first = int(starts[0]) if total else 0
            return self.indices[first : first + total]
        skipped = np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
        return self.indices[skipped + np.arange(total)]

    def definition(self) -> tuple[np.ndarray, ...]:
        return self.starts, self.sizes, self.indices

    def __getitem__(self, client: int) -> np.ndarray:
        start = self.starts[client]
        return self.indices[start : start + self.sizes[client]]

    @property
    def is_shared(self) -> bool:
        return len(self.indices) < self.sizes.sum()


def clients_per_block(entries: int) -> int:
    """Returns how many clients fit into one block if each of them has this many entries."""
    return max(1, _BLOCK // max(1, entries))


def stable_argsort(keys: np.ndarray) -> np.ndarray:
    """Returns `np.argsort(keys, kind="stable")` for integers of at least 0.

    Keys that fit into 16 bits, for which NumPy has a radix sort, are sorted several times faster.
    """
    narrow = keys.max(initial=0) < 1 << 16
    if narrow:
        keys = keys.astype(np.uint16)
    return np.argsort(keys, kind="stable")
