"""Columns of a table as inputs: numbers, names of categories, and cells without a value."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..errors import RowError
from .cells import identifiers_of, is_number, values_of

COARSE = 0.01  # rounding by more than this share of a column's standard deviation is told


class Column(NamedTuple):
    """A column of a file."""

    values: np.ndarray  # text, dates and columns with missing values are arrays of objects
    cells: Sequence[str] | None  # as they are written in a CSV file; None for a Parquet file


class Inputs(NamedTuple):
    """Columns side by side.

    Attributes:
        values: float32 [N, F]; 0 where a value is missing. The tokens of texts are int64 [N, T].
        names: The names of the columns [F]; that of a level is `column=level`.
        missing: Which values are missing, bool [N, F]; of texts [N, 1].
        rounded: The names of the columns that lost digits.
        coarse: A line about each column of which float32 loses what makes its values differ.
    """

    values: np.ndarray
    names: list[str]
    missing: np.ndarray
    rounded: list[str]
    coarse: list[str]


def gaps_of(values: np.ndarray) -> np.ndarray:
    """Returns where a column has no value, bool [N]: None, NaN, or text of spaces only."""
    if values.dtype.kind == "f":
        return np.isnan(values)
    if values.dtype.kind != "O":
        return np.zeros(len(values), bool)
    return np.array([x is None or x != x or not str(x).strip() for x in values], bool)


def without_rows(column: Column, left_out: np.ndarray) -> Column:
    """Returns a column without some rows, whose values have the type of those that are left."""
    keep = np.flatnonzero(~left_out).tolist()
    if column.cells is not None:
        cells = [column.cells[row] for row in keep]
        return Column(values_of(cells), cells)
    values = column.values[keep]
    if values.dtype.kind == "O":
        kinds = {type(value) for value in values}
        if len(kinds) == 1 and kinds <= {bool, int, float}:
            values = np.array(values.tolist())
    return Column(values, None)


def is_text(column: Column) -> bool:
    """Returns whether a column holds a text that is no number."""
    if column.values.dtype.kind in "biufM":
        return False
    known = column.values[~gaps_of(column.values)].tolist()
    return any(isinstance(value, str) for value in known)


def joined_names(columns: Sequence[Column], levels: Sequence[str] = ()) -> np.ndarray:
    """Returns the names in a column of all files, [N]: None where there is none.

    A cell of a CSV file that is one of the `levels` is a name, also if it is NA.
    """
    cells = [cell for column in columns for cell in column.cells or ()]
    if len(cells) == sum(len(column.values) for column in columns):
        return _names_in(cells, levels)
    parts = [column.values for column in columns]
    for number, column in enumerate(columns):
        if column.cells is not None:
            parts[number] = _names_in(column.cells, levels)
    return np.concatenate(parts)


def _names_in(cells: Sequence[str], levels: Sequence[str]) -> np.ndarray:
    """Returns the names in the cells of a CSV file, [N]: None where there is none."""
    names = identifiers_of(cells)
    if names.dtype.kind == "O":
        for place, cell in enumerate(cells):
            if names[place] is None and cell in levels:
                names[place] = cell
    return names


def levels_of(name: str, names: np.ndarray, given: Sequence[str] | None) -> list[str]:
    """Returns the levels of a category: those that are given, or all that there are, ascending.

    Raises:
        ConfigError: A name is not among the given levels.
    """
    gaps = gaps_of(names)
    known = names[~gaps].tolist()
    if given is None:
        if all(isinstance(value, int) for value in known):
            return [str(value) for value in sorted(set(known))]
        return sorted({str(value) for value in known})
    for row, value in enumerate(names.tolist(), 1):
        if not gaps[row - 1] and str(value) not in given:
            raise RowError(
                f"TableDataModule.levels: the column {name!r} holds {str(value)!r}; it must be one "
                f"of its levels, which are {', '.join(given)}",
                row,
            )
    return list(given)


def zeros_read_away(column: Column) -> str | None:
    """Returns the first cell of digits with a zero before them, where all cells are numbers.

    Such cells are the ids of patients or wards more often than numbers.
    """
    if column.cells is None or column.values.dtype.kind not in "iu":
        return None
    for cell in column.cells:
        digits = cell.strip().lstrip("+-")
        if len(digits) > 1 and digits[0] == "0" and digits.isdecimal():
            return cell
    return None


def codes_of(names: np.ndarray, levels: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the number of each name's level, and where there is no name, both [N]."""
    gaps = gaps_of(names)
    number = {level: code for code, level in enumerate(levels)}
    known = [0 if gap else number[str(name)] for name, gap in zip(names, gaps, strict=True)]
    return np.array(known, np.int64), gaps


def one_hot(codes: np.ndarray, gaps: np.ndarray, number: int) -> np.ndarray:
    """Returns a column for each level, [N, number]: 1 where a row has it; 0 for a gap."""
    rows = np.zeros((len(codes), number), np.float32)
    rows[np.arange(len(codes)), codes] = 1
    rows[gaps] = 0
    return rows


OTHERWISE = (
    ", or be left out (feature_columns), or be a category (categories: one-hot or codes), or be "
    "the text of which the inputs are made (text_column)"
)


def numbers_of(key: str, name: str, column: Column) -> tuple[np.ndarray, np.ndarray]:
    """Returns a column of one file as numbers, 0 for a gap, and its gaps, both [N].

    Raises:
        ConfigError: A cell is no number.
    """
    gaps = gaps_of(column.values)
    check_numbers(key, name, column.values, gaps, OTHERWISE)
    if column.values.dtype.kind in "biu":
        return column.values, gaps
    known = np.where(gaps, 0, column.values)
    return known.astype(np.float64), gaps


def check_numbers(
    key: str, name: str, values: np.ndarray, gaps: np.ndarray, otherwise: str = ""
) -> None:
    """Raises a ConfigError unless the values of a column, apart from gaps, are numbers."""
    if values.dtype.kind in "biuf":
        return
    cells = values.tolist()
    known = [(row, cell) for row, cell in enumerate(cells, 1) if not gaps[row - 1]]
    wrong = [pair for pair in known if not is_number(pair[1])]
    texts = [pair for pair in known if isinstance(pair[1], str)]  # one of them is no number
    if not wrong and not texts:
        return
    row, text = [*wrong, *texts][0]
    raise RowError(
        f"TableDataModule.{key}: the column {name!r} holds {text!r}; it must hold numbers"
        f"{otherwise}",
        row,
    )


def narrowed(values: np.ndarray) -> tuple[np.ndarray, bool]:
    """Returns numbers as float32, and whether one of them has lost digits."""
    with np.errstate(over="ignore"):  # infinite values raise an error when the data are loaded
        narrow = values.astype(np.float32)
    if values.dtype.kind == "f":
        return narrow, bool((narrow != values).any())
    # A whole number is compared as such: float64, too, would round 2**53 + 1.
    large = _large(values)
    whole = [int(a) != int(b) for a, b in zip(narrow[large], values[large], strict=True)]
    return narrow, any(whole)


def coarse_lines(name: str, values: np.ndarray, narrow: np.ndarray) -> list[str]:
    """Returns a line about a column whose differences float32 loses; none about any other column.

    Seconds since 1970 are an example: neighbours among float32 numbers of this size are 128 apart.
    """
    exact = values.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):  # infinite values are refused later
        deviation = exact.std()
        error = np.abs(narrow - exact).max()
    if not 0 < COARSE * deviation < error:  # a constant has no differences to lose
        return []
    return [
        f"{name!r}: float32 moves its values by up to {error:.3g}, and their standard deviation is "
        f"{deviation:.3g}; subtract a constant, such as the least value, in the file"
    ]


def _large(values: np.ndarray) -> np.ndarray:
    """Returns which whole numbers may have no float32: those above 2**24 in size."""
    if values.dtype.kind == "b":
        return np.zeros(len(values), bool)
    if values.dtype.kind == "u":
        return values > 2**24
    return (values > 2**24) | (values < -(2**24))


def side_by_side(columns: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Inputs:
    """Returns numbers and their gaps, by name, side by side."""
    values = []
    rounded = []
    coarse = []
    for name, (numbers, gaps) in columns.items():
        narrow, lost = narrowed(numbers)
        values.append(narrow)
        if lost:
            rounded.append(name)
            coarse += coarse_lines(name, numbers[~gaps], narrow[~gaps])
    missing = np.stack([gaps for _, gaps in columns.values()], 1)
    return Inputs(np.stack(values, 1), list(columns), missing, rounded, coarse)
