"""Tables in CSV or Parquet files."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..base import FederatedDataModule
from ..errors import ConfigError, require
from ..samples.loaded import Loaded
from ..samples.samples import TensorSamples

_UTF8 = "a CSV file must be saved as UTF-8"


class TableDataModule(FederatedDataModule):
    r"""A table in a CSV or Parquet file: a row for each sample, inputs float32 [N, F].

    A target column of whole numbers, text or booleans holds classes, which are numbered in
    ascending order; a column of floating numbers means regression. The package `pyarrow` reads the
    file (`pip install pyarrow`).

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
        **kwargs: The arguments of `FederatedDataModule`.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from datamodules import Natural
        >>> file = Path(tempfile.mkdtemp()) / "patients.csv"
        >>> rows = [f"{i},{i % 7},{'yes' if i % 2 else 'no'},{'AB'[i % 3 // 2]}" for i in range(30)]
        >>> _ = file.write_text("\n".join(["age,dose,cured,hospital", *rows]))
        >>> data = TableDataModule(file, "cured", client_column="hospital", partition=Natural())
        >>> data.num_clients, data.num_classes, data.input_shape
        (2, 2, torch.Size([2]))
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
        features = self.feature_columns
        if features is None:
            features = [
                name for name in tables[0] if name not in (self.target_column, self.client_column)
            ]
        targets, names = _classes(
            [self._column(table, "target_column", self.target_column) for table in tables]
        )
        inputs = [self._inputs(table, features) for table in tables]
        samples = [TensorSamples(x, y) for x, y in zip(inputs, targets, strict=True)]
        ids = None
        if self.client_column is not None:
            ids = np.concatenate(
                [self._column(table, "client_column", self.client_column) for table in tables]
            )
        columns = {  # for rules such as ByValue("age"); those with missing values are of no use
            name: np.concatenate([table[name] for table in tables])
            for name in tables[0]
            if all(name in table for table in tables)
        }
        test = samples[1] if len(samples) > 1 else None
        return Loaded(samples[0], test, ids, columns, names)

    def _inputs(self, table: dict[str, np.ndarray], features: Sequence[str]) -> torch.Tensor:
        """Returns the columns of the inputs side by side, float32 [N, F]."""
        columns = [self._column(table, "feature_columns", name) for name in features]
        for name, values in zip(features, columns, strict=True):
            if values.dtype.kind not in "biuf":
                row, text = next(
                    (pair for pair in enumerate(values.tolist(), 1) if not _is_number(pair[1])),
                    (1, values.tolist()[0]),  # all are numbers, written as text
                )
                raise ConfigError(
                    f"TableDataModule.feature_columns: the column {name!r} holds {text!r}; it "
                    f"must hold numbers, or be left out (row {row} after the names)"
                )
        require(
            "TableDataModule.feature_columns", features, len(columns) > 0, "at least one column"
        )
        wide = np.stack(columns, 1)
        narrow = wide.astype(np.float32)
        if (narrow != wide).any() and "features" not in self.rounded_arrays:
            self.rounded_arrays.append("features")
        return torch.from_numpy(narrow)

    def _column(self, table: dict[str, np.ndarray], key: str, name: str) -> np.ndarray:
        """Returns a column without missing values."""
        if name not in table:
            raise ConfigError(
                f"TableDataModule.{key}: {name!r}; it must be one of the columns, which are "
                f"{', '.join(table)}"
            )
        values = table[name]
        known = values.dtype.kind not in "Of"
        missing = 0 if known else sum(x is None or x != x or x == "" for x in values)
        if missing:
            raise ConfigError(
                f"TableDataModule.{key}: the column {name!r} has no value in {missing} of "
                f"{len(values)} rows; it must have one in each row"
            )
        return values.astype(str) if values.dtype.kind == "O" else values


def _read(path: Path) -> dict[str, np.ndarray]:
    """Reads a file; columns with text, dates or missing whole numbers are arrays of objects."""
    try:
        from pyarrow import ArrowException, csv, parquet
    except ImportError as error:
        raise ConfigError(
            f"TableDataModule.file: {str(path)!r}; the package pyarrow must be installed to read "
            "it, by: pip install pyarrow"
        ) from error
    key = f"TableDataModule.file: {str(path)!r}"
    try:
        table = (csv.read_csv if path.suffix == ".csv" else parquet.read_table)(path)
        names = table.column_names
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key} has a name of a column in another code; {_UTF8}") from error
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{key} cannot be read: {' '.join(str(error).split())}") from error
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{key} has two columns {twice[0]!r}; names of columns must differ")
    for name in names:
        if path.suffix == ".csv" and "binary" in str(table[name].type):
            raise ConfigError(f"{key} has a column {name!r} in another code; {_UTF8}")
    require("TableDataModule.file", str(path), table.num_rows > 0, "a file with at least one row")
    columns, numbers = {}, ("int", "uint", "halffloat", "float", "double")
    for name in names:
        values = table[name]
        if values.null_count or not str(values.type).startswith(numbers):
            listed = values.to_pylist()
            is_bool = str(values.type) == "bool" and not values.null_count
            columns[name] = np.array(listed, bool if is_bool else object)
        else:
            columns[name] = values.to_numpy()
    return columns


def _is_number(value: object) -> bool:
    """Returns whether a cell holds a number, or the text of one."""
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def _classes(targets: Sequence[np.ndarray]) -> tuple[list[torch.Tensor], list[str] | None]:
    """Returns numbered classes, int64, and their names; or floating targets as float32."""
    if targets[0].dtype.kind == "f":
        return [torch.from_numpy(values.astype(np.float32)) for values in targets], None
    names, labels = np.unique(np.concatenate(targets), return_inverse=True)
    ends = np.cumsum([len(values) for values in targets])[:-1]
    parts = [torch.from_numpy(part.astype(np.int64)) for part in np.split(labels, ends)]
    return parts, [str(name) for name in names]
