"""Partition rules with label skew: Dirichlet in both conventions, ClassesPerClient, Shards."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules import IID, ClassesPerClient, ConfigError, Dirichlet, LogNormal, Natural, Shards


def table(rule, labels, clients, seed=0):
    """Returns the number of samples of each class and client, [K, M], counted one by one."""
    owned = rule.assign(labels, clients, np.random.default_rng(seed))
    counts = np.zeros((labels.max() + 1, clients), int)
    for client in range(clients):
        for sample in owned[client]:
            counts[labels[sample], client] += 1
    return counts


def within_five_sigma(draws, mean):
    """Returns whether the mean of independent draws agrees with its expectation."""
    return abs(draws.mean() - mean) < 5 * draws.std() / np.sqrt(len(draws))


@pytest.mark.parametrize("alpha", [0.2, 0.5, 3.0])
def test_dirichlet_over_clients_has_the_moments_of_a_dirichlet(alpha):
    classes, per_class, clients = 600, 150, 5
    labels = np.repeat(np.arange(classes), per_class)
    shares = table(Dirichlet(alpha, min_size=1), labels, clients) / per_class
    # For p ~ Dir_M(alpha, ..., alpha): E p_i = 1/M, Var p_i = (1/M)(1 - 1/M) / (M alpha + 1) and
    # Cov(p_i, p_j) = -(1/M^2) / (M alpha + 1). Classes are independent draws. Rounding to whole
    # samples moves a share by less than 1/150, with a variance of at most 1/(4 * 150^2) = 1e-5.
    deviations = shares - 1 / clients
    variance = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    for i in range(clients):
        assert within_five_sigma(shares[:, i], 1 / clients)
        assert within_five_sigma(deviations[:, i] ** 2, variance)
    covariance = -1 / clients**2 / (clients * alpha + 1)
    assert within_five_sigma(deviations[:, 0] * deviations[:, 1], covariance)


@pytest.mark.parametrize("alpha", [1.0, 5.0])
def test_dirichlet_over_labels_has_the_moments_of_a_dirichlet(alpha):
    clients, size = 2000, 50
    prior = np.array([0.1, 0.2, 0.3, 0.4])
    labels = np.repeat(np.arange(4), (prior * clients * size).astype(int))
    shares = table(Dirichlet(alpha, over="labels"), labels, clients).T / size
    # q ~ Dir(alpha prior) and a count of n samples drawn by q is Dirichlet-multinomial:
    # E = prior, Var(count / n) = prior (1 - prior) (n + alpha) / (n (1 + alpha)).
    # The clients may draw a label more often than it has samples. The draws of M clients fluctuate
    # relatively by sqrt(Var / M) / prior <= 5 %, by which a client's share may change. The square
    # of a share then changes by less than twice as much, 10 %.
    variance = prior * (1 - prior) * (size + alpha) / (size * (1 + alpha))
    squares = (shares - prior) ** 2
    error = 5 * squares.std(0) / np.sqrt(clients) + variance / 10
    assert (abs(squares.mean(0) - variance) < error).all()
    # The bound is tight enough to tell this convention from Dir(alpha, ..., alpha), whose total
    # concentration is K alpha and whose mean is uniform.
    other = 0.25 * 0.75 * (size + 4 * alpha) / (size * (1 + 4 * alpha))
    assert (abs(squares.mean(0) - other) > error).any()


def test_dirichlet_with_a_huge_alpha_is_near_iid():
    labels = np.repeat(np.arange(10), 500)
    over_clients = table(Dirichlet(1e9), labels, 20)
    assert abs(over_clients - 25).max() <= 1
    over_labels = table(Dirichlet(1e9, over="labels"), labels, 20)
    # Multinomial counts of 250 draws with probability 1/10; five standard deviations.
    assert abs(over_labels - 25).max() < 5 * np.sqrt(250 * 0.1 * 0.9)


def test_dirichlet_with_a_tiny_alpha_gives_each_class_to_one_client():
    labels = np.repeat(np.arange(10), 50)
    counts = table(Dirichlet(1e-4, min_size=1, max_retries=10_000), labels, 2)
    assert (counts.max(0) == 50).all()


@pytest.mark.parametrize("over", ["clients", "labels"])
@pytest.mark.parametrize(("samples", "clients"), [(1797, 20), (1003, 10)])
def test_dirichlet_with_equal_sizes_has_equal_sizes_and_is_skewed(over, samples, clients):
    labels = np.random.default_rng(0).integers(0, 10, samples)
    counts = table(Dirichlet(0.1, over=over, equal_sizes=True), labels, clients)
    assert (counts.sum(0) == samples // clients).all()
    # Still skewed: IID clients would have a largest class of about a tenth of their samples.
    assert np.median(counts.max(0)) > 0.3 * samples / clients


def test_dirichlet_over_labels_sizes_differ_by_at_most_one():
    labels = np.random.default_rng(0).integers(0, 10, 1797)
    sizes = table(Dirichlet(0.1, over="labels"), labels, 20).sum(0)
    assert sorted(set(sizes)) == [89, 90]


def test_size_cap_stops_a_client_that_holds_the_mean():
    labels = np.repeat(np.arange(10), 100)
    capped = table(Dirichlet(0.1, min_size=1, size_cap=True), labels, 10)
    plain = table(Dirichlet(0.1, min_size=1), labels, 10)
    # Before a capped client got its last class it held less than the mean, 100.
    assert (capped.sum(0) - capped.max(0) < 100).all()
    assert not (plain.sum(0) - plain.max(0) < 100).all()


def test_dirichlet_redraws_until_every_client_has_the_minimum():
    labels = np.random.default_rng(0).integers(0, 10, 1797)
    smallest = [table(Dirichlet(0.1), labels, 20, seed).sum(0).min() for seed in range(20)]
    unconstrained = [
        table(Dirichlet(0.1, min_size=1), labels, 20, seed).sum(0).min() for seed in range(20)
    ]
    assert min(smallest) >= 10
    assert min(unconstrained) < 10


def test_wrong_arguments_of_dirichlet_are_refused(one_line):
    rng = np.random.default_rng(0)
    for alpha in (0.0, -1.0, float("nan"), float("inf")):
        with one_line(f"Dirichlet.alpha: {alpha}; it must be positive"):
            Dirichlet(alpha)
    with one_line("Dirichlet.over: 'client'; it must be clients or labels"):
        Dirichlet(1.0, over="client")
    with one_line("Dirichlet.min_size: 0"):
        Dirichlet(1.0, min_size=0)
    with one_line("Dirichlet.max_retries: 2.5"):
        Dirichlet(1.0, max_retries=2.5)
    with one_line("Dirichlet.size_cap: True; it must be False with over='labels'"):
        Dirichlet(1.0, over="labels", size_cap=True)
    with one_line("min_size: 10; not reached", "alpha=0.01", "num_clients=10", "max_retries=7"):
        Dirichlet(0.01, max_retries=7).assign(np.arange(200) % 2, 10, rng)
    with one_line("Dirichlet.min_size: 10; it must be at most 6", "num_clients=30"):
        Dirichlet(1.0, over="labels").assign(np.arange(200) % 2, 30, rng)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 25), min_size=1, max_size=6),
    clients=st.integers(1, 8),
    k=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_classes_per_client_is_exact_whenever_that_is_possible(sizes, clients, k, seed):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    # A class can have at most as many holders as samples, so that there are only so many
    # pairs of a client and a class; by Gale and Ryser's theorem that is the only obstacle.
    pairs = sum(min(size, clients) for size in sizes)
    if clients > len(labels) or k > len(sizes) or pairs < k * clients:
        with pytest.raises(ConfigError):
            table(ClassesPerClient(k), labels, clients, seed)
        return
    counts = table(ClassesPerClient(k), labels, clients, seed)
    assert ((counts > 0).sum(0) == k).all()
    holders = (counts > 0).sum(1)
    if clients * k >= len(sizes):
        assert (holders > 0).all()
    for size, number, row in zip(sizes, holders, counts, strict=True):
        # A class with fewer holders than others by two or more has no more samples to give.
        assert number >= holders.max() - 1 or number == size
        assert row.sum() in (0, size)
        if number:
            assert row.max() - row[row > 0].min() <= 1


def test_classes_of_clients_are_not_always_the_same_pairs():
    counts = table(ClassesPerClient(2), np.repeat(np.arange(10), 100), 50)
    pairs = {tuple(np.flatnonzero(column)) for column in counts.T}
    # Windows of one fixed order of the classes would give 5 or 10 pairs of the 45.
    assert len(pairs) > 15


def test_classes_with_more_holders_are_drawn_at_random():
    # Three clients, one class each of four: every class goes without a holder equally often.
    labels = np.repeat(np.arange(4), 5)
    without = sum(table(ClassesPerClient(1), labels, 3, s).sum(1) == 0 for s in range(400))
    assert without.sum() == 400
    assert (abs(without - 100) < 5 * np.sqrt(400 * 0.25 * 0.75)).all()


def test_wrong_arguments_of_classes_per_client_are_refused(one_line):
    rng = np.random.default_rng(0)
    with one_line("ClassesPerClient.classes: 0"):
        ClassesPerClient(0)
    with one_line("ClassesPerClient.classes: 3; it must be at most 2"):
        ClassesPerClient(3).assign(np.arange(100) % 2, 5, rng)
    with one_line("classes: 2; it must be at most 1 with num_clients=10", "11 pairs"):
        ClassesPerClient(2).assign(np.array([0] * 20 + [1]), 10, rng)


def test_shards_cut_at_class_borders_give_pure_shards():
    # 600 samples, 15 clients, 2 shards each: shards of 20, which divide the 60 of each class.
    counts = table(Shards(2), np.arange(600) % 10, 15)
    assert (counts.sum(0) == 40).all()
    assert set(counts.ravel()) <= {0, 20, 40}
    assert ((counts > 0).sum(0) <= 2).all()


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(8, 30), min_size=1, max_size=6),
    clients=st.integers(1, 4),
    s=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_shards_are_stretches_of_the_sorted_samples(sizes, clients, s, seed):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    if len(labels) < clients * s:
        with pytest.raises(ConfigError):
            table(Shards(s), labels, clients, seed)
        return
    counts = table(Shards(s), labels, clients, seed)
    shortest, longest = len(labels) // (clients * s), -(-len(labels) // (clients * s))
    assert (counts.sum(0) >= s * shortest).all()
    assert (counts.sum(0) <= s * longest).all()
    if longest <= min(sizes):  # then a shard spans at most two labels
        assert ((counts > 0).sum(0) <= 2 * s).all()


def test_shards_are_assigned_at_random():
    # Two clients, four shards of one label each: by chance client 0 gets any pair of the six.
    labels = np.repeat(np.arange(4), 5)
    pairs = [tuple(np.flatnonzero(table(Shards(2), labels, 2, s)[:, 0])) for s in range(600)]
    hits = np.unique(pairs, axis=0, return_counts=True)[1]
    assert len(hits) == 6
    assert (abs(hits - 100) < 5 * np.sqrt(600 * (1 / 6) * (5 / 6))).all()


def test_wrong_arguments_of_shards_are_refused(one_line):
    with one_line("Shards.shards_per_client: 0"):
        Shards(0)
    with one_line("shards_per_client: 30; it must be at most 25 with num_clients=4 and 100"):
        Shards(30).assign(np.arange(100) % 5, 4, np.random.default_rng(0))


def test_only_label_rules_need_labels(one_line):
    rng = np.random.default_rng(0)
    for targets in (np.linspace(0, 1, 60), np.zeros((60, 3), int)):
        for rule in (Dirichlet(1.0), ClassesPerClient(2), Shards(2)):
            with one_line(f"partition: {rule!r}", str(targets.dtype), "IID"):
                rule.assign(targets, 3, rng)
        for rule in (IID(), LogNormal(0.5), Natural(np.arange(60) % 3)):
            assert rule.assign(targets, 3, rng).sizes.sum() == 60


def test_labels_need_not_be_consecutive():
    sparse = np.array([3, 900, 41])[np.arange(90) % 3]
    dense = np.array([0, 2, 1])[np.arange(90) % 3]
    for rule in (Dirichlet(0.5, min_size=1), ClassesPerClient(2), Shards(2)):
        owned = [rule.assign(y, 5, np.random.default_rng(0)).indices for y in (sparse, dense)]
        assert np.array_equal(*owned)
