"""Tables in CSV or Parquet files."""

import csv
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from ..base import FederatedDataModule
from ..errors import ConfigError, error_line, optional_module, require
from ..rules.partitioner import Partitioner
from ..samples.loaded import Loaded
from ..samples.memory_map import train_and_test
from .cells import classes_of, identifiers_of, is_number, targets_of, values_of

_UTF8 = "a CSV file must be saved as UTF-8"
_KINDS = ("classes", "numbers")


class _Column(NamedTuple):
    """A column of a file."""

    values: np.ndarray  # text, dates and columns with missing values are arrays of objects
    cells: Sequence[str] | None  # as they are written in a CSV file; None for a Parquet file


_Table: TypeAlias = dict[str, _Column]


class TableDataModule(FederatedDataModule):
    r"""A table in a CSV or Parquet file: a row for each sample, inputs float32 [N, F].

    A target column of whole numbers, text or booleans holds classes, which are numbered in
    ascending order; a column of floating numbers means regression. `target_kind` overrides this.
    Cells such as NA among numbers are missing values. Parquet files need the package `pyarrow`
    (`pip install pyarrow`).

    In a CSV file the ids of clients and the names of classes are the text of the cells: 007, 7 and
    07 are three clients. They are in the order of text. Only where all cells of the column are
    whole numbers of the digits 0 to 9, without zeros before them (a minus is allowed), they are in
    the order of numbers. This holds for `client_column`, for the columns that `Natural`, `LEAF` and
    `Groups` name, and for classes.

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
        target_kind: What the target column holds. "classes": floating numbers are classes, too,
            and 2.0 is the class 2. "numbers": whole numbers are the values of a regression, or
            labels 0 and 1 for one output. None decides as above.
        class_names: The names of all classes, in the order of their numbers, for a file in which a
            class may be missing, such as that of one hospital of several. None: the classes that
            are in the file, in ascending order.

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
        target_kind: Literal["classes", "numbers"] | None = None,
        class_names: list[str | int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.given_classes: list[str] | None = None
        if class_names is not None:
            self.given_classes = [str(name) for name in class_names]
            differ = 0 < len(class_names) == len({*self.given_classes})
            expected = "a list of different names, of targets that are classes"
            holds = differ and target_kind != "numbers"
            require("TableDataModule.class_names", class_names, holds, expected)
        self.file = Path(file).expanduser()
        self.target_column = target_column
        self.client_column = client_column
        self.feature_columns = feature_columns
        holds = target_kind in (None, *_KINDS)
        require("TableDataModule.target_kind", target_kind, holds, "classes, numbers or None")
        self.target_kind = target_kind
        self.test_file = None
        if test_file is not None:
            self.test_file = Path(test_file).expanduser()
        for key, path in (("file", self.file), ("test_file", self.test_file)):
            if path is not None:
                exists = path.suffix in (".csv", ".parquet") and path.is_file()
                expected = "the path of an existing .csv or .parquet file"
                require(f"TableDataModule.{key}", str(path), exists, expected)
        if feature_columns is not None:
            others = not {target_column, client_column} & set(feature_columns)
            holds = len(feature_columns) > 0 and others
            expected = "columns for inputs only"
            require("TableDataModule.feature_columns", feature_columns, holds, expected)

    def load(self) -> Loaded:
        tables = [_read(path) for path in (self.file, self.test_file) if path is not None]
        known = (self.target_column, self.client_column)
        features = self.feature_columns or [name for name in tables[0] if name not in known]
        self.feature_names = list(features)
        targets, names = self._targets(tables)
        ids = None
        if self.client_column is not None:
            ids = self._column(tables, "client_column", self.client_column, identifiers_of)
            rule = type(self.partitioner)
            if rule.bound is Partitioner.bound:  # it sees no column
                rank_zero_warn(
                    f"TableDataModule.client_column: {self.client_column!r} is not used by "
                    f"{rule.__name__}; with partition: Natural each of its values is a client",
                    category=UserWarning,
                )
        inputs = np.concatenate([self._inputs(table, features) for table in tables])
        columns = {}  # for rules such as ByValue("age")
        for name in tables[0]:
            if all(name in table for table in tables):
                read = None
                if name in self.partitioner.id_columns:
                    read = identifiers_of
                columns[name] = _joined([table[name] for table in tables], read)
        num_train = len(tables[0][self.target_column].values)
        train, test = train_and_test(inputs, targets, num_train)
        return Loaded(train, test, ids, columns, names)

    @property
    def num_classes(self) -> int | None:
        """K, the number of the given `class_names`, or the largest integer target plus one."""
        if self.given_classes is not None:
            return len(self.given_classes)
        return super().num_classes

    def _targets(self, tables: Sequence[_Table]) -> tuple[np.ndarray, list[str] | None]:
        """Returns numbered classes, int64, and their names; or floating targets as float32."""
        key = "target_column"
        name = self.target_column
        if self.target_kind == "numbers":
            values = self._column(tables, key, name)
            _check_numbers(key, name, values)
            return values.astype(np.float32), None
        if self.target_kind == "classes":
            targets = self._column(tables, key, name, classes_of)
            if targets.dtype.kind == "f":  # of a Parquet file
                targets = _whole(targets)
        else:
            targets = self._column(tables, key, name, targets_of)
            if targets.dtype.kind == "f" and self.given_classes is None:
                return targets.astype(np.float32), None
        found, labels = np.unique(targets, return_inverse=True)
        names = [str(name) for name in found]
        if self.given_classes is None:
            return labels.astype(np.int64), names
        given = self.given_classes
        for one in names:
            expected = f"one of class_names, which are {', '.join(given)}"
            key = f"TableDataModule.target_column: a class of the column {name!r}"
            require(key, one, one in given, expected)
        numbers = np.array([given.index(one) for one in names], np.int64)
        return numbers[labels], given

    def _inputs(self, table: _Table, features: Sequence[str]) -> np.ndarray:
        """Returns the columns of the inputs side by side, float32 [N, F]."""
        columns = [self._column([table], "feature_columns", name) for name in features]
        for name, values in zip(features, columns, strict=True):
            _check_numbers("feature_columns", name, values, ", or be left out")
        expected = "at least one column"
        require("TableDataModule.feature_columns", features, len(columns) > 0, expected)
        wide = np.stack(columns, 1)
        narrow = wide.astype(np.float32)
        if (narrow != wide).any() and "features" not in self.rounded_arrays:
            self.rounded_arrays.append("features")
        return narrow

    def _column(
        self,
        tables: Sequence[_Table],
        key: str,
        name: str,
        read: Callable[[Sequence[str]], np.ndarray] | None = None,
    ) -> np.ndarray:
        """Returns a column of all tables, without missing values; see `_joined`."""
        for table in tables:
            expected = f"one of the columns, which are {', '.join(table)}"
            require(f"TableDataModule.{key}", name, name in table, expected)
            values = table[name].values
            can_lack = values.dtype.kind in "Of"
            if can_lack and (n := sum(x is None or x != x or not str(x).strip() for x in values)):
                raise ConfigError(
                    f"TableDataModule.{key}: the column {name!r} has no value in {n} of "
                    f"{len(values)} rows; it must have one in each row"
                )
        joined = _joined([table[name] for table in tables], read)
        if joined.dtype.kind == "O":
            return joined.astype(str)
        return joined


def _joined(
    columns: Sequence[_Column], read: Callable[[Sequence[str]], np.ndarray] | None
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


def _check_numbers(key: str, name: str, values: np.ndarray, otherwise: str = "") -> None:
    """Raises a ConfigError unless the values of a column are numbers or booleans."""
    if values.dtype.kind in "biuf":
        return
    cells = values.tolist()  # where all are numbers, they are written as text
    wrong = (pair for pair in enumerate(cells, 1) if not is_number(pair[1]))
    row, text = next(wrong, (1, cells[0]))
    raise ConfigError(
        f"TableDataModule.{key}: the column {name!r} holds {text!r}; it must hold numbers"
        f"{otherwise} (row {row} after the names)"
    )


def _read(path: Path) -> _Table:
    """Reads a file."""
    read = _read_parquet
    if path.suffix == ".csv":
        read = _read_csv
    names, columns = read(path)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        key = f"TableDataModule.file: {str(path)!r}"
        raise ConfigError(f"{key} has two columns {twice[0]!r}; names of columns must differ")
    holds = len(columns) > 0 and len(columns[0].values) > 0
    require("TableDataModule.file", str(path), holds, "a file with at least one row")
    return dict(zip(names, columns, strict=True))


def _read_csv(path: Path) -> tuple[list[str], list[_Column]]:
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
    return names, [_Column(values_of(column), column) for column in cells]


def _read_parquet(path: Path) -> tuple[list[str], list[_Column]]:
    key = f"TableDataModule.file: {str(path)!r}"
    pyarrow = optional_module(key, "pyarrow")
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{key} cannot be read: {error_line(error)}") from error
    numbers = ("int", "uint", "halffloat", "float", "double")
    columns = []
    for column in table.columns:
        kind = str(column.type)
        if kind.startswith(numbers) and not column.null_count:
            values = column.to_numpy()
        elif kind == "bool" and not column.null_count:
            values = np.array(column.to_pylist(), bool)
        else:
            values = np.array(column.to_pylist(), object)
        columns.append(_Column(values, None))
    return table.column_names, columns


def _whole(values: np.ndarray) -> np.ndarray:
    """Returns floating numbers as whole ones if all of them are whole and fit into 64 bits."""
    with np.errstate(invalid="ignore"):
        whole = values.astype(np.int64)
    if (whole == values).all():
        return whole
    return values
