"""Index arrays that are computed on access instead of being stored."""

import itertools
from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from .index_arrays import IndexArrays, clients_per_block


@dataclass(frozen=True, eq=False)
class Drawn(IndexArrays):
    """Index arrays of M clients, all of one length, computed anew on every access.

    The array of a client is a function of the key and the client alone, whichever other clients are
    accessed with it. Access takes time but no memory is held, so a million clients cost no more
    than the few that are accessed. The property `flat`, and all that needs it (the method `select`,
    the protocol `MatchLabels`, loaders of all clients' samples), computes every array.

    Attributes:
        key: The key of all draws, a whole number from 0 to 2^63 - 1.
        num_clients: M.
        size: The number of samples of each client.
        total: The number of samples to draw from; all indices are below `total`.

    Example:
        >>> from pfl.datamodules import DigitsDataModule, Drawn, Sampled
        >>> arrays = DigitsDataModule(num_clients=1_000_000, partition=Sampled(10)).partition.train
        >>> isinstance(arrays, Drawn), len(arrays), arrays[765_432].shape
        (True, 1000000, (7,))
    """

    key: int
    num_clients: int
    size: int
    total: int

    @abstractmethod
    def rows(self, clients: np.ndarray) -> np.ndarray:
        """Returns the ascending arrays of `clients` [C] as rows, [C, size] of type `dtype`."""

    @property
    @abstractmethod
    def width(self) -> int:
        """The number of entries that are drawn in order to compute the array of one client."""

    @property
    def dtype(self) -> type[np.signedinteger]:
        """The type of the indices: int32 where the number of samples allows it, else int64."""
        return np.int32 if self.total <= np.iinfo(np.int32).max else np.int64

    @property
    def sizes(self) -> np.ndarray:  # type: ignore[override]  # a property saves storing the array
        """The number of samples of each client, int64 [M]."""
        return np.broadcast_to(np.int64(self.size), self.num_clients)

    def of(self, clients: np.ndarray | slice) -> np.ndarray:
        if isinstance(clients, slice):
            clients = np.arange(*clients.indices(len(self)))
        elif len(clients) and not 0 <= clients.min() <= clients.max() < len(self):
            raise IndexError(f"clients must be between 0 and {len(self) - 1}")
        drawn = np.empty((len(clients), self.size), self.dtype)
        step = clients_per_block(self.width)
        for begin in range(0, len(clients), step):
            block = slice(begin, begin + step)
            drawn[block] = self.rows(clients[block])
        return drawn.ravel()

    def definition(self) -> tuple[np.ndarray, ...]:
        return (np.array([self.key, self.num_clients, self.size, self.total]),)


class Subsets(Drawn):
    """A random set of `size` of `total` samples for each client, independent of the other clients.

    All sets are equally likely, as far as 64 random bits modulo `total` are uniform (to 2^-64).
    """

    @property
    def width(self) -> int:
        return self.total if self._by_shuffling else self.size

    @property
    def _by_shuffling(self) -> bool:
        return 2 * self.size > self.total  # then shuffling is efficient

    def rows(self, clients: np.ndarray) -> np.ndarray:
        """Draws different indices below `total` for each client, ascending.

        For a set of up to half of the samples, the indices are drawn with replacement. Of equal
        indices all but one are drawn again, until no two are equal. The procedure treats all
        indices alike, so all sets are equally likely. A new index differs from all others of its
        client with probability 1/2 or more, so few attempts are needed.
        """
        if self._by_shuffling:
            bits = random_bits(self.key, clients, range(self.total))
            order = np.argsort(bits, axis=1, kind="stable")
            return np.sort(order[:, : self.size].astype(self.dtype), axis=1)
        rows = self._indices(clients, 0)
        rows.sort(axis=1)
        unfinished = np.arange(len(rows))  # numbers of the rows that may have equal indices
        for attempt in itertools.count(1):
            part = rows[unfinished]
            again = np.zeros(part.shape, bool)  # whether an entry equals the one before
            np.equal(part[:, 1:], part[:, :-1], out=again[:, 1:])
            still = np.unique(np.nonzero(again)[0])
            if not len(still):
                break
            unfinished = unfinished[still]
            again = again[still]
            part = rows[unfinished]
            part[again] = self._indices(clients[unfinished], attempt)[again]
            part.sort(axis=1)
            rows[unfinished] = part
        return rows

    def _indices(self, clients: np.ndarray, attempt: int) -> np.ndarray:
        """Draws `size` indices below `total` for each client, different ones in every attempt."""
        places = range(attempt * self.size, (attempt + 1) * self.size)
        bits = random_bits(self.key, clients, places)
        total = np.uint64(self.total)
        bits -= bits // total * total  # the remainder, faster than by `%`
        return bits.astype(self.dtype)


def random_bits(key: int, clients: np.ndarray, places: range) -> np.ndarray:
    """Draws 64 random bits for each of C clients and its P places (draws), uint64 [C, P].

    The key is a whole number from 0 to 2^63 - 1, ids and places are whole numbers of at least 0.
    """
    keys = _splitmix(np.array([key], np.uint64), np.asarray(clients, np.int64).astype(np.uint64))
    return _splitmix(keys[:, None], np.arange(places.start, places.stop, dtype=np.uint64))


def _splitmix(keys: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Returns `datamodules.randomness.fold` of NumPy's unsigned integers, without PyTorch."""
    x = keys + (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x
