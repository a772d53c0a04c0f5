"""Single columns of tables, and errors that name the row, the file and the client."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from ..errors import RowError, require_value
from .encoding import gaps_of, joined_names
from .table_files import Table, joined_cells, located


class ColumnReader:
    """Reads columns for the arguments of a `TableDataModule`.

    Args:
        client_column: The column of the client ids, which an error names; None: there is none.
        missing: "refuse", "drop" or "mean", what becomes of missing values.
    """

    def __init__(self, client_column: str | None, missing: str) -> None:
        self._client_column = client_column
        self._missing = missing

    def read(
        self,
        tables: Sequence[Table],
        key: str,
        name: str,
        read: Callable[[Sequence[str]], np.ndarray] | None = None,
    ) -> np.ndarray:
        """Returns a column of all tables, without missing values; see `joined_cells`."""
        self.check(tables, key, name)
        joined = joined_cells([table[name] for table in tables], read)
        if joined.dtype.kind == "O":
            return joined.astype(str)
        return joined

    def check(self, tables: Sequence[Table], key: str, name: str) -> None:
        """Raises a ConfigError if a table lacks the column that `key` names, or a needed value.

        With `missing` "mean" the values of `feature_columns` may be missing.
        """
        inputs = key == "feature_columns"
        for table in tables:
            expected = f"one of the columns, which are {', '.join(table)}"
            require_value(f"TableDataModule.{key}", name, name in table, expected)
            empty = gaps_of(table[name].values)
            gaps = int(empty.sum())
            if gaps == 0 or (inputs and self._missing == "mean"):
                continue
            otherwise = ""
            if self._missing == "refuse":
                otherwise = ", or missing must be 'drop'"
                if inputs:
                    otherwise += " or 'mean'"
            text = (
                f"TableDataModule.{key}: the column {name!r} has no value in {gaps} of "
                f"{len(table.rows)} rows; it must have one in each row{otherwise}"
            )
            with self.naming([table]):
                raise RowError(text, int(empty.argmax()) + 1)

    @contextmanager
    def naming(self, tables: Sequence[Table]) -> Iterator[None]:
        """Names inside the row of the file that is wrong, and its client where there is a column.

        The rows of the tables are counted from the first one's.
        """
        try:
            yield
        except RowError as error:
            told = located(error, tables)
            name = self._client_column
            if name is None or any(name not in table for table in tables):
                raise told from None
            clients = joined_names([table[name] for table in tables])
            client = clients[error.row - 1]
            if gaps_of(clients)[error.row - 1]:
                raise told from None
            raise told.of_client(client) from None
