"""The interactive figures of a report, drawn with Plotly.

Colours are Okabe & Ito's. Lines differ in their dashes and markers, too.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from pfl.report.curves import (
    BYTES,
    COLOURS,
    MODEL_COLOURS,
    UNITS,
    Line,
    Panel,
    panel_rows,
    weight_matrix,
)
from pfl.report.run_summary import size
from pfl.scores.names import scores_among
from pfl.scores.runs import Run, column_names

AXES = {"rounds": "round", "MB sent and received": BYTES, "sample gradients": "train/samples"}
AXES |= {"virtual seconds": "virtual_seconds"}
DASHES = {"global": "dash", "personalized": "solid", "finetuned": "dot", "unseen": "dashdot"}
SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "star", "x", "pentagon")
SYMBOL_OF = {"global": "circle", "personalized": "triangle-up", "local": "x"}
MOST_SHOWN = 1000  # in a figure or a table
MOST_LABELS = 6  # in a hover text
COUNTED = ("round", "train/samples", "virtual_seconds", "participants", "parameters/", "comm/")
SPLIT_WORDS = {"test": "test", "val": "validation"}
LAYOUT = {
    "template": "plotly_white",
    "margin": {"l": 60, "r": 20, "t": 30, "b": 50},
    "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#1a1a1a"},
    "legend": {"orientation": "h", "y": -0.26, "yanchor": "top"},
}


# ---- curves --------------------------------------------------------------------------------------


def columns_by_title(runs: Sequence[Run], suffix: str = "") -> dict[str, dict[str, str]]:
    """Returns what curves can show: by title, for each model, a column of `metrics.csv`."""
    columns = column_names(row for run in runs for row in run.rows)
    titles: dict[str, dict[str, str]] = {}
    for split, words in SPLIT_WORDS.items():
        for name in scores_among(columns, split):
            if f"{name}{suffix}" in columns:
                models = titles.setdefault(f"{words} {name.number}", {})
                models[name.model] = f"{name}{suffix}"
    titles = dict(sorted(titles.items(), key=lambda item: not item[0].endswith("accuracy")))
    if suffix:
        others = []
    else:
        others = [n for n in columns if not n.startswith(("test/", "val/", *COUNTED))]
    return titles | {name: {"": name} for name in others}


def score_lines(runs: Sequence[Run], suffix: str = "") -> go.Figure | None:
    """Returns lines of the mean over seeds with bands from the lowest to the highest seed, or None.

    Each trace has in its `meta` the score that it shows and its x for each axis of `AXES`, with
    which the page's script changes score and axis.
    """
    figure = go.Figure()
    labels = list(dict.fromkeys(run.label for run in runs))
    scores = columns_by_title(runs, suffix)
    have = [set(column_names(panel_rows([run]))) for run in runs if run.rows]
    axes = {title: name for title, name in AXES.items() if all(name in names for names in have)}
    names = {label: label for label in labels}
    for score, columns in scores.items():
        for kind, column in columns.items():
            rows = panel_rows(runs, model=kind)
            units = [(x, UNITS.get(x, 1)) for x in axes.values()]
            panels = [Panel(names, {}, x=x, y=[column], x_unit=unit) for x, unit in units]
            lines = [{line.label: line for line in panel.lines(rows)} for panel in panels]
            for label in labels:
                if all(label in found for found in lines):
                    by_axis = dict(zip(axes, (found[label] for found in lines), strict=True))
                    shown = score == next(iter(scores))
                    figure.add_traces(_line(score, kind, by_axis, labels, shown))
    if not figure.data:
        return None
    titles = {"xaxis_title": next(iter(axes)), "yaxis_title": next(iter(scores))}
    title = "Mean"
    if suffix:
        title = "Worst tenth of the clients"
    return _laid_out(figure, title, 430, **titles)


def _line(
    score: str, kind: str, by_axis: dict[str, Line], labels: Sequence[str], visible: bool
) -> list[go.Scatter]:
    """Returns the traces of one line: the borders of its band, and the line itself."""
    line = next(iter(by_axis.values()))
    number = labels.index(line.label)
    base = kind.partition("/")[0]
    colour = COLOURS[number % len(COLOURS)]
    if len(labels) == 1:
        colour = MODEL_COLOURS.get(base, COLOURS[0])
    meta = {"score": score, "x": {axis: one.x.tolist() for axis, one in by_axis.items()}}
    name = html.escape(", ".join(filter(None, [line.label, kind])))
    common = {"x": line.x, "meta": meta, "visible": visible, "legendgroup": name}
    traces = []
    if (line.high > line.low).any():
        border = {**common, "mode": "lines", "line_width": 0, "hoverinfo": "skip"}
        rgb = ", ".join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))
        band = {"fill": "tonexty", "fillcolor": f"rgba({rgb}, 0.15)"}
        for y, fill in ((line.low, {}), (line.high, band)):
            traces.append(go.Scatter(y=y, showlegend=False, **fill, **border))
    style = {"color": colour, "dash": DASHES.get(base, "solid"), "width": 2}
    marker = {"symbol": SYMBOLS[number % len(SYMBOLS)], "maxdisplayed": 12, "size": 7}
    look = {"mode": "lines+markers", "line": style, "marker": marker}
    return [*traces, go.Scatter(y=line.y, name=name, **look, **common)]


# ---- clients -------------------------------------------------------------------------------------


def clients(table: dict[str, np.ndarray], number: str) -> go.Figure | None:
    """Returns each client's scores; the text of a client has its labels, sizes, scores and gain."""
    kinds = [name for name in table if name.partition("/")[0] in MODEL_COLOURS]
    drawn = [kind for kind in kinds if kind in SYMBOL_OF]
    for adapted in ("finetuned", "unseen"):  # after the most steps
        drawn += [kind for kind in kinds if kind.startswith(adapted)][-1:]
    if not drawn:
        return None
    order = np.argsort(table[drawn[0]], kind="stable")
    texts = [_text(table, client, kinds) for client in order]
    figure = go.Figure()
    places = np.arange(1, len(order) + 1)
    look = {"mode": "markers", "text": texts, "hovertemplate": "%{text}<extra></extra>"}
    for kind in drawn:
        marker: dict[str, Any] = {"symbol": SYMBOL_OF.get(kind, "star"), "size": 9, "opacity": 0.8}
        marker["color"] = MODEL_COLOURS[kind.partition("/")[0]]
        figure.add_scatter(x=places, y=table[kind][order], name=kind, marker=marker, **look)
    x = f"clients, by {number} of the {drawn[0]} model"
    return _laid_out(figure, "Each client", 400, xaxis_title=x, yaxis_title=f"test {number}")


def _text(table: dict[str, np.ndarray], client: int, kinds: Sequence[str]) -> str:
    """Returns what is known of a client, in lines."""
    name = ""
    if "name" in table:
        name = f", {html.escape(str(table['name'][client]))}"
    lines = [f"<b>client {table['client'][client]:.0f}{name}</b>"]
    sizes = {"training": "train_samples", "validation": "val_samples", "test": "test_samples"}
    known = [f"{table[key][client]:.0f} {word}" for word, key in sizes.items() if key in table]
    if known:
        lines.append(f"samples: {', '.join(known)}")
    labels = ((table[name][client], name[6:]) for name in table if name.startswith("label_"))
    if counts := sorted(labels, reverse=True):
        have = [f"{html.escape(label)}: {count:.0f}" for count, label in counts if count]
        more = ""
        if len(have) > MOST_LABELS:
            more = f", and {len(have) - MOST_LABELS} more"
        lines.append(f"labels: {', '.join(have[:MOST_LABELS])}{more}")
    scores = [kind for kind in kinds if not np.isnan(table[kind][client])]
    lines += [f"{kind}: {table[kind][client]:.4f}" for kind in scores]
    if "gain" in table and not np.isnan(table["gain"][client]):
        lines.append(f"gain over local: {table['gain'][client]:+.4f}")
    ways = {"sent": "uplink_bytes", "received": "downlink_bytes"}
    sent = [f"{word} {size(table[key][client])}" for word, key in ways.items() if key in table]
    if sent:
        lines.append(", ".join(sent))
    return "<br>".join(lines)


def boxes(scores: dict[str, np.ndarray], number: str) -> go.Figure | None:
    """Returns how each method's scores (by label) are distributed over clients and seeds."""
    if len(scores) < 2:
        return None
    figure = go.Figure()
    for index, (label, values) in enumerate(scores.items()):
        marker = {"color": COLOURS[index % len(COLOURS)], "size": 4, "opacity": 0.6}
        look = {"jitter": 0.5, "showlegend": False, "marker": marker}
        if len(values) <= MOST_SHOWN:
            shown = "all"
        else:
            shown = "outliers"
        figure.add_box(y=values, name=html.escape(label), boxpoints=shown, **look)
    return _laid_out(figure, "Clients of all methods", 430, yaxis_title=f"test {number}")


# ---- maps ----------------------------------------------------------------------------------------


def label_map(table: dict[str, np.ndarray]) -> go.Figure | None:
    """Returns the label counts as a heat map, or the clients' sizes if there are no labels."""
    if "train_samples" not in table:
        return None
    ids = table["client"].astype(int)
    labels = [n for n in table if n.startswith("label_")]
    thinned = len(ids) and len(ids) != ids.max() + 1
    if thinned:
        who = [str(i) for i in ids]
    else:
        who = ids.tolist()
    if "name" in table:
        who = [html.escape(str(name)) for name in table["name"]]
    if labels:
        x: Any = ids
        if len(set(who)) == len(who):
            x = who
        names = [html.escape(name.removeprefix("label_")) for name in labels]
        text = "client %{x}, label %{y}: %{z} training samples<extra></extra>"
        figure = _heat(np.stack([table[name] for name in labels]), x, names, "samples", text)
        y = {"yaxis_title": "label", "yaxis_type": "category"}
        return _laid_out(figure, "Who has which labels", 380, xaxis_title="client", **y)
    figure = go.Figure(go.Bar(x=ids, y=table["train_samples"], marker_color=COLOURS[0]))
    y = {"yaxis_title": "training samples"}
    return _laid_out(figure, "Who has how much", 380, xaxis_title="client", **y)


def collaboration(table: dict[str, np.ndarray]) -> go.Figure | None:
    """Returns who learned from whom in the last round, as a heat map; None if not recorded."""
    if not table:
        return None
    ids, matrix = weight_matrix(table["client"], table["partner"], table["weight"])
    names = [f"{client:.0f}" for client in ids]
    text = "client %{y} takes %{z:.4f} from client %{x}<extra></extra>"
    heat = _heat(matrix, names, names, "weight", text)
    axes = {"xaxis_title": "partner", "yaxis_title": "client"}
    figure = _laid_out(heat, "Who learned from whom in the last round", 420, **axes)
    figure.update_xaxes(type="category")
    return figure.update_yaxes(type="category", autorange="reversed")


# ---- common --------------------------------------------------------------------------------------


def _heat(z: np.ndarray, x: Any, y: Any, unit: str, text: str) -> go.Figure:
    """Returns a heat map from 0, with a text for each of its fields."""
    look = {"colorscale": "Blues", "zmin": 0, "colorbar_title_text": unit, "hovertemplate": text}
    return go.Figure(go.Heatmap(z=z, x=x, y=y, **look))


def _laid_out(figure: go.Figure, title: str, height: int, **axes: Any) -> go.Figure:
    figure.update_layout(title=title, height=height, **LAYOUT, **axes)
    return figure.update_xaxes(automargin=True).update_yaxes(automargin=True)
