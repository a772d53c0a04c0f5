"""Index arrays that are computed when they are asked for."""

import itertools
from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from datamodules.partition import IndexArrays, clients_per_block
from datamodules.randomness import fold


@dataclass(frozen=True, eq=False)
class Drawn(IndexArrays):
    """Index arrays of M clients, all of one length, drawn anew whenever they are asked for.

    A client's array is a function of the key and the client, whoever it is asked for with, and
    takes time and no memory: so a million clients cost no more than the few that are looked at.
    ``flat`` and all that needs it (``select``, ``MatchLabels``, pooled loaders) draw everything.

    Attributes:
        key: Of all draws, a whole number from 0 to 2^63 - 1.
        num_clients: M.
        size: The number of samples of each client.
        total: The number of samples that there are; indices are below it.
    """

    key: int
    num_clients: int
    size: int
    total: int

    @abstractmethod
    def rows(self, clients: np.ndarray) -> np.ndarray:
        """Return the ascending arrays of clients [C] as rows, [C, size] of ``dtype``."""

    @property
    @abstractmethod
    def width(self) -> int:
        """How many numbers are looked at to draw one client's array."""

    @property
    def dtype(self) -> type[np.signedinteger]:
        """int32 where the number of samples allows it, else int64."""
        return np.int32 if self.total <= np.iinfo(np.int32).max else np.int64

    @property
    def sizes(self) -> np.ndarray:  # type: ignore[override]  # not stored, for a copy would be
        """The number of samples of each client, int64 [M]: a view of one number, read-only."""
        return np.broadcast_to(np.int64(self.size), self.num_clients)

    def of(self, clients: np.ndarray | slice) -> np.ndarray:
        """Draw the arrays of some clients, laid end to end; see ``IndexArrays.of``."""
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
        """Return the key and the three numbers."""
        return (np.array([self.key, self.num_clients, self.size, self.total]),)


class Subsets(Drawn):
    """A random set of ``size`` of ``total`` samples for each client, independently of the others.

    All sets are equally likely, as far as 64 random bits modulo ``total`` are uniform (to 2^-64).
    """

    @property
    def width(self) -> int:
        """All samples where they are shuffled, else those that are drawn."""
        return self.total if self._by_shuffling else self.size

    @property
    def _by_shuffling(self) -> bool:
        return 2 * self.size > self.total  # so few are left out that it is no waste

    def rows(self, clients: np.ndarray) -> np.ndarray:
        """Draw different numbers below ``total`` in each row, ascending.

        Up to half of the samples are drawn with replacement, and all but one of equal ones are
        drawn again until none are equal. Nothing in this tells one number from another, so all sets
        are equally likely. A new draw is new to its row with probability 1/2 or more: the rows that
        are drawn again become fewer in a geometric series.
        """
        keys = fold(self.key, clients)[:, None]
        if self._by_shuffling:
            order = np.argsort(fold(keys, np.arange(self.total)), axis=1, kind="stable")
            return np.sort(order[:, : self.size].astype(self.dtype), axis=1)
        rows = self._numbers(keys, 0)
        rows.sort(axis=1)
        some = np.arange(len(rows))  # rows that may have equal numbers
        for attempt in itertools.count(1):
            part = rows[some]
            again = _repeated(part)
            still = again.any(axis=1)
            if not still.any():
                break
            some, part, again = some[still], part[still], again[still]
            part[again] = self._numbers(keys[some], attempt)[again]
            part.sort(axis=1)
            rows[some] = part
        return rows

    def _numbers(self, keys: np.ndarray, attempt: int) -> np.ndarray:
        """Draw ``size`` numbers below ``total`` for each key, others in every attempt."""
        draws = fold(keys, np.arange(attempt * self.size, (attempt + 1) * self.size))
        return (draws % np.uint64(self.total)).astype(self.dtype)


def _repeated(rows: np.ndarray) -> np.ndarray:
    """Return where an entry of ascending rows equals the one before it, bool."""
    repeated = np.zeros(rows.shape, bool)
    np.equal(rows[:, 1:], rows[:, :-1], out=repeated[:, 1:])
    return repeated
