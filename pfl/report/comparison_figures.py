"""Figures of a comparison of methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pfl.report.comparison import ComparedRuns, blocks
from pfl.report.curves import BYTES, COLOURS, MARKERS, UNITS, Panel, PanelRow, draw, panel_rows
from pfl.scores.names import ScoreName, models_of
from pfl.scores.runs import column_names
from pfl.scores.statistics import critical_difference, mean_ranks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {"round": "rounds", BYTES: "MB sent and received", "train/samples": "gradients"}


def curves(comparison: ComparedRuns, suffix: str = "") -> Figure:
    """Draws the score against rounds, bytes, gradients and virtual time, with bands over seeds.

    The suffix "_worst10" draws the mean of the worst tenth of the clients.
    """
    number = comparison.number
    table: list[PanelRow] = []
    for run in comparison.runs:
        score = f"{comparison.score_of(run.label)}{suffix}"
        for row in panel_rows([run], comparison.budget, comparison.main_kind(run.label)):
            if score in row:
                table.append({"train/samples": 0, BYTES: 0, **row, "score": row[score]})
    label = f"test {number}" + ", worst tenth" * bool(suffix)
    runs = {name: name for name in comparison.labels}
    names = dict(NAMES)
    if table and all("virtual_seconds" in row for row in table):
        names["virtual_seconds"] = "virtual seconds"
    panels = [
        Panel(runs, {}, x=x, y=["score"], x_unit=UNITS.get(x, 1), xlabel=name, ylabel=label)
        for x, name in names.items()
    ]
    return draw(comparison.title, panels, table)


def communication(comparison: ComparedRuns, bandwidth: float) -> Figure | None:
    """Draws the time that communication has taken so far, by round, as FedSLR's Figure 5 does.

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
    return draw(comparison.title, [panel], table)


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


def gains(comparison: ComparedRuns) -> Figure | None:
    """Draws the distribution of each client's gain over the baseline as violins.

    A red line marks equality. None if no run has recorded scores of clients.
    """
    shown = []
    differences = []
    for label in comparison.labels:
        ours, theirs = comparison.pairs(label)
        if comparison.larger_is_better:
            gain = ours - theirs
        else:
            gain = theirs - ours
        gain = gain[~np.isnan(gain)]
        if label != comparison.baseline and len(gain):
            shown.append(label)
            differences.append(gain)
    if not shown:
        return None
    figure, axes = _figure(max(4.5, 1.2 * len(shown) + 1.5), 3.6)
    parts = axes.violinplot(differences, showmeans=True, widths=0.8)
    bodies: Any = parts["bodies"]
    for label, body in zip(shown, bodies, strict=True):
        body.set_facecolor(_colour(comparison, label))
        body.set_alpha(0.5)
    axes.axhline(0, color="#D00000", linewidth=1.2)
    axes.set_xticks(range(1, len(shown) + 1), shown, rotation=20 if len(shown) > 4 else 0)
    axes.set(ylabel=f"gain over {comparison.baseline} ({comparison.number})")
    axes.set_title(comparison.title)
    axes.grid(alpha=0.3, axis="y")
    return figure


def scatter(comparison: ComparedRuns) -> Figure | None:
    """Draws each client's personalized score against the global model's; None without both."""
    number = comparison.number
    points = {}
    for label in comparison.labels:
        runs = comparison.of(label)
        models = models_of(column_names(row for run in runs for row in run.rows), number)
        pairs = []
        if not {"global", "personalized"} <= set(models):
            continue
        names = [ScoreName("test", model, number) for model in ("global", "personalized")]
        for run in runs:
            row = comparison.chosen[id(run)]
            if not row:
                continue
            known = [s for name in names if (s := run.client_scores(row, name)) is not None]
            if len(known) == 2:
                pairs.append(np.stack(known))
        if pairs:
            points[label] = np.concatenate(pairs, axis=1)
    if not points:
        return None
    figure, axes = _figure(4.6, 4.4)
    for index, (label, (x, y)) in enumerate(points.items()):
        colour = _colour(comparison, label)
        marker = MARKERS[index % len(MARKERS)]
        axes.scatter(x, y, s=14, alpha=0.6, label=label, color=colour, marker=marker, linewidths=0)
    limits = [*axes.get_xlim(), *axes.get_ylim()]
    ends = [min(limits), max(limits)]
    axes.plot(ends, ends, color="#999999", linewidth=1, zorder=0)
    axes.set(xlabel=f"global model, {number}", ylabel=f"personalized model, {number}")
    axes.set_title(comparison.title)
    axes.legend(fontsize="small")
    return figure


def _colour(comparison: ComparedRuns, label: str) -> str:
    """Returns the colour that a method has in all figures of a comparison."""
    return COLOURS[comparison.labels.index(label) % len(COLOURS)]


def rank_diagram(comparisons: Sequence[ComparedRuns], alpha: float = 0.05) -> Figure | None:
    """Draws the mean ranks of the methods with Nemenyi's critical difference (Demšar 2006).

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
    figure, axes = _figure(6.5, 1.3 + 0.3 * half)
    axes.set_axis_off()
    low = 1
    high = len(labels)
    axes.set(xlim=(low - 0.45 * high, high + 0.45 * high), ylim=(-1.5 - half * 0.9, 2.2))
    axes.plot([low, high], [0, 0], color="black", linewidth=1)
    step = 1
    if high > 15:
        step = 5  # more numbers would overlap
    for tick in range(low, high + 1, step):
        axes.plot([tick, tick], [0, 0.2], color="black", linewidth=1)
        axes.text(tick, 0.3, str(tick), ha="center", va="bottom", fontsize=8)
    axes.plot([low, low + width], [1.5, 1.5], color="black", linewidth=2)
    text = f"critical difference {width:.2f} ({len(scores)} blocks)"
    axes.text(low + width + 0.1, 1.5, text, va="center", fontsize=8)
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
        axes.plot([ranks[method], ranks[method], end], [0, y, y], color="#555555", linewidth=0.9)
        name = f"{labels[method]} ({ranks[method]:.2f})"
        axes.text(end, y, name, ha=side, va="center", fontsize=9)
    for number, (first, last) in enumerate(_cliques(ranks[order], width)):
        y = -0.3 - 0.25 * number
        axes.plot([first - 0.03, last + 0.03], [y, y], color=COLOURS[1], linewidth=3)
    return figure


def _cliques(ranks: np.ndarray, width: float) -> list[tuple[float, float]]:
    """Returns the longest runs of sorted mean ranks whose ends are within the difference."""
    found: list[tuple[int, int]] = []
    for first in range(len(ranks)):
        last = int(np.flatnonzero(ranks - ranks[first] <= width)[-1])
        if last > first and not any(a <= first and last <= b for a, b in found):
            found.append((first, last))
    return [(float(ranks[a]), float(ranks[b])) for a, b in found]


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure  # slow to import; pyplot would need a display

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()
