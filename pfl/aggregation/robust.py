"""Means that withstand attackers: what the server makes of the cohort's messages.

Each rule takes the messages of n clients, all messages of a client joined to one vector, as the
rows x_1, ..., x_n of a matrix, and returns one vector. Unless a rule says otherwise, every client
counts alike, since a client could claim any number of samples. f is the number of attackers against
which a rule is set up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated

import torch
from torch import Tensor

from pfl.aggregation.attacks import Attack
from pfl.aggregation.joined import Values, join, split
from pfl.datamodules.ranges import Checked, Count, CountOrZero, Positive, Range
from pfl.errors import ConfigError


class Rule(Checked, ABC):
    """What replaces the mean of the clients' messages.

    Example:
        >>> rows = torch.tensor([[0.0, 1.0], [1.0, 2.0], [900.0, -900.0]])
        >>> Median()(rows)
        tensor([1., 1.])

    Attributes:
        limit: A number if the rule is the mean of messages that are scaled to this norm at most,
            which needs no two of them at the same time; None: it needs all messages.
    """

    limit: float | None = None

    @abstractmethod
    def __call__(self, rows: Tensor) -> Tensor:
        """Returns one vector [K] for the rows [n, K] of n >= 1 clients.

        Raises:
            ConfigError: There are too few clients for the rule.
        """

    def _require_clients(self, rows: Tensor, least: int, why: str) -> None:
        if len(rows) < least:
            raise ConfigError(
                f"loop.aggregation: {type(self).__name__} needs at least {least} clients' messages "
                f"in a round ({why}), and there are {len(rows)}; give more clients_per_round, or "
                f"fewer attackers"
            )


class Median(Rule):
    """The median of each value (Yin, Chen, Ramchandran, Bartlett, ICML 2018, Definition 1).

    For an even number of clients the mean of the two middle values. It holds against f < n / 2
    attackers.
    """

    def __call__(self, rows: Tensor) -> Tensor:
        ordered = rows.sort(0).values
        return (ordered[(len(rows) - 1) // 2] + ordered[len(rows) // 2]) / 2


class TrimmedMean(Rule):
    """The mean of each value without the largest and the smallest ones (Yin et al. 2018, Def. 2).

    Args:
        share: β, the share of clients that is left out at each end; the number is
            rounded down, so that the rule holds against floor(β n) attackers.
    """

    def __init__(self, share: Annotated[float, Range(least=0, below=0.5)] = 0.2) -> None:
        self.share = share

    def __call__(self, rows: Tensor) -> Tensor:
        cut = int(self.share * len(rows) + 1e-9)
        return rows.sort(0).values[cut : len(rows) - cut].mean(0)


class GeometricMedian(Rule):
    """The point with the smallest sum of distances to the messages (Pillutla et al. 2022, RFA).

    Weiszfeld's iteration, smoothed: x <- sum w_i x_i / sum w_i with w_i = 1 / max(ν d, |x_i - x|),
    from the median of each value; d is the median distance of the messages from there. It holds
    against f < n / 2 attackers.

    Args:
        steps: The largest number of iterations.

    Note:
        The paper takes 3 to 5 steps with ν = 1e-6, which does not reach the minimum; here the
        iteration runs with this ν until it moves by at most 1e-7 d.
    """

    smoothing = 1e-6  # ν
    tolerance = 1e-7

    def __init__(self, steps: Count = 1000) -> None:
        self.steps = steps

    def __call__(self, rows: Tensor) -> Tensor:
        point = Median()(rows)  # the mean could be beyond all numbers
        scale = float((rows - point).norm(dim=1).median())
        for _ in range(self.steps if scale else 0):
            distances = (rows - point).norm(dim=1).clamp_min(self.smoothing * scale)
            weights = distances.reciprocal()
            before = point
            point = (weights / weights.sum()) @ rows
            if float((point - before).norm()) <= self.tolerance * scale:
                break
        return point


class Krum(Rule):
    """The message with the nearest neighbours (Blanchard, El Mhamdi, Guerraoui, Stainer 2017).

    The score of x_i is the sum of the squared distances to its n - f - 2 nearest other messages.
    The message with the lowest score is taken, or the mean of the `keep` ones with the lowest
    (Multi-Krum). It needs n >= 2 f + 3 clients.

    Args:
        attackers: f.
        keep: m.
    """

    def __init__(self, attackers: CountOrZero, keep: Count = 1) -> None:
        self.attackers = attackers
        self.keep = keep

    def __call__(self, rows: Tensor) -> Tensor:
        self._require_clients(rows, max(2 * self.attackers + 3, self.keep), "2 f + 3 and m")
        scores = krum_scores(squared_distances(rows), self.attackers)
        return rows[scores.sort(stable=True).indices[: self.keep]].mean(0)


class Bulyan(Rule):
    """Krum again and again, then the middle of each value (El Mhamdi, Guerraoui, Rouault 2018).

    θ = n - 2 f messages are chosen, one after another, by Krum among those that are left; of each
    value the θ - 2 f ones nearest to their median are averaged. It needs n >= 4 f + 3 clients.

    Args:
        attackers: f.
    """

    def __init__(self, attackers: CountOrZero) -> None:
        self.attackers = attackers

    def __call__(self, rows: Tensor) -> Tensor:
        f = self.attackers
        self._require_clients(rows, 4 * f + 3, "4 f + 3")
        distances = squared_distances(rows)
        left = torch.arange(len(rows), device=rows.device)
        chosen = []
        for _ in range(len(rows) - 2 * f):
            best = int(krum_scores(distances[left][:, left], f).argmin())
            chosen.append(left[best])
            left = torch.cat([left[:best], left[best + 1 :]])
        picked = rows[torch.stack(chosen)]
        from_median = (picked - Median()(picked)).abs()
        nearest = from_median.sort(dim=0, stable=True).indices[: len(picked) - 2 * f]
        return picked.gather(0, nearest).mean(0)


class NormBound(Rule):
    """The mean of messages that are scaled to a norm of at most `limit` (Sun et al. 2019).

    A message is measured from its reference: a model from the model that the client received. f
    attackers of n move the mean by at most 2 `limit` f / n. With a limit, messages are added up as
    they come; without, all messages of a round are kept until its end.

    Args:
        limit: The largest norm; None: the median of the norms of the round.
    """

    def __init__(self, limit: Positive | None = None) -> None:
        self.limit = limit

    def __call__(self, rows: Tensor) -> Tensor:
        norms = rows.norm(dim=1)
        limit = self.limit or float(Median()(norms[:, None]))
        scale = torch.where(norms > limit, limit / norms, torch.ones_like(norms))
        return (scale / len(rows)) @ rows


def squared_distances(rows: Tensor) -> Tensor:
    """Returns the squared distance of every pair of rows, [n, n]."""
    return torch.stack([(rows - row).square().sum(1) for row in rows])


def krum_scores(distances: Tensor, attackers: int) -> Tensor:
    """Returns each row's sum of its n - f - 2 smallest squared distances to others, at least one.

    Args:
        distances: Squared distances, [n, n].
        attackers: f.
    """
    count = max(1, len(distances) - attackers - 2)
    others = distances.clone().fill_diagonal_(float("inf"))
    return others.sort(1).values[:, :count].sum(1)


class RobustMean:
    """What stands in for the mean of messages in a run with a rule, or with attackers that collude.

    Args:
        rule: The rule; None: the method's weighted mean.
        attack: What the attackers of the run do together; None: nothing.

    Attributes:
        not_finite: How many clients' messages counted as zero, once they were combined.
    """

    def __init__(self, rule: Rule | None, attack: Attack | None) -> None:
        self.rule = rule
        self.attack = attack
        self.not_finite = 0

    def combine(
        self, rows: Values, references: Values, weights: Values, attacking: Tensor
    ) -> dict[str, Tensor]:
        """Returns what the server gets for each message, [K] by name.

        A client's messages count as zero if one of their values is not finite.

        Args:
            rows: The messages of n >= 1 clients, [n, K] by name.
            references: Public values [K] from which some of them are measured, by name.
            weights: The weights of the clients in the mean of each message, [n], of sum 1.
            attacking: Which of the clients attack, bool [n].
        """
        joined = join(rows, references)
        bad = ~joined.isfinite().all(1)
        joined[bad], self.not_finite = 0, int(bad.sum())
        if self.attack is not None and attacking.any() and not attacking.all():
            message = self.attack.collude(joined[~attacking], int(attacking.sum()))
            if message is not None:
                joined[attacking] = message
        if self.rule is not None:
            return split(self.rule(joined), rows, references)
        return {
            name: weights[name].to(values) @ values + references.get(name, 0)
            for name, values in split(joined, rows, {}).items()
        }
