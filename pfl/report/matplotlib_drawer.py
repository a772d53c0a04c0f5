"""Draws figures with matplotlib, for files of PNG and PDF.

It leaves pyplot's global state alone, so it works without a display and inside other programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import figure as matplotlib_figure
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import LogFormatter, MaxNLocator

from pfl.report.plots import Bars, Curve, Figure, Guide, HeatMap, Plot, Spread, Words

MOST_NUMBERS = 11  # names of rows or columns that are numbers and stand beside a heat map
MOST_LEVEL = 4  # names of distributions that fit beside one another


PAPER: dict[Any, Any] = {
    "font.family": "serif",
    "font.serif": ["STIXGeneral"],  # as Times, and matplotlib brings it
    "mathtext.fontset": "stix",
    "font.size": 8,
    "axes.titlesize": 8,
    "figure.titlesize": 9,
    "legend.fontsize": 7,
    "pdf.fonttype": 42,  # conferences refuse fonts of type 3
}
"""How matplotlib draws for papers with two columns of text."""
COLUMN = 3.25  # inches, the width of one column of such a paper
TEXT = 6.75  # inches, the width of both
WIDEST = 6.0  # inches; a plot that is wider takes both columns


def paper_size(figure: Figure) -> tuple[float, float]:
    """Returns the width and height of a figure in a paper with two columns of text, in inches."""
    width, height = figure.size
    new = COLUMN
    if figure.columns > 1 or width > WIDEST:
        new = TEXT
    return new, height * new / width


def draw(figure: Figure) -> matplotlib_figure.Figure:
    """Returns the figure of matplotlib."""
    drawn = matplotlib_figure.Figure(figsize=figure.size, layout="constrained")
    rows = -(-len(figure.plots) // figure.columns)
    places = drawn.subplots(rows, figure.columns, squeeze=False).ravel()
    handles: dict[str, Any] = {}
    for plot, axes in zip(figure.plots, places, strict=False):
        handles |= draw_plot(axes, plot)
    for axes in places[len(figure.plots) :]:
        axes.axis("off")
    if figure.title:
        drawn.suptitle(figure.title)
    if figure.legend == "below":
        columns = min(figure.columns + 2, len(handles))
        look: dict[str, Any] = {"loc": "outside lower center", "ncols": columns}
        drawn.legend(handles.values(), handles, fontsize="small", **look)
    elif figure.legend == "right":
        look = {"loc": "outside right center", "title": figure.legend_title}
        drawn.legend(handles.values(), handles, fontsize="small", **look)
    return drawn


def draw_plot(axes: Axes, plot: Plot) -> dict[str, Any]:
    """Draws a plot, and returns what a legend of the whole figure shows, by its words."""
    handles = {}
    spreads = [mark for mark in plot.marks if isinstance(mark, Spread)]
    if spreads:
        _violins(axes, spreads)
    for mark in plot.marks:
        if isinstance(mark, Curve):
            (line,) = _curve(axes, mark)
            if mark.label:
                handles[mark.label] = line
        elif isinstance(mark, HeatMap):
            _heat_map(axes, mark)
        elif isinstance(mark, Bars):
            axes.bar(mark.x, mark.heights, color=mark.colour)
        elif isinstance(mark, Guide):
            _guide(axes, mark)
        elif isinstance(mark, Words):
            look: dict[str, Any] = {"ha": mark.side, "va": mark.height, "fontsize": mark.size}
            axes.text(mark.x, mark.y, mark.text, **look)
    axes.set(xlabel=plot.xlabel, ylabel=plot.ylabel)
    axes.set_title(plot.title, fontsize=plot.title_size)
    if "x" in plot.log:
        axes.set_xscale("log")
    if "y" in plot.log:
        axes.set_yscale("log")
    axes.set(xlim=plot.xlim, ylim=plot.ylim)
    _numbers(axes, plot)
    if plot.grid:
        axes.grid(alpha=0.3, axis=plot.grid)
    if plot.legend and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
    if not plot.frame:
        axes.set_axis_off()
    return handles


def _curve(axes: Axes, curve: Curve) -> Sequence[Any]:
    look: dict[str, Any] = {"linestyle": curve.line or "none", "linewidth": curve.width}
    marker = curve.marker or "none"
    if len(curve.x) == 1 and not curve.marker:  # a line alone would show nothing
        marker = "o"
    look |= {"marker": marker, "markersize": curve.size}
    look["markeredgewidth"] = curve.outline
    look |= {"color": curve.colour, "alpha": curve.opacity, "label": curve.label}
    drawn = axes.plot(curve.x, curve.y, **look)
    borders = curve.borders
    if borders is not None:
        look = {"color": curve.colour, "alpha": 0.15, "linewidth": 0, "label": curve.band}
        axes.fill_between(curve.x, *borders, **look)
    return drawn


def _heat_map(axes: Axes, heat: HeatMap) -> None:
    look: dict[str, Any] = {"cmap": "Blues", "interpolation": "nearest"}
    look["aspect"] = "auto"
    if heat.square:
        look["aspect"] = "equal"
    if heat.from_zero:
        look["vmin"] = 0
    image = axes.imshow(heat.values, **look)
    for axis, names in ((axes.xaxis, heat.columns), (axes.yaxis, heat.rows)):
        if names is None:
            _show_whole_numbers(axis)
        else:
            shown = _shown(names)
            axis.set_ticks(list(shown), list(shown.values()))
    axes.figure.colorbar(image, ax=axes, label=heat.unit)


def _show_whole_numbers(axis: Axis) -> None:
    """Has whole numbers beside an axis, also where a single one lies between its ends."""
    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _shown(names: Sequence[Any]) -> Mapping[int, str]:
    """Returns the names that stand beside a heat map: all words, and some of the numbers."""
    most = len(names)
    if all(str(name).isdigit() for name in names):
        most = min(most, MOST_NUMBERS)
    places = np.unique(np.linspace(0, len(names) - 1, most).round().astype(int))
    return {int(place): without_math(str(names[place])) for place in places}


def without_math(name: str) -> str:
    """Returns a name from the data as matplotlib shows it: two dollars would begin a formula."""
    return name.replace("$", r"\$")


def _violins(axes: Axes, spreads: Sequence[Spread]) -> None:
    values = [spread.values for spread in spreads]
    parts = axes.violinplot(values, showmeans=True, widths=0.8)
    bodies: Any = parts["bodies"]
    for spread, body in zip(spreads, bodies, strict=True):
        body.set_facecolor(spread.colour)
        body.set_alpha(0.5)
    rotation = 0
    if len(spreads) > MOST_LEVEL:
        rotation = 20
    names = [spread.label for spread in spreads]
    axes.set_xticks(range(1, len(spreads) + 1), names, rotation=rotation)


def _guide(axes: Axes, guide: Guide) -> None:
    look: dict[str, Any] = {"color": guide.colour, "linewidth": guide.width}
    if guide.y == "0":
        axes.axhline(0, **look)
    else:
        limits = [*axes.get_xlim(), *axes.get_ylim()]
        ends = [min(limits), max(limits)]
        axes.plot(ends, ends, zorder=0, **look)


def _numbers(axes: Axes, plot: Plot) -> None:
    """Gives the axes their words or numbers: short logarithmic axes have 20, 40 and not 2×10¹."""
    for name, axis, ticks in (("x", axes.xaxis, plot.xticks), ("y", axes.yaxis, plot.yticks)):
        if name in plot.whole:
            _show_whole_numbers(axis)
        if ticks is not None:
            axis.set_ticks(list(ticks), list(ticks.values()))
            axis.set_ticks([], minor=True)
    low, high = axes.get_ylim()
    if "y" in plot.log and low >= 1 and high < 100 * low:
        axes.yaxis.set_major_formatter(LogFormatter())
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
