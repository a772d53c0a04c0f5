"""Tables of a paper in Markdown, computed from the rounds of many runs.

In a paper's file, a table is a mapping with the keys `title`, `y`, `y_unit`, `at`, `runs` and
`where` of a panel (see `pfl.report.curves`), and

    rows: [run]                # the axes whose values are the rows: `run` or axes of the grid
    columns: [data]            # the axes whose values are the columns; one column by default
    printed:                   # optional: by the words of a row, what the paper printed, a number
      FedAvg: [90.25, null]    # for each column, shown in brackets beside ours

A cell is the mean ± sample standard deviation of the last round's y over the seeds, or the value
itself if there is one seed. A cell is "–" if a run has no such metric or diverged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from pfl.datamodules.errors import require_value
from pfl.errors import ConfigError
from pfl.report import table as tables
from pfl.report.curves import Panel, PanelRow, read_panel


@dataclass(frozen=True)
class Crosstab:
    """Content of one table; the docstring of the module explains the keys."""

    panel: Panel
    rows: list[str]
    columns: list[str]
    printed: dict[str, list[float | None]] = field(default_factory=dict)

    @property
    def places(self) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
        """The values of the axes in each row, and in each column."""
        values: dict[str, list[Any]] = {"run": list(self.panel.runs), **self.panel.axes}
        values |= self.panel.where
        down, across = (product(*(values[a] for a in axes)) for axes in (self.rows, self.columns))
        return list(down), list(across)

    def markdown(self, table: Sequence[PanelRow]) -> str:
        """Returns the title and the table, from rows with one run and round each."""
        where = self.panel.where.items()
        table = [row for row in table if all(row[axis] in chosen for axis, chosen in where)]
        downward, across = self.places
        head = [" / ".join(self.rows), *(self.words(self.columns, point) for point in across)]
        if not self.columns:
            head[1] = self.panel.y[0]
        lines: list[list[tables.Cell]] = []
        for down in downward:
            place = dict(zip(self.rows, down, strict=True))
            words = self.words(self.rows, down)
            points = [dict(zip(self.columns, point, strict=True)) for point in across]
            cells = [self._cell(table, place | point) for point in points]
            printed = self.printed.get(words, [None] * len(cells))
            pairs = zip(cells, printed, strict=True)
            lines.append([words, *(c if p is None else f"{c} ({p:g})" for c, p in pairs)])
        return f"**{self.panel.title}**\n\n{tables.markdown(tables.Table(head, lines))}"

    def words(self, axes: list[str], values: tuple[Any, ...]) -> str:
        """Returns values of some axes in words, with the labels of runs."""
        point = zip(axes, values, strict=True)
        return ", ".join(self.panel.runs[v] if axis == "run" else str(v) for axis, v in point)

    def _cell(self, table: Sequence[PanelRow], point: dict[str, Any]) -> str:
        rows = [row for row in table if all(row[axis] == v for axis, v in point.items())]
        seeds = dict.fromkeys(row["seed"] for row in rows)
        values = [self.panel.point_value([r for r in rows if r["seed"] == seed]) for seed in seeds]
        known = np.array([value for value in values if value is not None]) / self.panel.y_unit
        if not len(known) or len(known) < len(values):
            return "–"
        if len(known) == 1:
            return f"{known[0]:.4g}"
        mean = known.mean()
        spread = known.std(ddof=1)
        if mean:
            scale = np.floor(np.log10(abs(mean)))
        else:
            scale = 0
        decimals = int(np.clip(3 - scale, 0, 9))  # four digits of the mean, as many of the spread
        return f"{mean:.{decimals}f} ± {spread:.{decimals}f}"


def read_table(name: str, content: Any, runs: list[str], grid: Mapping[str, Iterable]) -> Crosstab:
    """Returns a table of a paper's file, of which the keys are checked."""
    expected = "keys and values, y and rows among them"
    require_value(f"{name}: tables", content, isinstance(content, dict), expected)
    own = ("rows", "columns", "printed")
    rows, columns = (list(content.get(key, [])) for key in own[:2])
    rest = {key: value for key, value in content.items() if key not in own}
    panel = read_panel(name, rest, runs, grid)
    counts = {"run": len(panel.runs)}
    counts |= {axis: len(panel.where.get(axis, values)) for axis, values in panel.axes.items()}
    used = rows + columns
    whole = len(set(used)) == len(used) and {a for a, n in counts.items() if n > 1} <= set(used)
    if not (rows and whole and set(used) <= set(counts)):
        raise ConfigError(
            f"{name}: tables: rows {rows} and columns {columns}; together they must name each of "
            f"{', '.join(counts)} once"
        )
    result = Crosstab(panel, rows, columns, content.get("printed") or {})
    downward, across = result.places
    known = [result.words(rows, down) for down in downward]
    for row, printed in result.printed.items():
        holds = row in known and len(printed) == len(across)
        expected = f"a row of the table, {', '.join(known)}, with {len(across)} numbers"
        require_value(f"{name}: tables.printed", {row: printed}, holds, expected)
    return result
