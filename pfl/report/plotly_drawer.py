"""Draws figures with Plotly, for a page of HTML.

A figure of a page is one plot, and its title stands above it in the page.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from pfl.report.plots import Bars, Curve, Figure, Guide, HeatMap, Plot, Spread, Words

DASHES = {"-": "solid", "--": "dash", ":": "dot", "-.": "dashdot"}
SYMBOLS = {"o": "circle", "s": "square", "D": "diamond", "P": "cross", "^": "triangle-up"}
SYMBOLS |= {"v": "triangle-down", "*": "star", "x": "x", "X": "x", "p": "pentagon"}
PIXELS = 100  # of a page in an inch of a picture
MOST_POINTS = 1000  # of a distribution
LAYOUT = {
    "template": "plotly_white",
    "margin": {"l": 60, "r": 20, "t": 30, "b": 50},
    "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#1a1a1a"},
    "legend": {"orientation": "h", "y": -0.26, "yanchor": "top"},
}


def draw(figure: Figure) -> go.Figure:
    """Returns the figure of Plotly."""
    (plot,) = figure.plots
    drawn = go.Figure()
    for mark in plot.marks:
        if isinstance(mark, Curve):
            drawn.add_traces(_curve(mark, plot))
        elif isinstance(mark, HeatMap):
            _heat_map(drawn, mark)
        elif isinstance(mark, Bars):
            drawn.add_bar(x=mark.x, y=mark.heights, marker_color=mark.colour)
        elif isinstance(mark, Spread):
            _box(drawn, mark)
        elif isinstance(mark, Guide | Words):
            raise NotImplementedError(f"no figure of a page has {type(mark).__name__}")
    titles = {"xaxis_title": plot.xlabel or None, "yaxis_title": plot.ylabel or None}
    height = round(PIXELS * figure.size[1])
    drawn.update_layout(height=height, **LAYOUT, **titles)
    return drawn.update_xaxes(automargin=True).update_yaxes(automargin=True)


def _curve(curve: Curve, plot: Plot) -> list[go.Scatter]:
    """Returns the traces of a curve: the borders of its band, and the curve itself.

    The `meta` of a trace has the choice for which it is shown, and its x on each axis; the page's
    script reads them.
    """
    name = html.escape(curve.label)
    common: dict[str, Any] = {"x": curve.x}
    if curve.choice:
        first = next(mark.choice for mark in plot.marks if isinstance(mark, Curve))
        by_axis = {axis: x.tolist() for axis, x in curve.x_by_axis.items()}
        common["meta"] = {"score": curve.choice, "x": by_axis}
        common |= {"visible": curve.choice == first, "legendgroup": name}
    traces = []
    borders = curve.borders
    if borders is not None:
        low, high = borders
        rgb = ", ".join(str(int(curve.colour[i : i + 2], 16)) for i in (1, 3, 5))
        fill = {"fill": "tonexty", "fillcolor": f"rgba({rgb}, 0.15)"}
        border = {**common, "mode": "lines", "line_width": 0, "hoverinfo": "skip"}
        traces.append(go.Scatter(y=low, showlegend=False, **border))
        traces.append(go.Scatter(y=high, showlegend=False, **fill, **border))
    marker: dict[str, Any] = {"symbol": SYMBOLS[curve.marker]}
    if curve.line:
        look: dict[str, Any] = {"mode": "lines+markers"}
        look["line"] = {"color": curve.colour, "dash": DASHES[curve.line], "width": 2}
        marker |= {"maxdisplayed": 12, "size": 7}
    else:
        look = {"mode": "markers"}
        marker |= {"color": curve.colour, "size": 9, "opacity": curve.opacity}
    if curve.texts:
        look["text"] = [_text(text) for text in curve.texts]
        look["hovertemplate"] = "%{text}<extra></extra>"
    return [*traces, go.Scatter(y=curve.y, name=name, marker=marker, **look, **common)]


def _text(text: str) -> str:
    """Returns what is said about a point, with its first line in bold."""
    first, *rest = [html.escape(line) for line in text.split("\n")]
    return "<br>".join([f"<b>{first}</b>", *rest])


def _heat_map(drawn: go.Figure, heat: HeatMap) -> None:
    look: dict[str, Any] = {"colorscale": "Blues", "colorbar_title_text": heat.unit}
    look |= {"hovertemplate": f"{heat.text}<extra></extra>"}
    if heat.from_zero:
        look["zmin"] = 0
    drawn.add_heatmap(z=heat.values, x=_names(heat.columns), y=_names(heat.rows), **look)
    drawn.update_yaxes(type="category")
    if heat.square:
        drawn.update_xaxes(type="category")
        drawn.update_yaxes(autorange="reversed")


def _names(names: Sequence[Any] | None) -> Sequence[Any] | None:
    """Returns names for HTML; numbers stay numbers."""
    if names is None:
        return None
    return [html.escape(name) if isinstance(name, str) else name for name in names]


def _box(drawn: go.Figure, spread: Spread) -> None:
    shown = "all"
    if len(spread.values) > MOST_POINTS:
        shown = "outliers"
    marker = {"color": spread.colour, "size": 4, "opacity": 0.6}
    look = {"boxpoints": shown, "jitter": 0.5, "showlegend": False, "marker": marker}
    drawn.add_box(y=spread.values, name=html.escape(spread.label), **look)
