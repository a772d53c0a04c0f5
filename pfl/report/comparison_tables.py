"""The tables of a comparison, for readers and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from pfl.errors import ConfigError
from pfl.report.comparison import ComparedRuns, all_labels, blocks
from pfl.report.table import Cell, Column, Estimate, Table
from pfl.scores.names import ScoreName, direction, models_of, numbers_of, parts_of
from pfl.scores.runs import Row, Run
from pfl.scores.statistics import Paired, mean_ranks

COUNTS = "score that counts"  # the column of the model that counts, the only one with a best
PRINTED = {"score": COUNTS, "worst": "worst 10%"}  # short words for what papers print
MEANS_ONLY = {
    "gained": ".0%",
    "MB up": ",.2f",
    "MB down": ",.2f",
    "parameters": ",.0f",
    "gradients": ",.0f",
    "seconds": ",.1f",
    "virtual seconds": ",.1f",
    "tuning trials": ",.0f",
}
"""The columns of the table that show means only, and their format; the others are scores."""
Record = dict[str, Any]


def overview_table(comparisons: Sequence[ComparedRuns]) -> Table:
    """Returns a row for each method: its scores at all points of a grid, by mean rank.

    The score is that of the model that counts. A method that lacks a run has no rank (see
    `blocks`), and stands at the end.
    """
    ranks = _ranks(comparisons)
    scores = [_score_column(c.title, c, c.number) for c in comparisons]
    columns = [Column("method"), Column("model"), *scores, Column("mean rank", ".2f", better=False)]
    rows: list[list[Cell]] = []
    for label in sorted(all_labels(comparisons), key=lambda label: ranks.get(label, np.inf)):
        means = [Estimate.of(c.values(label, c.score_of(label) or "")) for c in comparisons]
        model = next(filter(None, (c.main_kind(label) for c in comparisons)), None)
        rows.append([label, model, *means, ranks.get(label)])
    return Table(columns, rows, "Scores at all points, by mean rank.", "tab:overview")


def score_table(comparison: ComparedRuns) -> Table:
    """Returns a row for each method: scores, worst tenth, metrics, gain and costs.

    `model` is the model that counts, whose score, worst tenth, metrics, gain and parameters these
    are. The best score that counts is the best of the table.
    """
    numbers = {label: _numbers(comparison, label) for label in comparison.labels}
    if comparison.tuning:
        empty = set()
    else:
        empty = {"tuning trials"}
    if all(np.isnan(row["gained"]).all() for row in numbers.values()):
        empty.add("gained")
    if "virtual_seconds" not in comparison.columns:
        empty.add("virtual seconds")
    heads = [head for head in numbers[comparison.labels[0]] if head not in empty]
    columns = [Column("method"), Column("model")]
    for head in heads:
        number = comparison.number
        if head in numbers_of(comparison.columns):
            number = head
        column = _score_column(head, comparison, number)
        if head in MEANS_ONLY:
            column = Column(head, MEANS_ONLY[head])
        elif head != COUNTS:
            column = replace(column, better=None)
        columns.append(column)
    rows: list[list[Cell]] = []
    for label, row in numbers.items():
        cells = [Estimate.of(row[head]) for head in heads]
        means = [c.mean if h in MEANS_ONLY else c for h, c in zip(heads, cells, strict=True)]
        rows.append([label, comparison.main_kind(label), *means])
    caption = " ".join([f"{comparison.title}." * bool(comparison.title), *comparison.notes()[:2]])
    return Table(columns, rows, caption.strip(), _label(comparison))


def paper_table(comparisons: Sequence[ComparedRuns], words: Sequence[str]) -> Table:
    """Returns what a paper prints: a row for each method, and the columns that are asked for.

    Several points of a grid, such as data sets, stand beside each other. The best score that counts
    of each is the best of its column.

    Args:
        comparisons: The points of the grid.
        words: `score`, `worst`, or headings of `score_table`; `percent` has shares in percent.
    """
    shown = [PRINTED.get(word, word) for word in words if word != "percent"]
    percent = "percent" in words
    columns: list[Column] = [Column("method")]
    rows: dict[str, list[Cell]] = {label: [label] for label in all_labels(comparisons)}
    for comparison in comparisons:
        table = score_table(comparison)
        _require_heads(words, table.heads[1:])
        part = table.only(["method", *shown])
        cells = {str(row[0]): row[1:] for row in part.rows}
        for label, row in rows.items():
            row += cells.get(label, [None] * len(shown))
        for column in part.forms[1:]:
            head = column.head.replace(COUNTS, comparison.number.replace("_", " "))
            group = ""
            if len(comparisons) > 1 and len(shown) == 1:
                head = comparison.title
            elif len(comparisons) > 1:
                group = comparison.title
            if percent and column.is_share:
                column = replace(column, form=".1f", scale=100)
            columns.append(replace(column, head=head, group=group))
    caption = f"{comparisons[0].number.replace('_', ' ').capitalize()} on the clients' test samples"
    if percent and any(column.is_share for column in columns):
        caption += " in %"
    if any(len(c.of(label)) > 1 for c in comparisons for label in c.labels):
        caption += ", mean ± sample standard deviation over seeds"
    return Table(columns, list(rows.values()), f"{caption}.", "tab:comparison")


def check_columns(
    words: Sequence[str], scores: Sequence[str], metric: str | None, *, tuned: bool
) -> None:
    """Refuses columns of `paper_table` that no run can have, before there are runs.

    Args:
        words: As in `paper_table`.
        scores: The scores that some run can have, such as `global/accuracy`.
        metric: The score that counts, as in `ComparedRuns`.
        tuned: Whether it is known what the methods' tuning took.
    """
    names = [ScoreName("test", *parts_of(score)) for score in scores]
    models = dict.fromkeys(name.model for name in names)
    own = {"loss", parts_of(metric)[1] or "accuracy"}  # the latter is the score that counts
    others = dict.fromkeys(name.number for name in names if name.number not in own)
    costs = [head for head in MEANS_ONLY if tuned or head != "tuning trials"]
    _require_heads(words, ["model", *models, *others, *costs])


def _require_heads(words: Sequence[str], heads: Sequence[str]) -> None:
    """Refuses columns of a paper's table that are not among the headings."""
    known = [*PRINTED, *(head for head in heads if head not in PRINTED.values())]
    for word in words:
        if word != "percent" and word not in (*known, *PRINTED.values()):
            raise ConfigError(
                f"compare: --latex: {word}; it must be one of percent, {', '.join(known)}"
            )


def _label(comparison: ComparedRuns) -> str:
    """Returns the label of a comparison's tables in LaTeX."""
    slug = "".join(c if c.isalnum() else "-" for c in comparison.title.lower()).strip("-")
    return f"tab:{slug or 'scores'}"


def _score_column(head: str, comparison: ComparedRuns, number: str) -> Column:
    better = direction(number, comparison.metrics)
    return Column(head, ".4f", better, is_share=number == "accuracy")


def statistics_table(comparison: ComparedRuns) -> Table:
    """Returns a row for each method that is compared with the baseline."""
    heads = [f"difference to {comparison.baseline}", "95% interval", "p (Holm)"]
    heads += ["wins", "ties", "losses"]
    rows: list[list[Cell]] = []
    for label, (result, p) in comparison.statistics.items():
        row: list[Cell] = [label, comparison.main_kind(label)]
        if not result.pairs:
            rows.append([*row, *[None] * 6])
            continue
        row += [f"{result.difference:+.4f}", f"[{result.low:+.4f}, {result.high:+.4f}]"]
        rows.append([*row, f"{p:.2g}", result.wins, result.ties, result.losses])
    counts = [Column(head, ",.0f") for head in heads[3:]]
    caption = f"{comparison.title}. " * bool(comparison.title)
    caption += f"Each method against {comparison.baseline}, by pairs of clients."
    label = f"{_label(comparison)}-statistics"
    return Table(["method", "model", *heads[:3], *counts], rows, caption, label)


def records(comparisons: Sequence[ComparedRuns]) -> list[Record]:
    """Returns a row for each method at each point of a grid, with the numbers of all tables.

    A score has its standard deviation in a column of its own.
    """
    ranks = _ranks(comparisons)
    rows = []
    for comparison in comparisons:
        notes = " ".join(comparison.notes())
        for label in comparison.labels:
            row = {**comparison.point, "method": label, "model": comparison.main_kind(label)}
            row["runs"] = len(comparison.of(label))
            for head, values in _numbers(comparison, label).items():
                row[head], spread = Estimate.of(values)
                if head not in MEANS_ONLY:
                    row[f"{head} std"] = spread
            row |= {"mean rank": ranks.get(label), "baseline": comparison.baseline}
            result, p = comparison.statistics.get(label, (None, None))  # none of the baseline
            row |= {field.name: getattr(result, field.name, None) for field in fields(Paired)}
            row["p (Holm)"] = p
            rows.append({**row, "notes": notes})
    return rows


def run_records(comparisons: Sequence[ComparedRuns]) -> list[Record]:
    """Returns a row for each run: what it is, and its `metrics.csv` in the round that counts."""
    rows = []
    for comparison in comparisons:
        for run in comparison.runs:
            status = "unfinished"
            if run.finished:
                status = "finished"
            row = {**run.point, "method": run.label, "seed": run.seed, "folder": run.folder}
            if run.diverged:
                status = "diverged"
            row["status"] = status
            row["model"] = comparison.main_kind(run.label)
            row["gained"] = comparison.gained_of(run)
            row["seconds"] = comparison.seconds_of(run)
            rows.append({**row, **(comparison.chosen[id(run)] or {})})
    return rows


def run_numbers(comparison: ComparedRuns, run: Run, last: Row | None = None) -> dict[str, float]:
    """Returns a run's numbers in the round that counts, by the columns of the tables; NaN for none.

    Bytes and gradients are those up to the round `last`, if it is given. Gradients have those of
    each client's fine-tuning, once, if a fine-tuned model counts.
    """
    number = comparison.number
    columns = comparison.columns
    row = comparison.chosen[id(run)] or {}
    main = comparison.main_kind(run.label) or ""
    names = {COUNTS: ScoreName("test", main, number)}
    names |= {m: ScoreName("test", m, number) for m in models_of(columns, number)}
    names["worst 10%"] = ScoreName("test", main, f"{number}_worst10")
    others = [name for name in numbers_of(columns) if name not in (number, "loss")]
    names |= {name: ScoreName("test", main, name) for name in others}
    # An adapted model is as large as its start.
    sizes = [f"parameters/{kind}" for kind in (main, "personalized", "global")]
    size = next((name for name in sizes if name in row), "")
    costs = last or row
    gained = comparison.gained_of(run)
    if gained is None:
        gained = np.nan
    seconds = comparison.seconds_of(run)
    if seconds is None:
        seconds = np.nan
    return {head: row.get(str(name), np.nan) for head, name in names.items()} | {
        "gained": gained,
        "MB up": costs.get("comm/uplink_bytes", np.nan) / 1e6,
        "MB down": costs.get("comm/downlink_bytes", np.nan) / 1e6,
        "parameters": row.get(size, np.nan),
        "gradients": costs.get("train/samples", np.nan) + run.finetuning_samples(main),
        "seconds": seconds,
        "virtual seconds": costs.get("virtual_seconds", np.nan),
    }


def _numbers(comparison: ComparedRuns, label: str) -> dict[str, np.ndarray]:
    """Returns for each column of the table the numbers of a method's runs, which may be NaN."""
    rows = [run_numbers(comparison, run) for run in comparison.of(label)]
    numbers = {head: np.array([row[head] for row in rows], float) for head in rows[0]}
    return numbers | {"tuning trials": np.array([comparison.tuning_cost(label, "trials")])}


def _ranks(comparisons: Sequence[ComparedRuns]) -> dict[str, float]:
    """Returns the mean rank of each method that has all runs."""
    labels, scores = blocks(comparisons)
    if labels:
        return dict(zip(labels, mean_ranks(scores).tolist(), strict=True))
    return {}
