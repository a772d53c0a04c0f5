"""What runs have left in their folders, read for a comparison."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pfl.errors import ConfigError
from pfl.report.client_scores import ClientScoresByRound
from pfl.report.distribution import direction

Row = dict[str, Any]
BUDGETS = {
    "rounds": ("round",),
    "bytes": ("comm/uplink_bytes", "comm/downlink_bytes"),
    "gradients": ("train/samples",),
}
"""What a budget may limit: the columns of `metrics.csv` whose sum must not exceed it."""


def best_round(
    rows: list[Row], metric: str | None = None, metrics: Mapping[str, bool | None] | None = None
) -> Row | None:
    """Returns the row with the best validation score; None if no round was validated.

    The score is the mean accuracy of the personalized models or, if there are none, of the global
    model; for regression it is the loss. The first of equal rounds wins.

    Args:
        rows: The rows of `metrics.csv`.
        metric: Another score: a number of the same models, such as `f1_score`, or one of certain
            models, such as `val/global/loss`.
        metrics: For each metric beside accuracy and loss whether large values are good.

    Returns:
        A copy of the row, with the name of the score as `selected_by`.
    """
    numbers = ("accuracy", "loss") if metric is None else (metric,)
    names = [f"val/{k}/{n}" for n in numbers for k in ("personalized", "global")]
    for name in [metric] if metric is not None and "/" in metric else names:
        have = [row for row in rows if name in row and not math.isnan(row[name])]
        if have:
            best = max(have, key=lambda row: signed(name, row[name], metrics))
            return {"selected_by": name, **best}
    return None


def spent(row: Row, what: str) -> float:
    """Returns what a run has spent up to a round's row of one of `BUDGETS`."""
    return float(sum(row.get(name, 0.0) for name in BUDGETS[what]))


def signed(name: str, value: float, metrics: Mapping[str, bool | None] | None = None) -> float:
    """Returns a score, larger for better: one whose small values are good gets a minus.

    Args:
        name: The name of the score, such as `val/global/loss`.
        value: The score.
        metrics: For each metric beside accuracy and loss whether large values are good.
    """
    return -value if direction(name.replace("/", "_"), metrics or {}) is False else value


@dataclass(frozen=True)
class Run:
    """A run that has ended.

    Attributes:
        label: The name of the method in the comparison.
        seed: The seed of the run.
        folder: The folder of the run.
        point: The run's values on the axes of a grid.
        rows: The rows of `metrics.csv`.
        summary: The content of `summary.json`; empty if the run diverged in its first round.
        scores: Every client's scores by round, if the run has recorded them.
        diverged: Whether the models were no longer finite.
    """

    label: str
    seed: int
    folder: Path
    point: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    summary: Row = field(default_factory=dict)
    scores: ClientScoresByRound | None = None
    diverged: bool = False

    @classmethod
    def read(
        cls, label: str, seed: int, folder: Path, *, unfinished: bool = False, **known: Any
    ) -> Run:
        """Returns the run in a folder.

        Args:
            label: The name of the method in the comparison.
            seed: The seed of the run.
            folder: The folder of the run.
            unfinished: Allows a run that has not ended, whose `summary` is empty.
            known: `point` and `diverged`.

        Raises:
            ConfigError: The folder has no run that has ended.
        """
        summary = folder / "summary.json"
        if not (unfinished or known.get("diverged") or summary.is_file()):
            raise ConfigError(
                f"compare: {folder} has no summary.json; it must be the folder of a run that has "
                f"ended"
            )
        return cls(
            label,
            seed,
            folder,
            rows=_rows(folder / "metrics.csv"),
            summary=json.loads(summary.read_text()) if summary.is_file() else {},
            scores=ClientScoresByRound.read(folder),
            **known,
        )

    @property
    def finished(self) -> bool:
        """Whether the run has ended as it was meant to."""
        return bool(self.summary.get("finished", False))

    def shares_partition(self, other: Run) -> bool | None:
        """Returns whether two runs have the same partition; None if a run has not recorded it."""
        hashes = [run.summary.get("partition_hash") for run in (self, other)]
        return None if None in hashes else hashes[0] == hashes[1]

    def evaluated(self, budget: tuple[str, float] | None = None) -> list[Row]:
        """Returns the rows of rounds with a test score that a budget allows.

        Args:
            budget: One of `BUDGETS` and the limit.
        """
        rows = self.within(budget)
        return [row for row in rows if any(name.startswith("test/") for name in row)]

    def within(self, budget: tuple[str, float] | None) -> list[Row]:
        """Returns the rows of rounds that a budget allows."""
        if budget is None:
            return self.rows
        return [row for row in self.rows if spent(row, budget[0]) <= budget[1]]

    @property
    def metrics(self) -> dict[str, bool | None]:
        """For each metric beside accuracy and loss whether large values are good."""
        return {} if self.scores is None else self.scores.metrics

    def selected(
        self, budget: tuple[str, float] | None = None, metric: str | None = None
    ) -> Row | None:
        """Returns the row of the round that counts: the best by validation, else the last.

        None if the run diverged, or has no evaluated round within the budget.

        Args:
            budget: One of `BUDGETS` and the limit.
            metric: The score, as in `best_round`.
        """
        rows = self.evaluated(budget)
        if self.diverged or not rows:
            return None
        return best_round(rows, metric, self.metrics) or rows[-1]

    def client_scores(self, row: Row, column: str) -> np.ndarray | None:
        """Returns the clients' scores [M] in a round, such as `test_personalized_accuracy`.

        None if the run has not recorded them.
        """
        if self.scores is not None and not self.scores.percentiles:
            return self.scores.of(int(row["round"]), column)
        if not self.rows or row["round"] != self.rows[-1]["round"]:
            return None
        return self.clients.get(column)

    @cached_property
    def clients(self) -> dict[str, np.ndarray]:
        """The columns of `clients.csv` [M], float64, with NaN where empty; none before the end."""
        path = self.folder / "clients.csv"
        if not path.is_file():
            return {}
        with path.open(newline="") as file:
            names, *rows = csv.reader(file)
        values = np.array([[value or "nan" for value in row] for row in rows], np.float64)
        return dict(zip(names, values.reshape(-1, len(names)).T, strict=True))


def kinds(runs: Sequence[Run], number: str) -> list[str]:
    """Returns the kinds of model with a test score in some run; see `tested_kinds`."""
    return tested_kinds({name for run in runs for row in run.rows for name in row}, number)


def tested_kinds(names: Iterable[str], number: str) -> list[str]:
    """Returns the kinds of model with a test score, in the order of the tables.

    Args:
        names: Names of metrics.
        number: "accuracy" or "loss".

    Returns:
        Of "global", "personalized", "finetuned/<steps>" and "unseen/<steps>" those that there are.
    """
    found = re.compile(rf"test/((?:\w+)(?:/\d+)?)/{number}$")
    have = {match[1] for name in names if (match := found.match(name))}
    order = ["global", "personalized", "finetuned", "unseen"]

    def place(kind: str) -> tuple[int, int]:
        name, _, steps = kind.partition("/")
        return order.index(name) if name in order else len(order), int(steps or 0)

    return sorted(have, key=place)


def metric_names(names: Iterable[str]) -> list[str]:
    """Returns the names of the metrics that were computed beside accuracy and loss.

    Args:
        names: Names of the columns of `metrics.csv`.
    """
    found = re.compile(r"test/(?:\w+)(?:/\d+)?/(\w+)_clients$")
    return list(dict.fromkeys(match[1] for name in names if (match := found.match(name))))


def scores_of(runs: Sequence[Run]) -> list[str]:
    """Returns the names of the scores that runs have: accuracy, loss and further metrics."""
    names = dict.fromkeys(name for run in runs for row in run.rows for name in row)
    have = [number for number in ("accuracy", "loss") if tested_kinds(names, number)]
    return [*have, *metric_names(names)]


def _rows(path: Path) -> list[Row]:
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
