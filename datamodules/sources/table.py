"""A data module of tables in CSV or Parquet files."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from ..base import FederatedDataModule
from ..errors import ConfigError, RowError, require_value
from ..protocols.order import sortable
from ..protocols.protocol import SplitOwn
from ..ranges import Count, as_int
from ..rules.partitioner import Partitioner
from ..rules.sample_values import add_rule
from ..samples.loaded import Loaded, NewSamples
from ..samples.memory_map import train_and_test
from .cells import classes_of, identifiers_of, targets_of
from .encoding import Inputs, check_numbers, coarse_lines, gaps_of, narrowed
from .table_columns import ColumnReader
from .table_files import SUFFIXES, Table, joined_cells, path_of_table, read_table, rows_left
from .table_inputs import InputReader, texts_of
from .tokens import tokens_of
from .windows import windows


class TableDataModule(FederatedDataModule):
    r"""A table in a CSV or Parquet file: a row for each sample, inputs float32 [N, F].

    With `text_column` the inputs are the tokens of texts, int64 [N, length], for a network that
    begins with an embedding.

    A target column of whole numbers, text or booleans holds classes, which are numbered in
    ascending order; a column of floating numbers means regression. `target_kind` overrides this.
    Cells such as NA or spaces among numbers are missing values. Parquet files need the package
    `pyarrow` (`pip install pyarrow`); an index of pandas without a name is left out, and decimal
    numbers are numbers.

    In a CSV file the ids of clients and the names of classes are the text of the cells: 007, 7 and
    07 are three clients. They are in the order of text. Only where all cells of the column are
    whole numbers of the digits 0 to 9, without zeros before them (a minus is allowed), they are in
    the order of numbers. This holds for `client_column`, for the columns that `Natural`, `LEAF` and
    `Groups` name, and for classes. Only of targets, true, TRUE and True are one class, `True`.

    In a configuration file, with a client for each hospital:

        data:
          class_path: TableDataModule
          init_args:
            file: patients.csv
            target_column: outcome
            client_column: hospital
            transforms: [Normalize]

    Args:
        file: Path of a `.csv` or `.parquet` file. A CSV file begins with the names of its columns.
        target_column: The column of the targets.
        feature_columns: The columns of the inputs, numbers or booleans; None takes all others.
        client_column: The column of the client ids, numbers or text. If neither `partition` nor
            `num_clients` is given, each id is a client, as with `Natural()`.
        test_file: Path of a file with the same columns: the official test set, if there is one.
        target_kind: What the target column holds. "classes": floating numbers are classes, too,
            and 2.0 is the class 2. "numbers": whole numbers are the values of a regression, or
            labels 0 and 1 for one output. None decides as above.
        class_names: The names of all classes, in the order of their numbers, for a file in which a
            class may be missing, such as that of one hospital of several. None: the classes that
            are in the file, in ascending order.
        missing: What becomes of rows that lack the value of an input, the target or the client.
            "refuse" refuses the file. "drop" leaves them out. "mean" gives an input the mean of
            its column over its client's training samples, in all samples of this client; a row
            without target or client is still refused. A run says how many there are.
        categories: What becomes of columns of text among the inputs, such as blood groups.
            "one-hot": a column of 0 and 1 for each level, named `column=level`. "codes": the number
            of the level, from 0, as for an embedding. None refuses them. Levels are those of all
            clients and of both files, in the order of `client_column`'s ids. An empty cell has no
            level, and a cell NA among text is the level NA.
        category_columns: The columns that are categories, also such that hold numbers, as codes of
            wards do. None: all columns of text.
        levels: By column, the list of its levels in their order, for a file in which a level may be
            missing, such as that of one hospital of several.
        window: The rows of a window, W, for a series: inputs are float32 [N, F, W], as for a
            convolution in time, the W rows of a client that end `horizon` rows before that of the
            target. The transform `TimeFirst` makes [N, W, F] of them. The inputs are then all
            columns but those of client and order, also the target's column, which has its past
            values there. None: each row is a sample.
        horizon: The rows from the end of a window to its target.
        order_column: The column by which the rows of each client are sorted for windows: numbers,
            or dates as in `SplitOwn(order=...)`. None: the rows of the file are in order.
        text_column: The column of the texts that are the inputs, alone. None: the inputs are the
            columns above.
        tokenizer: What makes numbers of a text: "bytes" or another one, as in
            `HuggingFaceDataModule`.
        length: Tokens of a text; further ones are left out. Missing ones are 0, or the padding
            token of the tokenizer.

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
        missing: Literal["refuse", "drop", "mean"] = "refuse",
        categories: Literal["one-hot", "codes"] | None = None,
        category_columns: list[str] | None = None,
        levels: dict[str, list[str | int]] | None = None,
        window: Count | None = None,
        horizon: Count = 1,
        order_column: str | None = None,
        text_column: str | None = None,
        tokenizer: str | Callable[[str], list[int]] = "bytes",
        length: Count = 128,
        **kwargs: Any,
    ) -> None:
        add_rule(client_column is not None, kwargs)
        super().__init__(**kwargs)
        self.file = path_of_table("file", file)
        self.target_column = target_column
        self.feature_columns = feature_columns
        self.client_column = client_column
        self.test_file = None
        if test_file is not None:
            self.test_file = path_of_table("test_file", test_file)
        self.target_kind = target_kind
        self.given_classes: list[str] | None = None
        if class_names is not None:
            self.given_classes = _names("class_names", class_names)
        self.missing = missing
        self.categories = categories
        self.category_columns = category_columns
        self._given_levels = {
            name: _names(f"levels: the levels of {name!r}", names)
            for name, names in (levels or {}).items()
        }
        self.window = as_int(window)
        self.horizon = int(horizon)
        self.order_column = order_column
        self.text_column = text_column
        self.tokenizer = tokenizer
        self.length = int(length)
        self.read_columns: list[str] = []  # of the inputs, in the file; known after `setup`
        self._require_one_kind_of_inputs(levels)
        self._require_columns()

    def _require_one_kind_of_inputs(self, levels: Mapping[str, Sequence] | None) -> None:
        """Refuses arguments of another kind of inputs than the one that others ask for."""
        if self.text_column is not None:
            expected = "None, as text_column has the inputs"
            for key in ("feature_columns", "categories", "window"):
                other = getattr(self, key)
                require_value(f"TableDataModule.{key}", other, other is None, expected)
            expected = "'refuse' or 'drop', as texts have no mean"
            holds = self.missing != "mean"
            require_value("TableDataModule.missing", self.missing, holds, expected)
        for key, value in (("category_columns", self.category_columns), ("levels", levels)):
            expected = "None, unless categories is one-hot or codes"
            holds = value is None or self.categories is not None
            require_value(f"TableDataModule.{key}", value, holds, expected)
        if self.window is None:
            expected = "1, as there is no window"
            holds = self.horizon == 1
            require_value("TableDataModule.horizon", self.horizon, holds, expected)
            expected = "None, as there is no window"
            holds = self.order_column is None
            require_value("TableDataModule.order_column", self.order_column, holds, expected)
        else:
            expected = "'refuse', as a series with gaps has no windows of equal steps"
            holds = self.missing == "refuse"
            require_value("TableDataModule.missing", self.missing, holds, expected)

    def _require_columns(self) -> None:
        """Refuses columns that are chosen twice, and names of classes of numbers."""
        if self.given_classes is not None:
            expected = "None, as target_kind is numbers"
            holds = self.target_kind != "numbers"
            require_value("TableDataModule.class_names", self.given_classes, holds, expected)
        if self.feature_columns is None:
            return
        taken = {self.client_column}
        if self.window is None:
            taken.add(self.target_column)
        columns = set(self.feature_columns)
        once = len(self.feature_columns) == len(columns)
        holds = bool(columns) and once and not taken & columns
        expected = "columns for inputs only, each once"
        require_value("TableDataModule.feature_columns", self.feature_columns, holds, expected)

    def load(self) -> Loaded:
        self.conversions = []
        tables = [read_table(path, self.conversions) for path in self._paths()]
        for table in tables[1:]:
            assert self.test_file is not None
            table.file = self.test_file.name
        features = self._features(tables[0])
        self.read_columns = features
        if self.missing == "drop":
            tables = self._without_gaps(tables, features)
        targets, names = self._targets(tables)
        ids = self._client_ids(tables)
        inputs = self._inputs(tables, features)
        columns = self._columns_of_rules(tables)
        num_train = len(tables[0].rows)
        sample_rows = np.concatenate([table.rows for table in tables])
        values = inputs.values
        if self.window is not None:
            rows, last, num_train = self._windows(tables, ids, columns)
            values = np.ascontiguousarray(values[rows].transpose(0, 2, 1))
            targets = targets[last]
            columns = {name: column[last] for name, column in columns.items()}
            sample_rows = sample_rows[last]
            if ids is not None:
                ids = ids[last]
        self._sample_rows = np.split(sample_rows, [num_train])
        train, test = train_and_test(values, targets, num_train)
        missing = None
        if self.missing == "mean":
            missing = inputs.missing
        return Loaded(train, test, ids, columns, names, missing)

    def in_file(self, error: RowError) -> RowError:
        train, test = self._sample_rows
        place = error.row - 1
        if place < len(train):
            return RowError(error.text, int(train[place]))
        assert self.test_file is not None
        return RowError(error.text, int(test[place - len(train)]), self.test_file.name)

    def read_like(self, other: FederatedDataModule) -> None:
        super().read_like(other)
        if not isinstance(other, TableDataModule):
            return
        if self.text_column is None and self.feature_columns is None:
            self.feature_columns = list(other.read_columns)
            self.text_column = other.text_column
            self.tokenizer = other.tokenizer
            self.length = other.length
        if self.categories is None:
            self.categories = other.categories
        if self.target_kind is None:
            self.target_kind = other.target_kind
        self.take_names(other.class_names, other.category_levels, other.class_names is None)
        if self.missing == "refuse":
            self.missing = other.missing

    def take_names(
        self,
        class_names: Sequence[str] | None,
        levels: Mapping[str, Sequence[str]],
        numbers: bool,
    ) -> None:
        """Takes the classes, levels and kind of targets of other data where none are given.

        A file may lack a class or a level, or have whole numbers alone where others have text or
        fractions.

        Args:
            class_names: The names of the classes, in order; None: there are none.
            levels: By column of categories its levels, in order.
            numbers: Whether targets are numbers.
        """
        if self.categories is not None:
            chosen = self.feature_columns
            own = {n: list(names) for n, names in levels.items() if chosen is None or n in chosen}
            if self.category_columns is None and own:
                self.category_columns = list(own)
            self._given_levels = {**own, **self._given_levels}
        if class_names is not None and self.given_classes is None:
            self.given_classes = list(class_names)
        if numbers and self.target_kind is None and self.given_classes is None:
            self.target_kind = "numbers"

    def new_samples(self, path: Path) -> NewSamples:
        """Reads the rows of a file, with the numbers of the rows, from 1, as ids.

        Columns and levels are those that the module has read; the target may be missing. With
        `missing: mean` a missing value is NaN, and else refused. Of a series the inputs are the
        windows that end with each row, for which a client's first rows are too few; the times at
        which they end are ids, too.
        """
        if path.suffix not in SUFFIXES:
            raise ConfigError("it must be a .csv or .parquet file, as the run's")
        self._ready()
        table = read_table(path, [])
        for name in self.read_columns:
            if name not in table:
                raise ConfigError(
                    f"it lacks the column {name!r}, an input of the run; its columns are "
                    f"{', '.join(table)}"
                )
        if self.text_column is not None:
            inputs, _ = self._texts([table])
        else:
            single = ColumnReader(self.client_column, "mean")  # gaps are refused below
            levels = self.category_levels
            reader = InputReader(single, self.categories, list(levels), levels)
            inputs = reader.read([table], self.read_columns)
        if self.missing == "mean":
            inputs.values[inputs.missing] = np.nan
        elif inputs.missing.any():
            row, place = np.argwhere(inputs.missing)[0].tolist()
            raise ConfigError(
                f"row {row + 1} after the names has no value of {inputs.names[place]!r}; a "
                f"prediction needs one"
            )
        values = inputs.values
        places = np.arange(len(values))
        if self.window is not None:
            values, table, places = self._windows_of_rows(path, table, values)
        columns = {name: np.array(one.cells or one.values, object) for name, one in table.items()}
        ids = {"row": places + 1}
        if self.order_column is not None:  # of windows
            ids[self.order_column] = columns[self.order_column]
        clients = None
        naming = ""
        if self.client_column is not None:
            naming = f"rows with the column {self.client_column!r}"
            if self.client_column in columns:
                clients = [str(cell) for cell in columns[self.client_column]]
        return NewSamples(values, ids, clients, naming, columns)

    def _windows_of_rows(
        self, path: Path, table: Table, values: np.ndarray
    ) -> tuple[np.ndarray, Table, np.ndarray]:
        """Returns the windows [n, F, W] of values [N, F], and the rows with which they end."""
        assert self.window is not None
        ids = np.zeros(len(values), np.int64)
        if self.client_column is not None and self.client_column in table:
            ids = self._reader.read([table], "client_column", self.client_column, identifiers_of)
        order = None
        if self.order_column is not None:
            column = self._reader.read([table], "order_column", self.order_column)
            with self._reader.naming([table]):
                order = sortable("TableDataModule.order_column", self.order_column, column)
        rows, last = windows(ids, order, self.window, horizon=0)
        expected = f"at most the number of rows of a client in {path}"
        require_value("TableDataModule.window", self.window, len(rows) > 0, expected)
        others = np.ones(len(values), bool)
        others[last] = False
        kept = rows_left(table, others)
        return np.ascontiguousarray(values[rows].transpose(0, 2, 1)), kept, last

    @property
    def _reader(self) -> ColumnReader:
        return ColumnReader(self.client_column, self.missing)

    def _client_ids(self, tables: Sequence[Table]) -> np.ndarray | None:
        """Returns the ids of the samples' clients; None if there is no column of them."""
        if self.client_column is None:
            return None
        ids = self._reader.read(tables, "client_column", self.client_column, identifiers_of)
        rule = type(self.partitioner)
        if rule.bound is Partitioner.bound:  # it sees no column
            rank_zero_warn(
                f"TableDataModule.client_column: {self.client_column!r} is not used by "
                f"{rule.__name__}; with partition: Natural each of its values is a client",
                category=UserWarning,
            )
        return ids

    def _inputs(self, tables: Sequence[Table], features: Sequence[str]) -> Inputs:
        """Returns the inputs of all rows, and notes their names, levels and changes."""
        if self.text_column is not None:
            self._reader.check(tables, "text_column", self.text_column)
            inputs, line = self._texts(tables)
            self.conversions.append(line)
            return inputs
        reader = InputReader(
            self._reader, self.categories, self.category_columns, self._given_levels
        )
        inputs = reader.read(tables, features)
        self.category_levels = reader.levels
        self.conversions += reader.conversions
        self.feature_names = inputs.names
        if inputs.rounded:
            if "features" not in self.rounded_arrays:
                self.rounded_arrays.append("features")
            self._tell_rounded(inputs.rounded, inputs.coarse)
        return inputs

    def _texts(self, tables: Sequence[Table]) -> tuple[Inputs, str]:
        """Returns the tokens of the texts of all rows, and a line that says what they are.

        Where a text is missing, they are those of an empty one.
        """
        assert self.text_column is not None
        texts: list[str] = []
        gaps = []
        for table in tables:
            with self._reader.naming([table]):
                own, missing = texts_of(self.text_column, table[self.text_column])
            texts += own
            gaps.append(missing)
        tokens, line = tokens_of(self.text_column, texts, self.tokenizer, self.length)
        return Inputs(tokens, [self.text_column], np.concatenate(gaps)[:, None], [], []), line

    def _columns_of_rules(self, tables: Sequence[Table]) -> dict[str, np.ndarray]:
        """Returns the columns that all tables have, for rules such as ByValue("age")."""
        columns = {}
        for name in tables[0]:
            if not all(name in table for table in tables):
                continue
            read = None
            if name in self.partitioner.id_columns:
                self._reader.check(tables, "partition", name)
                read = identifiers_of
            columns[name] = joined_cells([table[name] for table in tables], read)
        return columns

    def _paths(self) -> list[Path]:
        return [path for path in (self.file, self.test_file) if path is not None]

    def _features(self, table: Table) -> list[str]:
        """Returns the names of the columns of the inputs."""
        if self.text_column is not None:
            return [self.text_column]
        if self.feature_columns is not None:
            return list(self.feature_columns)
        known = {self.client_column, self.order_column}
        if self.window is None:
            known.add(self.target_column)
        if isinstance(self.protocol, SplitOwn):
            known.add(self.protocol.order)
        return [name for name in table if name not in known]

    def _without_gaps(self, tables: Sequence[Table], features: Sequence[str]) -> list[Table]:
        """Returns the tables without the rows that lack a value that is needed."""
        needed = [*features, self.target_column]
        if self.client_column is not None:
            needed.append(self.client_column)
        needed += [name for name in self.partitioner.id_columns if name not in needed]
        result = []
        counts = dict.fromkeys(needed, 0)
        dropped = 0
        total = 0
        for table in tables:
            gaps = np.zeros(len(table.rows), bool)
            for name in needed:
                if name not in table:  # this is refused later
                    continue
                mine = gaps_of(table[name].values)
                counts[name] += int(mine.sum())
                gaps |= mine
            total += len(gaps)
            dropped += int(gaps.sum())
            holds = not gaps.all()
            expected = "'refuse' or 'mean', as each row of a file lacks a value"
            require_value("TableDataModule.missing", self.missing, holds, expected)
            if gaps.any():
                table = rows_left(table, gaps)
            result.append(table)
        if dropped:
            where = ", ".join(f"{name!r} {count}" for name, count in counts.items() if count)
            self.conversions.append(
                f"{dropped} of {total} rows are left out, as they have no value in: {where}"
            )
        return result

    def _windows(
        self, tables: Sequence[Table], ids: np.ndarray | None, columns: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Returns rows and target's row of each window, and how many are of the first file."""
        assert self.window is not None
        if isinstance(self.protocol, SplitOwn) and self.protocol.order is None:
            rank_zero_warn(
                "TableDataModule.protocol: SplitOwn at random puts windows that overlap into "
                "training and test; SplitOwn(order=COLUMN) tests on each client's last windows",
                category=UserWarning,
            )
        order = None
        if self.order_column is not None:
            holds = self.order_column in columns
            expected = f"one of the columns, which are {', '.join(columns)}"
            require_value("TableDataModule.order_column", self.order_column, holds, expected)
            key = "TableDataModule.order_column"
            with self._reader.naming(tables):
                order = sortable(key, self.order_column, columns[self.order_column])
        found = []
        begin = 0
        for table in tables:
            end = begin + len(table.rows)
            series = np.zeros(end - begin, np.int64)
            if ids is not None:
                series = ids[begin:end]
            own = None
            if order is not None:
                own = order[begin:end]
            rows, last = windows(series, own, self.window, self.horizon)
            needed = self.window + self.horizon
            expected = f"fewer rows, as no client of the file has {needed} rows"
            require_value("TableDataModule.window", self.window, len(rows) > 0, expected)
            found.append((rows + begin, last + begin))
            begin = end
        rows = np.concatenate([pair[0] for pair in found])
        last = np.concatenate([pair[1] for pair in found])
        return rows, last, len(found[0][0])

    @property
    def num_classes(self) -> int | None:
        """K, the number of given `class_names`, or the largest integer target plus one."""
        if self.given_classes is not None:
            return len(self.given_classes)
        return super().num_classes

    def _targets(self, tables: Sequence[Table]) -> tuple[np.ndarray, list[str] | None]:
        """Returns numbered classes, int64, and their names; or floating targets as float32."""
        key = "target_column"
        name = self.target_column
        if self.target_kind == "numbers":
            values = self._reader.read(tables, key, name)
            with self._reader.naming(tables):
                check_numbers(key, name, values, np.zeros(len(values), bool))
            return self._rounded_targets(values), None
        if self.target_kind == "classes":
            targets = self._reader.read(tables, key, name, classes_of)
            if targets.dtype.kind == "f":  # of a Parquet file
                targets = _whole(targets)
        else:
            targets = self._reader.read(tables, key, name, targets_of)
            if targets.dtype.kind == "f" and self.given_classes is None:
                return self._rounded_targets(targets), None
        found, labels = np.unique(targets, return_inverse=True)
        names = [str(name) for name in found]
        if self.given_classes is None:
            return labels.astype(np.int64), names
        given = self.given_classes
        known = given
        if targets.dtype.kind == "b":  # a file may have true, True or TRUE
            known = [one.capitalize() for one in given]
        for number, one in enumerate(names):
            if one not in known:
                text = (
                    f"TableDataModule.target_column: a class of the column {name!r}: {one!r}; it "
                    f"must be one of class_names, which are {', '.join(given)}"
                )
                with self._reader.naming(tables):
                    raise RowError(text, int((labels == number).argmax()) + 1)
        numbers = np.array([known.index(one) for one in names], np.int64)
        return numbers[labels], given

    def _rounded_targets(self, values: np.ndarray) -> np.ndarray:
        """Returns the values of a regression as float32, and says if they lose digits."""
        narrow, lost = narrowed(values)
        if lost:
            coarse = coarse_lines(self.target_column, values, narrow)
            self._tell_rounded([self.target_column], coarse)
        return narrow

    def _tell_rounded(self, names: Sequence[str], coarse: Sequence[str]) -> None:
        """Says which columns are rounded, and which of them lose their differences by it."""
        rounded = f"{', '.join(map(repr, names))}: rounded to float32, with 7 digits"
        for line in (rounded, *coarse):
            if line not in self.conversions:  # inputs of a series are past targets
                self.conversions.append(line)


def _names(key: str, given: Sequence[str | int]) -> list[str]:
    """Returns names as text.

    Raises:
        ConfigError: There is none, or two are equal.
    """
    names = [str(name) for name in given]
    holds = 0 < len(names) == len({*names})
    require_value(f"TableDataModule.{key}", given, holds, "a list of different names")
    return names


def _whole(values: np.ndarray) -> np.ndarray:
    """Returns floating numbers as whole ones if all of them are whole and fit into 64 bits."""
    with np.errstate(invalid="ignore"):
        whole = values.astype(np.int64)
    if (whole == values).all():
        return whole
    return values
