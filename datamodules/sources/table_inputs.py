"""The columns of a table that are inputs: numbers, and categories as numbers."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from ..errors import ConfigError, RowError, require_value
from .encoding import (
    Column,
    Inputs,
    codes_of,
    gaps_of,
    is_text,
    joined_names,
    levels_of,
    numbers_of,
    one_hot,
    side_by_side,
    zeros_read_away,
)
from .table_columns import ColumnReader
from .table_files import Table

Parts = dict[str, tuple[np.ndarray, np.ndarray]]  # values and gaps [N] of each input, by its name


class InputReader:
    """Reads the columns of the inputs side by side.

    Args:
        columns: Reads and checks single columns.
        categories: "one-hot", "codes" or None, what becomes of categories.
        category_columns: The columns that are categories; None: all columns of text.
        given_levels: The levels of columns whose levels are not those that the tables have.

    Attributes:
        levels: By column, the levels of the categories; known after `read`.
        conversions: In what the inputs differ from the cells, a line for each change.
    """

    def __init__(
        self,
        columns: ColumnReader,
        categories: Literal["one-hot", "codes"] | None,
        category_columns: Sequence[str] | None,
        given_levels: Mapping[str, list[str]],
    ) -> None:
        self._columns = columns
        self._categories = categories
        self._category_columns = category_columns
        self._given_levels = given_levels
        self.levels: dict[str, list[str]] = {}
        self.conversions: list[str] = []

    def read(self, tables: Sequence[Table], features: Sequence[str]) -> Inputs:
        """Returns the columns `features` of all tables, a category as one or several inputs."""
        expected = "at least one column"
        require_value("TableDataModule.feature_columns", features, len(features) > 0, expected)
        categories = self._chosen(tables, features)
        inputs: Parts = {}
        for name in features:
            self._columns.check(tables, "feature_columns", name)
            if name not in categories:
                inputs[name] = self._numbers(tables, name)
                continue
            found = self._category(tables, name)
            for one in found:
                expected = f"a name that no level of {name!r} has"
                taken = one != name and (one in features or one in inputs)
                require_value("TableDataModule.feature_columns", one, not taken, expected)
            inputs |= found
        return side_by_side(inputs)

    def _numbers(self, tables: Sequence[Table], name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the values of a column of numbers, and its gaps."""
        parts = []
        for table in tables:
            with self._columns.naming([table]):
                parts.append(numbers_of("feature_columns", name, table[name]))
            cell = zeros_read_away(table[name])
            if cell is not None:
                self._tell_zeros(name, cell)
        values = np.concatenate([part[0] for part in parts])
        return values, np.concatenate([part[1] for part in parts])

    def _tell_zeros(self, name: str, cell: str) -> None:
        """Says that cells such as 007 are numbers among the inputs."""
        line = f"{name!r}: cells such as {cell} are read as numbers; feature_columns leaves ids out"
        if line not in self.conversions:
            self.conversions.append(line)

    def _chosen(self, tables: Sequence[Table], features: Sequence[str]) -> Sequence[str]:
        """Returns which columns of the inputs are categories."""
        if self._categories is None:
            return []
        given = self._category_columns
        if given is None:
            given = [*self._given_levels]
            for name in features:
                if any(name in table and is_text(table[name]) for table in tables):
                    given.append(name)
        for key, names in (("category_columns", given), ("levels", self._given_levels)):
            for name in names:
                expected = f"one of the columns of the inputs, which are {', '.join(features)}"
                require_value(f"TableDataModule.{key}", name, name in features, expected)
        return given

    def _category(self, tables: Sequence[Table], name: str) -> Parts:
        """Returns the inputs of a category."""
        given = self._given_levels.get(name)
        names = joined_names([table[name] for table in tables], given or ())
        with self._columns.naming(tables):
            levels = levels_of(name, names, given)
        codes, gaps = codes_of(names, levels)
        self.levels[name] = levels
        if self._categories == "codes":
            if gaps.any():
                raise ConfigError(
                    f"TableDataModule.categories: 'codes', but the column {name!r} has no value in "
                    f"{gaps.sum()} rows, and codes have no mean; it must be 'one-hot', or missing "
                    "must be 'drop'"
                )
            shown = ", ".join(f"{level} = {code}" for code, level in enumerate(levels))
            self.conversions.append(f"{name!r}: the levels are numbers, {shown}")
            return {name: (codes, gaps)}
        rows = one_hot(codes, gaps, len(levels))
        self.conversions.append(f"{name!r}: a column of 0 and 1 for each of {', '.join(levels)}")
        return {f"{name}={level}": (rows[:, k], gaps) for k, level in enumerate(levels)}


def texts_of(name: str, column: Column) -> tuple[list[str], np.ndarray]:
    """Returns the texts of a column, "" where one is missing, and where that is, bool [N].

    The texts are as they are written in a CSV file.

    Raises:
        RowError: A value of a Parquet file is no text.
    """
    gaps = gaps_of(column.values)
    cells = column.cells
    if cells is None:
        cells = column.values.tolist()
    texts = []
    for row, cell in enumerate(cells, 1):
        if gaps[row - 1]:
            texts.append("")
        elif isinstance(cell, str):
            texts.append(cell)
        else:
            raise RowError(
                f"TableDataModule.text_column: the column {name!r} holds {cell!r}; it must hold "
                f"text",
                row,
            )
    return texts, gaps
