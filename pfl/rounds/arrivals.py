"""When messages arrive at a server that takes them as they come, in virtual time."""

from __future__ import annotations

import heapq
import zlib
from typing import NamedTuple

import numpy as np

from pfl.datamodules.randomness import generator


class Arrivals(NamedTuple):
    """The messages that fill the buffer of a round.

    Attributes:
        ids: The clients that sent them, ascending int64 [K].
        versions: The rounds with whose first models these clients began, int64 [K].
        slots: The numbers that they had among the clients that train at the same time, int64 [K].
        begun: The slots of the clients that began with the first model of this round.
        time: When the last message arrived.
    """

    ids: np.ndarray
    versions: np.ndarray
    slots: np.ndarray
    begun: np.ndarray
    time: float


class Timetable:
    """A queue of the clients that train, whose messages fill one buffer after another.

    `slots` clients train at any time. When one has sent its message, another one begins with the
    model that the server then has, drawn from those that neither train nor have a message in the
    buffer; if there is none, as soon as there is one. The server takes all messages of an instant
    before anyone begins. Durations do not depend on what is learned, so that this is a function of
    the seed, known before the run.

    Args:
        ids: The clients, ascending int64 [M].
        seconds: How long each of them takes, [M].
        slots: How many train at the same time, at most M.
        buffer: K, the number of messages after which the server moves the model, at most M.
        seed: The seed of the draws.

    Example:
        Two clients take 1 and 2.5 seconds, and the server moves after each message:

        >>> table = Timetable(np.arange(2), np.array([1.0, 2.5]), slots=2, buffer=1, seed=0)
        >>> [int(table.of(number).ids[0]) for number in range(4)]
        [0, 0, 1, 0]
        >>> table.of(2).time, table.of(2).versions.tolist()  # two moves after it began
        (2.5, [0])
    """

    def __init__(
        self, ids: np.ndarray, seconds: np.ndarray, slots: int, buffer: int, seed: int
    ) -> None:
        self._ids = ids
        self._seconds = seconds
        self.buffer = buffer
        self._idle = list(range(len(ids)))
        self._free = list(range(slots))
        self._training: list[tuple[float, int, int, int, int]] = []
        self._rng = generator(seed, "arrivals")
        self._begun = 0
        self._now = 0.0
        self._rounds: list[Arrivals] = []
        self._sums = [zlib.crc32(f"{slots} {buffer}".encode())]  # after each number of rounds

    def of(self, round_index: int) -> Arrivals:
        """Returns the messages of a round, from 0."""
        while len(self._rounds) <= round_index:
            self._rounds.append(self._next())
        return self._rounds[round_index]

    def checksum(self, rounds: int) -> int:
        """Returns a checksum of who came in the first `rounds`, from when, and of who began."""
        self.of(rounds)
        return self._sums[rounds]

    def _next(self) -> Arrivals:
        arrived: list[tuple[int, int, int]] = []
        begun: list[int] = []
        while len(arrived) < self.buffer:
            if not self._training or self._training[0][0] > self._now:
                begun += self._begin()
            self._now, _, place, version, slot = heapq.heappop(self._training)
            self._free.append(slot)
            arrived.append((place, version, slot))
        places, versions, slots = np.array(sorted(arrived), np.int64).T
        self._idle += places.tolist()
        ids = self._ids[places]
        starts = np.array(begun, np.int64)
        told = np.concatenate([ids, versions, slots, starts])
        self._sums.append(zlib.crc32(told.tobytes(), self._sums[-1]))
        return Arrivals(ids, versions, slots, starts, self._now)

    def _begin(self) -> list[int]:
        """Lets idle clients begin while slots are free; returns their slots."""
        slots = []
        while self._free and self._idle:
            drawn = int(self._rng.integers(len(self._idle)))
            slot = self._free.pop()
            self._idle[drawn], self._idle[-1] = self._idle[-1], self._idle[drawn]
            place = self._idle.pop()
            end = self._now + float(self._seconds[place])
            # The number of the start orders what arrives at one instant.
            heapq.heappush(self._training, (end, self._begun, place, len(self._rounds), slot))
            self._begun += 1
            slots.append(slot)
        return slots
