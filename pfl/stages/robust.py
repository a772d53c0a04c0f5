"""Robust rules in place of the mean, and attackers that act together."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from pfl.aggregation.attacks import Attack
from pfl.aggregation.joined import clipped_sums
from pfl.aggregation.robust import RobustMean, Rule
from pfl.clients import Clients
from pfl.errors import ConfigError
from pfl.stages.mean import Arrived, MeasuredMean, client_weights
from pfl.stages.stage import Messages, Served

Attacking = Callable[[int, np.ndarray], np.ndarray]
"""A function of (round, ids [n]) that returns which of the clients attack, bool [n]."""


class _OverMeans(MeasuredMean):
    """What stands in for the means of messages, measured from their references.

    Args:
        weighting: The clients' weights for messages that do not name their own.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"single messages"})
    takes: ClassVar[frozenset[str]] = frozenset({"products"})

    def __init__(self, weighting: str) -> None:
        super().__init__()
        self.weighting = weighting

    @property
    def key(self) -> str:
        return "loop.aggregation"

    def sent(self, clients: Clients, messages: Messages) -> Messages:
        """Refuses a method whose server gets every message by itself, and no mean."""
        kept = self._served.kept
        means = [n for n, m in messages.items() if m.reduce == "mean" and n not in kept]
        if (messages or self._served.sends_first) and not means:
            raise ConfigError(
                f"loop.aggregation: the server of {self._served.method} gets every client's "
                f"messages by themselves, and no mean that a rule or colluding attackers could "
                f"change; take another method"
            )
        return messages


class BoundedMean(_OverMeans):
    """The mean of messages that are scaled to a norm of at most `limit`, added up as they come.

    Args:
        weighting: The method's weights; if they are all zero, nothing is averaged.
        limit: The largest norm of a client's messages together.
    """

    def __init__(self, weighting: str, limit: float) -> None:
        super().__init__(weighting)
        self.limit = limit

    def sums(self, messages: Messages, sizes: np.ndarray, like: Tensor) -> dict[str, Tensor]:
        values, references = self.measured(messages, like)
        sums, _ = clipped_sums(values, references, self.limit)
        return sums

    def means(self, arrived: Arrived, metrics: dict[str, float]) -> dict[str, Tensor] | None:
        self.take_not_finite(arrived, metrics)
        total = {"samples": arrived.samples, "uniform": float(len(arrived.ids))}
        if total[self.weighting] == 0:
            return None
        clients = float(len(arrived.ids))
        return {
            name: values / clients + self._found.get(name, 0)
            for name, values in arrived.sums.items()
        }


class RuledMean(_OverMeans):
    """What a rule makes of all messages of a round, or attackers that act together of the mean.

    Args:
        weighting: The clients' weights, where there is no rule.
        rule: The rule; None: the weighted mean.
        attack: What the attackers do together; None: nothing.
        attacking: Says which clients attack in a round.
    """

    one_by_one: ClassVar[bool] = True

    def __init__(
        self, weighting: str, rule: Rule | None, attack: Attack | None, attacking: Attacking
    ) -> None:
        super().__init__(weighting)
        self._robust = RobustMean(rule, attack)
        self._attacking = attacking
        self._weightings: dict[str, str] = {}
        self._round = 0

    @property
    def key(self) -> str:
        if self._robust.rule is None:
            return "loop.attackers"
        return super().key

    def set_up(self, served: Served) -> None:
        super().set_up(served)
        rule = self._robust.rule
        if rule is not None:  # the rule says how many clients it needs
            rule(torch.zeros(served.cohort_size, 1))

    def begin(self, round_index: int) -> None:
        super().begin(round_index)
        self._round = round_index

    def sums(self, messages: Messages, sizes: np.ndarray, like: Tensor) -> dict[str, Tensor]:
        self._found |= self._references.of(messages)
        for name, message in messages.items():
            self._weightings[name] = message.weighting or self.weighting
        return {}

    def means(self, arrived: Arrived, metrics: dict[str, float]) -> dict[str, Tensor] | None:
        total = {"samples": arrived.samples, "uniform": float(len(arrived.ids))}
        if total[self.weighting] == 0:
            return None
        if not arrived.rows:
            return {}
        shares = {}
        for name in arrived.rows:
            weights = client_weights(self._weightings[name], arrived.sizes).double()
            shares[name] = weights / weights.sum().clamp_min(1)
        attacking = torch.from_numpy(self._attacking(self._round, arrived.ids))
        means = self._robust.combine(arrived.rows, self._found, shares, attacking)
        metrics["not_finite"] = self._robust.not_finite
        return means
