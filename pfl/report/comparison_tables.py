"""The tables of a comparison, for readers (terminal, Markdown, LaTeX) and for programs (CSV)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from pfl.report.comparison import Comparison, all_labels, blocks
from pfl.report.results import kinds, scores_of
from pfl.report.statistics import Paired, mean_ranks

LATEX = str.maketrans(
    {character: f"\\{character}" for character in "&%_#${}"}
    | {"\\": r"\textbackslash{}", "^": r"\^{}", "~": r"\~{}", "±": r"$\pm$", "–": "--"}
)
MEANS_ONLY = {
    "gained": ".0%",
    "MB up": ",.2f",
    "MB down": ",.2f",
    "parameters": ",.0f",
    "gradients": ",.0f",
    "seconds": ",.1f",
    "tuning trials": ",.0f",
}
"""The columns of the table that show means only, and their format; the others are scores."""
Cells = list[list[str]]
Record = dict[str, Any]


def overview_table(comparisons: Sequence[Comparison]) -> Cells:
    """Returns a header and a row for each method: its scores at all points of a grid, by mean rank.

    The score is that of the model that counts. A rank is that of a method within a block (see
    `blocks`); a method that lacks a run has none, and stands at the end.
    """
    ranks = _ranks(comparisons)
    cells = [["method", "model", *(comparison.title for comparison in comparisons), "mean rank"]]
    for label in sorted(all_labels(comparisons), key=lambda label: ranks.get(label, np.inf)):
        names = [f"test/{c.main_kind(label)}/{c.number}" for c in comparisons]
        means = [_text(c.values(label, name)) for c, name in zip(comparisons, names, strict=True)]
        rank = f"{ranks[label]:.2f}" if label in ranks else "–"
        model = next(filter(None, (c.main_kind(label) for c in comparisons)), "–")
        cells.append([label, model, *means, rank])
    return cells


def score_table(comparison: Comparison) -> Cells:
    """Returns a header and a row for each method: scores, worst tenth, metrics, gain and costs.

    Metrics beside the score are those of the model that counts.
    """
    rows = {label: _numbers(comparison, label) for label in comparison.labels}
    empty = set() if comparison.tuning else {"tuning trials"}
    if not any(len(row["gained"]) for row in rows.values()):
        empty.add("gained")
    heads = [head for head in rows[comparison.labels[0]] if head not in empty]
    cells = [["method", *heads]]
    for label, row in rows.items():
        cells.append([label, *(_text(row[head], MEANS_ONLY.get(head)) for head in heads)])
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
    for label, (result, p) in comparison.statistics.items():
        if not result.pairs:
            cells.append([label, *["–"] * 6])
            continue
        counts = (result.wins, result.ties, result.losses)
        interval = f"[{result.low:+.4f}, {result.high:+.4f}]"
        p_text = "–" if np.isnan(p) else f"{p:.2g}"
        cells.append([label, f"{result.difference:+.4f}", interval, p_text, *map(str, counts)])
    return cells


def records(comparisons: Sequence[Comparison]) -> list[Record]:
    """Returns a row for each method at each point of a grid, with the numbers of all tables.

    A score has its standard deviation in a column of its own. `model` is the model that counts,
    `low` and `high` are the ends of the interval, and `notes` are those of the whole table.
    """
    ranks = _ranks(comparisons)
    rows = []
    for comparison in comparisons:
        notes = " ".join(comparison.notes())
        for label in comparison.labels:
            row = {**comparison.point, "method": label, "model": comparison.main_kind(label)}
            row["runs"] = len(comparison.of(label))
            for head, values in _numbers(comparison, label).items():
                row[head] = _mean(values)
                if head not in MEANS_ONLY:
                    row[f"{head} std"] = _spread(values)
            row |= {"mean rank": ranks.get(label), "baseline": comparison.baseline}
            result, p = comparison.statistics.get(label, (None, None))  # none of the baseline
            row |= {field.name: getattr(result, field.name, None) for field in fields(Paired)}
            row["p (Holm)"] = p
            rows.append({**row, "notes": notes})
    return rows


def run_records(comparisons: Sequence[Comparison]) -> list[Record]:
    """Returns a row for each run: what it is, and all numbers of the round that counts.

    The numbers are the columns of `metrics.csv`; a run that diverged has none.
    """
    rows = []
    for comparison in comparisons:
        for run in comparison.runs:
            status = "finished" if run.finished else "unfinished"
            row = {**run.point, "method": run.label, "seed": run.seed, "folder": run.folder}
            row["status"] = "diverged" if run.diverged else status
            row["model"] = comparison.main_kind(run.label)
            row["gained"] = comparison.gained_of(run)
            row["seconds"] = comparison.seconds_of(run)
            rows.append({**row, **(comparison.chosen[id(run)] or {})})
    return rows


def _numbers(comparison: Comparison, label: str) -> dict[str, np.ndarray]:
    """Returns for each column of the table the numbers of a method's runs; NaN where one has none.

    A column is empty if no run can have such a number: `gained` without a local baseline, and
    `seconds` with a budget.
    """
    number, main, runs = comparison.number, comparison.main_kind(label), comparison.of(label)
    names = {
        kind.replace("/", ", k = "): f"test/{kind}/{number}"
        for kind in kinds(comparison.runs, number)
    }
    names["worst 10%"] = f"test/{main}/{number}_worst10"
    others = [name for name in scores_of(comparison.runs) if name not in (number, "loss")]
    names |= {name: f"test/{main}/{name}" for name in others}
    shares = [comparison.gained_of(run) for run in runs]
    seconds = [comparison.seconds_of(run) for run in runs]
    return {head: comparison.values(label, name) for head, name in names.items()} | {
        "gained": np.array([share for share in shares if share is not None]),
        "MB up": comparison.values(label, "comm/uplink_bytes") / 1e6,
        "MB down": comparison.values(label, "comm/downlink_bytes") / 1e6,
        "parameters": comparison.values(label, f"parameters/{main}"),
        "gradients": comparison.values(label, "train/samples"),
        "seconds": np.array([value for value in seconds if value is not None]),
        "tuning trials": np.array([comparison.tuned(label, "trials")]),
    }


def _ranks(comparisons: Sequence[Comparison]) -> dict[str, float]:
    """Returns the mean rank of each method that has all runs."""
    labels, scores = blocks(comparisons)
    return dict(zip(labels, mean_ranks(scores).tolist(), strict=True)) if labels else {}


def _mean(values: np.ndarray) -> float:
    """Returns the mean, NaN where a run has no such number."""
    return float(values.mean()) if len(values) else np.nan


def _spread(values: np.ndarray) -> float | None:
    """Returns the sample standard deviation, which one run does not have."""
    return float(values.std(ddof=1)) if len(values) > 1 else None


def _text(values: np.ndarray, form: str | None = None) -> str:
    """Returns the mean in a format, or else mean ± sample standard deviation; "–" for NaN."""
    mean = _mean(values)
    if np.isnan(mean):
        return "–"
    if form is not None:
        return f"{mean:{form}}"
    spread = _spread(values)
    return f"{mean:.4f}" + (f" ± {spread:.4f}" if spread is not None else "")


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
