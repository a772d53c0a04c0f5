"""Which client owns which sample, stored as a few flat arrays."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

_HASH_CHUNK = 1 << 20  # entries converted to little-endian int64 at a time
_BLOCK = 1 << 16  # entries of a block of clients: arrays of half a MiB stay in the cache


class IndexArrays(ABC):
    """Index arrays of M clients: which samples each of them holds.

    ``Ragged`` stores them, ``datamodules.drawn.Drawn`` computes them when they are asked for.

    Attributes:
        sizes: int64 [M], the number of samples of each client.
    """

    sizes: np.ndarray

    @abstractmethod
    def of(self, clients: np.ndarray | slice) -> np.ndarray:
        """Return the arrays of some clients laid end to end, in the order they are asked for.

        Args:
            clients: Their ids, integers [C], or a slice of all ids.

        Returns:
            int64 or int32 [sum of their sizes].

        Raises:
            IndexError: There is no such client.
        """

    @abstractmethod
    def definition(self) -> tuple[np.ndarray, ...]:
        """Return the integers that all index arrays follow from, for ``Partition.hash``."""

    def __len__(self) -> int:
        """Return the number of clients M."""
        return len(self.sizes)

    def __getitem__(self, client: int) -> np.ndarray:
        """Return the index array of one client."""
        return self.of(np.array([range(len(self))[client]]))

    @property
    def is_shared(self) -> bool:
        """Whether the clients share one array, which is stored once."""
        return False

    @property
    def owners(self) -> np.ndarray:
        """The client of each entry of ``flat``, int64 [sizes.sum()]."""
        return np.repeat(np.arange(len(self)), self.sizes)

    @property
    def flat(self) -> np.ndarray:
        """All clients' arrays laid end to end, [sizes.sum()]."""
        return self.of(slice(None))

    def select(self, keep: np.ndarray) -> "Ragged":
        """Keep the entries of ``flat`` where ``keep`` (bool) holds; clients stay in place."""
        sizes = np.bincount(self.owners[keep], minlength=len(self))
        return Ragged.from_sizes(self.flat[keep], sizes)

    def blocks(self, clients: slice = slice(None)) -> Iterator[slice]:
        """Cut clients into blocks small enough for the processor's cache.

        Work on 30 million entries takes several times as long in one piece as block by block.

        Args:
            clients: Which ones, a stretch of ids; all if not given.

        Yields:
            The clients of a block, with at most 65,536 entries beside those of one of them.
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
    """Index arrays of M clients in one flat array; no Python object per client.

    Client ``i`` holds ``indices[starts[i] : starts[i] + sizes[i]]``. The clients' stretches lie end
    to end in the order of the clients, or every client's stretch is the whole of ``indices``: a
    test set that is the same for all is stored once.

    Attributes:
        indices: int64 or int32 [total], sample indices.
        starts: int64 [M], where each client's stretch begins.
        sizes: int64 [M], its length.
    """

    indices: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray

    @classmethod
    def from_sizes(cls, indices: np.ndarray, sizes: np.ndarray) -> "Ragged":
        """Build from the clients' arrays laid end to end, in the order of the clients."""
        sizes = sizes.astype(np.int64)
        return cls(indices, np.cumsum(sizes) - sizes, sizes)

    @classmethod
    def from_owners(cls, owners: np.ndarray, num_clients: int) -> "Ragged":
        """Group samples by owner.

        Args:
            owners: Integers [N]: the client of every sample, -1 for nobody.
            num_clients: M.

        Returns:
            One ascending index array per client.
        """
        # The pair (owner, sample) packed into one integer: sorting values is several times
        # faster than an argsort of the owners. M and N are both far below 2^31. All is done in
        # one array, as new memory costs more than the arithmetic.
        bits = len(owners).bit_length()
        packed = np.empty(len(owners), np.int64)
        for begin in range(0, len(owners), _BLOCK):
            end = min(begin + _BLOCK, len(owners))
            high = owners[begin:end].astype(np.int64) << bits
            np.bitwise_or(high, np.arange(begin, end), out=packed[begin:end])
        packed.sort()
        starts = np.searchsorted(packed, np.arange(num_clients + 1) << bits)
        indices = packed[starts[0] :]  # behind the samples of nobody, which are negative
        indices &= (1 << bits) - 1
        return cls.from_sizes(indices, np.diff(starts))

    @classmethod
    def shared(cls, indices: np.ndarray, num_clients: int) -> "Ragged":
        """Give every client the same array, stored once."""
        start, size = np.int64(0), np.int64(len(indices))  # of everyone: views of one number
        starts, sizes = (np.broadcast_to(number, num_clients) for number in (start, size))
        return cls(indices.astype(np.int64), starts, sizes)

    def of(self, clients: np.ndarray | slice) -> np.ndarray:
        """Return the arrays of some clients laid end to end; a view where they lie so already."""
        starts, sizes = self.starts[clients], self.sizes[clients]
        total = int(sizes.sum())
        if isinstance(clients, slice) and (
            not total or starts[-1] + sizes[-1] == starts[0] + total
        ):
            first = int(starts[0]) if total else 0
            return self.indices[first : first + total]
        skipped = np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
        return self.indices[skipped + np.arange(total)]

    def definition(self) -> tuple[np.ndarray, ...]:
        """Return all three arrays."""
        return self.starts, self.sizes, self.indices

    def __getitem__(self, client: int) -> np.ndarray:
        """Return the index array of one client, as a view."""
        start = self.starts[client]
        return self.indices[start : start + self.sizes[client]]

    @property
    def is_shared(self) -> bool:
        """Whether the clients share one array, which is stored once."""
        return len(self.indices) < self.sizes.sum()


@dataclass(frozen=True, eq=False)
class Partition:
    """Every client's training, validation and test samples.

    Sample indices count through one index space: the training samples, followed by the official
    test samples if the data set has any.

    Attributes:
        train: Training samples of each client.
        val: Validation samples, taken from the client's own; empty arrays if there are none.
        test: Test samples, as the protocol gives them.
    """

    train: IndexArrays
    val: IndexArrays
    test: IndexArrays

    def __len__(self) -> int:
        """Return the number of clients M."""
        return len(self.train)

    @cached_property
    def hash(self) -> str:
        """SHA-256 (64 hex digits) over all arrays as little-endian int64: equal on all platforms.

        It changes when any sample moves to another client or to another split. Of arrays that are
        computed when asked for (``Sampled``) it covers what they are computed from: the key that
        the seed gives, the numbers of clients, of samples of each, and of samples to draw from,
        which of a client's samples are in which split, and the labels this is stratified by.
        """
        digest = hashlib.sha256()
        for name in ("train", "val", "test"):
            arrays: IndexArrays = getattr(self, name)
            for array in arrays.definition():
                digest.update(f"{name}:{len(array)};".encode())
                for begin in range(0, len(array), _HASH_CHUNK):
                    digest.update(array[begin : begin + _HASH_CHUNK].astype("<i8").tobytes())
        return digest.hexdigest()


def clients_per_block(entries: int) -> int:
    """Return how many clients a block has whose arrays take this many entries each."""
    return max(1, _BLOCK // max(1, entries))


def stable_argsort(keys: np.ndarray) -> np.ndarray:
    """Return ``np.argsort(keys, kind="stable")`` of integers of at least 0.

    Keys that fit into 16 bits, for which numpy has a radix sort, are sorted several times faster.
    """
    narrow = keys.max(initial=0) < 1 << 16
    return np.argsort(keys.astype(np.uint16) if narrow else keys, kind="stable")
