"""A comparison of methods: the scores that count, paired statistics and notes for the reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from pfl.errors import ConfigError
from pfl.scores import names
from pfl.scores.runs import BUDGETS, Row, Run, column_names, cost_of
from pfl.scores.statistics import Paired, compare_pairs, holm

MANY = 1 << 40  # more clients than a run has
UNEQUAL = 0.01  # relative difference of budgets that a table points out


@dataclass(frozen=True)
class ComparedRuns:
    """Runs of several methods with the same seeds.

    Attributes:
        runs: All runs of one point of the grid.
        baseline: The label of the method with which the others are compared.
        budget: One of `pfl.scores.runs.BUDGETS` and its limit; None: whole runs.
        title: What is compared.
        tuning: What each method's tuning took, such as `{"FedAvg": {"trials": 20}}`, if known.
        metric: The score that counts, such as `f1_score` or `finetuned/5/accuracy`; None: accuracy,
            or loss for regression, of the model that each run's `loop.select_by` names, or else of
            the model after fine-tuning, the personalized or the global model.

    Raises:
        ConfigError: No run has that score, or a run has not recorded what the budget limits.
    """

    runs: Sequence[Run]
    baseline: str
    budget: tuple[str, float] | None = None
    title: str = ""
    tuning: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    metric: str | None = None
    chosen: dict[int, Row | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        columns = column_names(row for run in self.runs for row in run.rows)
        if self.metric is not None and not names.candidates(columns, "test", self.metric):
            number = names.parts_of(self.metric)[1]
            scores = names.scores_among(columns, "test")
            have = [f"{name.model}/{name.number}" for name in scores if name.number == number]
            words = ", ".join(have or names.numbers_of(columns))
            raise ConfigError(f"metric: {self.metric}; the runs have {words}")
        if self.budget is not None:
            what = BUDGETS[self.budget[0]]
            for run in self.runs:
                if run.rows and not {*what} & {*column_names(run.rows)}:
                    raise ConfigError(
                        f"budget: {self.budget[0]}; {run.folder} has no {' and no '.join(what)} in "
                        f"its metrics.csv (virtual seconds need loop.clock)"
                    )
        self.chosen.update({id(run): run.selected(self.budget, self.metric) for run in self.runs})

    @property
    def point(self) -> dict[str, Any]:
        """The values on the axes of the grid that all runs share."""
        return self.runs[0].point

    @property
    def labels(self) -> list[str]:
        """The methods, in the order of the runs."""
        return list(dict.fromkeys(run.label for run in self.runs))

    @property
    def columns(self) -> list[str]:
        """The columns of `metrics.csv` that some run has."""
        return column_names(row for run in self.runs for row in run.rows)

    @cached_property
    def number(self) -> str:
        """What is scored: the number in `metric`, or else "accuracy", or "loss" for regression."""
        first = names.candidates(self.columns, "test", self.metric)
        if first:
            return first[0].number
        return names.parts_of(self.metric)[1] or "accuracy"

    @property
    def metrics(self) -> names.Directions:
        """For each metric beside accuracy and loss whether large values are good."""
        return {name: better for run in self.runs for name, better in run.metrics.items()}

    @property
    def larger_is_better(self) -> bool:
        """Whether a larger score is better."""
        return names.direction(self.number, self.metrics) is not False

    def of(self, label: str) -> list[Run]:
        """Returns the runs of a method."""
        return [run for run in self.runs if run.label == label]

    def baseline_of(self, run: Run) -> Run | None:
        """Returns the baseline run that has the same seed as `run`, or None."""
        return next((one for one in self.of(self.baseline) if one.seed == run.seed), None)

    def score_of(self, label: str) -> names.ScoreName | None:
        """Returns the score that counts for a method; None if its runs do not have it."""
        runs = self.of(label)
        chosen = [run.summary["select_by"] for run in runs if run.summary.get("select_by")]
        model = names.parts_of(self.metric)[0]
        if chosen and not model:
            model = names.parts_of(chosen[0])[0]
        if model:
            wanted = f"{model}/{self.number}"
        else:
            wanted = self.number
        columns = column_names(row for run in runs for row in run.rows)
        return next(iter(names.candidates(columns, "test", wanted)), None)

    def main_kind(self, label: str) -> str | None:
        """Returns the kind of model that counts for a method, such as "personalized"."""
        name = self.score_of(label)
        if name is None:
            return None
        return name.model

    def values(self, label: str, name: names.ScoreName | str) -> np.ndarray:
        """Returns a number of each run of a method, in the round that counts; NaN where none."""
        rows = [self.chosen[id(run)] for run in self.of(label)]
        return np.array([float((row or {}).get(str(name), np.nan)) for row in rows])

    def client_scores(self, run: Run) -> np.ndarray | None:
        """Returns the clients' test scores [M] of the model that counts."""
        row = self.chosen[id(run)]
        name = self.score_of(run.label)
        if row is None or name is None:
            return None
        return run.client_scores(row, name)

    # ---- statistics ---------------------------------------------------------------------------

    def pairs(self, label: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the scores of a method and of the baseline, a pair for each client.

        Scores of a client are its mean over the seeds, since the differences of one client are
        alike under all seeds. Runs of other seeds have the same clients if their partitions are
        equal; clients of the same name are the same ones; otherwise each seed has its own.

        Empty if a run of the method or of the baseline diverged: the seeds that are left would
        flatter it. Runs with different partitions are not paired.
        """
        runs = self.of(label)
        if any(run.diverged for run in [*runs, *self.of(self.baseline)]):
            return np.empty(0), np.empty(0)
        method = [np.empty(0)]
        baseline = [np.empty(0)]
        whose = [np.empty(0, int)]
        for run in runs:
            other = self.baseline_of(run)
            if other is None or run.shares_partition(other) is False:
                continue
            ours = self.client_scores(run)
            theirs = self.client_scores(other)
            if ours is not None and theirs is not None and len(ours) == len(theirs):
                method.append(ours)
                baseline.append(theirs)
                whose.append(self._who(run, len(ours)))
        clients = np.unique(np.concatenate(whose), return_inverse=True)[1]
        scores = np.stack([np.concatenate(method), np.concatenate(baseline)]).astype(np.float64)
        known = ~np.isnan(scores).any(axis=0)  # a pair needs both
        counts = np.bincount(clients, known)
        sums = [np.bincount(clients, np.where(known, one, 0.0)) for one in scores]
        with np.errstate(invalid="ignore"):
            ours, theirs = sums / counts
        return ours, theirs

    def _who(self, run: Run, count: int) -> np.ndarray:
        """Returns names or numbers of a run's clients that only the same clients have elsewhere."""
        digests = sorted({str(one.summary.get("partition_hash")) for one in self.runs})
        if len(digests) > 1 and "name" in run.clients:
            return run.clients["name"]
        place = digests.index(str(run.summary.get("partition_hash")))
        return np.arange(count) + place * MANY

    @cached_property
    def statistics(self) -> dict[str, tuple[Paired, float]]:
        """Each method's comparison with the baseline, and Holm's corrected p-value."""
        others = [label for label in self.labels if label != self.baseline]
        results = [compare_pairs(*self.pairs(label), self.larger_is_better) for label in others]
        corrected = holm([result.p for result in results])
        return dict(zip(others, zip(results, corrected, strict=True), strict=True))

    def gains_of(self, run: Run) -> np.ndarray | None:
        """Returns each client's gain over the local baseline in the round that counts, [M].

        None if the run has no local baseline (the callback `LocalBaseline`) of that round.
        """
        row = self.chosen[id(run)]
        name = self.score_of(run.label)
        if row is None or name is None:
            return None
        local = run.client_scores(row, name._replace(model="local"))
        scores = run.client_scores(row, name)
        if local is None or scores is None or len(local) != len(scores):
            return None
        # Scores of every round are kept in float32: equal scores must stay equal.
        gains = scores.astype(np.float32) - local.astype(np.float32)
        if self.larger_is_better:
            return gains
        return -gains

    def gained_of(self, run: Run) -> float | None:
        """Returns the share of a run's clients that score better than their local baseline."""
        gains = self.gains_of(run)
        if gains is None or np.isnan(gains).all():
            return None
        return float((gains[~np.isnan(gains)] > 0).mean())

    def seconds_of(self, run: Run) -> float | None:
        """Returns a run's seconds; None with a budget: they are known of whole runs only."""
        if self.budget is not None:
            return None
        return run.summary.get("wall_seconds", np.nan)

    def tuning_cost(self, label: str, what: str) -> float:
        """Returns what was spent on a method's tuning: trials, rounds, gradients or seconds."""
        return float(self.tuning.get(label, {}).get(what, 0.0))

    # ---- notes --------------------------------------------------------------------------------

    def notes(self) -> list[str]:
        """Returns what a reader of the table must know, in sentences."""
        notes = [f"The score is {self.number}."]
        counts = sorted({len(self.of(label)) for label in self.labels})
        if counts == [1]:
            notes.append("Each method has one run: how much a seed changes is not known.")
        else:
            seeds = " or ".join(map(str, counts))
            notes.append(f"± is the standard deviation over {seeds} seeds.")
        rows = [row for row in self.chosen.values() if row is not None]
        if not rows:
            notes.append("No run has a test score.")
        elif all("selected_by" in row for row in rows):
            notes.append("The round that counts is the best one on validation data.")
        elif any("selected_by" in row for row in rows):
            notes.append(
                "The round that counts is the best one on validation data where a run has some, "
                "and otherwise the last one: the methods are not compared on equal terms."
            )
        else:
            notes.append("There are no validation data: the last round counts.")
        if self.budget:
            notes.append(f"Runs are cut after {self.budget[1]:g} {self.budget[0]}.")
        groups = {
            "Diverged, and left out": [run for run in self.runs if run.diverged],
            "Not finished": [run for run in self.runs if not (run.finished or run.diverged)],
            f"Not paired with {self.baseline}, since its partition is another one": [
                run
                for run in self.runs
                if (other := self.baseline_of(run)) and run.shares_partition(other) is False
            ],
            f"Not paired with {self.baseline}, which has no run of the same seed": [
                run for run in self.runs if self.baseline_of(run) is None
            ],
        }
        for words, runs in groups.items():
            if runs:
                named = "; ".join(f"{run.label}, seed {run.seed}" for run in runs)
                notes.append(f"{words}: {named}.")
        return notes + self._budget_notes() + self._tuning_notes()

    def _budget_notes(self) -> list[str]:
        """Returns a sentence for each budget that the methods did not share, up to the cut."""
        notes = []
        for what in BUDGETS:
            means = {}
            for label in self.labels:
                ends = [run.within(self.budget)[-1:] for run in self.of(label)]
                if all(ends):
                    costs = [cost_of(row, what) for (row,) in ends]
                    if what == "gradients":
                        model = self.main_kind(label)
                        adapted = [run.finetuning_samples(model) for run in self.of(label)]
                        costs = np.add(costs, adapted).tolist()
                    means[label] = float(np.mean(costs))
            whole = " in the whole run" * (not self.budget)
            notes += _unequal(f"{what}{whole}", means)
        return notes

    def _tuning_notes(self) -> list[str]:
        """Returns a sentence for each budget of tuning that the methods did not share."""
        notes: list[str] = []
        if not self.tuning:
            return notes
        for what in ("trials", "rounds", "gradients"):
            costs = {label: self.tuning_cost(label, what) for label in self.labels}
            notes += _unequal(f"{what} of tuning", costs)
        if not notes:
            return ["All methods were tuned with equal numbers of trials, rounds and gradients."]
        return notes


def _unequal(what: str, values: Mapping[str, float]) -> list[str]:
    """Returns a sentence about the least and the largest value, unless they are about equal."""
    ends = sorted(values.items(), key=lambda item: item[1])
    if not ends or ends[-1][1] <= (1 + UNEQUAL) * ends[0][1]:
        return []
    least, low = ends[0]
    most, high = ends[-1]
    return [f"Unequal {what}: from {_amount(low)} ({least}) to {_amount(high)} ({most})."]


def _amount(value: float) -> str:
    """Returns a mean over seeds with so many digits that unequal ones look unequal."""
    if value < 1000:
        return f"{value:.3g}"
    return f"{value:,.0f}"


def all_labels(comparisons: Sequence[ComparedRuns]) -> list[str]:
    """Returns the methods of all comparisons, in their order."""
    return list(dict.fromkeys(label for one in comparisons for label in one.labels))


def blocks(comparisons: Sequence[ComparedRuns]) -> tuple[list[str], np.ndarray]:
    """Returns the methods that have all runs, and their mean scores [blocks, methods].

    A block is a seed at one point of the grid. Scores whose small values are good have a minus.
    """
    seeds = [sorted({run.seed for run in comparison.runs}) for comparison in comparisons]
    columns = {}
    for label in all_labels(comparisons):
        column = []
        for comparison, wanted in zip(comparisons, seeds, strict=True):
            values = comparison.values(label, comparison.score_of(label) or "")
            if not comparison.larger_is_better:
                values = -values
            by_seed = {run.seed: v for run, v in zip(comparison.of(label), values, strict=True)}
            column += [by_seed.get(seed, np.nan) for seed in wanted]
        if not np.isnan(column).any():
            columns[label] = column
    return list(columns), np.array(list(columns.values())).T


def point_text(point: dict[str, Any]) -> str:
    """Returns a point of the grid in words, such as "alpha 0.1, data digits"."""
    return ", ".join(f"{axis} {value}" for axis, value in point.items())
