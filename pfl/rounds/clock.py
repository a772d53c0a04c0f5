"""Virtual time: how long clients would take, whatever machine simulates them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from pfl.datamodules.randomness import generator
from pfl.datamodules.ranges import Checked, NonNegative, Positive
from pfl.errors import ConfigError
from pfl.files import read_value


@dataclass(frozen=True)
class Clock(Checked):
    """How fast clients are. A client takes latency_i + (sample gradients) / speed_i seconds.

    The sample gradients are those of the client's local steps in a round, as `cost` of the method
    counts them; of clients that take a part of their local steps, as large a part. A round ends
    with the slowest client of its cohort, of clients that fail as well; the server takes no time.

    Args:
        speed: Sample gradients in a second, of the median client.
        spread: The standard deviation of the logarithms of the clients' speeds, which are normal; 0
            for clients that are equally fast.
        latency: The seconds that both messages of a client take together.
        clients: A pair [speed, latency] for each client in place of all these, as a list or as the
            path of a JSON file.

    Example:
        Four samples at 2 a second, after half a second; the second client is twice as fast:

        >>> clock = Clock(clients=[[2.0, 0.5], [4.0, 0.5]])
        >>> clock.seconds(np.array([0, 1]), np.array([4.0, 4.0]), seed=0)
        array([2.5, 1.5])
    """

    argument_group: ClassVar[str] = "loop.clock"
    speed: Positive = 1000.0
    spread: NonNegative = 0.0
    latency: NonNegative = 0.0
    clients: str | Sequence[Sequence[float]] | None = None

    @cached_property
    def given(self) -> np.ndarray | None:
        """The pairs [speed, latency] of the clients that `clients` gives, float64 [M, 2]."""
        if self.clients is None:
            return None
        given = self.clients
        key = "loop.clock.clients"
        pairs = read_value(key, given) if isinstance(given, str) else given
        try:
            values = np.asarray(pairs, np.float64).reshape(len(pairs), 2)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                "loop.clock.clients: each client must have a pair [speed, latency] of numbers"
            ) from error
        wrong = ~(np.isfinite(values).all(1) & (values[:, 0] > 0) & (values[:, 1] >= 0))
        if wrong.any():
            raise ConfigError(
                f"loop.clock.clients: client {int(wrong.argmax())} has "
                f"{values[wrong.argmax()].tolist()}; a speed must be above 0, a latency at least 0"
            )
        return values

    def check(self, total: int) -> None:
        """Refuses any other number of pairs than `total`, one for each client."""
        if self.given is not None and len(self.given) != total:
            raise ConfigError(
                f"loop.clock.clients: {len(self.given)} pairs; the data have {total} clients"
            )

    def seconds(self, ids: np.ndarray, gradients: np.ndarray, seed: int) -> np.ndarray:
        """Returns how long clients take for their sample gradients, both [n]; float64 [n]."""
        if self.given is not None:
            speed, latency = self.given[ids].T
            return latency + gradients / speed
        # The first numbers of a stream do not depend on how many follow.
        draws = generator(seed, "speeds").standard_normal(int(ids.max(initial=-1)) + 1)
        return self.latency + gradients / (self.speed * np.exp(self.spread * draws[ids]))
