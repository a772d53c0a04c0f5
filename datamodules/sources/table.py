"""Tables in CSV or Parquet files."""

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from ..base import FederatedDataModule
from ..errors import ConfigError, one_line, optional_module, require
from ..rules.partitioner import Partitioner
from ..samples.loaded import Loaded
from ..samples.memory_map import train_and_test

_UTF8 = "a CSV file must be saved as UTF-8"
_MISSING = {"", "#N/A", "#NA", "-NaN", "-nan", "N/A", "NA", "NULL", "NaN", "n/a", "nan", "null"}


class TableDataModule(FederatedDataModule):
    r"""A table in a CSV or Parquet file: a row for each sample, inputs float32 [N, F].

    A target column of whole numbers, text or booleans holds classes, which are numbered in
    ascending order; a column of floating numbers means regression. Cells such as NA among numbers
    are missing values. Parquet files need the package `pyarrow` (`pip install pyarrow`).

    In a configuration file, with a client for each hospital:

        data:
          class_path: TableDataModule
          init_args:
            file: patients.csv
            target_column: outcome
            client_column: hospital
            partition: Natural
            transforms: [Normalize]

    Args:
        file: Path of a `.csv` or `.parquet` file. A CSV file begins with the names of its columns.
        target_column: The column of the targets.
        feature_columns: The columns of the inputs, numbers or booleans; None takes all others.
        client_column: The column of the client ids, numbers or text, for `partition=Natural()`.
        test_file: Path of a file with the same columns: the official test set, if there is one.

    Example:
        >>> import tempfile, pathlib
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "patients.csv"
        >>> _ = file.write_text("age,dose,cured\n" + "51,0.5,yes\n47,2.5,no\n" * 10)
        >>> data = TableDataModule(file, "cured", num_clients=2)
        >>> data.class_names, data.input_shape
        (['no', 'yes'], torch.Size([2]))
    """

    def __init__(
        self,
        file: str | os.PathLike,
        target_column: str,
        feature_columns: list[str] | None = None,
        client_column: str | None = None,
        test_file: str | os.PathLike | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.file = Path(file).expanduser()
        self.target_column, self.client_column = target_column, client_column
        self.feature_columns = feature_columns
        self.test_file = None if test_file is None else Path(test_file).expanduser()
        for key, path in (("file", self.file), ("test_file", self.test_file)):
            if path is not None:
                exists = path.suffix in (".csv", ".parquet") and path.is_file()
                expected = "the path of an existing .csv or .parquet file"
                require(f"TableDataModule.{key}", str(path), exists, expected)
        if feature_columns is not None:
            others = not {target_column, client_column} & set(feature_columns)
            holds, expected = len(feature_columns) > 0 and others, "columns for inputs only"
            require("TableDataModule.feature_columns", feature_columns, holds, expected)

    def load(self) -> Loaded:
        tables = [_read(path) for path in (self.file, self.test_file) if path is not None]
        known = (self.target_column, self.client_column)
        features = self.feature_columns or [name for name in tables[0] if name not in known]
        self.feature_names = list(features)
        targets, names = _classes(self._column(tables, "target_column", self.target_column))
        ids = None
        if self.client_column is not None:
            ids = self._column(tables, "client_column", self.client_column)
            rule = type(self.partitioner)
            if rule.bound is Partitioner.bound:  # it sees no column
                rank_zero_warn(
                    f"TableDataModule.client_column: {self.client_column!r} is not used by "
                    f"{rule.__name__}; with partition: Natural each of its values is a client",
                    category=UserWarning,
                )
        inputs = np.concatenate([self._inputs(table, features) for table in tables])
        columns = {  # for rules such as ByValue("age")
            name: np.concatenate([table[name] for table in tables])
            for name in tables[0]
            if all(name in table for table in tables)
        }
        train, test = train_and_test(inputs, targets, len(tables[0][self.target_column]))
        return Loaded(train, test, ids, columns, names)

    def _inputs(self, table: dict[str, np.ndarray], features: Sequence[str]) -> np.ndarray:
        """Returns the columns of the inputs side by side, float32 [N, F]."""
        columns = [self._column([table], "feature_columns", name) for name in features]
        for name, values in zip(features, columns, strict=True):
            if values.dtype.kind not in "biuf":
                cells = values.tolist()  # where all are numbers, they are written as text
                wrong = (pair for pair in enumerate(cells, 1) if not _is_number(pair[1]))
                row, text = next(wrong, (1, cells[0]))
                raise ConfigError(
                    f"TableDataModule.feature_columns: the column {name!r} holds {text!r}; it "
                    f"must hold numbers, or be left out (row {row} after the names)"
                )
        expected = "at least one column"
        require("TableDataModule.feature_columns", features, len(columns) > 0, expected)
        wide = np.stack(columns, 1)
        narrow = wide.astype(np.float32)
        if (narrow != wide).any() and "features" not in self.rounded_arrays:
            self.rounded_arrays.append("features")
        return narrow

    def _column(self, tables: Sequence[dict[str, np.ndarray]], key: str, name: str) -> np.ndarray:
        """Returns a column of all tables, without missing values."""
        parts = []
        for table in tables:
            expected = f"one of the columns, which are {', '.join(table)}"
            require(f"TableDataModule.{key}", name, name in table, expected)
            values = table[name]
            can_lack = values.dtype.kind in "Of"
            if can_lack and (n := sum(x is None or x != x or not str(x).strip() for x in values)):
                raise ConfigError(
                    f"TableDataModule.{key}: the column {name!r} has no value in {n} of "
                    f"{len(values)} rows; it must have one in each row"
                )
            parts.append(values.astype(str) if values.dtype.kind == "O" else values)
        return np.concatenate(parts)


def _read(path: Path) -> dict[str, np.ndarray]:
    """Reads a file; columns with text, dates or missing values are arrays of objects."""
    names, columns = (_read_csv if path.suffix == ".csv" else _read_parquet)(path)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        key = f"TableDataModule.file: {str(path)!r}"
        raise ConfigError(f"{key} has two columns {twice[0]!r}; names of columns must differ")
    rows = len(columns[0]) if columns else 0
    require("TableDataModule.file", str(path), rows > 0, "a file with at least one row")
    return dict(zip(names, columns, strict=True))


def _read_csv(path: Path) -> tuple[list[str], list[np.ndarray]]:
    key = f"TableDataModule.file: {str(path)!r}"
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            text = file.read()
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        names, *rows = [row for row in reader if row] or [[]]
    except (OSError, csv.Error) as error:
        raise ConfigError(f"{key} cannot be read: {error}") from error
    if "\0" in text:
        raise ConfigError(f"{key} holds the character NUL, as UTF-16 does; {_UTF8}")
    if len(names) == 1 and ";" in names[0]:  # as spreadsheets write it where numbers have commas
        raise ConfigError(f"{key} has semicolons between its cells; they must be commas")
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
    return names, [_column_of_csv(column) for column in cells]


def _column_of_csv(cells: Sequence[str]) -> np.ndarray:
    """Returns whole numbers, else floating ones, else booleans, else text."""
    gaps = not _MISSING.isdisjoint(cells)
    known = [cell for cell in cells if cell not in _MISSING] if gaps else cells
    kinds: tuple[type, ...] = () if "_" in "".join(known) else (int, float)  # see _is_number
    values: np.ndarray
    for kind in kinds:
        try:
            values = np.fromiter(map(kind, known), kind, len(known))
            break
        except (ValueError, OverflowError):
            pass
    else:
        if not {cell.lower() for cell in known} <= {"true", "false"}:
            return np.array(cells, object)
        values = np.array([cell.lower() == "true" for cell in known])
    if not gaps:
        return values
    column = np.full(len(cells), None, object)
    column[[cell not in _MISSING for cell in cells]] = values
    return column


def _read_parquet(path: Path) -> tuple[list[str], list[np.ndarray]]:
    key = f"TableDataModule.file: {str(path)!r}"
    pyarrow = optional_module(key, "pyarrow")
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{key} cannot be read: {one_line(error)}") from error
    columns, numbers = [], ("int", "uint", "halffloat", "float", "double")
    for values in table.columns:
        if values.null_count or not str(values.type).startswith(numbers):
            is_bool = str(values.type) == "bool" and not values.null_count
            columns.append(np.array(values.to_pylist(), bool if is_bool else object))
        else:
            columns.append(values.to_numpy())
    return table.column_names, columns


def _is_number(value: object) -> bool:
    """Returns whether a cell holds a number, or the text of one."""
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return "_" not in str(value)  # Python reads 1_0 as the number 10


def _classes(targets: np.ndarray) -> tuple[np.ndarray, list[str] | None]:
    """Returns numbered classes, int64, and their names; or floating targets as float32."""
    if targets.dtype.kind == "f":
        return targets.astype(np.float32), None
    names, labels = np.unique(targets, return_inverse=True)
    return labels.astype(np.int64), [str(name) for name in names]
