"""The tables of a comparison of methods: scores, costs and paired statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pfl.errors import ConfigError
from pfl.report.results import BUDGETS, Row, Run, kinds, scores_of, signed, spent
from pfl.report.statistics import Paired, holm, mean_ranks, paired

LATEX = str.maketrans(
    {character: f"\\{character}" for character in "&%_#${}"}
    | {"\\": r"\textbackslash{}", "^": r"\^{}", "~": r"\~{}", "±": r"$\pm$", "–": "--"}
)
UNEQUAL = 0.01  # relative difference of budgets that a table points out


@dataclass(frozen=True)
class Comparison:
    """Runs of several methods with the same seeds.

    Attributes:
        runs: All runs of one point of the grid.
        baseline: The label of the method with which the others are compared.
        budget: One of `pfl.report.results.BUDGETS` and its limit; None: whole runs.
        title: What is compared.
        tuning: What each method's tuning took, such as `{"FedAvg": {"trials": 20}}`, if known.
        metric: The score that counts, such as `f1_score`; None: accuracy, or loss for regression.

    Raises:
        ConfigError: No run has that score.
    """

    runs: Sequence[Run]
    baseline: str
    budget: tuple[str, float] | None = None
    title: str = ""
    tuning: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    metric: str | None = None
    chosen: dict[int, Row | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.metric is not None and not kinds(self.runs, self.metric):
            have = ", ".join(scores_of(self.runs))
            raise ConfigError(f"compare: metric: {self.metric}; the runs have {have}")
        self.chosen.update({id(run): run.selected(self.budget, self.metric) for run in self.runs})

    @property
    def labels(self) -> list[str]:
        """The methods, in the order of the runs."""
        return list(dict.fromkeys(run.label for run in self.runs))

    @property
    def number(self) -> str:
        """The score that counts: `metric`, or else "accuracy", or "loss" for regression."""
        return self.metric or ("accuracy" if kinds(self.runs, "accuracy") else "loss")

    @property
    def larger_is_better(self) -> bool:
        """Whether a larger score is better."""
        known = {name: better for run in self.runs for name, better in run.metrics.items()}
        return signed(f"test/{self.number}", 1.0, known) > 0

    def of(self, label: str) -> list[Run]:
        """Returns the runs of a method."""
        return [run for run in self.runs if run.label == label]

    def main_kind(self, label: str) -> str | None:
        """Returns the kind of model that counts for a method: personalized, or else global."""
        have = kinds(self.of(label), self.number)
        return next((kind for kind in ("personalized", "global") if kind in have), None)

    def values(self, label: str, name: str) -> np.ndarray:
        """Returns a number of each run of a method, in the round that counts; NaN where none."""
        rows = [self.chosen[id(run)] for run in self.of(label)]
        return np.array([float((row or {}).get(name, np.nan)) for row in rows])

    def client_scores(self, run: Run) -> np.ndarray | None:
        """Returns the clients' test scores [M] of the model that counts."""
        row, kind = self.chosen[id(run)], self.main_kind(run.label)
        if row is None or kind is None:
            return None
        return run.client_scores(row, f"test_{kind}_{self.number}")

    # ---- statistics ---------------------------------------------------------------------------

    def pairs(self, label: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the scores of a method and of the baseline, a pair for each client and seed.

        Empty if a run of the method diverged: the seeds that are left would flatter it. Runs with
        different partitions are not paired.
        """
        baseline = {run.seed: run for run in self.of(self.baseline)}
        ours: list[np.ndarray] = []
        theirs: list[np.ndarray] = []
        runs = self.of(label)
        for run in [] if any(run.diverged for run in runs) else runs:
            other = baseline.get(run.seed)
            if other is None or run.shares_partition(other) is False:
                continue
            a, b = self.client_scores(run), self.client_scores(other)
            if a is not None and b is not None and len(a) == len(b):
                ours.append(a)
                theirs.append(b)
        if not ours:
            return np.empty(0), np.empty(0)
        return np.concatenate(ours), np.concatenate(theirs)

    def statistics(self) -> dict[str, tuple[Paired, float]]:
        """Returns each method's comparison with the baseline, and Holm's corrected p-value."""
        others = [label for label in self.labels if label != self.baseline]
        results = {label: paired(*self.pairs(label), self.larger_is_better) for label in others}
        corrected = holm([result.p for result in results.values()])
        return {label: (results[label], p) for label, p in zip(others, corrected, strict=True)}

    def gains_of(self, run: Run) -> np.ndarray | None:
        """Returns how much better [M] than alone each client is, in the round that counts.

        None if the run has no local baseline (the callback `LocalBaseline`), or with a budget, to
        which training alone was not cut.
        """
        if self.budget is not None:
            return None
        alone, scores = run.clients.get(f"test_local_{self.number}"), self.client_scores(run)
        if alone is None or scores is None:
            return None
        # Scores of every round are kept in float32: equal scores must stay equal.
        gains = scores.astype(np.float32) - alone.astype(np.float32)
        return gains if self.larger_is_better else -gains

    def gained_of(self, run: Run) -> float | None:
        """Returns the share of a run's clients that score better than alone."""
        gains = self.gains_of(run)
        known = None if gains is None else gains[~np.isnan(gains)]
        return float((known > 0).mean()) if known is not None and len(known) else None

    def gained(self, label: str) -> float | None:
        """Returns the share of clients, over all seeds, that score better than alone.

        None if the runs have no local baseline.
        """
        shares = [self.gained_of(run) for run in self.of(label)]
        known = [share for share in shares if share is not None]
        return float(np.mean(known)) if known else None

    def tuned(self, label: str, what: str) -> float:
        """Returns what was spent on a method's tuning: trials, rounds, gradients or seconds."""
        return float(self.tuning.get(label, {}).get(what, 0.0))

    # ---- notes --------------------------------------------------------------------------------

    def notes(self) -> list[str]:
        """Returns what a reader of the table must know, in sentences."""
        notes = [f"The score is {self.number}."]
        notes.append(f"± is the standard deviation over {self._seeds()}.")
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
        baseline = {run.seed: run for run in self.of(self.baseline)}
        groups = {
            "Diverged, and left out": [run for run in self.runs if run.diverged],
            "Not finished": [run for run in self.runs if not (run.finished or run.diverged)],
            f"Not paired with {self.baseline}, since its partition is another one": [
                run
                for run in self.runs
                if run.seed in baseline and run.shares_partition(baseline[run.seed]) is False
            ],
        }
        for words, runs in groups.items():
            if runs:
                named = "; ".join(f"{run.label}, seed {run.seed}" for run in runs)
                notes.append(f"{words}: {named}.")
        return notes + self._unequal() + self._tuned()

    def _seeds(self) -> str:
        counts = sorted({len(self.of(label)) for label in self.labels})
        return " or ".join(map(str, counts)) + (" seed" if counts == [1] else " seeds")

    def _unequal(self) -> list[str]:
        """Returns a sentence for each budget that the methods did not share, up to the cut."""
        notes = []
        whole = "" if self.budget else " in the whole run"
        for what in BUDGETS:
            means = {}
            for label in self.labels:
                ends = [run.within(self.budget)[-1:] for run in self.of(label)]
                if all(ends):
                    means[label] = float(np.mean([spent(row, what) for (row,) in ends]))
            if not means or max(means.values()) <= (1 + UNEQUAL) * min(means.values()):
                continue
            least, most = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
            notes.append(
                f"Unequal {what}{whole}: from {means[least]:,.0f} ({least}) "
                f"to {means[most]:,.0f} ({most})."
            )
        return notes

    def _tuned(self) -> list[str]:
        """Returns a sentence for each budget of tuning that the methods did not share."""
        if not self.tuning:
            return []
        notes = []
        for what in ("trials", "rounds", "gradients"):
            spent = {label: self.tuned(label, what) for label in self.labels}
            least, most = min(spent, key=spent.__getitem__), max(spent, key=spent.__getitem__)
            if spent[most] > (1 + UNEQUAL) * spent[least]:
                notes.append(
                    f"Unequal tuning: {least} had {spent[least]:,.0f} {what}, "
                    f"{most} {spent[most]:,.0f}."
                )
        if not notes:
            return ["All methods were tuned with equal numbers of trials, rounds and gradients."]
        return notes


def all_labels(comparisons: Sequence[Comparison]) -> list[str]:
    """Returns the methods of all comparisons, in their order."""
    return list(dict.fromkeys(label for one in comparisons for label in one.labels))


def blocks(comparisons: Sequence[Comparison]) -> tuple[list[str], np.ndarray]:
    """Returns the methods that have all runs, and their mean scores [blocks, methods].

    A block is a seed of one of the comparisons, which are the points of a grid. Scores whose small
    values are good have a minus.
    """
    seeds = [sorted({run.seed for run in comparison.runs}) for comparison in comparisons]
    columns = {}
    for label in all_labels(comparisons):
        column = []
        for comparison, wanted in zip(comparisons, seeds, strict=True):
            kind = comparison.main_kind(label)
            values = comparison.values(label, f"test/{kind}/{comparison.number}")
            values = values if comparison.larger_is_better else -values
            by_seed = {run.seed: v for run, v in zip(comparison.of(label), values, strict=True)}
            column += [by_seed.get(seed, np.nan) for seed in wanted]
        if not np.isnan(column).any():
            columns[label] = column
    return list(columns), np.array(list(columns.values())).T


# ---- tables --------------------------------------------------------------------------------------

Cells = list[list[str]]


def overview_table(comparisons: Sequence[Comparison]) -> Cells:
    """Returns a header and a row for each method: its scores at all points of a grid, by mean rank.

    The score is that of the model that counts. A rank is that of a method within a block (see
    `blocks`); a method that lacks a run has none, and stands at the end.
    """
    labels, scores = blocks(comparisons)
    ranks = mean_ranks(scores) if labels else np.empty(0)
    by_label = dict(zip(labels, ranks.tolist(), strict=True))
    cells = [["method", "model", *(comparison.title for comparison in comparisons), "mean rank"]]
    for label in sorted(all_labels(comparisons), key=lambda label: by_label.get(label, np.inf)):
        names = [f"test/{c.main_kind(label)}/{c.number}" for c in comparisons]
        means = [_mean(c.values(label, name)) for c, name in zip(comparisons, names, strict=True)]
        rank = f"{by_label[label]:.2f}" if label in by_label else "–"
        model = next(filter(None, (c.main_kind(label) for c in comparisons)), "–")
        cells.append([label, model, *means, rank])
    return cells


def score_table(comparison: Comparison) -> Cells:
    """Returns a header and a row for each method: scores, worst tenth, metrics, gain and costs.

    Metrics beside the score are those of the model that counts.
    """
    number = comparison.number
    shown = kinds(comparison.runs, number)
    names = [name for name in scores_of(comparison.runs) if name not in (number, "loss")]
    head = ["method", *(kind.replace("/", ", k = ") for kind in shown), "worst 10%", *names]
    gained = {label: comparison.gained(label) for label in comparison.labels}
    if any(share is not None for share in gained.values()):
        head.append("gained")
    head += ["MB up", "MB down", "parameters", "gradients", "seconds"]
    cells = [[*head, "tuning trials"] if comparison.tuning else head]
    for label in comparison.labels:
        row = [label]
        for kind in shown:
            row.append(_mean(comparison.values(label, f"test/{kind}/{number}")))
        main = comparison.main_kind(label)
        row.append(_mean(comparison.values(label, f"test/{main}/{number}_worst10")))
        row += [_mean(comparison.values(label, f"test/{main}/{name}")) for name in names]
        if "gained" in head:
            share = gained[label]
            row.append("–" if share is None else f"{share:.0%}")
        row += _costs(comparison, label)
        if comparison.tuning:
            row.append(f"{comparison.tuned(label, 'trials'):,.0f}")
        cells.append(row)
    return cells


def statistics_table(comparison: Comparison) -> Cells:
    """Returns a header and a row for each method that is compared with the baseline."""
    cells = [
        [
            "method",
            f"difference to {comparison.baseline}",
            "95% interval",
            "p (Holm)",
            "wins",
            "ties",
            "losses",
        ]
    ]
    for label, (result, p) in comparison.statistics().items():
        if not result.pairs:
            cells.append([label, *["–"] * 6])
            continue
        counts = (result.wins, result.ties, result.losses)
        interval = f"[{result.low:+.4f}, {result.high:+.4f}]"
        p_text = "–" if np.isnan(p) else f"{p:.2g}"
        cells.append([label, f"{result.difference:+.4f}", interval, p_text, *map(str, counts)])
    return cells


def _mean(values: np.ndarray) -> str:
    """Returns mean ± sample standard deviation; "–" where a run has no such number."""
    if not len(values) or np.isnan(values).any():
        return "–"
    spread = f" ± {values.std(ddof=1):.4f}" if len(values) > 1 else ""
    return f"{values.mean():.4f}{spread}"


def _costs(comparison: Comparison, label: str) -> list[str]:
    """Returns the means of bytes, parameters, sample gradients and seconds of a method's runs."""
    main = comparison.main_kind(label)
    runs = [] if comparison.budget else comparison.of(label)  # seconds are known of whole runs only
    seconds = [run.summary.get("wall_seconds", np.nan) for run in runs]
    columns = [
        (comparison.values(label, "comm/uplink_bytes") / 1e6, 2),
        (comparison.values(label, "comm/downlink_bytes") / 1e6, 2),
        (comparison.values(label, f"parameters/{main}"), 0),
        (comparison.values(label, "train/samples"), 0),
        (np.array(seconds), 1),
    ]
    means = [(values.mean() if len(values) else np.nan, digits) for values, digits in columns]
    return ["–" if np.isnan(mean) else f"{mean:,.{digits}f}" for mean, digits in means]


def markdown(cells: Cells) -> str:
    """Returns a table in Markdown."""
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in cells]
    head, *rows = (f"| {' | '.join(row)} |" for row in escaped)
    return "\n".join([head, f"|{'---|' * len(cells[0])}", *rows]) + "\n"


def text(cells: Cells) -> str:
    """Returns a table for a terminal, with aligned columns."""
    columns = [[row[i] for row in cells] for i in range(len(cells[0]))]
    for number, column in enumerate(columns):
        width = max(map(len, column))
        columns[number] = [c.rjust(width) if number else c.ljust(width) for c in column]
    head, *rows = ("  ".join(row) for row in zip(*columns, strict=True))
    return "\n".join([head, "-" * len(head), *rows]) + "\n"


def latex(cells: Cells) -> str:
    """Returns a table in LaTeX, for the package booktabs."""
    rows = [" & ".join(map(escaped, row)) + r" \\" for row in cells]
    begin = rf"\begin{{tabular}}{{l{'r' * (len(cells[0]) - 1)}}}"
    lines = [begin, r"\toprule", rows[0], r"\midrule", *rows[1:], r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def escaped(cell: str) -> str:
    """Returns a text for LaTeX."""
    return cell.translate(LATEX)


def described(point: dict[str, Any]) -> str:
    """Returns a point of the grid in words, such as "alpha 0.1, data digits"."""
    return ", ".join(f"{axis} {value}" for axis, value in point.items())
