"""Panels of a paper's figure, drawn from the rounds of many runs.

In a figure's file, a panel is a mapping with any of these keys:

    x: round                   # a metric, or the name of an axis of the grid
    y: train/global/gap        # a metric, or a sum of metrics, "a + b"; or a list of these: the
                               # first one that a row has
    at: last                   # if x is an axis, the round of a run that is shown: `last`, `best`
                               # (lowest y), or {metric: value}, the first with metric <= value
    runs: [FedAvg, FedPD]      # the runs, in this order; all by default. A mapping gives the
                               # labels; runs with the same label have the same colour
    where: {size: small}       # the values of the grid's axes that are shown: one or a list
    minus: FedAvg              # y is the difference to this run's, seed by seed
    log: y                     # logarithmic axes: x, y or xy
    x_unit: 40000              # x is divided by this value; y by `y_unit`
    xlim, ylim: [0, 1]
    title, xlabel, ylabel: text

A line is the mean over the seeds, with a band from the lowest to the highest seed. The line ends in
the round before the first seed diverged. A point of a grid is left out if a seed has no such round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any, cast

import numpy as np

from pfl.datamodules.errors import is_number, require_value
from pfl.errors import ConfigError
from pfl.report.plots import COLOURS, LINES, MARKERS, Curve, Figure, Plot
from pfl.scores.names import MODELS, SPLITS, STATISTICS, ScoreName
from pfl.scores.runs import BUDGETS, Run

PanelRow = Mapping[str, Any]
BYTES = "comm/bytes"  # sent and received, in the rows of `panel_rows`
_Series = dict[Any, dict[Any, tuple[float, float]]]  # x and y by round or value, by seed
UNITS = {BYTES: 1e6}  # by which figures divide a column
SUM = " + "


def panel_rows(
    runs: Sequence[Run], budget: tuple[str, float] | None = None, model: str | None = None
) -> list[dict[str, Any]]:
    """Returns the rows of `metrics.csv` of some runs as panels take them, and all bytes so far.

    Sample gradients have those of each client's fine-tuning, once, if a `model` is fine-tuned. A
    diverged run has one more row, without values: its seed counts even if no round was evaluated.
    """
    rows = []
    for run in runs:
        adapted = run.finetuning_samples(model)
        for row in run.within(budget):
            entry = {"run": run.label, "seed": run.seed, "diverged": 0, **row}
            if adapted and "train/samples" in row:
                entry["train/samples"] = row["train/samples"] + adapted
            both = [row[way] for way in BUDGETS["bytes"] if way in row]
            if len(both) == 2:
                entry[BYTES] = sum(both)
            rows.append(entry)
        if run.diverged:
            rows.append({"run": run.label, "seed": run.seed, "diverged": 1})
    return rows


@dataclass(frozen=True)
class Panel:
    """Content of one panel; the docstring of the module explains the keys."""

    runs: dict[str, str]
    axes: dict[str, list[Any]] = field(metadata={"inner": True})
    x: str = "round"
    y: list[str] = field(default_factory=list)
    at: str | dict[str, float] = "last"
    where: dict[str, list[Any]] = field(default_factory=dict)
    minus: str | None = None
    log: str = ""
    x_unit: float = 1.0
    y_unit: float = 1.0
    xlim: list[float] | None = None
    ylim: list[float] | None = None
    title: str = ""
    xlabel: str | None = None
    ylabel: str | None = None

    @property
    def metrics(self) -> list[str]:
        """The columns of `metrics.csv` that this panel needs."""
        sums = [name for y in self.y for name in y.split(SUM)]
        names = ["round"]
        if self.x not in self.axes:
            names.append(self.x)
        names += sums
        if isinstance(self.at, dict):
            names += list(self.at)
        return names

    def shows(self, run: str, axes: Mapping[str, Any]) -> bool:
        """Returns whether the panel shows a run at a point of the grid."""
        drawn = run in self.runs or run == self.minus
        return drawn and all(axes[axis] in v for axis, v in self.where.items())

    def finds(self, table: Sequence[PanelRow]) -> bool:
        """Returns whether some run has a metric that the panel shows."""
        have = self._metrics_in(table)
        return any(have.issuperset(y.split(SUM)) for y in self.y)

    def _metrics_in(self, table: Sequence[PanelRow]) -> set[str]:
        return {name for row in table if row["run"] in self.runs for name in row}

    def check(self, figure: str, table: Sequence[PanelRow], known: Iterable[str]) -> None:
        """Refuses a panel with a metric that no run has; `known` are all metrics."""
        have = self._metrics_in(table)
        of_y = {name for y in self.y for name in y.split(SUM)}
        missing = [name for name in (self.x, *self.metrics) if name not in have | of_y]
        if not self.finds(table):
            missing.append(" or ".join(self.y))
        if missing:
            metrics = ", ".join(known)
            raise ConfigError(f"{figure}: panels: no run has {missing[0]!r}; there are {metrics}")

    def check_scores(self, figure: str, scores: Sequence[str]) -> None:
        """Refuses a panel with a score that no run can have; `scores` are as `global/accuracy`.

        Other metrics are known once the runs have ended (`check`).
        """
        shown = [self.y, [self.x]]
        if isinstance(self.at, dict):
            shown.append(list(self.at))
        for names in shown:
            if not any(all(_can_be(n, scores) for n in name.split(SUM)) for name in names):
                have = ", ".join(f"test/{score}" for score in scores)
                raise ConfigError(
                    f"{figure}: panels: no run has {' or '.join(names)!r}; scores are {have}, and "
                    f"the same with val"
                )

    def lines(self, table: Sequence[PanelRow]) -> list[Curve]:
        """Returns the lines: one for each run and point of the grid's other axes."""
        others = {k: self.where.get(k, v) for k, v in self.axes.items() if k != self.x}
        points = [dict(zip(others, values, strict=True)) for values in product(*others.values())]
        lines = (self._line(table, run, point) for run in self.runs for point in points)
        return [line for line in lines if len(line.x)]

    def _line(self, table: Sequence[PanelRow], run: str, point: dict[str, Any]) -> Curve:
        series = self._series(table, run, point)
        if self.minus is not None:
            series = _differences(series, self._series(table, self.minus, point))
        x, y, low, high = _mean([*series.values()], self.x_unit, self.y_unit)
        return Curve(self.runs[run], x, y, low, high, point=point)

    def _series(self, table: Sequence[PanelRow], run: str, point: dict[str, Any]) -> _Series:
        """Returns the points of a run at a point of the grid, by seed."""
        rows = [r for r in table if r["run"] == run and all(r[k] == v for k, v in point.items())]
        seeds = dict.fromkeys(row["seed"] for row in rows)
        return {seed: self._points([r for r in rows if r["seed"] == seed]) for seed in seeds}

    def _points(self, rows: Sequence[PanelRow]) -> dict[Any, tuple[float, float]]:
        """Returns x and y of one seed, by the value of the axis or by the round."""
        if self.x not in self.axes:
            rows = [row for row in rows if self.x in row and self._y(row) is not None]
            return {row["round"]: (row[self.x], cast(float, self._y(row))) for row in rows}
        points = {}
        for x in self.where.get(self.x, self.axes[self.x]):
            y = self.point_value([row for row in rows if row[self.x] == x])
            if y is not None:
                points[x] = (x, y)
        return points

    def point_value(self, rows: Sequence[PanelRow]) -> float | None:
        """Returns y in the round of a run that `at` chooses; None if there is none."""
        values = [y for row in rows if (y := self._y(row)) is not None]
        if isinstance(self.at, dict):
            ((metric, threshold),) = self.at.items()
            reached = (self._y(row) for row in rows if row.get(metric, np.inf) <= threshold)
            return next(reached, None)
        if not values or any(row["diverged"] for row in rows):
            return None
        if self.at == "best":
            return min(values)
        return values[-1]

    def _y(self, row: PanelRow) -> float | None:
        sums = (y.split(SUM) for y in self.y)
        return next((sum(row[n] for n in names) for names in sums if row.keys() >= {*names}), None)


def _can_be(metric: str, scores: Sequence[str]) -> bool:
    """Returns whether a metric is one of the scores, or a statistic of one, or no score at all."""
    name = ScoreName.of(metric)
    numbers = [name.number, *(name.number.removesuffix(end) for end in STATISTICS)]
    if any(f"{name.model}/{number}" in scores for number in numbers):
        return True
    known = {score.rpartition("/")[2] for score in scores}
    is_score = name.kind in MODELS or not known.isdisjoint(numbers)
    return name.split not in SPLITS or not is_score


def _differences(series: _Series, base: _Series) -> _Series:
    """Returns the points of the seeds that both have, with the differences of y."""
    found: _Series = {}
    for seed in series.keys() & base.keys():
        others = base[seed]
        points = {key: value for key, value in series[seed].items() if key in others}
        found[seed] = {key: (x, y - others[key][1]) for key, (x, y) in points.items()}
    return found


def _mean(
    series: list[dict[Any, tuple[float, float]]], x_unit: float, y_unit: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns mean x and mean, lowest and highest y of the points that all seeds have."""
    common = [key for one in series[:1] for key in one if all(key in s for s in series)]
    if not common:
        return (np.empty(0),) * 4
    points = np.array([[s[key] for key in common] for s in series], float)
    x = points[..., 0] / x_unit
    y = points[..., 1] / y_unit
    return x.mean(0), y.mean(0), y.min(0), y.max(0)


def read_panel(figure: str, content: Any, runs: list[str], grid: Mapping[str, Iterable]) -> Panel:
    """Returns a panel of a figure's file, of which the keys are checked."""

    def need(key: str, holds: bool, expected: str) -> None:
        require_value(f"{figure}: panels.{key}", content.get(key), holds, expected)

    holds = isinstance(content, dict) and bool(content.get("y"))
    require_value(f"{figure}: panels", content, holds, "keys and values, y, a metric, among them")
    names = [f.name for f in fields(Panel) if not f.metadata.get("inner")]
    for key in content:
        require_value(f"{figure}: panels", key, key in names, f"one of the keys {', '.join(names)}")
    axes = {key: list(values) for key, values in grid.items()}
    where = content.get("where", {})
    need("where", isinstance(where, dict), f"values of the grid's axes, {axes}")
    need("x", isinstance(content.get("x", ""), str), "a metric, or an axis of the grid")
    given = {"runs": runs, **content, "y": _as_list(content["y"])}
    given["where"] = {key: _as_list(value) for key, value in where.items()}
    if not isinstance(given["runs"], dict):
        given["runs"] = {run: run for run in _as_list(given["runs"])}
    labels = given["runs"].values()
    need("runs", all(isinstance(label, str) for label in labels), "runs, or a label for each")
    need("y", all(isinstance(y, str) for y in given["y"]), "a metric, or a list of metrics")
    need("runs", given["runs"].keys() <= {*runs}, f"some of {', '.join(runs)}")
    minus = given.get("minus")
    need("minus", minus is None or minus in runs, f"one of {', '.join(runs)}")
    for key, values in given["where"].items():
        holds = key in axes and all(value in axes[key] for value in values)
        need("where", holds, f"values of the grid's axes, {axes}")
    need("log", given.get("log", "") in ("", "x", "y", "xy"), "x, y or xy")
    for key in ("x_unit", "y_unit"):
        unit = given.get(key, 1.0)
        expected = "a number but 0, such as 1.0e+6 (YAML reads 1.0e6 as text)"
        need(key, is_number(unit) and unit != 0, expected)
    for key in ("xlim", "ylim"):
        ends = given.get(key)
        holds = isinstance(ends, list) and len(ends) == 2 and all(map(is_number, ends))
        need(key, ends is None or holds, "two numbers, such as [0, 1.0e+6]")
    values = axes.get(content.get("x", ""), [])
    need("x", all(isinstance(x, int | float) for x in values), "an axis of numbers")
    at = given.get("at", "last")
    holds = at in ("last", "best")
    if isinstance(at, dict):
        holds = len(at) == 1 and all(map(is_number, at.values()))
    need("at", holds, "last, best or {metric: number}")
    return Panel(axes=axes, **given)


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    return [value]


# ---- figures -------------------------------------------------------------------------------------


def figure_of(title: str, panels: Sequence[Panel], table: Sequence[PanelRow]) -> Figure:
    """Returns a figure of all panels, up to three in a row, with one legend below them.

    Panels that have no line in common have a legend each.
    """
    columns = min(len(panels), 3)
    if len(panels) == 4:
        columns = 2
    rows = -(-len(panels) // columns)
    size = (max(6.5, 4.3 * columns), 3.3 * rows + 0.8)
    named = [_named(panel.lines(table)) for panel in panels]
    shown = [{line.label for line in lines} for lines in named]
    apart = len(panels) > 1 and sum(map(len, shown)) == len(set().union(*shown))
    plots = []
    for panel, lines in zip(panels, named, strict=True):
        together = lines
        if not apart:
            together = [line for others in named for line in others]
        plots.append(_plot(panel, lines, _styles(together), legend=apart))
    legend = "below"
    if apart:
        legend = ""
    return Figure(plots, size, columns, title, legend)


@dataclass(frozen=True, eq=False)
class _Line:
    """A line of a panel, its words in the legend, and what these are made of."""

    curve: Curve
    label: str
    run: str
    point: str


def _named(curves: Sequence[Curve]) -> list[_Line]:
    """Returns the lines of a panel, with the point of the grid in their labels, if it varies.

    A panel of one run alone has the points as labels.
    """
    runs = {curve.label for curve in curves}
    named = []
    for curve in curves:
        words = []
        for axis, value in curve.point.items():
            if len({str(other.point[axis]) for other in curves}) > 1:
                words.append(_in_words(axis, value))
        point = ", ".join(words)
        parts = [curve.label, point]
        if len(runs) == 1 and point:
            parts = [point]
        named.append(_Line(curve, ", ".join(filter(None, parts)), curve.label, point))
    return named


def _in_words(axis: str, value: Any) -> str:
    """Returns a value of a grid's axis: a text says itself what it is, a number needs the name."""
    if isinstance(value, str):
        return value
    name = axis.rpartition(".")[2].replace("_", " ")
    return f"{name} {value}"


def _styles(lines: Sequence[_Line]) -> dict[str, tuple[str, str, str]]:
    """Returns the colour, the line and the marker of each label; no two have the same ones.

    The colour shows the run and the line the point of the grid, where so many can be told apart.
    Elsewhere each label has a colour, until there are no more, and some lines are dashed, so that
    lines on top of one another still show.
    """
    runs = list(dict.fromkeys(line.run for line in lines))
    points = list(dict.fromkeys(line.point for line in lines))
    by_run = 1 < len(runs) <= len(COLOURS) and 1 < len(points) <= len(LINES)
    styles: dict[str, tuple[str, str, str]] = {}
    for line in lines:
        if line.label in styles:
            continue
        turn, number = divmod(len(styles), len(COLOURS))
        kind = max(0, number - 3) + turn
        if by_run:
            number = runs.index(line.run)
            kind = points.index(line.point)
        marker = MARKERS[(number + turn) % len(MARKERS)]
        styles[line.label] = (COLOURS[number], LINES[kind % len(LINES)], marker)
    return styles


def _plot(
    panel: Panel,
    lines: Sequence[_Line],
    styles: Mapping[str, tuple[str, str, str]],
    *,
    legend: bool,
) -> Plot:
    """Returns what one panel shows."""
    curves = []
    for line in lines:
        colour, kind, marker = styles[line.label]
        if panel.x not in panel.axes and len(line.curve.x) > 1:  # no single points
            marker = ""
        look: dict[str, Any] = {"colour": colour, "line": kind, "marker": marker}
        curves.append(replace(line.curve, label=line.label, width=1.4, size=4, **look))
    xlabel = panel.xlabel
    if xlabel is None:
        xlabel = panel.x
    ylabel = panel.ylabel
    if ylabel is None:
        ylabel = " or\n".join(panel.y)
    xticks = None
    if "x" in panel.log and panel.x in panel.axes:
        values = panel.where.get(panel.x, panel.axes[panel.x])
        xticks = {x / panel.x_unit: f"{x:g}" for x in values}
    return Plot(
        curves,
        title=panel.title,
        xlabel=xlabel,
        ylabel=ylabel,
        log=panel.log,
        xlim=panel.xlim,
        ylim=panel.ylim,
        xticks=xticks,
        grid="both",
        legend=legend,
    )
