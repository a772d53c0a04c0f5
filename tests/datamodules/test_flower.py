"""Flower's partitioners as rules, and rules as Flower's partitioners."""

import numpy as np
import pytest

from datamodules import (
    DigitsDataModule,
    Dirichlet,
    FlowerRule,
    Groups,
    Natural,
    SplitOwn,
    TableDataModule,
    flower_partitioner,
)

# The package datasets sorts in a way that new versions of pyarrow deprecate.
pytestmark = pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning")

LABELS = np.random.default_rng(9).integers(0, 6, 901)


def table(rule, clients, seed, labels=LABELS):
    """Returns the number of samples of each client and class, [M, K]."""
    owned = rule.assign(labels, clients, np.random.default_rng(seed))
    assert len(np.unique(owned.flat)) == len(owned.flat)
    return [np.bincount(labels[owned[i]], minlength=6).tolist() for i in range(clients)]


def flowers(partitioner, labels=LABELS):
    """Returns the same numbers of one of Flower's partitioners."""
    datasets = pytest.importorskip("datasets")
    partitioner.dataset = datasets.Dataset.from_dict({"label": labels})
    parts = [partitioner.load_partition(i)["label"] for i in range(partitioner.num_partitions)]
    return [np.bincount(part, minlength=6).tolist() for part in parts]


@pytest.fixture
def flwr():
    """The partitioners of flwr-datasets."""
    return pytest.importorskip("flwr_datasets.partitioner")


def test_arguments_of_a_partitioner_that_is_an_object_are_refused(one_line):
    with one_line("FlowerRule.arguments", "given as an object"):
        FlowerRule(object(), {"alpha": 1})


def test_any_partitioner_of_flower_is_a_rule(flwr):
    arguments = {"partition_by": "label", "alpha": 0.5, "partition_sizes": [100, 200, 50]}
    rules = {
        "IidPartitioner": ({}, 4),
        "DirichletPartitioner": ({"partition_by": "label", "alpha": 1.0}, 5),
        "InnerDirichletPartitioner": (arguments, 3),
        "LinearPartitioner": ({}, 4),
    }
    for name, (given, clients) in rules.items():
        with pytest.warns() if name.startswith("Inner") else pytest.MonkeyPatch.context():
            data = DigitsDataModule(clients, FlowerRule(name, given), SplitOwn(0.5, 0.0))
            sizes = data.client_sizes + data.partition.test.sizes
        held = np.concatenate([part.flat for part in data.partition.splits.values()])
        assert len(np.unique(held)) == len(held) == sizes.sum()
        assert sizes.tolist() == [100, 200, 50] or sizes.sum() == 1797


def test_an_object_of_flower_s_is_a_rule_and_stays_unused(flwr):
    partitioner = flwr.ShardPartitioner(5, "label", 2, seed=8)
    rule = FlowerRule(partitioner)
    found = [table(rule, 5, seed) for seed in (0, 1)]
    assert found[0] == found[1] == flowers(partitioner)


def test_flower_s_natural_ids_are_columns_of_the_data(flwr, tmp_path):
    lines = [f"{i},{'abc'[i % 3]},{i % 2}" for i in range(30)]
    (tmp_path / "t.csv").write_text("\n".join(["x,ward,y", *lines]))
    rule = FlowerRule("NaturalIdPartitioner", {"partition_by": "ward"})
    arguments = dict(feature_columns=["x"], num_clients=3, partition=rule)
    data = TableDataModule(tmp_path / "t.csv", "y", protocol=SplitOwn(0.0, 0.0), **arguments)
    found = {frozenset(data.partition.train[i].tolist()) for i in range(3)}
    assert found == {frozenset(range(i, 30, 3)) for i in range(3)}


def test_what_flower_refuses_is_one_line(flwr, one_line):
    for name, arguments, parts in (
        ("NoPartitioner", {}, ["'NoPartitioner'", "a class in flwr_datasets.partitioner"]),
        ("DirichletPartitioner", {"alpha": 1.0}, ["DirichletPartitioner failed", "partition_by"]),
        ("IidPartitioner", {"num_partitions": 3}, ["num_clients: 4; it must be 3"]),
    ):
        with one_line(*parts):
            DigitsDataModule(4, FlowerRule(name, arguments)).setup()


def test_a_rule_is_a_partitioner_of_flower(flwr):
    datasets = pytest.importorskip("datasets")
    rows = {"image": np.arange(901), "label": LABELS, "writer": np.arange(901) % 10}
    for rule, clients in (
        (Dirichlet(0.5), 7),
        (Natural("writer"), None),
        (Groups([[1, 2], [5]], "writer"), None),
    ):
        partitioner = flower_partitioner(rule, clients, seed=4)
        assert isinstance(partitioner, flwr.Partitioner)
        partitioner.dataset = datasets.Dataset.from_dict(rows)
        columns = {name: np.asarray(values) for name, values in rows.items()}
        known = rule.bound(columns, 901, 901)
        number = clients or known.count()
        expected = known.assign(LABELS, number, np.random.default_rng(4))
        assert partitioner.num_partitions == number
        for i in range(number):
            part = partitioner.load_partition(i)
            assert part["image"][:] == expected[i].tolist()
    named = flower_partitioner(Dirichlet(0.5), 7, partition_by="name", seed=4)
    named.dataset = datasets.Dataset.from_dict({"name": [f"class {k}" for k in LABELS]})
    expected = Dirichlet(0.5).assign(LABELS, 7, np.random.default_rng(4))
    assert len(named.load_partition(2)) == expected.sizes[2]


class EverySecond:
    """A partitioner as Flower's are: partition i has the rows i, i + 2, ... in their order."""

    dataset = None
    num_partitions = 2

    def load_partition(self, i):
        return self.dataset.select(range(i, len(self.dataset), 2))


def test_a_column_of_the_name_index_is_not_taken_for_the_rows(tmp_path):
    pytest.importorskip("datasets")
    lines = [f"{7 - row},{row % 3},{row % 2}" for row in range(8)]
    (tmp_path / "t.csv").write_text("\n".join(["index,x,y", *lines]))
    data = TableDataModule(
        tmp_path / "t.csv", "y", num_clients=2, partition=FlowerRule(EverySecond()),
        protocol=SplitOwn(0.0, 0.0),
    )  # fmt: skip
    found = [data.partition.train[client].tolist() for client in range(2)]
    assert found == [[0, 2, 4, 6], [1, 3, 5, 7]]
