"""One type for tables, and how it is shown: terminal, Markdown, LaTeX, CSV, HTML.

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

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from typing import Any, NamedTuple

import numpy as np

from pfl import files
from pfl.datamodules.errors import is_number, require_value
from pfl.errors import ConfigError, printable
from pfl.report.curves import Panel, PanelRow, read_panel

LATEX = str.maketrans(
    {character: f"\\{character}" for character in "&%_#${}"}
    | {"\\": r"\textbackslash{}", "^": r"\^{}", "~": r"\~{}", "±": r"$\pm$", "–": "--"}
    # LaTeX's first fonts have other characters in the places of these.
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
)
HTML = """<div class="wide"><table><thead><tr>
{%- for column in table.forms %}<th scope="col"><button>{{ column.head }}</button></th>
{%- endfor %}</tr></thead><tbody>
{%- for row in table.rows %}<tr>
{%- for cell, column in table.pairs(row) %}<td data-value="{{ value(cell) }}">
{%- if cell.target %}<a href="{{ cell.target }}">{{ cell.words }}</a>
{%- else %}{{ column.text(cell) }}{% endif %}</td>
{%- endfor %}</tr>
{%- endfor %}</tbody></table></div>"""


class Estimate(NamedTuple):
    """A mean, and its sample standard deviation, which a single value does not have."""

    mean: float
    std: float | None = None

    @classmethod
    def of(cls, values: np.ndarray) -> Estimate:
        """Returns the estimate of some values; the mean is NaN where one is missing."""
        if not len(values):
            return cls(np.nan)
        if len(values) == 1:
            return cls(float(values.mean()))
        return cls(float(values.mean()), float(values.std(ddof=1)))


class Link(NamedTuple):
    """Words that lead to a place within a page of HTML."""

    target: str
    words: str


Cell = str | float | Estimate | Link | None


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        head: The heading.
        form: The format of numbers; "": as many digits as they need.
        better: Whether large numbers are good; None: nothing is the best.
        is_share: Whether the numbers are shares, which can be shown in percent.
        scale: By which numbers are multiplied where they are shown.
        group: In LaTeX, a heading above this one and its neighbours of the same group; "": none.
    """

    head: str
    form: str = ""
    better: bool | None = None
    is_share: bool = False
    scale: float = 1
    group: str = ""

    def text(self, cell: Cell) -> str:
        """Returns a cell in words; "–" if there is no value."""
        if isinstance(cell, Link):
            return cell.words
        if isinstance(cell, str):
            return printable(" ".join(cell.split()))
        number = number_of(cell)
        if number is None:
            return "–"
        if isinstance(cell, Estimate) and cell.std is not None:
            return f"{self._number(number)} ± {self._number(cell.std)}"
        return self._number(number)

    def _number(self, value: float) -> str:
        if self.form:
            return f"{self.scale * value:{self.form}}"
        whole = float(value).is_integer() and (abs(value) > 1 or isinstance(value, int))
        digits = 4
        if whole or abs(value) >= 1000:
            digits = 0
        elif abs(value) >= 10:
            digits = 1
        return f"{value:,.{digits}f}"


@dataclass(frozen=True)
class Table:
    """Columns, or their headings, and rows of cells.

    Example:
        >>> columns = ["method", Column("score", ".2f", better=True)]
        >>> table = Table(columns, [["A", 0.5], ["B", 0.25]])
        >>> print(text(table), end="")
        method  score
        -------------
        A        0.50
        B        0.25
    """

    columns: Sequence[Column | str]
    rows: Sequence[Sequence[Cell]] = ()
    caption: str = ""
    label: str = ""

    @property
    def forms(self) -> list[Column]:
        """The columns, where a heading has the plainest form."""
        return [Column(one) if isinstance(one, str) else one for one in self.columns]

    @property
    def heads(self) -> list[str]:
        """The headings."""
        return [printable(column.head) for column in self.forms]

    @property
    def cells(self) -> list[list[str]]:
        """The headings and all rows in words."""
        return [
            self.heads,
            *([column.text(cell) for cell, column in self.pairs(r)] for r in self.rows),
        ]

    def pairs(self, row: Sequence[Cell]) -> Iterable[tuple[Cell, Column]]:
        """Returns each cell of a row with its column."""
        return zip(row, self.forms, strict=True)

    def only(self, heads: Sequence[str]) -> Table:
        """Returns the table with some of its columns, in this order."""
        for head in heads:
            require_value("columns", head, head in self.heads, " or ".join(self.heads))
        places = [self.heads.index(head) for head in heads]
        rows = [[row[place] for place in places] for row in self.rows]
        return replace(self, columns=[self.columns[place] for place in places], rows=rows)

    def in_percent(self) -> Table:
        """Returns the table with shares in percent, to two digits."""
        columns = [
            replace(c, head=f"{c.head} (%)", form=".2f", scale=100) if c.is_share else c
            for c in self.forms
        ]
        return replace(self, columns=columns)

    def numbers(self, place: int) -> list[float]:
        """Returns the numbers, or means, in a column."""
        numbers = (number_of(row[place]) for row in self.rows)
        return [number for number in numbers if number is not None]

    def best(self, place: int) -> str | None:
        """Returns the text of the best mean in a column; None if nothing is the best."""
        column = self.forms[place]
        known = self.numbers(place)
        if column.better is None or len(known) < 2:
            return None
        if column.better:
            return column.text(max(known))
        return column.text(min(known))

    def are_best(self) -> list[list[bool]]:
        """Returns for each cell whether its mean, as it is shown, is the best of its column."""
        best = [self.best(place) for place in range(len(self.columns))]
        found = []
        for row in self.rows:
            shown = []
            for (cell, column), good in zip(self.pairs(row), best, strict=True):
                number = number_of(cell)
                shown.append(number is not None and column.text(number) == good)
            found.append(shown)
        return found


def number_of(cell: Cell) -> float | None:
    """Returns the number, or the mean, in a cell; None if there is none, or it is NaN."""
    if isinstance(cell, Estimate):
        cell = cell.mean
    if isinstance(cell, int | float) and cell == cell:
        return cell
    return None


# ---- renderers -----------------------------------------------------------------------------------


def text(table: Table) -> str:
    """Returns a table for a terminal, with aligned columns."""
    columns = [list(column) for column in zip(*table.cells, strict=True)]
    for number, column in enumerate(columns):
        width = max(map(len, column))
        columns[number] = [c.rjust(width) for c in column]
        if number == 0:
            columns[number] = [c.ljust(width) for c in column]
    head, *rows = ("  ".join(row).rstrip() for row in zip(*columns, strict=True))
    return "\n".join([head, "-" * len(head), *rows]) + "\n"


def markdown(table: Table) -> str:
    """Returns a table in Markdown, with the best numbers of each column in bold."""
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in table.cells]
    for cells, best in zip(escaped[1:], table.are_best(), strict=True):
        for place, is_best in enumerate(best):
            if is_best:
                cells[place] = f"**{cells[place]}**"
    head, *rows = (f"| {' | '.join(row)} |" for row in escaped)
    return "\n".join([head, f"|{'---|' * len(table.columns)}", *rows]) + "\n"


TO_FIT = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"


def latex(
    table: Table,
    *,
    percent: bool = False,
    bold: bool = True,
    columns: Sequence[str] | None = None,
    mean: bool = False,
    notes: str = "",
    wide: bool = False,
    fits: bool = False,
) -> str:
    """Returns a table in LaTeX, for the package booktabs; a caption makes it a float.

    Args:
        table: The table.
        percent: Shows shares in percent.
        bold: Prints the best numbers of each column in bold.
        columns: The headings of the columns that are shown; None: all.
        mean: Adds a row with the mean ± sample standard deviation over rows.
        notes: Sentences below the table, within its float.
        wide: Whether the float is as wide as the page where the text has two columns.
        fits: Prints the table smaller where it is wider than its place, for which the package
            graphicx is needed.
    """
    if columns is not None:
        table = table.only(columns)
    if percent:
        table = table.in_percent()
    lines = [*_group_lines(table.forms), _latex_row(map(escape, table.heads))]
    lines.append(r"\midrule")
    for row, best in zip(table.rows, table.are_best(), strict=True):
        cells = [escape(column.text(cell)) for cell, column in table.pairs(row)]
        for place, is_best in enumerate(best):
            if bold and is_best:
                cells[place] = rf"\textbf{{{cells[place]}}}"
        lines.append(_latex_row(cells))
    if mean:
        means = [Estimate.of(np.array(table.numbers(p))) for p in range(len(table.columns))]
        pairs = zip(table.forms[1:], means[1:], strict=True)
        last = ["mean ± std", *(column.text(cell).replace("–", "") for column, cell in pairs)]
        lines += [r"\midrule", _latex_row(map(escape, last))]
    begin = rf"\begin{{tabular}}{{@{{}}l{'r' * (len(table.columns) - 1)}@{{}}}}"
    lines = [begin, r"\toprule", *lines, r"\bottomrule", r"\end{tabular}"]
    if fits:
        lines = [TO_FIT, *lines, "}"]
    if table.caption:
        if table.label:
            label = [rf"\label{{{table.label}}}"]
        else:
            label = []
        kind = "table"
        if wide:
            kind = "table*"
        head = [
            rf"\begin{{{kind}}}",
            r"\centering",
            rf"\caption{{{escape(table.caption)}}}",
            *label,
        ]
        if notes:
            below = [rf"\par\footnotesize {escape(notes)}"]
        else:
            below = []
        lines = [*head, *lines, *below, rf"\end{{{kind}}}"]
    return "\n".join(lines) + "\n"


def _latex_row(cells: Iterable[str]) -> str:
    """Returns a row of a table; its first character is no option of the command before it."""
    row = " & ".join(cells) + r" \\"
    if row.startswith(("[", "*")):
        return "{}" + row
    return row


def _group_lines(columns: Sequence[Column]) -> list[str]:
    """Returns the line of headings above groups of columns, with the rules below them."""
    if not any(column.group for column in columns):
        return []
    cells = []
    rules = []
    first = 1
    for group, members in groupby(column.group for column in columns):
        count = len(list(members))
        if group:
            cells.append(rf"\multicolumn{{{count}}}{{c}}{{{escape(group)}}}")
            rules.append(rf"\cmidrule(lr){{{first}-{first + count - 1}}}")
        else:
            cells += [""] * count
        first += count
    return [" & ".join(cells) + r" \\", " ".join(rules)]


def escape(words: str) -> str:
    """Returns a text for LaTeX, in one line."""
    return " ".join(words.split()).translate(LATEX)


def csv(table: Table) -> bytes:
    """Returns a table as CSV with exact numbers; deviations have columns of their own."""
    spread = {place for row in table.rows for place, c in enumerate(row) if isinstance(c, Estimate)}
    rows: list[list[Any]] = [[], *([] for _ in table.rows)]
    for place, column in enumerate(table.forms):
        rows[0] += [column.head] + [f"{column.head} std"] * (place in spread)
        for line, row in zip(rows[1:], table.rows, strict=True):
            cell = row[place]
            line.append(exact(cell))
            if place in spread:
                line.append(cell.std if isinstance(cell, Estimate) else None)
    return files.csv_lines(rows)


def exact(cell: Cell) -> str | float | None:
    """Returns the words, or the number, in a cell without rounding."""
    if isinstance(cell, Link | str):
        if isinstance(cell, Link):
            return cell.words
        return cell
    return number_of(cell)


def html(table: Table) -> str:
    """Returns a table of HTML that sorts; each cell has its exact value, and shows it shortened."""

    def value(cell: Cell) -> str:
        found = exact(cell)
        if isinstance(found, str):
            return found
        if found is None:
            return ""
        return json.dumps(found)

    return template(HTML).render(table=table, value=value)


@functools.cache
def template(source: str) -> Any:
    """Returns a template of Jinja, which comes with PyTorch; it escapes everything."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.ChainableUndefined)
    return environment.from_string(source)


# ---- tables of a paper's file --------------------------------------------------------------------


@dataclass(frozen=True)
class Crosstab:
    """What a table of a paper's file shows; the docstring of the module explains the keys."""

    panel: Panel
    rows: list[str]
    columns: list[str]
    printed: dict[str, list[float | None]] = field(default_factory=dict)

    def points(self, axes: Sequence[str]) -> list[tuple[Any, ...]]:
        """Returns all combinations of the values of some axes."""
        values: dict[str, list[Any]] = {"run": list(self.panel.runs), **self.panel.axes}
        values |= self.panel.where
        return list(product(*(values[axis] for axis in axes)))

    def words(self, axes: Sequence[str], point: tuple[Any, ...]) -> str:
        """Returns values of some axes in words, with the labels of runs."""
        words = []
        for axis, value in zip(axes, point, strict=True):
            if axis == "run":
                value = self.panel.runs[value]
            words.append(str(value))
        return ", ".join(words)

    def markdown(self, rows: Sequence[PanelRow]) -> str:
        """Returns the title and the table, from rows with one run and round each."""
        return f"**{self.panel.title}**\n\n{markdown(self.table(rows))}"

    def table(self, rows: Sequence[PanelRow]) -> Table:
        """Returns the table, from rows with one run and round each."""
        where = self.panel.where.items()
        shown = [row for row in rows if all(row[axis] in chosen for axis, chosen in where)]
        across = self.points(self.columns)
        head = [" / ".join(self.rows), *(self.words(self.columns, point) for point in across)]
        if not self.columns:
            head[1] = " or ".join(self.panel.y)
        lines: list[list[Cell]] = []
        for down in self.points(self.rows):
            words = self.words(self.rows, down)
            printed = self.printed.get(words, [None] * len(across))
            line: list[Cell] = [words]
            for point, number in zip(across, printed, strict=True):
                place = dict(zip([*self.rows, *self.columns], [*down, *point], strict=True))
                cell = self._cell(shown, place)
                if number is not None:
                    cell = f"{cell} ({number:g})"
                line.append(cell)
            lines.append(line)
        return Table(head, lines)

    def _cell(self, rows: Sequence[PanelRow], place: dict[str, Any]) -> str:
        """Returns the mean over the seeds at a place of the table, with four digits."""
        here = [row for row in rows if all(row[axis] == v for axis, v in place.items())]
        seeds = dict.fromkeys(row["seed"] for row in here)
        values = [self.panel.point_value([r for r in here if r["seed"] == seed]) for seed in seeds]
        known = np.array([value for value in values if value is not None]) / self.panel.y_unit
        if not len(known) or len(known) < len(values):
            return "–"
        if len(known) == 1:
            return f"{known[0]:.4g}"
        mean = known.mean()
        spread = known.std(ddof=1)
        scale = 0
        if mean:
            scale = np.floor(np.log10(abs(mean)))
        decimals = int(np.clip(3 - scale, 0, 9))  # of the spread as many as of the mean
        return f"{mean:.{decimals}f} ± {spread:.{decimals}f}"


def read_table(name: str, content: Any, runs: list[str], grid: Mapping[str, Iterable]) -> Crosstab:
    """Returns a table of a paper's file, of which the keys are checked."""
    expected = "keys and values, y and rows among them"
    require_value(f"{name}: tables", content, isinstance(content, dict), expected)
    own = ("rows", "columns", "printed")
    rest = {key: value for key, value in content.items() if key not in own}
    panel = read_panel(name, rest, runs, grid)
    for key in ("rows", "columns"):
        holds = isinstance(content.get(key, []), list)
        require_value(f"{name}: tables.{key}", content.get(key), holds, "a list of axes")
    rows = list(content.get("rows", []))
    columns = list(content.get("columns", []))
    counts = {"run": len(panel.runs)}
    counts |= {axis: len(panel.where.get(axis, values)) for axis, values in panel.axes.items()}
    used = rows + columns
    whole = len(set(used)) == len(used) and {a for a, n in counts.items() if n > 1} <= set(used)
    if not (rows and whole and set(used) <= set(counts)):
        raise ConfigError(
            f"{name}: tables: rows {rows} and columns {columns}; together they must name each of "
            f"{', '.join(counts)} once"
        )
    printed_rows = content.get("printed") or {}
    expected = "a list of numbers for each row of the table"
    require_value(f"{name}: tables.printed", printed_rows, isinstance(printed_rows, dict), expected)
    result = Crosstab(panel, rows, columns, printed_rows)
    known = [result.words(rows, down) for down in result.points(rows)]
    number = len(result.points(columns))
    for row, printed in result.printed.items():
        holds = row in known and isinstance(printed, list) and len(printed) == number
        holds = holds and all(value is None or is_number(value) for value in printed)
        expected = f"a row of the table, {', '.join(known)}, with {number} numbers"
        require_value(f"{name}: tables.printed", {row: printed}, holds, expected)
    return result
