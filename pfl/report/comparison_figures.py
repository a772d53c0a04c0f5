"""Figures of several runs: their curves, and how their clients and their ranks differ.

The functions return plain data (`pfl.report.plots`), which pictures and the page both show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pfl.report.comparison import ComparedRuns, blocks
from pfl.report.curves import BYTES, UNITS, Panel, PanelRow, figure_of, panel_rows
from pfl.report.plots import (
    COLOURS,
    MARKERS,
    MODEL_COLOURS,
    Curve,
    Figure,
    Guide,
    Mark,
    Plot,
    Spread,
    Words,
)
from pfl.scores.names import (
    STATISTICS,
    ScoreName,
    models_of,
    scores_among,
    training_scores,
)
from pfl.scores.runs import Run, column_names
from pfl.scores.statistics import critical_difference, mean_ranks

AXES = {"round": "rounds", BYTES: "MB sent and received", "train/samples": "gradients"}
PAGE_AXES = {"rounds": "round", "MB sent and received": BYTES, "sample gradients": "train/samples"}
PAGE_AXES |= {"virtual seconds": "virtual_seconds"}
PAGE_LINES = {"global": "--", "personalized": "-", "finetuned": ":", "unseen": "-."}
PAGE_MARKERS = ("o", "s", "D", "P", "^", "*", "x", "p")
COUNTED = ("round", "train/samples", "virtual_seconds", "participants", "parameters/", "comm/")
SPLIT_WORDS = {"test": "test", "val": "validation", "train": "training"}
GAPLESS = 15  # ranks whose numbers fit beside one another


# ---- curves --------------------------------------------------------------------------------------


def curves(comparison: ComparedRuns, suffix: str = "") -> Figure:
    """Shows the score against rounds, bytes, gradients and virtual time, with bands over seeds.

    The suffix "_worst10" shows the mean of the worst tenth of the clients. A line ends before the
    first seed diverged, as those of `pfl.report.curves`.
    """
    table: list[PanelRow] = []
    for run in comparison.runs:
        score = f"{comparison.score_of(run.label)}{suffix}"
        for row in panel_rows([run], comparison.budget, comparison.main_kind(run.label)):
            if score in row:
                table.append({"train/samples": 0, BYTES: 0, **row, "score": row[score]})
            elif row["diverged"]:
                table.append(row)
    label = f"test {comparison.number}"
    if suffix:
        label += ", worst tenth"
    axes = dict(AXES)
    scored = [row for row in table if not row["diverged"]]
    if scored and all("virtual_seconds" in row for row in scored):
        axes["virtual_seconds"] = "virtual seconds"
    runs = {name: name for name in comparison.labels}
    panels = [
        Panel(runs, {}, x=x, y=["score"], x_unit=UNITS.get(x, 1), xlabel=name, ylabel=label)
        for x, name in axes.items()
    ]
    return figure_of(comparison.title, panels, table)


def communication(comparison: ComparedRuns, bandwidth: float) -> Figure | None:
    """Shows the time that communication has taken so far, by round, as FedSLR's Figure 5 does.

    The clients of a round send and receive side by side, so that a round takes as long as the mean
    client's bytes at a `bandwidth` in bits a second. None if no run has recorded bytes.
    """
    table = [
        {"run": run.label, "seed": run.seed, "diverged": 0, "round": number, "seconds": seconds}
        for run in comparison.runs
        for number, seconds in communication_seconds(run.within(comparison.budget), bandwidth)
    ]
    if not table:
        return None
    label = f"seconds of communication so far,\nat {bandwidth / 1e6:g} Mbit/s"
    runs = {name: name for name in comparison.labels}
    panel = Panel(runs, {}, y=["seconds"], xlabel="rounds", ylabel=label)
    return figure_of(comparison.title, [panel], table)


def communication_seconds(rows: Sequence[PanelRow], bandwidth: float) -> list[tuple[float, float]]:
    """Returns pairs of a round and the seconds that communication has taken up to its end."""
    before = 0.0
    seconds = 0.0
    points = []
    for row in rows:
        if "comm/uplink_bytes" in row and "participants" in row:
            total = row["comm/uplink_bytes"] + row["comm/downlink_bytes"]
            seconds += 8 * (total - before) / max(row["participants"], 1) / bandwidth
            before = total
            points.append((row["round"], seconds))
    return points


# ---- clients -------------------------------------------------------------------------------------


def gains(comparison: ComparedRuns) -> Figure | None:
    """Shows the distribution of each client's gain over the baseline.

    A red line marks equality. None if no run has recorded scores of clients.
    """
    marks: list[Mark] = []
    for label in comparison.labels:
        ours, theirs = comparison.pairs(label)
        gain = ours - theirs
        if not comparison.larger_is_better:
            gain = theirs - ours
        gain = gain[~np.isnan(gain)]
        if label != comparison.baseline and len(gain):
            marks.append(Spread(label, gain, _colour(comparison, label)))
    if not marks:
        return None
    size = (max(4.5, 1.2 * len(marks) + 1.5), 3.6)
    marks.append(Guide("0", "#D00000", 1.2))
    ylabel = f"gain over {comparison.baseline} ({comparison.number})"
    return Figure([Plot(marks, title=comparison.title, ylabel=ylabel, grid="y")], size)


def scatter(comparison: ComparedRuns) -> Figure | None:
    """Shows each client's personalized score against the global model's; None without both."""
    number = comparison.number
    models = ("global", "personalized")
    marks: list[Mark] = []
    for label in comparison.labels:
        runs = comparison.of(label)
        known = models_of(column_names(row for run in runs for row in run.rows), number)
        pairs = []
        for run in runs:
            row = comparison.chosen[id(run)]
            if row and set(known) >= set(models):
                found = [run.client_scores(row, ScoreName("test", m, number)) for m in models]
                scores = [values for values in found if values is not None]
                if len(scores) == len(models):
                    pairs.append(np.stack(scores))
        if pairs:
            x, y = np.concatenate(pairs, axis=1)
            look: dict[str, Any] = {"colour": _colour(comparison, label), "opacity": 0.6}
            look |= {"marker": MARKERS[len(marks) % len(MARKERS)], "line": ""}
            look |= {"size": 14**0.5, "outline": 0}
            marks.append(Curve(label, x, y, **look))
    if not marks:
        return None
    marks.append(Guide("x", COLOURS[7], 1))
    plot = Plot(
        marks,
        title=comparison.title,
        xlabel=f"global model, {number}",
        ylabel=f"personalized model, {number}",
        legend=True,
    )
    return Figure([plot], size=(4.6, 4.4))


def _colour(comparison: ComparedRuns, label: str) -> str:
    """Returns the colour that a method has in all figures of a comparison."""
    return COLOURS[comparison.labels.index(label) % len(COLOURS)]


# ---- ranks ---------------------------------------------------------------------------------------


def rank_diagram(comparisons: Sequence[ComparedRuns], alpha: float = 0.05) -> Figure | None:
    """Shows the mean ranks of the methods with Nemenyi's critical difference (Demšar 2006).

    A block is a seed of a point of the grid; methods that a bar connects do not differ
    significantly. None with fewer than three methods or two blocks.
    """
    labels, scores = blocks(comparisons)
    if len(labels) < 3 or len(scores) < 2:
        return None
    ranks = mean_ranks(scores)
    width = critical_difference(len(labels), len(scores), alpha)
    order = np.argsort(ranks, kind="stable")
    half = -(-len(labels) // 2)
    low = 1
    high = len(labels)
    marks: list[Mark] = [_stroke([low, high], [0, 0], "black", 1)]
    step = 1
    if high > GAPLESS:
        step = 5
    for tick in range(low, high + 1, step):
        marks.append(_stroke([tick, tick], [0, 0.2], "black", 1))
        marks.append(Words(str(tick), tick, 0.3, height="bottom", size=8))
    marks.append(_stroke([low, low + width], [1.5, 1.5], "black", 2))
    text = f"critical difference {width:.2f} ({len(scores)} blocks)"
    marks.append(Words(text, low + width + 0.1, 1.5, side="left", size=8))
    for place, method in enumerate(order):
        if place < half:
            level = place
            end = low - 0.05 * high
            side = "right"
        else:
            level = len(labels) - 1 - place
            end = high + 0.05 * high
            side = "left"
        y = -1.5 - level * 0.9
        marks.append(_stroke([ranks[method], ranks[method], end], [0, y, y], "#555555", 0.9))
        marks.append(Words(f"{labels[method]} ({ranks[method]:.2f})", end, y, side))
    for number, (first, last) in enumerate(_cliques(ranks[order], width)):
        y = -0.3 - 0.25 * number
        marks.append(_stroke([first - 0.03, last + 0.03], [y, y], COLOURS[1], 3))
    xlim = (low - 0.45 * high, high + 0.45 * high)
    plot = Plot(marks, xlim=xlim, ylim=(-1.5 - half * 0.9, 2.2), frame=False)
    return Figure([plot], size=(6.5, 1.3 + 0.3 * half))


def _stroke(x: Sequence[float], y: Sequence[float], colour: str, width: float) -> Curve:
    """Returns a line of the diagram, which no legend names."""
    return Curve("", np.array(x), np.array(y), colour=colour, width=width)


def _cliques(ranks: np.ndarray, width: float) -> list[tuple[float, float]]:
    """Returns the longest runs of sorted mean ranks whose ends are within the difference."""
    found: list[tuple[int, int]] = []
    for first in range(len(ranks)):
        last = int(np.flatnonzero(ranks - ranks[first] <= width)[-1])
        if last > first and not any(a <= first and last <= b for a, b in found):
            found.append((first, last))
    return [(float(ranks[a]), float(ranks[b])) for a, b in found]


# ---- the figures of all runs on a page -----------------------------------------------------------


def columns_by_title(runs: Sequence[Run], suffix: str = "") -> dict[str, dict[str, str]]:
    """Returns what curves can show: by title, for each model, a column of `metrics.csv`."""
    columns = column_names(row for run in runs for row in run.rows)
    titles: dict[str, dict[str, str]] = {}
    trained = training_scores(columns)
    for split, words in SPLIT_WORDS.items():
        names = scores_among(columns, split)
        if split == "train":
            names = trained
        for name in names:
            if f"{name}{suffix}" in columns:
                models = titles.setdefault(f"{words} {name.number}", {})
                models[name.model] = f"{name}{suffix}"
    titles = dict(sorted(titles.items(), key=lambda item: not item[0].endswith("accuracy")))
    scores = {f"{name}{end}" for name in trained for end in ("", *STATISTICS)}
    if not suffix:
        for column in columns:
            if column not in scores and not column.startswith(("test/", "val/", *COUNTED)):
                titles[column] = {"": column}
    return titles


def axes_of(runs: Sequence[Run]) -> dict[str, str]:
    """Returns the axes that a page offers: by title, the column that all runs have."""
    have = [set(column_names(panel_rows([run]))) for run in runs if run.rows]
    return {title: name for title, name in PAGE_AXES.items() if all(name in h for h in have)}


def curve_choices(runs: Sequence[Run], suffix: str = "") -> Figure | None:
    """Returns curves of every score, of which a page's reader chooses one, and an axis; or None.

    A curve is the mean over seeds, with a band from the lowest to the highest seed.
    """
    labels = list(dict.fromkeys(run.label for run in runs))
    scores = columns_by_title(runs, suffix)
    axes = axes_of(runs)
    found: list[Mark] = []
    for score, columns in scores.items():
        for kind, column in columns.items():
            rows = panel_rows(runs, model=kind)
            by_axis = {axis: _curves_by_label(rows, labels, x, column) for axis, x in axes.items()}
            for number, label in enumerate(labels):
                if all(label in lines for lines in by_axis.values()):
                    lines = {axis: curves[label] for axis, curves in by_axis.items()}
                    found.append(_choice(lines, score, kind, number, len(labels)))
    if not found:
        return None
    title = "Mean"
    if suffix:
        title = "Worst tenth of the clients"
    plot = Plot(found, title=title, xlabel=next(iter(axes)), ylabel=next(iter(scores)))
    return Figure([plot], size=(6, 4.3))


def _curves_by_label(
    rows: Sequence[PanelRow], labels: Sequence[str], x: str, y: str
) -> dict[str, Curve]:
    panel = Panel({label: label for label in labels}, {}, x=x, y=[y], x_unit=UNITS.get(x, 1))
    return {curve.label: curve for curve in panel.lines(rows)}


def _choice(
    by_axis: Mapping[str, Curve], score: str, kind: str, number: int, methods: int
) -> Curve:
    """Returns one curve: of a method with this number, of a kind of model, on all axes."""
    first = next(iter(by_axis.values()))
    base = kind.partition("/")[0]
    colour = COLOURS[number % len(COLOURS)]
    if methods == 1:
        colour = MODEL_COLOURS.get(base, COLOURS[0])
    return Curve(
        ", ".join(filter(None, [first.label, kind])),
        first.x,
        first.y,
        first.low,
        first.high,
        colour=colour,
        line=PAGE_LINES.get(base, "-"),
        marker=PAGE_MARKERS[number % len(PAGE_MARKERS)],
        choice=score,
        x_by_axis={axis: curve.x for axis, curve in by_axis.items()},
    )


def boxes(scores: Mapping[str, np.ndarray], number: str) -> Figure | None:
    """Returns how each method's scores, by label, are distributed over clients and seeds."""
    if len(scores) < 2:
        return None
    marks = [
        Spread(label, values, COLOURS[index % len(COLOURS)])
        for index, (label, values) in enumerate(scores.items())
    ]
    plot = Plot(marks, title="Clients of all methods", ylabel=f"test {number}")
    return Figure([plot], size=(6, 4.3))
