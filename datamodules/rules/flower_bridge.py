"""Partitioners of the package `flwr-datasets` as rules, and rules as such partitioners."""

import copy
import inspect
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np
from numpy.random import Generator

from ..errors import ConfigError, error_line, require_value
from ..partitions.index_arrays import IndexArrays, Ragged
from .partitioner import Columns, Partitioner

_ROWS = "rows of the data module"  # a column that no table has, as many have an "index"


class FlowerRule(Partitioner):
    """Any partitioner of the package `flwr-datasets` as a rule (`pip install flwr-datasets`).

    The partitioner sees a data set with the columns `label` (the targets), `client_ids` and the
    other columns of the data module, as far as they exist. It gets the number of clients as
    `num_partitions` and a `seed` from the data module's, unless `arguments` have them.

    In a configuration file:

        partition:
          class_path: FlowerRule
          init_args:
            partitioner: DirichletPartitioner
            arguments: {partition_by: label, alpha: 0.3}

    Args:
        partitioner: The name of a class in `flwr_datasets.partitioner`, the path of another class,
            or a partitioner without a data set.
        arguments: The arguments of the class, if `partitioner` is a name.

    Example:
        >>> rule = FlowerRule("DirichletPartitioner", {"partition_by": "label", "alpha": 0.3})
        >>> rule.describe()
        'the partitioner DirichletPartitioner of Flower (partition_by=label, alpha=0.3)'
    """

    overlaps = True  # it is for Flower's partitioner to say

    def __init__(self, partitioner: Any, arguments: dict[str, Any] | None = None) -> None:
        is_name = isinstance(partitioner, str)
        expected = "None, as the partitioner is given as an object"
        require_value("FlowerRule.arguments", arguments, is_name or arguments is None, expected)
        self.partitioner = partitioner
        self.arguments = dict(arguments or {})
        self._columns: dict[str, np.ndarray] = {}

    def bound(self, columns: Columns, num_train: int, num_samples: int) -> "FlowerRule":
        rule = copy.copy(self)
        rule._columns = dict(columns)
        return rule

    @property
    def id_columns(self) -> tuple[str, ...]:
        if "NaturalId" not in self._name:
            return ()
        if isinstance(self.partitioner, str):
            return (self.arguments.get("partition_by", "client_ids"),)
        # Flower's partitioners keep the name of the column to themselves.
        kept = {name.strip("_"): value for name, value in vars(self.partitioner).items()}
        return (kept.get("partition_by", "client_ids"),)

    @property
    def reach(self) -> int | None:
        return min(map(len, self._columns.values()), default=None)

    def restricted(self, samples: np.ndarray | slice) -> "FlowerRule":
        rule = copy.copy(self)
        rule._columns = {name: values[samples] for name, values in self._columns.items()}
        return rule

    def assign(self, targets: np.ndarray, num_clients: int, rng: Generator) -> IndexArrays:
        seed = int(rng.integers(1 << 31))
        datasets = _flower("datasets")
        columns = {**self._columns, _ROWS: np.arange(len(targets))}
        if targets.ndim == 1:
            columns["label"] = targets
        try:
            partitioner = self._build(num_clients, seed)
            partitioner.dataset = datasets.Dataset.from_dict(columns)
            made = partitioner.num_partitions
            parts = [np.sort(partitioner.load_partition(i)[_ROWS]) for i in range(made)]
        except ConfigError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            key = f"FlowerRule.partitioner: {self._name}"
            raise ConfigError(f"{key} failed: {error_line(error)}") from error
        require_value(
            "num_clients", num_clients, made == num_clients, f"{made}, as of {self._name}"
        )
        sizes = np.array([len(part) for part in parts])
        return Ragged.from_sizes(np.concatenate(parts).astype(np.int64), sizes)

    def _build(self, num_clients: int, seed: int) -> Any:
        """Returns a new partitioner without a data set."""
        if not isinstance(self.partitioner, str):
            return copy.deepcopy(self.partitioner)
        package, _, name = self.partitioner.rpartition(".")
        kind = getattr(_flower(package or "flwr_datasets.partitioner"), name, None)
        if kind is None:
            raise ConfigError(
                f"FlowerRule.partitioner: {self.partitioner!r}; it must be the name of a class in "
                "flwr_datasets.partitioner, such as DirichletPartitioner"
            )
        known = inspect.signature(kind).parameters
        ours = {"num_partitions": num_clients, "seed": seed}
        return kind(**{**{k: v for k, v in ours.items() if k in known}, **self.arguments})

    @property
    def _name(self) -> str:
        given = self.partitioner
        if isinstance(given, str):
            return given
        return type(given).__name__

    def describe(self) -> str:
        arguments = ", ".join(f"{key}={value}" for key, value in self.arguments.items())
        return f"the partitioner {self._name} of Flower ({arguments})"


def flower_partitioner(
    rule: Partitioner, num_partitions: int | None = None, partition_by: str = "label", seed: int = 0
) -> Any:
    """Returns a rule as one of Flower's partitioners (`flwr_datasets.partitioner.Partitioner`).

    Args:
        rule: A rule of this package. One that needs client ids or other values of the samples
            takes them from the columns of the data set, such as `Natural("writer_id")`.
        num_partitions: The number of clients; None with a rule that determines it.
        partition_by: The column of the labels, numbers or text.

    Example:
        >>> from importlib.util import find_spec
        >>> from pfl.datamodules import Shards
        >>> if find_spec("flwr_datasets"):  # Flower takes it as FederatedDataset(partitioners=...)
        ...     from datasets import Dataset
        ...     shards = flower_partitioner(Shards(2), num_partitions=3)
        ...     shards.dataset = Dataset.from_dict({"label": [0, 1, 2] * 10})
        ...     assert len(shards.load_partition(0)) == 10
    """
    base = _flower("flwr_datasets.partitioner").Partitioner

    class RulePartitioner(base):  # type: ignore[misc, valid-type]
        """A rule as Flower's partitioner."""

        @cached_property
        def owned(self) -> IndexArrays:
            """The rows of each partition."""
            labels = np.asarray(self.dataset[partition_by])
            if labels.dtype.kind not in "biuf":
                labels = np.unique(labels, return_inverse=True)[1]
            known = rule.bound(_Columns(self.dataset), len(labels), len(labels))
            number = num_partitions
            if number is None:
                number = known.count()
            expected = f"a whole number with {rule!r}"
            require_value("flower_partitioner.num_partitions", number, number is not None, expected)
            assert number is not None
            return known.assign(labels, number, np.random.default_rng(seed))

        @property
        def num_partitions(self) -> int:
            """The number of partitions."""
            return len(self.owned)

        def load_partition(self, partition_id: int) -> Any:
            """Returns the rows of a partition as a `datasets.Dataset`."""
            return self.dataset.select(self.owned[partition_id])

    return RulePartitioner()


class _Columns(Mapping[str, np.ndarray]):
    """The columns of a `datasets.Dataset`, each read when a rule asks for it."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._dataset.column_names:
            raise KeyError(name)
        return np.asarray(self._dataset[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._dataset.column_names)

    def __len__(self) -> int:
        return len(self._dataset.column_names)


def _flower(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"FlowerRule.partitioner: the module {module} cannot be imported; for Flower's "
            "partitioners the package must be installed, by: pip install flwr-datasets"
        ) from error
