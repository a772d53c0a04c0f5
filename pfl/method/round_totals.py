"""The totals of a round: what is added up over its clients, and then over all processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from pfl.aggregation.joined import NOT_FINITE, clipped_sums
from pfl.aggregation.privacy import PrivateMean
from pfl.aggregation.robust import RobustMean
from pfl.communication import Message
from pfl.distributed.collectives import gather, gather_rows, sum_over_processes
from pfl.method.factors import PRODUCTS, Factors, sum_of_products
from pfl.method.sides import Log


class RoundTotals:
    """What one process has added up over the clients of a round.

    Args:
        weighting: The clients' weights in the mean of a message that does not name its own:
            "samples" or "uniform".
        private: What makes the means private; None: nothing does.
        robust: What replaces the means; None: nothing does.
        factors: The pairs of LoRA's factors in a model, whose products are added up, too.

    Attributes:
        sums: The weighted sum of each message over clients, by name.
        counts: Numbers of samples and clients, bytes down and bytes up; the number of clients
            whose messages were lost; and the sample gradients that were taken: of lost clients, and
            after `reduce` of all; float64 [6].
        metrics: Numbers for the round's row of metrics, by name.
        references: The public values near which the messages of all clients lie, by name, where
            they are not zero; None before they are known.
        log: The losses and tables of the clients whose messages arrived.
        ids: The ids of these clients, ascending int64; after `reduce`.
        not_finite: Names of client states with a value that is not finite; after `reduce`.

    Example:
        >>> totals = RoundTotals("samples")
        >>> message = Message(torch.tensor([[1.0], [4.0]]), nbytes=4)
        >>> sums = totals.weigh({"w": message}, np.array([2, 1]), like=torch.zeros(1))
        >>> totals.add(sums, [3, 2, 8, 8])  # 3 samples of 2 clients; 8 bytes down, 8 bytes up
        >>> totals.reduce()
        >>> totals.means(0, np.array([2, 1]), np.array([False, False]))["w"]  # (2 * 1 + 1 * 4) / 3
        tensor([2.])
    """

    def __init__(
        self,
        weighting: str,
        private: PrivateMean | None = None,
        robust: RobustMean | None = None,
        factors: Sequence[Factors] = (),
    ) -> None:
        self.weighting, self.private, self.robust = weighting, private, robust
        self.factors = factors
        self.references: dict[str, Tensor] | None = None
        self.sums: dict[str, Tensor] = {}
        self.counts = np.zeros(6)
        self.metrics: dict[str, float] = {}
        self.log = Log()
        self.ids = np.empty(0, np.int64)
        self.not_finite: set[str] = set()
        self._rows: dict[str, list[Tensor]] = {}
        self._row_ids: list[np.ndarray] = []
        self._ranges: dict[str, list[Tensor]] = {}
        self._weightings: dict[str, str] = {}
        self._loss_sums: dict[str, np.ndarray] = {}

    def weigh(
        self, messages: Mapping[str, Message], sizes: np.ndarray, like: Tensor
    ) -> dict[str, Tensor]:
        """Returns the weighted sum of each message over C clients; adds nothing to the totals.

        Args:
            messages: The clients' messages by name, values [C, K].
            sizes: Number of samples of each client, int64 [C].
            like: A tensor with the dtype and the device of the sums.
        """
        values = {name: message.values.to(like) for name, message in messages.items()}
        if self.private is not None:
            return self.private.sums(values, self.references or {})
        if self.robust is not None and self.robust.limit is not None:
            return clipped_sums(values, self.references or {}, self.robust.limit)[0]
        sums = {}
        for name, message in messages.items():
            self._weightings[name] = message.weighting or self.weighting
            if self.robust is not None:
                continue  # it takes the messages one by one
            uniform = self._weightings[name] == "uniform"
            weights = torch.from_numpy(np.ones(len(sizes)) if uniform else sizes).to(like)
            sums[name] = weights @ values[name]
            if name == "w" and self.factors and values[name].shape[1] == like.numel():
                sums[PRODUCTS] = sum_of_products(self.factors, values[name], weights)
                self._weightings[PRODUCTS] = self._weightings[name]
        return sums

    def add(
        self,
        sums: Mapping[str, Tensor],
        counts: Sequence[float],
        ids: np.ndarray | None = None,
        rows: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Adds a group of clients to the totals.

        Args:
            sums: The group's weighted sums by name.
            counts: The first four of the `counts`.
            ids: The clients, int64 [C].
            rows: The messages that the server gets one by one, [C, K] by name.
        """
        for name, total in sums.items():
            if name in self.sums:
                self.sums[name] += total  # in place: new memory costs more than the sum
            else:
                self.sums[name] = total
        for name, values in (rows or {}).items():
            self._rows.setdefault(name, []).append(values)
        self._row_ids.append(np.empty(0, np.int64) if ids is None else ids)
        self.counts[:4] += counts

    def add_lost(self, count: int, down: int, up: int, log: Log) -> None:
        """Adds clients whose messages were lost: their number, bytes and sample gradients."""
        self.counts += [0, 0, down, up, count, log.gradients]

    def note_ranges(self, ranges: Mapping[str, Tensor]) -> None:
        """Notes the range of each client state's rows, which `reduce` requires to be finite."""
        for name, ends in ranges.items():
            self._ranges.setdefault(name, []).append(ends)

    def reduce(self) -> None:
        """Adds counts and losses up over all processes. Every process must call it.

        It also finds the client states that are not finite.
        """
        sums: dict[str, np.ndarray] = {}
        for name, logged in self.log.losses.items():
            counts = np.concatenate([counts for _, counts in logged])
            losses = torch.cat([loss for loss, _ in logged]).double().cpu().numpy()
            # Sorted, because threads log in any order.
            sums[name] = np.array([np.sort(losses * counts).sum(), counts.sum()])
        self.counts[5] += self.log.gradients
        own, self.counts = self.counts, np.zeros_like(self.counts)
        self._local_ids = np.concatenate([self.ids, *self._row_ids])
        own_not_finite = not_finite({name: torch.cat(ends) for name, ends in self._ranges.items()})
        of_all = gather((own, sums, own_not_finite, self._local_ids))
        self.ids = np.sort(np.concatenate([ids for *_, ids in of_all]))
        for counts, losses, names, _ in of_all:
            self.counts += counts
            self.not_finite |= names
            for name, entry in losses.items():  # a process without clients has logged nothing
                self._loss_sums[name] = self._loss_sums.get(name, 0) + entry

    @property
    def samples(self) -> float:
        """Number of sample gradients that the clients of all processes took; after `reduce`."""
        return float(self.counts[5])

    def mean_losses(self) -> dict[str, float]:
        """Returns the mean of each loss over samples and processes; after `reduce`.

        The order of names does not depend on which client a process had first.
        """
        names = sorted(self._loss_sums, key=lambda name: (name != "train", name))
        sums = {name: self._loss_sums[name] for name in names}
        return {name: float(total / count) for name, (total, count) in sums.items() if count}

    def means(
        self, round_index: int, client_sizes: np.ndarray, attacking: np.ndarray
    ) -> dict[str, Tensor] | None:
        """Returns each message's weighted mean over the clients of all processes; after `reduce`.

        None if there is no client to average over. Every process must call it, once.

        Args:
            round_index: The round, from 0, to which the noise of a private mean belongs.
            client_sizes: Number of samples of each client of `ids`, int64 [n].
            attacking: Which of them attack, bool [n].
        """
        sums = {name: sum_over_processes(total) for name, total in self.sums.items()}
        references = self.references or {}
        if NOT_FINITE in sums:
            self.metrics["not_finite"] = float(sums.pop(NOT_FINITE))
        if self.private is not None:
            return self.private.release(sums, references, round_index)
        samples, clients, *_ = self.counts.tolist()
        weight = {"samples": samples, "uniform": clients}
        if weight[self.weighting] == 0:
            return None
        if self.robust is not None and self.robust.limit is not None:
            return {n: total / clients + references.get(n, 0) for n, total in sums.items()}
        means = {n: total.div_(weight[self._weightings[n]]) for n, total in sums.items()}
        rows, self._rows = self._rows, {}  # all rows are in memory once, not twice
        gathered = {name: self._gather_rows(rows.pop(name)) for name in list(rows)}
        if self.robust is not None and self._weightings:
            of_means = {name: gathered.pop(name) for name in self._weightings}
            each = {"samples": client_sizes, "uniform": np.ones(len(client_sizes))}
            shares = {
                name: torch.from_numpy(each[weighting] / each[weighting].sum())
                for name, weighting in self._weightings.items()
            }
            attackers = torch.from_numpy(attacking)
            means |= self.robust.combine(of_means, references, shares, attackers)
            self.metrics["not_finite"] = self.robust.not_finite
        return means | gathered

    def _gather_rows(self, parts: list[Tensor]) -> Tensor:
        """Returns the rows of all processes, [n, K], in the order of `ids`."""
        rows = parts[0].new_zeros(len(self.ids), parts[0].shape[1])
        places = np.searchsorted(self.ids, self._local_ids)
        rows[torch.from_numpy(places)] = torch.cat(parts)
        return sum_over_processes(rows)

    def gathered_tables(self, names: Sequence[str]) -> dict[str, dict[str, np.ndarray]]:
        """Returns the rows of all processes by table. Every process must call it."""
        return {name: gather_rows(self.log.tables.get(name, [])) for name in names}


def not_finite(values: Mapping[str, Tensor]) -> set[str]:
    """Returns the names of the tensors with a value that is infinite or NaN."""
    return {name for name, tensor in values.items() if not value_range(tensor).isfinite().all()}


def value_range(values: Tensor) -> Tensor:
    """Returns the least and the greatest value, [2]: NaN if one is NaN, zeros without values.

    One pass over the values, ten times as fast as `isfinite`, which does not wait for a device.
    """
    return torch.stack(values.aminmax()) if values.numel() else values.new_zeros(2)
