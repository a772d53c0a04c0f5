"""Figures of a run: who has which labels, how training went, what each client gained.

Colours are the first three of Okabe & Ito's palette for colour-blind readers. Nothing here touches
pyplot's global state, so it works without a display and inside other programs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

COLOURS = {"global": "#0072B2", "personalized": "#D55E00", "local": "#777777"}


def run_figure(rows: list[dict[str, Any]], columns: dict[str, np.ndarray]) -> Figure:
    """Three panels: label counts, accuracy by round, accuracy by client.

    Args:
        rows: Of `metrics.csv`, one a round.
        columns: Of `clients.csv`, by name.
    """
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    labels = [name for name in columns if name.startswith("label_")]
    if labels:
        draw_partition(left, np.stack([columns[name] for name in labels], 1))
    else:
        left.bar(columns["client"], columns["train_samples"], color=COLOURS["local"])
        left.set(xlabel="client", ylabel="training samples", title="Who has how much")
    draw_curves(middle, rows)
    draw_clients(right, columns)
    return figure


def partition_figure(counts: np.ndarray) -> Figure:
    """`draw_partition` alone."""
    figure = Figure(figsize=(5, 3.8), layout="constrained")
    draw_partition(figure.subplots(), counts)
    return figure


def collaboration_figure(
    client: np.ndarray, partner: np.ndarray, weight: np.ndarray, round_index: int
) -> Figure:
    """Heat map of who learns from whom: a row for each client, a column for each partner."""
    ids = np.union1d(client, partner)
    matrix = np.zeros((len(ids), len(ids)))
    matrix[np.searchsorted(ids, client), np.searchsorted(ids, partner)] = weight
    figure = Figure(figsize=(5, 4.2), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(matrix, cmap="Blues", vmin=0, interpolation="nearest")
    ticks = np.unique(np.linspace(0, len(ids) - 1, min(len(ids), 11)).round().astype(int))
    axes.set_xticks(ticks, ids[ticks])
    axes.set_yticks(ticks, ids[ticks])
    axes.set(xlabel="partner", ylabel="client", title=f"Collaboration in round {round}")
    figure.colorbar(image, label="weight")
    return figure


def draw_partition(axes: Axes, counts: np.ndarray) -> None:
    """Training samples of each label (rows of the picture) at each client, counts [M, K]."""
    image = axes.imshow(counts.T, aspect="auto", cmap="Blues", interpolation="nearest")
    axes.set(xlabel="client", ylabel="label", title="Who has which labels")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.figure.colorbar(image, ax=axes, label="training samples")


def draw_curves(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Mean test score over the rounds, with the worst tenth of the clients dotted."""
    number = score_name(row for row in rows)
    for kind in ("global", "personalized"):
        for suffix, style in (("", "-"), ("_worst10", ":")):
            name = f"test/{kind}/{number}{suffix}"
            points = [(row["round"], row[name]) for row in rows if name in row]
            if points:
                label = kind if not suffix else f"{kind}, worst 10 %"
                axes.plot(*zip(*points, strict=True), style, color=COLOURS[kind], label=label)
    axes.set(xlabel="round", ylabel=f"test {number}", title="Mean over clients")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


def draw_clients(axes: Axes, columns: dict[str, np.ndarray]) -> None:
    """Each client's test score by kind of model, clients in the order of the first of them."""
    number = "accuracy" if any(k.endswith("_accuracy") for k in columns) else "loss"
    kinds = [kind for kind in COLOURS if f"test_{kind}_{number}" in columns]
    if not kinds:
        return
    order = np.argsort(columns[f"test_{kinds[0]}_{number}"])
    markers = {"global": "o", "personalized": "^", "local": "x"}
    for kind in kinds:
        values = columns[f"test_{kind}_{number}"][order]
        axes.plot(values, markers[kind], color=COLOURS[kind], label=kind, alpha=0.8)
    axes.set(
        xlabel=f"clients, by {number} of the {kinds[0]} model",
        ylabel=f"test {number}",
        title="Each client",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def score_name(rows: Any) -> str:
    """`accuracy` where it was measured, else `loss` (regression)."""
    return "accuracy" if any("test/" in k and "accuracy" in k for r in rows for k in r) else "loss"
