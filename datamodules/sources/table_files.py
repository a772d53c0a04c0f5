"""Files of tables, CSV or Parquet, as columns by name, and several of them as one."""

import csv
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError, RowError, error_line, optional_module, require_value
from .cells import values_of
from .encoding import Column, without_rows

SUFFIXES = (".csv", ".parquet")
_UTF8 = "a CSV file must be saved as UTF-8"
_PANDAS_INDEX = re.compile(r"__index_level_\d+__")  # of the rows that are left of a data frame


class Table(dict[str, Column]):
    """Columns by name.

    Attributes:
        rows: The number of each row in its file, from 1, after the names.
        file: The name of the file if it is not the first one.
    """

    def __init__(self, columns: Mapping[str, Column], rows: np.ndarray, file: str = "") -> None:
        super().__init__(columns)
        self.rows = rows
        self.file = file


def path_of_table(key: str, given: str | os.PathLike) -> Path:
    """Returns the path of an existing file of a table.

    Raises:
        ConfigError: It is no path, there is no such file, or it has another suffix.
    """
    kind = f"an object of type {type(given).__name__}"
    expected = "the path of a file, such as to_csv or to_parquet of pandas writes"
    require_value(f"TableDataModule.{key}", kind, isinstance(given, str | os.PathLike), expected)
    path = Path(given).expanduser()
    exists = path.suffix in SUFFIXES and path.is_file()
    expected = "the path of an existing .csv or .parquet file"
    require_value(f"TableDataModule.{key}", str(path), exists, expected)
    return path


def located(error: RowError, tables: Sequence[Table]) -> RowError:
    """Returns an error about a row of several tables with its number in its file."""
    place = error.row - 1
    for table in tables:
        if place < len(table.rows):
            return RowError(error.text, int(table.rows[place]), table.file)
        place -= len(table.rows)
    return error


def rows_left(table: Table, left_out: np.ndarray) -> Table:
    """Returns a table without the rows that are left out, bool [N]."""
    columns = {name: without_rows(column, left_out) for name, column in table.items()}
    return Table(columns, table.rows[~left_out], table.file)


def joined_cells(
    columns: Sequence[Column], read: Callable[[Sequence[str]], np.ndarray] | None
) -> np.ndarray:
    """Returns a column of all files; `read` makes values of the cells of CSV files.

    The cells of all files are read together, so that a column is text if it is text in one file.
    """
    parts = [column.values for column in columns]
    if read is not None:
        cells = [cell for column in columns for cell in column.cells or ()]
        if all(column.cells is not None for column in columns):
            return read(cells)
        for number, column in enumerate(columns):
            if column.cells is not None:
                parts[number] = read(column.cells)
    return np.concatenate(parts)


def read_table(path: Path, conversions: list[str]) -> Table:
    """Reads a file, and says in `conversions` what was left out."""
    if path.suffix == ".csv":
        names, columns = _read_csv(path, conversions)
    else:
        names, columns = _read_parquet(path, conversions)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        key = f"TableDataModule.file: {str(path)!r}"
        raise ConfigError(f"{key} has two columns {twice[0]!r}; names of columns must differ")
    holds = len(columns) > 0 and len(columns[0].values) > 0
    require_value("TableDataModule.file", str(path), holds, "a file with at least one row")
    rows = np.arange(1, len(columns[0].values) + 1)
    return Table(dict(zip(names, columns, strict=True)), rows)


def _read_csv(path: Path, conversions: list[str]) -> tuple[list[str], list[Column]]:
    key = f"TableDataModule.file: {str(path)!r}"
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            text = file.read()
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        lines = list(reader)
        names, *rows = [row for row in lines if row] or [[]]
    except (OSError, csv.Error) as error:
        raise ConfigError(f"{key} cannot be read: {error}") from error
    empty = len(lines) - len(rows) - 1
    if empty > 0:
        conversions.append(f"{path.name}: lines left out, as they are empty: {empty}")
    if "\0" in text:
        raise ConfigError(f"{key} holds the character NUL, as UTF-16 does; {_UTF8}")
    if len(names) == 1 and (between := _other_separator(lines)):
        raise ConfigError(f"{key} has {between} between its cells; they must be commas")
    if "" in names:
        raise ConfigError(
            f"{key} has a column without a name, as an index of pandas; name it, or leave it out"
        )
    for number, row in enumerate(rows, 1):
        if len(row) != len(names):
            raise ConfigError(
                f"{key} cannot be read: row {number} after the names has {len(row)} cells instead "
                f"of {len(names)}"
            )
    cells = list(zip(*rows, strict=True))
    for name, column in zip(names, cells, strict=False):
        try:
            name.encode(), "".join(column).encode()
        except UnicodeEncodeError as error:
            shown = name.encode(errors="replace").decode()
            raise ConfigError(f"{key} has a column {shown!r} in another code; {_UTF8}") from error
    return names, [Column(values_of(column), column) for column in cells]


def _other_separator(lines: Sequence[Sequence[str]]) -> str:
    """Returns what stands between the cells of a file without commas; "" if it has one column."""
    rows = [row[0] for row in lines if row]
    if ";" in rows[0]:  # as spreadsheets write it where numbers have commas
        return "semicolons"
    for between, name in (("\t", "tabs"), (" ", "spaces")):
        sizes = {len(row.split(between)) for row in rows}
        if len(sizes) == 1 and sizes != {1}:
            return name
    return ""


def _read_parquet(path: Path, conversions: list[str]) -> tuple[list[str], list[Column]]:
    key = f"TableDataModule.file: {str(path)!r}"
    pyarrow = optional_module(key, "pyarrow")
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{key} cannot be read: {error_line(error)}") from error
    unnamed = [name for name in table.column_names if _PANDAS_INDEX.fullmatch(name)]
    if unnamed:
        table = table.drop_columns(unnamed)
        conversions.append(f"{path.name}: the index of pandas is left out, as it has no name")
    numbers = ("int", "uint", "halffloat", "float", "double")
    columns = []
    for column in table.columns:
        if pyarrow.types.is_decimal(column.type):
            column = _without_decimals(pyarrow, column)
        kind = str(column.type)
        if kind.startswith(numbers) and not column.null_count:
            values = column.to_numpy()
        elif kind == "bool" and not column.null_count:
            values = np.array(column.to_pylist(), bool)
        else:
            values = np.fromiter(column.to_pylist(), object, len(column))  # may be lists
        columns.append(Column(values, None))
    return table.column_names, columns


def _without_decimals(pyarrow: Any, column: Any) -> Any:
    """Returns decimal numbers as floating ones, or as whole ones if their type has no fraction.

    Whole numbers that do not fit into 64 bits stay decimal, as floating ones would merge ids.
    """
    if column.type.scale > 0:
        return column.cast(pyarrow.float64())
    try:
        return column.cast(pyarrow.int64())
    except pyarrow.ArrowInvalid:
        return column
