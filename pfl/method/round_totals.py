"""The totals of a round: what is added up over its clients, and then over all processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pfl.clients import Clients
from pfl.distributed.collectives import (
    gather,
    gather_rows,
    sum_and_gather,
    sum_over_processes,
)
from pfl.method.log import Log
from pfl.stages.mean import Arrived, Mean
from pfl.stages.stage import Messages

STATE = "state "  # before the name of a client state, which a message may have, too


class Parcel(NamedTuple):
    """What the server makes of the messages of a group of C clients as they arrive.

    Attributes:
        sums: The sums [K] of the messages that the server gets as means, by name.
        rows: The messages [C, K] that the server gets one by one, by name.
        singles: The messages [C, K] that the mean needs one by one, by name.
        kept: The messages that the server keeps for each client, by name.
        ranges: The least and the greatest value of each client state, [2] by name.
        finite: Whether the sums are finite, as a number for each name that is finite if they are.
    """

    sums: Mapping[str, Tensor]
    rows: Mapping[str, Tensor]
    singles: Mapping[str, Tensor]
    kept: Messages
    ranges: Mapping[str, Tensor]
    finite: Mapping[str, Tensor]


@dataclass
class Counts:
    """Numbers that are added up over the clients of a round.

    Attributes:
        samples: The samples of the clients whose messages arrived.
        clients: The number of these clients.
        down: Bytes that the server has sent.
        up: Bytes that the server has received.
        lost: The number of clients whose messages were lost.
        gradients: The sample gradients that all clients have taken.
    """

    samples: float = 0.0
    clients: float = 0.0
    down: float = 0.0
    up: float = 0.0
    lost: float = 0.0
    gradients: float = 0.0

    def add(self, other: Counts) -> None:
        """Adds other counts."""
        self.samples += other.samples
        self.clients += other.clients
        self.down += other.down
        self.up += other.up
        self.lost += other.lost
        self.gradients += other.gradients


@dataclass
class _Words:
    """What the processes of a round tell each other as plain values.

    Attributes:
        losses: By name, the sum of the losses over samples, and the number of these.
        not_finite: Names of client states with a value that is not finite.
    """

    losses: dict[str, np.ndarray]
    not_finite: set[str] = field(default_factory=set)


class RoundTotals:
    """What one process has added up over the clients of a round.

    Args:
        mean: Makes the means of messages.
        kept: The names of the messages that the server keeps for each client.
        like: A tensor with the dtype and the device of the sums.
        expected: The ids of the clients whose messages may arrive at any process.
        loss_names: The names of losses that all processes know, to which `reduce` adds new ones;
            the same list for all rounds of a run.

    Attributes:
        counts: Numbers over the clients; after `reduce` over those of all processes.
        log: The losses and tables of the clients whose messages arrived.
        ids: The ids of these clients, ascending int64; after `reduce`.
        not_finite: Names of client states with a value that is not finite; after `reduce`.
    """

    def __init__(
        self,
        mean: Mean,
        kept: Iterable[str],
        like: Tensor,
        expected: np.ndarray,
        loss_names: list[str],
    ) -> None:
        self.counts = Counts()
        self.log = Log()
        self.ids = np.empty(0, np.int64)
        self.not_finite: set[str] = set()
        self._mean = mean
        self._kept = frozenset(kept)
        self._like = like
        self._expected = np.unique(expected)
        self._loss_names = loss_names
        self._sums: dict[str, Tensor] = {}
        self._rows: dict[str, list[Tensor]] = {}
        self._singles: dict[str, list[Tensor]] = {}
        self._row_ids: list[np.ndarray] = []
        self._ranges: dict[str, list[Tensor]] = {}
        # For each group its clients, and a number that is finite, or not.
        self._numbers: dict[str, list[tuple[np.ndarray, Tensor]]] = {}
        self._losses: dict[str, np.ndarray] = {}

    def read(self, clients: Clients, messages: Messages) -> Parcel:
        """Returns what the server makes of the messages of C clients; adds nothing to the totals.

        It runs in the thread that trained the clients.
        """
        kept = {}
        rows = {}
        singles = {}
        means = {}
        for name, message in messages.items():
            if name in self._kept:
                kept[name] = message
            elif message.reduce == "rows":
                rows[name] = message.values
            else:
                means[name] = message
                if self._mean.one_by_one:
                    singles[name] = message.values
        sums = self._mean.sums(means, clients.sizes, self._like)
        ranges = {name: value_range(values) for name, values in clients.state.items()}
        finite = {name: total.sum() for name, total in sums.items()}  # read if the mean is not
        return Parcel(sums, rows, singles, kept, ranges, finite)

    def add(self, clients: Clients, parcel: Parcel, down: int, up: int, log: Log) -> None:
        """Adds clients whose messages arrived, with their bytes together."""
        for name, total in parcel.sums.items():
            if name in self._sums:
                self._sums[name] += total  # in place: new memory costs more than the sum
            else:
                self._sums[name] = total
        for name, values in parcel.rows.items():
            self._rows.setdefault(name, []).append(values)
        for name, values in parcel.singles.items():
            self._singles.setdefault(name, []).append(values)
        for name, ends in parcel.ranges.items():
            self._ranges.setdefault(name, []).append(ends)
            self._numbers.setdefault(STATE + name, []).append((clients.ids, ends.sum()))
        for name, number in parcel.finite.items():
            self._numbers.setdefault(name, []).append((clients.ids, number))
        self._row_ids.append(clients.ids)
        self.log.extend(log)
        samples = float(clients.sizes.sum())
        taken = log.gradients
        self.counts.add(Counts(samples, len(clients), down, up, gradients=taken))

    def add_lost(self, clients: Clients, down: int, log: Log) -> None:
        """Adds clients whose messages were lost."""
        self.counts.add(Counts(down=down, lost=len(clients), gradients=log.gradients))

    def reduce(self) -> None:
        """Adds sums, counts and losses up over all processes. Every process must call it.

        It also finds the client states that are not finite. All of it is one tensor, if the
        messages are short; only names that another process may not know travel as words: those of
        losses that no round before has had, and those of states that are not finite.
        """
        losses = {}
        for name, logged in self.log.losses.items():
            counts = np.concatenate([numbers for _, numbers in logged])
            values = torch.cat([loss for loss, _ in logged]).double().cpu().numpy()
            # Sorted, because threads log in any order.
            losses[name] = np.array([np.sort(values * counts).sum(), counts.sum()])
        bad = not_finite({name: torch.cat(ends) for name, ends in self._ranges.items()})
        known = self._loss_names
        has_news = bool(bad or losses.keys() - {*known})
        entries = [losses.get(name, np.zeros(2)) for name in known]
        numbers = np.concatenate([[has_news], astuple(self.counts), *entries])
        ids = np.concatenate([np.empty(0, np.int64), *self._row_ids])
        arrived = np.bincount(np.searchsorted(self._expected, ids), minlength=len(self._expected))
        of_all = sum_and_gather(
            list(self._sums.values()),
            torch.from_numpy(arrived),
            torch.from_numpy(numbers),
            self._like,
        )
        self._own_ids = ids
        self.ids = np.repeat(self._expected, of_all.counts.long().numpy())
        rows = of_all.numbers.numpy()
        first = len(numbers) - 2 * len(known)  # of the losses
        self.counts = Counts()
        for row in rows.tolist():
            self.counts.add(Counts(*row[1:first]))
        if rows[:, 0].any():
            words = gather(_Words(losses, bad))
        else:
            table = rows[:, first:].reshape(len(rows), len(known), 2)
            words = [_Words(dict(zip(known, of_one, strict=True))) for of_one in table]
        for one in words:
            self.not_finite |= one.not_finite
            for name, entry in one.losses.items():  # a process without clients has logged nothing
                self._losses[name] = self._losses.get(name, 0) + entry
        known.extend(sorted(self._losses.keys() - {*known}))

    def mean_losses(self) -> dict[str, float]:
        """Returns the mean of each loss over samples and processes; after `reduce`.

        The order of names does not depend on which client a process had first.
        """
        means = {}
        for name in sorted(self._losses, key=lambda name: (name != "train", name)):
            total, count = self._losses[name]
            if count:
                means[f"{name}/loss"] = float(total / count)
        return means

    def means(self, sizes: np.ndarray, metrics: dict[str, float]) -> dict[str, Tensor] | None:
        """Returns what the server reads: means [K] and rows [n, K] by name; after `reduce`.

        None if there is no client to average over. Every process must call it, once.

        Args:
            sizes: Number of samples of every client by id, int64.
            metrics: Numbers of the round's row, to which some may be added.
        """
        arrived = Arrived(self.ids, sizes[self.ids], self.counts.samples, self._sums)
        for name, parts in self._singles.items():
            arrived.rows[name] = self._gather(parts)
        means = self._mean.means(arrived, metrics)
        if means is None:
            return None
        for name in list(self._rows):  # all rows are in memory once, not twice
            means[name] = self._gather(self._rows.pop(name))
        return means

    def _gather(self, parts: list[Tensor]) -> Tensor:
        """Returns the rows of all processes, [n, K], in the order of `ids`."""
        rows = parts[0].new_zeros(len(self.ids), parts[0].shape[1])
        places = np.searchsorted(self.ids, self._own_ids)
        rows[torch.from_numpy(places)] = torch.cat(parts)
        return sum_over_processes(rows)

    def culprits(self, names: Iterable[str]) -> list[int]:
        """Returns clients with messages of these names that are not finite, ascending.

        A state has `STATE` before its name.

        Clients that have trained together cannot be told apart, and are all named. Every process
        must call it.
        """
        found: set[int] = set()
        for name in names:
            for ids, number in self._numbers.get(name, ()):
                if not number.isfinite():
                    found.update(ids.tolist())
        return sorted(set().union(*gather(found)))

    def tables(self, names: Sequence[str]) -> dict[str, dict[str, np.ndarray]]:
        """Returns the rows of all processes by table. Every process must call it."""
        return {name: gather_rows(self.log.tables.get(name, [])) for name in names}


def not_finite(values: Mapping[str, Tensor]) -> set[str]:
    """Returns the names of the tensors with a value that is infinite or NaN."""
    return {name for name, tensor in values.items() if not value_range(tensor).isfinite().all()}


def value_range(values: Tensor) -> Tensor:
    """Returns the least and the greatest value, [2]: NaN if one is NaN, zeros without values.

    One pass over the values, ten times as fast as `isfinite`, which does not wait for a device.
    """
    if not values.numel():
        return values.new_zeros(2)
    return torch.stack(values.aminmax())
