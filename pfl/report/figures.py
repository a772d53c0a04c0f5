"""Figures of a run: the clients' labels, scores by round, scores by client.

The colours are the first of Okabe & Ito's palette for colour-blind readers. The functions leave
pyplot's global state alone, so they work without a display and inside other programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pfl.report.curves import COLOURS, MODEL_COLOURS, Line, plot, weight_matrix
from pfl.scores.names import candidates, scores_among
from pfl.scores.runs import column_names
from pfl.scores.table import ScoreTable

CLASSES = (*COLOURS[:6], "#777777", "#8C6D00")
BY_CLASS = ("o", "^", "s", "D", "v", "P")


def run_figure(
    rows: list[dict[str, Any]], columns: dict[str, np.ndarray], scores: ScoreTable | None = None
) -> Figure:
    """Returns a figure of label counts, score by round, score by client, and fine-tuning if any.

    Args:
        rows: The rows of `metrics.csv`.
        columns: The columns of `clients.csv`, by name.
        scores: The clients' scores by round, for a band in the second panel.
    """
    curves = adaptation_curves(rows)
    if any(len(points) > 1 for points in curves.values()):
        count = 4
    else:
        count = 3
    figure = Figure(figsize=(1 + 4 * count, 3.8), layout="constrained")
    left, middle, right, *more = figure.subplots(1, count)
    if more:
        draw_adaptation(more[0], curves, score_name(rows))
    labels = [name for name in columns if name.startswith("label_")]
    if labels:
        names = [name.removeprefix("label_") for name in labels]
        draw_partition(left, np.stack([columns[name] for name in labels], 1), names)
    else:
        left.bar(columns["client"], columns["train_samples"], color=MODEL_COLOURS["local"])
        left.set(xlabel="client", ylabel="training samples", title="Who has how much")
    draw_curves(middle, rows, scores)
    draw_clients(right, columns, score_name(rows))
    return figure


def partition_figure(counts: np.ndarray, names: Sequence[str] | None = None) -> Figure:
    """Returns a figure of the label counts [M, K]; see `draw_partition`."""
    figure = Figure(figsize=(5, 3.8), layout="constrained")
    draw_partition(figure.subplots(), counts, names)
    return figure


def collaboration_figure(
    client: np.ndarray, partner: np.ndarray, weight: np.ndarray, round_index: int
) -> Figure:
    """Returns a heat map of who learns from whom: a row per client, a column per partner."""
    ids, matrix = weight_matrix(client, partner, weight)
    figure = Figure(figsize=(5, 4.2), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(matrix, cmap="Blues", vmin=0, interpolation="nearest")
    ticks = np.unique(np.linspace(0, len(ids) - 1, min(len(ids), 11)).round().astype(int))
    labels = ids[ticks].astype(int)  # a table's numbers are floats
    axes.set_xticks(ticks, labels)
    axes.set_yticks(ticks, labels)
    axes.set(xlabel="partner", ylabel="client", title=f"Collaboration in round {round_index}")
    figure.colorbar(image, label="weight")
    return figure


def matrix_figure(
    values: np.ndarray, models: Sequence[str], sites: Sequence[str], score: str
) -> Figure:
    """Returns a heat map of a score: a row for each model, a column for each client's samples."""
    size = (2.5 + 0.35 * min(len(sites), 40), 1.5 + 0.25 * min(len(models), 60))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(values, cmap="Blues", aspect="auto", interpolation="nearest")
    for axis, names in ((axes.xaxis, sites), (axes.yaxis, models)):
        places = np.unique(np.linspace(0, len(names) - 1, min(len(names), 40)).round().astype(int))
        axis.set_ticks(places, [names[place] for place in places.tolist()], fontsize="small")
    axes.tick_params(axis="x", rotation=90)
    axes.set(xlabel="samples of", ylabel="model", title=score)
    figure.colorbar(image)
    return figure


def embedding_figure(
    panels: dict[tuple[str, str], tuple[np.ndarray, np.ndarray]], targets: np.ndarray, client: int
) -> Figure:
    """Returns a figure of a client's test samples in the plane, a panel for each pair of models.

    Args:
        panels: For each (extractor, classifier) the places [n, 2] and the predicted classes [n].
        targets: The classes [n].
        client: The id of the client, for the title.
    """
    if len(panels) == 4:
        side = 2
    else:
        side = 1
    figure = Figure(figsize=(4.2 * side + 1, 3.6 * side + 0.3), layout="constrained")
    shown = figure.subplots(side, side, squeeze=False).ravel()
    for axes, (models, (places, predicted)) in zip(shown, panels.items(), strict=True):
        for label in np.unique(targets).astype(int):
            look = {"color": CLASSES[label % len(CLASSES)], "label": str(label)}
            marker = BY_CLASS[label // len(CLASSES) % len(BY_CLASS)]
            axes.scatter(*places[targets == label].T, s=26, marker=marker, **look)
        wrong = predicted != targets
        axes.scatter(*places[wrong].T, s=40, color="black", marker="x", linewidths=1.2)
        extractor, classifier = models
        title = f"{extractor} extractor, {classifier} classifier\naccuracy {1 - wrong.mean():.4f}"
        axes.set_title(title, fontsize="medium")
        axes.set(xticks=[], yticks=[])
    figure.suptitle(f"Test samples of client {client} (t-SNE; black crosses: wrong)")
    handles, names = shown[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right center", title="class", fontsize="small")
    return figure


def draw_partition(axes: Axes, counts: np.ndarray, names: Sequence[str] | None = None) -> None:
    """Draws the label counts [M, K] as a heat map: a row per label, a column per client."""
    image = axes.imshow(counts.T, aspect="auto", cmap="Blues", interpolation="nearest")
    axes.set(xlabel="client", ylabel="label", title="Who has which labels")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if names and not all(name.isdigit() for name in names):
        axes.set_yticks(range(len(names)), names)
    axes.figure.colorbar(image, ax=axes, label="training samples")


def draw_curves(axes: Axes, rows: list[dict[str, Any]], scores: ScoreTable | None = None) -> None:
    """Draws the mean test score by round; the worst tenth of the clients is dotted.

    If there are scores by round, a band holds the personalized models' (or else the global model's)
    without the lowest and the highest tenth of the clients.
    """
    number = score_name(rows)
    names = scores_among(column_names(rows), "test")
    shown = [n for n in names if n.number == number and n.model in ("global", "personalized")]
    for name in shown:
        for suffix, form, words in (("", "-", ""), ("_worst10", ":", ", worst 10 %")):
            points = [(row["round"], row[key]) for row in rows if (key := f"{name}{suffix}") in row]
            if not points:
                continue
            x, y = np.array(points, float).T
            band = {"q10": y, "q90": y}
            if scores is not None and name == shown[-1] and name in scores.names and not suffix:
                found = scores.over_rounds(name)
                if found and np.array_equal(scores.rounds, x):
                    band = found
            line = Line(name.model, {}, x, y, band["q10"], band["q90"])
            look = {"color": MODEL_COLOURS[name.model], "label": f"{name.model}{words}"}
            plot(axes, line, form, f"{name.model}, 80 % of clients", **look)
    axes.set(xlabel="round", ylabel=f"test {number}", title="Mean over clients")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


def draw_clients(axes: Axes, columns: dict[str, np.ndarray], number: str) -> None:
    """Draws a test score of each client; clients are sorted by the score of their first model."""
    markers = {"global": "o", "personalized": "^", "local": "x"}
    of_tests = scores_among(columns, "test")
    names = [name for name in of_tests if name.model in markers and name.number == number]
    if not names:
        return
    order = np.argsort(columns[str(names[0])])
    for name in names:
        values = columns[str(name)][order]
        colour = MODEL_COLOURS[name.model]
        axes.plot(values, markers[name.model], color=colour, label=name.model, alpha=0.8)
    xlabel = f"clients, by {number} of the {names[0].model} model"
    axes.set(xlabel=xlabel, ylabel=f"test {number}", title="Each client")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def adaptation_curves(rows: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Returns (steps of fine-tuning, mean test score) in the last evaluation, by kind of model."""
    number = score_name(rows)
    curves: dict[str, list[tuple[int, float]]] = {}
    tested = [row for row in rows if scores_among(row, "test")]
    if tested:
        last = tested[-1]
    else:
        last = {}
    for name in scores_among(last, "test"):
        if "/" in name.model and name.number == number:
            curves.setdefault(name.kind, []).append((name.steps, last[str(name)]))
    return curves


def draw_adaptation(axes: Axes, curves: dict[str, list[tuple[int, float]]], number: str) -> None:
    """Draws the mean test score by steps of fine-tuning (`adaptation_curves`)."""
    labels = {"finetuned": ("clients that train", "o-"), "unseen": ("unseen clients", "s--")}
    for name, points in curves.items():
        label, style = labels[name]
        axes.plot(*zip(*points, strict=True), style, color=MODEL_COLOURS[name], label=label)
    axes.set(xlabel="local steps of fine-tuning", ylabel=f"test {number}", title="Fine-tuning")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def score_name(rows: list[dict[str, Any]]) -> str:
    """Returns "accuracy" if the rows have one, otherwise "loss" (regression)."""
    first = candidates(column_names(rows), "test")
    if first:
        return first[0].number
    return "loss"
