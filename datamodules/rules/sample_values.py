"""Partition rules by a value of each sample: a client id, a group of ids, a continuous value."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.random import Generator

from ..errors import ConfigError, require_value
from ..partitions.index_arrays import IndexArrays
from .partitioner import Columns, Partitioner, even_owners

Values = Sequence[str | int | float] | str | np.ndarray | None


class PerSample(Partitioner):
    """The base of rules that need one value, a number or text, of every sample.

    Args:
        values: The values [N]; the name of a column of the data set; or None for its client ids.

    Attributes:
        argument: The name of the argument `values` in the constructor of the subclass.
        noun: What a value is, in messages.
        takes_ids: Whether values are ids, of which each text in a CSV file is another one, or
            numbers where the column holds numbers.
    """

    argument = "client_ids"
    noun = "id"
    takes_ids = False

    def __init__(self, values: Values = None) -> None:
        self._key = f"{type(self).__name__}.{self.argument}"  # for messages
        self._column = "client_ids"
        self._values: np.ndarray | None = None
        if isinstance(values, str):
            self._column = values
            setattr(self, self.argument, values)  # for `repr`
        elif values is not None:
            self._values = np.asarray(values)

    def bound(self, columns: Columns, num_train: int, num_samples: int) -> "PerSample":
        rule = self
        if self._values is None:
            if self._column in columns:
                rule = self._with(columns[self._column])
            elif self._column != "client_ids":
                known = "None, as it has no columns"
                if columns:
                    known = f"one of {', '.join(columns)}"
                raise ConfigError(
                    f"{self._key}: {self._column!r} is not a column of the data set; it must be "
                    f"{known}"
                )
        values = rule.sample_values()
        expected = f"({num_train},), one {self.noun} per training sample"
        if num_samples > num_train:
            also = "per training and official test sample"
            expected += f", or ({num_samples},), one {self.noun} {also}"
        holds = len(values) in (num_train, num_samples)
        require_value(f"{self._key}.shape", values.shape, holds, expected)
        return rule

    @property
    def id_columns(self) -> tuple[str, ...]:
        if not self.takes_ids or self._values is not None:
            return ()
        return (self._column,)

    @property
    def reach(self) -> int | None:
        if self._values is None:
            return None
        return len(self._values)

    def restricted(self, samples: np.ndarray | slice) -> "PerSample":
        if self._values is None:
            return self
        return self._with(self._values[samples])

    def sample_values(self, total: int | None = None) -> np.ndarray:
        """Returns the value of every sample, [N]; N is `total` if that is known.

        Raises:
            ConfigError: There are no values, their number is wrong, or some are missing.
        """
        values = self._values
        noun = self.noun
        if values is None:
            raise ConfigError(
                f"{self._key}: None; it must be given, as the data set has no client ids"
            )
        holds = values.ndim == 1 and total in (None, len(values))
        expected = f"({'N' if total is None else total},), one {noun} per sample"
        require_value(f"{self._key}.shape", values.shape, holds, expected)
        if values.dtype.kind in "fO":  # an array of objects may hold text, as arrays of pandas do
            given = values.tolist()
            gaps = [value is None or value != value for value in given]
            missing = sum(gaps)
            first = ""
            if missing:
                first = f", first for sample {gaps.index(True)}"
            if missing or len({isinstance(value, str) for value in given}) > 1:
                raise ConfigError(
                    f"{self._key}: None or NaN for {missing} of {len(given)} samples{first}; all "
                    f"{noun}s must be numbers, or all text"
                )
        return values

    def _with(self, values: np.ndarray) -> "PerSample":
        rule = object.__new__(type(self))
        vars(rule).update(vars(self), _values=np.asarray(values))
        return rule


def add_rule(has_ids: bool, arguments: dict[str, Any]) -> None:
    """Adds the partition that ids of clients mean to a data module's arguments.

    It is `Natural()` where neither `partition` nor `num_clients` is given.
    """
    said = arguments.get("num_clients") is not None or arguments.get("partition") is not None
    if has_ids and not said:
        arguments["partition"] = Natural()


class Natural(PerSample):
    """Samples assigned by a given client id of each sample.

    The clients are numbered in ascending order of their ids. With fewer clients than ids, the ids
    with the most samples are kept (of ids with equally many samples, the lower ones), still in
    ascending order; the samples of the other ids are not used, which the record of a run states.
    With `num_clients=None` there is one client per id.

    Args:
        client_ids: One id (number or text) per sample, or the name of a column of the data set;
            None uses the client ids of the data set. The ids may cover the training samples only;
            then no official test samples are assigned.

    Example:
        >>> from pfl.datamodules import TensorDataModule
        >>> ids = ["ann", "bob", "bob"] * 10
        >>> data = TensorDataModule(np.zeros((30, 2)), np.zeros(30), partition=Natural(ids))
        >>> data.num_clients, data.client_sizes
        (2, array([ 7, 14]))
    """

    counts_clients = True
    takes_ids = True

    def __init__(self, client_ids: Sequence[str | int] | str | np.ndarray | None = None) -> None:
        super().__init__(client_ids)

    def count(self) -> int:
        return len(np.unique(self.sample_values()))

    def client_names(self, owned: IndexArrays) -> list[str]:
        first = owned.flat[np.cumsum(owned.sizes) - owned.sizes]
        return [str(name) for name in self.sample_values()[first]]

    def owners(self, targets: np.ndarray, num_clients: int, rng: Generator) -> np.ndarray:
        names, places = np.unique(self.sample_values(len(targets)), return_inverse=True)
        _check_clients(num_clients, len(names))
        largest = np.argsort(-np.bincount(places), kind="stable")[:num_clients]
        number = np.full(len(names), -1)
        number[np.sort(largest)] = np.arange(num_clients)
        return number[places]

    def describe(self) -> str:
        by = ""
        if self._column != "client_ids":
            by = f", by the column {self._column}"
        return f"samples held by the clients they came from (natural{by})"


class Groups(PerSample):
    """Groups of client ids: each client holds the samples of several ids.

    Args:
        groups: The ids of each client; ids in no group are not used. An id such as 007 must be in
            quotes, as YAML and Python take it for the number 7. None deals all ids to the clients
            in random order; the numbers of ids per client then differ by at most one.
        client_ids: As in `Natural`.

    Example:
        >>> from pfl.datamodules import TensorDataModule
        >>> wards = ["a", "b", "c"] * 10
        >>> rule = Groups([["a", "c"], ["b"]], wards)
        >>> data = TensorDataModule(np.zeros((30, 2)), np.zeros(30), partition=rule)
        >>> data.num_clients, data.client_sizes + data.partition.test.sizes
        (2, array([18,  9]))
    """

    takes_ids = True

    def __init__(
        self,
        groups: Sequence[Sequence[str | int]] | None = None,
        client_ids: Sequence[str | int] | str | np.ndarray | None = None,
    ) -> None:
        super().__init__(client_ids)
        self.groups: list[list[str | int]] | None = None
        if groups is None:
            return
        self.groups = [list(group) for group in groups]
        self.counts_clients = True
        filled = len(self.groups) > 0 and all(self.groups)
        require_value("Groups.groups", groups, filled, "a list of lists with at least one id each")
        given = [str(name) for group in self.groups for name in group]
        twice = sorted({name for name in given if given.count(name) > 1})
        require_value("Groups.groups", groups, not twice, f"without ids in two places ({twice})")

    def __repr__(self) -> str:
        column = ""
        if self._column != "client_ids":
            column = f", client_ids={self._column!r}"
        return f"Groups(groups={self.groups!r}{column})"

    def count(self) -> int | None:
        if self.groups is None:
            return None
        return len(self.groups)

    def client_names(self, owned: IndexArrays) -> list[str] | None:
        if self.groups is None:
            return None
        return ["+".join(map(str, group)) for group in self.groups]

    def owners(self, targets: np.ndarray, num_clients: int, rng: Generator) -> np.ndarray:
        names, owners = np.unique(self.sample_values(len(targets)), return_inverse=True)
        number = np.full(len(names), -1)
        if self.groups is None:
            _check_clients(num_clients, len(names))
            number[rng.permutation(len(names))] = even_owners(len(names), num_clients)
            return number[owners]
        known = len(self.groups)
        require_value(
            "num_clients", num_clients, num_clients == known, f"{known} or null, as in groups"
        )
        place = {}
        for number_of_id, name in enumerate(names.tolist()):
            place[name] = number_of_id
            place[str(name)] = number_of_id  # "7" is the number 7; 7 is not the text "7" or "007"
        for client, group in enumerate(self.groups):
            for name in group:
                expected = "groups of ids that samples have, such as " + repr(names.tolist()[0])
                require_value("Groups.groups", name, name in place, expected)
                number[place[name]] = client
        return number[owners]

    def describe(self) -> str:
        how = "as given"
        if self.groups is None:
            how = "at random"
        return f"samples held by groups of client ids, grouped {how}"


class ByValue(PerSample):
    """Samples sorted by a continuous value and cut into one piece per client.

    The first client holds the samples with the lowest values. The sizes of the clients differ by
    at most one. Samples with equal values are in random order.

    Args:
        values: One number per sample, or the name of a column of the data set; None uses the
            targets, which must be one number per sample.

    Example:
        >>> from pfl.datamodules import TensorDataModule
        >>> age = np.arange(30) % 10
        >>> rule = ByValue(age)
        >>> data = TensorDataModule(age[:, None] / 10, age, num_clients=3, partition=rule)
        >>> data.samples.targets[data.partition.train[0]].unique()
        tensor([0, 1, 2, 3])
    """

    argument = "values"
    noun = "value"

    def __init__(self, values: Sequence[float] | str | np.ndarray | None = None) -> None:
        super().__init__(values)
        self._by_target = values is None

    def bound(self, columns: Columns, num_train: int, num_samples: int) -> "PerSample":
        if self._by_target:
            return self
        return super().bound(columns, num_train, num_samples)

    def owners(self, targets: np.ndarray, num_clients: int, rng: Generator) -> np.ndarray:
        values = targets
        if not self._by_target:
            values = self.sample_values(len(targets))
        kind = f"{values.dtype} of shape {values.shape}"
        holds = values.ndim == 1 and values.dtype.kind in "biuf"
        require_value("ByValue.values", kind, holds, "one number per sample")
        if self._by_target:
            known = not np.isnan(values).any()
            expected = (
                "given, as the streamed samples have no targets: DatasetSamples(data, targets)"
            )
            require_value("ByValue.values", None, known, expected)
        shuffled = rng.permutation(len(values))
        owners = np.empty(len(values), np.int64)
        order = shuffled[np.argsort(values[shuffled], kind="stable")]
        owners[order] = np.sort(even_owners(len(values), num_clients))
        return owners

    def describe(self) -> str:
        what = "a given value"
        if self._by_target:
            what = "their target"
        if self._column != "client_ids":
            what = f"the column {self._column}"
        return f"samples sorted by {what} and cut into one piece per client"


def _check_clients(num_clients: int, names: int) -> None:
    expected = f"at most {names}, the number of different client_ids"
    require_value("num_clients", num_clients, num_clients <= names, expected)
