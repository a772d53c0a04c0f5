"""Rules of two levels, of given sizes and of given label distributions."""

import numpy as np
import pytest

from datamodules import (
    IID,
    DigitDomainsDataModule,
    Dirichlet,
    Groups,
    LabelDistribution,
    Natural,
    Sampled,
    Shards,
    Sizes,
    SplitOwn,
    TensorDataModule,
    Within,
)


def held(rule, targets, clients, seed=0):
    """Returns the samples of each client as lists."""
    owned = rule.assign(np.asarray(targets), clients, np.random.default_rng(seed))
    return [owned[client].tolist() for client in range(clients)]


def test_within_divides_each_domain_among_its_clients():
    data = DigitDomainsDataModule(
        5, Within(Natural("domain"), Dirichlet(0.3)), protocol=SplitOwn(0.5, 0.0)
    )
    # The first 1,797 images are scikit-learn's, of which 1,442 are training samples: these come
    # first, then 4,000 of MNIST, then 355 and 1,000 test samples.
    small = {*range(1442), *range(5442, 5797)}
    samples = [
        {i for arrays in data.partition.splits.values() for i in arrays[client].tolist()}
        for client in range(5)
    ]
    for client in range(5):  # three clients of five in the first of two domains
        assert samples[client] <= small if client < 3 else not samples[client] & small
    assert set.union(*samples[:3]) == small
    assert len(set.union(*samples)) == 6797 == sum(map(len, samples))
    # Within the domain, labels are skewed as by Dirichlet alone on that domain's labels: IID
    # clients would have a largest class of about a tenth.
    counts = data.label_counts()[3:]
    assert (counts.max(1) / counts.sum(1)).max() > 0.2


def test_within_passes_each_rule_the_samples_of_its_group():
    """The rules draw in the order outer, group 0, group 1; the test calls them by hand."""
    labels = np.random.default_rng(5).integers(0, 4, 200)
    found = held(Within(Dirichlet(2.0), Shards(2), groups=3), labels, 8, seed=7)
    rng = np.random.default_rng(7)
    groups = Dirichlet(2.0).assign(labels, 3, rng)
    expected = []
    for group, clients in enumerate((3, 3, 2)):  # eight clients in three groups
        inner = Shards(2).assign(labels[groups[group]], clients, rng)
        expected += [groups[group][inner[client]].tolist() for client in range(clients)]
    assert found == expected


def test_within_nests_and_takes_shared_samples():
    ids, wards = np.repeat([0, 1], 30), np.arange(60) % 3
    deep = Within(Natural(ids), Within(Natural(wards), IID()))
    assert [len(h) for h in held(deep, np.zeros(60), 12)] == [5] * 12
    for client, samples in enumerate(held(deep, np.zeros(60), 12)):
        assert {ids[i] for i in samples} == {client // 6}
        assert {wards[i] for i in samples} == {client % 6 // 2}
    for client, samples in enumerate(held(Within(Natural(ids), Sampled(20)), np.zeros(60), 6)):
        assert len(set(samples)) == 20 and {ids[i] for i in samples} == {client // 3}


def test_within_refuses_what_does_not_fit(one_line):
    with one_line("Within.groups: None; it must be a whole number with outer=IID()"):
        Within(IID(), Shards(2))
    with one_line("num_clients: 1; it must be at least 2, the number of groups"):
        held(Within(Natural([0, 1, 1]), IID()), np.zeros(3), 1)
    with one_line("Within.inner: in group 0: num_clients: 2; it must be from 1 to 1"):
        held(Within(Natural([0, 1, 1]), IID()), np.zeros(3), 4)


def test_sizes_are_those_given_and_samples_are_random():
    hits = np.zeros((3, 10))
    for seed in range(2000):
        first, second = held(Sizes([5, 2]), np.zeros(10), 2, seed)
        assert len(first) == 5 and len(second) == 2 and not set(first) & set(second)
        hits[0, first] += 1
        hits[1, second] += 1
    # Each sample belongs to client 0 with probability 5/10, to client 1 with 2/10.
    for client, share in enumerate((0.5, 0.2)):
        assert (abs(hits[client] - 2000 * share) < 5 * np.sqrt(2000 * share * (1 - share))).all()


def test_sizes_that_do_not_fit_are_refused(one_line):
    with one_line("Sizes.sizes: 0"):
        Sizes([3, 0])
    with one_line("Sizes.sizes: 11; it must be at most 10 together"):
        held(Sizes([5, 6]), np.zeros(10), 2)
    with one_line("num_clients: 3; it must be 2 or null"):
        held(Sizes([5, 2]), np.zeros(10), 3)


def table(rule, labels, clients):
    """Returns the number of samples of each client and class, [M, K], counted one by one."""
    samples = held(rule, labels, clients)
    assert len({i for own in samples for i in own}) == sum(map(len, samples))
    return [[sum(labels[i] == k for i in own) for k in np.unique(labels)] for own in samples]


def test_counts_of_labels_are_met_exactly():
    labels = np.repeat([3, 7, 9], [20, 10, 30])
    wanted = [[5, 0, 1], [15, 10, 2]]
    assert table(LabelDistribution(wanted), labels, 2) == wanted


def test_shares_of_labels_get_the_largest_size_that_fits():
    labels = np.repeat([0, 1], [60, 30])
    # Of class 1 the clients want 0.5 + 0.25 = 0.75 samples for each of their n, so that n = 40.
    rule = LabelDistribution([[0.5, 0.5], [0.75, 0.25]])
    assert table(rule, labels, 2) == [[20, 20], [30, 10]]
    # Shares need not sum to one. 10 samples in the ratio 1:2 are 3 1/3 and 6 2/3, rounded 3 and 7.
    assert table(LabelDistribution([[0.1, 0.2]], size=10), labels, 1) == [[3, 7]]
    # One-hot rows are shares of clients with one class.
    assert table(LabelDistribution(np.eye(2)), labels, 2) == [[30, 0], [0, 30]]


def test_rounding_never_takes_more_than_there_is():
    shares = np.random.default_rng(0).dirichlet([0.3] * 5, size=12)
    labels = np.random.default_rng(1).integers(0, 5, 400)
    counts = np.array(table(LabelDistribution(shares), labels, 12))
    size = counts.sum(1)
    assert (size == size[0]).all() and (abs(counts - shares * size[0]) < 1).all()
    assert (counts.sum(0) <= np.bincount(labels)).all()
    assert (counts.sum(0) / np.bincount(labels)).max() > 0.9  # the class that limits the size


@pytest.mark.parametrize("name", ["shares.npy", "shares.csv"])
def test_label_distributions_are_read_from_files(name, tmp_path):
    wanted = np.array([[2, 3], [0, 4]])
    if name.endswith("npy"):
        np.save(tmp_path / name, wanted)
    else:
        (tmp_path / name).write_text("2,3\n0,4\n")
    rule = LabelDistribution(str(tmp_path / name))
    assert table(rule, np.repeat([0, 1], 10), 2) == wanted.tolist()
    assert repr(rule).startswith(f"LabelDistribution(distribution={str(tmp_path / name)!r}")


def test_label_distributions_that_do_not_fit_are_refused(one_line, tmp_path):
    labels = np.repeat([0, 1], 10)
    with one_line("LabelDistribution.distribution: '11 samples of class number 1'", "at most 10"):
        held(LabelDistribution([[0, 11]]), labels, 1)
    with one_line("LabelDistribution.size", "samples of class number 0", "at most 10"):
        held(LabelDistribution([[0.9, 0.1]], size=20), labels, 1)
    with one_line("LabelDistribution.distribution.shape: (1, 3)", "2 columns"):
        held(LabelDistribution([[1, 2, 3]]), labels, 1)
    with one_line("num_clients: 4; it must be 1 or null"):
        held(LabelDistribution([[1, 2]]), labels, 4)
    with one_line("LabelDistribution.distribution", "rows of different lengths"):
        LabelDistribution([[1, 2], [3]])
    with one_line("rows [1] of zeros"):
        LabelDistribution([[1, 2], [0, 0]])
    for wrong in ([[1, -2]], [[1, float("nan")]], [1, 2]):
        with one_line("LabelDistribution.distribution.shape", "at least 0"):
            LabelDistribution(wrong)
    with one_line("nowhere.csv", "a .npy file, or a .csv file"):
        LabelDistribution(str(tmp_path / "nowhere.csv"))


def test_rules_that_determine_the_clients_need_no_num_clients():
    inputs, labels = np.zeros((40, 1)), np.arange(40) % 2
    rules = [
        (Sizes([10, 20, 5]), 3),
        (LabelDistribution([[5, 5], [10, 2]]), 2),
        (Natural(np.arange(40) % 4), 4),
        (Groups([[0, 1], [2]], np.arange(40) % 3), 2),
    ]
    for rule, clients in rules:
        assert TensorDataModule(inputs, labels, partition=rule).num_clients == clients
