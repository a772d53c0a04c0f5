"""Schedules of the clients' learning rate, by round or by local step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from pfl.datamodules.errors import check_optional, require_value
from pfl.errors import ConfigError


class RateSchedule(ABC):
    """A factor on the local learning rate: of each round, or of each local step of a round.

    Rounds count from the first of the run; local steps from the first of each local training, so
    that they begin anew in every round.

    Args:
        rounds: The number of rounds that the schedule is about.
        steps: The number of local steps that it is about; one of the two must be given.

    Example:
        >>> halves = Decay(rounds=10, factor=0.5)
        >>> [halves.of_round(r) for r in (0, 9, 10, 20)]
        [1.0, 1.0, 0.5, 0.25]
        >>> halves.of_step(10)  # it is about rounds
        1.0
    """

    def __init__(self, rounds: int | None = None, steps: int | None = None) -> None:
        name = type(self).__name__
        check_optional(f"{name}.rounds", rounds)
        check_optional(f"{name}.steps", steps)
        if (rounds is None) == (steps is None):
            given = f"rounds: {rounds}, steps: {steps}"
            raise ConfigError(f"{name}: {given}; give one of them, such as {name}(rounds=100)")
        self.by_step = rounds is None
        self.length = rounds or steps or 1

    @abstractmethod
    def factor(self, index: int) -> float:
        """Returns the factor of a round or a local step, both from 0."""

    def of_round(self, round_index: int) -> float:
        """Returns the factor of a round, from 0; 1 if the schedule is about local steps."""
        if self.by_step:
            return 1.0
        return self.factor(round_index)

    def of_step(self, step: int) -> float:
        """Returns the factor of a local step, from 0; 1 if the schedule is about rounds."""
        if self.by_step:
            return self.factor(step)
        return 1.0


class Cosine(RateSchedule):
    """Lowers the rate along half a wave: floor + (1 - floor) (1 + cos(π t / T)) / 2.

    From T on the factor is `floor`.

    Args:
        rounds, steps: T, the rounds, or the local steps of a round, until the factor is `floor`.
        floor: The last factor.

    Example:
        >>> [round(Cosine(rounds=4).of_round(t), 3) for t in range(6)]
        [1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """

    def __init__(
        self, rounds: int | None = None, steps: int | None = None, floor: float = 0.0
    ) -> None:
        super().__init__(rounds, steps)
        require_value("Cosine.floor", floor, 0 <= floor <= 1, "from 0 to 1")
        self.floor = floor

    def factor(self, index: int) -> float:
        if index >= self.length:
            return self.floor
        wave = (1 + math.cos(math.pi * index / self.length)) / 2
        return self.floor + (1 - self.floor) * wave


class WarmUp(RateSchedule):
    """Raises the rate evenly to its full value: (t + 1) / T until t = T - 1, and then 1.

    Args:
        rounds, steps: T, the first round, or local step of a round, with the full rate.

    Example:
        >>> [WarmUp(steps=4).of_step(t) for t in range(6)]
        [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    """

    def factor(self, index: int) -> float:
        return min(1.0, (index + 1) / self.length)


class Decay(RateSchedule):
    """Multiplies the rate by a factor again and again: factor^(t // T), in whole numbers.

    Args:
        rounds, steps: T, the rounds, or the local steps of a round, between two changes.
        factor: The factor of each change.
    """

    def __init__(
        self, rounds: int | None = None, steps: int | None = None, factor: float = 0.1
    ) -> None:
        super().__init__(rounds, steps)
        require_value("Decay.factor", factor, 0 < factor <= 1, "above 0 and at most 1")
        self.each = factor

    def factor(self, index: int) -> float:
        return self.each ** (index // self.length)


def step_rate(rate: float, schedules: list[RateSchedule], step: int) -> float:
    """Returns the learning rate of a local step (from 0) whose round has a rate."""
    for schedule in schedules:
        rate *= schedule.of_step(step)
    return rate
