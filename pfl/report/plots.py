"""What figures show, as plain data: marks in plots, and plots in a figure.

A figure is built once. `pfl.report.matplotlib_drawer` draws it as PNG and PDF, and
`pfl.report.plotly_drawer` as a part of a page of HTML.

The colours are Okabe & Ito's for colour-blind readers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
GREY = "#777777"
MODEL_COLOURS = {"global": COLOURS[0], "personalized": COLOURS[1], "local": GREY}
MODEL_COLOURS |= {"finetuned": COLOURS[2], "unseen": COLOURS[3]}
LINES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


@dataclass(frozen=True, eq=False)
class Curve:
    """Points with a line through them, a marker at each of them, or both.

    Lines and markers have the names of matplotlib.

    Attributes:
        label: The words in the legend; "": the curve is not in it.
        x: Where the points are.
        y: Where the points are.
        low: The lower border of a band around the line; None: there is no band.
        high: The upper border of the band.
        band: The words of the band in the legend; "": it is not in it.
        point: The point of a grid that is shown, by the names of the grid's axes.
        line: How the points are connected; "": not at all.
        marker: What stands at each point; "": nothing.
        width: The width of the line.
        size: The size of the markers.
        outline: The width of their outlines, or of the lines of a cross.
        opacity: 1, or less where what lies below shines through.
        texts: What a page says about each point, in lines.
        choice: The choice of a page's reader for which the curve is shown; "": it always is.
        x_by_axis: The values of x on each axis that a page's reader can choose.
    """

    label: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    band: str = ""
    point: Mapping[str, Any] = field(default_factory=dict)
    colour: str = COLOURS[0]
    line: str = "-"
    marker: str = ""
    width: float = 1.5
    size: float = 6
    outline: float = 1
    opacity: float = 1
    texts: Sequence[str] = ()
    choice: str = ""
    x_by_axis: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def borders(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The borders of the band; None if it is nowhere wider than the line."""
        if self.low is None or self.high is None or not (self.high > self.low).any():
            return None
        return self.low, self.high


@dataclass(frozen=True, eq=False)
class HeatMap:
    """A table of numbers as colours, from white to blue.

    Attributes:
        values: The numbers, [rows, columns].
        unit: What the numbers are.
        rows: The names of the rows; None: they have numbers.
        columns: The names of the columns; None: they have numbers.
        from_zero: Whether white is 0, and not the smallest number.
        square: Whether rows and columns are the same ones, so that the fields are squares.
        text: What a page says about the column %{x}, the row %{y} and the number %{z} there.
    """

    values: np.ndarray
    unit: str
    rows: Sequence[Any] | None = None
    columns: Sequence[Any] | None = None
    from_zero: bool = True
    square: bool = False
    text: str = ""


@dataclass(frozen=True, eq=False)
class Bars:
    """Bars of some heights."""

    x: np.ndarray
    heights: np.ndarray
    colour: str


@dataclass(frozen=True, eq=False)
class Spread:
    """How some values are distributed: a violin, or a box with points on a page."""

    label: str
    values: np.ndarray
    colour: str


@dataclass(frozen=True)
class Guide:
    """A line where both sides are equal: y is 0, or y is x."""

    y: str
    colour: str
    width: float


@dataclass(frozen=True)
class Words:
    """Words at a place; `side` is the side of the words at which the place is."""

    text: str
    x: float
    y: float
    side: str = "center"
    height: str = "center"
    size: float = 9


Mark = Curve | HeatMap | Bars | Spread | Guide | Words


@dataclass(frozen=True, eq=False)
class Plot:
    """A pair of axes, and the marks in it.

    Attributes:
        marks: What is drawn, in this order.
        title: The words above.
        title_size: The size of these words, by its name in matplotlib.
        xlabel: The words below the x axis.
        ylabel: The words beside the y axis.
        log: The axes that are logarithmic: "", "x", "y" or "xy".
        xlim: The ends of the x axis; None: those of the marks.
        ylim: The ends of the y axis; None: those of the marks.
        xticks: The words of the x axis, by place; None: numbers.
        yticks: The words of the y axis, by place; None: numbers.
        whole: The axes whose numbers are whole: "", "x", "y" or "xy".
        grid: The axes whose numbers have lines through the plot: "", "x", "y" or "both".
        legend: Whether the plot has a legend of its own.
        frame: Whether there is a frame with numbers.
    """

    marks: Sequence[Mark]
    title: str = ""
    title_size: str = "large"
    xlabel: str = ""
    ylabel: str = ""
    log: str = ""
    xlim: Sequence[float] | None = None
    ylim: Sequence[float] | None = None
    xticks: Mapping[float, str] | None = None
    yticks: Mapping[float, str] | None = None
    whole: str = ""
    grid: Literal["", "x", "y", "both"] = ""
    legend: bool = False
    frame: bool = True


@dataclass(frozen=True, eq=False)
class Figure:
    """Plots beside and below one another.

    Attributes:
        plots: The plots, row by row.
        size: Width and height, in inches of a picture. A page is as wide as it is.
        columns: How many plots are in a row.
        title: The words above all plots.
        legend: Where the legend of all plots is: "", "below" or "right".
        legend_title: The words above that legend.
    """

    plots: Sequence[Plot]
    size: tuple[float, float]
    columns: int = 1
    title: str = ""
    legend: str = ""
    legend_title: str = ""
