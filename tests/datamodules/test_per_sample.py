"""Rules by a value of each sample: groups of ids, continuous values, columns of a data set."""

import numpy as np
import pytest

from datamodules import ByValue, Groups, Natural, SplitOwn, TableDataModule, TensorDataModule


def held(rule, targets, clients, seed=0):
    """Returns the samples of each client as lists."""
    owned = rule.assign(np.asarray(targets), clients, np.random.default_rng(seed))
    return [owned[client].tolist() for client in range(clients)]


def test_groups_join_the_samples_of_their_ids():
    ids = np.array(["a", "b", "c", "a", "d", "b"])
    assert held(Groups([["d", "a"], ["b"]], ids), np.zeros(6), 2) == [[0, 3, 4], [1, 5]]


def test_random_groups_keep_ids_together_and_have_as_many_ids():
    ids = np.random.default_rng(0).integers(0, 11, 300)
    seen = set()
    for seed in range(20):
        samples = held(Groups(client_ids=ids), np.zeros(300), 4, seed)
        groups = [frozenset(ids[own].tolist()) for own in samples]
        assert sorted(map(len, groups)) == [2, 3, 3, 3]
        assert frozenset.union(*groups) == set(range(11)) and sum(map(len, samples)) == 300
        seen.add(frozenset(groups))
    assert len(seen) == 20  # of 11! / (3!^3 2! 3!) = 15,400 ways: equal ones are improbable


def test_groups_that_do_not_fit_are_refused(one_line):
    ids = np.array([1, 2, 3])
    with one_line("Groups.groups: 4; it must be groups of ids that samples have"):
        held(Groups([[1], [4]], ids), np.zeros(3), 2)
    with one_line("num_clients: 3; it must be 2 or null, as in groups"):
        held(Groups([[1], [2]], ids), np.zeros(3), 3)
    with one_line("Groups.groups", "without ids in two places (['2'])"):
        Groups([[1, 2], [2]])
    with one_line("Groups.groups", "at least one id each"):
        Groups([[1], []])
    with one_line("Groups.client_ids: None; it must be given"):
        held(Groups(), np.zeros(3), 2)


def test_by_value_cuts_the_sorted_samples():
    values = np.array([0.5, -1.0, 3.0, 2.0, 0.0, 9.0, 4.0])
    # Sorted: samples 1, 4, 0, 3, 2, 6, 5; seven samples of three clients are 3, 2 and 2.
    assert held(ByValue(values), np.zeros(7), 3) == [[0, 1, 4], [2, 3], [5, 6]]
    # Without values the targets count.
    assert held(ByValue(), values, 3) == [[0, 1, 4], [2, 3], [5, 6]]


def test_by_value_draws_among_equal_values():
    hits = np.zeros(10)
    for seed in range(2000):
        hits[held(ByValue(np.ones(10)), np.zeros(10), 2, seed)[0]] += 1
    assert (abs(hits - 1000) < 5 * np.sqrt(2000 / 4)).all()


def test_by_value_refuses_text_and_several_targets(one_line):
    with one_line("ByValue.values", "one number per sample"):
        held(ByValue(["a", "b"]), np.zeros(2), 2)
    with one_line("ByValue.values", "of shape (4, 2)"):
        held(ByValue(), np.zeros((4, 2)), 2)
    with one_line(
        "ByValue.values", "None or NaN for 1 of 2 samples, first for sample 1; all values must be"
    ):
        held(ByValue([1.0, np.nan]), np.zeros(2), 2)


@pytest.fixture
def patients(tmp_path):
    """A table of 30 patients of two hospitals with three wards; the age falls with the row."""
    lines = [f"{60 - i},{'AB'[i % 2]},w{i % 3},{i % 2}" for i in range(30)]
    (tmp_path / "p.csv").write_text("\n".join(["age,hospital,ward,cured", *lines]))

    def build(rule, clients=None):
        arguments = dict(feature_columns=["age"], num_clients=clients, partition=rule)
        return TableDataModule(
            tmp_path / "p.csv", "cured", protocol=SplitOwn(0.0, 0.0), **arguments
        )

    return build


def test_columns_of_a_table_are_named(patients):
    data = patients(Natural("ward"))
    assert [data.partition.train[i].tolist() for i in range(3)] == [
        list(range(i, 30, 3)) for i in range(3)
    ]
    assert repr(data.partitioner) == "Natural(client_ids='ward')"
    data = patients(ByValue("age"), 2)
    assert data.partition.train[0].tolist() == list(range(15, 30))
    data = patients(Groups([["w0", "w2"], ["w1"]], "ward"))
    assert data.partition.train[1].tolist() == list(range(1, 30, 3))


def test_unknown_columns_are_refused(patients, one_line):
    with one_line(
        "Natural.client_ids: 'room' is not a column", "one of age, hospital, ward, cured"
    ):
        patients(Natural("room")).setup()
    data = TensorDataModule(np.zeros((4, 1)), np.zeros(4), num_clients=2, partition=Natural("x"))
    with one_line("Natural.client_ids: 'x' is not a column of the data set; it must be None"):
        data.setup()


def test_ids_of_training_samples_only_leave_official_test_samples_to_nobody():
    given = np.zeros((10, 1)), np.zeros(10, int), np.zeros((4, 1)), np.zeros(4, int)
    for rule in (Natural(), Groups([[0], [1]])):
        data = TensorDataModule(*given, client_ids=np.arange(10) % 2, partition=rule)
        held = {i for arrays in data.partition.splits.values() for i in arrays.flat.tolist()}
        assert held == set(range(10)) and data.left_out()["samples_unused"] == 4
