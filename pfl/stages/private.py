"""Differential privacy in a round: of the sum over clients, and of the samples of each client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from pfl.aggregation.privacy import PrivateMean
from pfl.clients import Clients
from pfl.engines.oracle import Oracle
from pfl.engines.private import PrivateEngine
from pfl.errors import ConfigError
from pfl.stages.mean import Arrived, MeasuredMean
from pfl.stages.stage import Initial, Messages, Place, Served, Stage

GRADIENTS = "private gradients"
"""The client state that counts how many gradients a client has taken."""


class ClippedSum(MeasuredMean):
    """The sum of clipped messages with noise, over the expected number of clients.

    Args:
        private: Clips, adds noise, and counts what was revealed.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"true messages"})
    takes: ClassVar[frozenset[str]] = frozenset({"single messages", "products"})

    def __init__(self, private: PrivateMean) -> None:
        super().__init__()
        self.private = private
        self._round = 0

    @property
    def key(self) -> str:
        return "loop.privacy"

    def set_up(self, served: Served) -> None:
        super().set_up(served)
        reason = ""
        if served.kept:
            reason = (
                f"the server of {served.method} reads the messages of single clients; take "
                f"another method"
            )
        elif served.statistics:
            reason = (
                "model.buffers: average; running statistics with noise can be impossible ones; "
                "give local"
            )
        if reason:
            raise ConfigError(f"loop.privacy: {reason}")

    def begin(self, round_index: int) -> None:
        super().begin(round_index)
        self._round = round_index

    def sent(self, clients: Clients, messages: Messages) -> Messages:
        """Refuses messages that the server would get one by one."""
        for name, message in messages.items():
            if message.reduce == "rows":
                raise ConfigError(
                    f"loop.privacy: the server of {self._served.method} gets the message {name!r} "
                    f"of every client by itself, which noise on a sum does not hide; take another "
                    f"method"
                )
        return messages

    def sums(self, messages: Messages, sizes: np.ndarray, like: Tensor) -> dict[str, Tensor]:
        return self.private.sums(*self.measured(messages, like))

    def means(self, arrived: Arrived, metrics: dict[str, float]) -> dict[str, Tensor]:
        metrics |= self.private.facts(self._round + 1)
        self.take_not_finite(arrived, metrics)
        return self.private.release(arrived.sums, self._found, self._round)

    def participants(self, arrived: int) -> int:
        """Returns the expected number: how many clients came is not public."""
        return self.private.cohort


class CountedGradients(Stage):
    """Counts how many private gradients each client has taken (`loop.sample_privacy`).

    Args:
        oracles: Their engines make gradients private; there is one for each network.
    """

    place: ClassVar[Place] = Place.MODEL
    always_kept: ClassVar[frozenset[str]] = frozenset({GRADIENTS})

    def __init__(self, oracles: Sequence[Oracle]) -> None:
        self._oracles = oracles

    def states(self) -> dict[str, Initial]:
        return {GRADIENTS: self.none}

    def none(self) -> Tensor:
        """Returns the number of gradients before the first one, [1]."""
        return torch.zeros(1)

    def sent(self, clients: Clients, messages: Messages) -> Messages:
        for oracle in self._oracles:
            engine = oracle.engine
            if isinstance(engine, PrivateEngine):
                taken = engine.take_counts(clients.ids).to(clients.state[GRADIENTS])
                clients.state[GRADIENTS] = clients.state[GRADIENTS] + taken
        return messages
