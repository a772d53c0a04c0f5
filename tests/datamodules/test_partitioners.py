"""Partition rules: what holds for all, and the rules IID, LogNormal, Natural and Sampled."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules import (
    IID,
    ClassesPerClient,
    Dirichlet,
    LogNormal,
    Natural,
    Partitioner,
    Ragged,
    Sampled,
    Shards,
)

# Each rule, and whether the rule uses every sample.
RULES = [
    (IID(), True),
    (Dirichlet(1.0, min_size=1), True),
    (Dirichlet(1.0, min_size=1, size_cap=True), True),
    (Dirichlet(0.1, min_size=1, equal_sizes=True), False),
    (Dirichlet(0.3, over="labels", min_size=1), True),
    (Dirichlet(0.3, over="labels", min_size=1, equal_sizes=True), False),
    (ClassesPerClient(1), False),
    (Shards(2), True),
    (LogNormal(1.0, min_size=1), True),
]


@pytest.mark.parametrize(("rule", "complete"), RULES, ids=lambda value: repr(value))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_sample_has_at_most_one_owner(rule: Partitioner, complete: bool, data):
    clients = data.draw(st.integers(1, 5), "clients")
    # Ten samples per client and more: small enough to find edge cases, large enough that
    # "at least one sample each" can always be met.
    labels = np.array(data.draw(st.lists(st.integers(0, 5), min_size=50, max_size=90), "labels"))
    seed = data.draw(st.integers(0, 2**32), "seed")
    owned = rule.assign(labels, clients, np.random.default_rng(seed))
    assert len(owned) == clients
    held = [sample for i in range(clients) for sample in owned[i].tolist()]
    assert len(held) == len(set(held))
    assert set(held) <= set(range(len(labels)))
    assert all(owned[i].tolist() == sorted(owned[i].tolist()) for i in range(clients))
    assert (owned.sizes >= 1).all()
    if complete:
        assert len(held) == len(labels)
    again = rule.assign(labels, clients, np.random.default_rng(seed))
    assert np.array_equal(owned.flat, again.flat)
    assert np.array_equal(owned.sizes, again.sizes)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-1, 4), max_size=40))
def test_from_owners_groups_samples_by_owner(owners):
    ragged = Ragged.from_owners(np.array(owners, np.int64), 5)
    for client in range(5):
        assert ragged[client].tolist() == [s for s, o in enumerate(owners) if o == client]
    assert ragged.owners.tolist() == sorted(o for o in owners if o >= 0)


@pytest.mark.parametrize(
    "rule", [*(rule for rule, _ in RULES), Natural(np.arange(7))], ids=lambda value: repr(value)
)
def test_no_clients_or_more_clients_than_samples_are_refused(rule, one_line):
    with one_line("num_clients: 8; it must be from 1 to 7, the number of samples"):
        rule.assign(np.arange(7) % 2, 8, np.random.default_rng(0))
    with one_line("num_clients: 0; it must be from 1 to 7"):
        rule.assign(np.arange(7) % 2, 0, np.random.default_rng(0))


def test_iid_sizes_differ_by_one_and_samples_are_assigned_uniformly():
    hits = np.zeros(4)
    for seed in range(2000):
        owned = IID().assign(np.zeros(10), 4, np.random.default_rng(seed))
        assert sorted(owned.sizes) == [2, 2, 3, 3]
        hits[[i for i in range(4) if 0 in owned[i]]] += 1
    # Sample 0 goes to client i with probability size_i / 10; hits are binomial.
    share = np.array([3, 3, 2, 2]) / 10
    assert (abs(hits - 2000 * share) < 5 * np.sqrt(2000 * share * (1 - share))).all()


@pytest.mark.parametrize(("sigma", "min_size"), [(0.0, 10), (0.5, 10), (2.0, 10), (2.0, 400)])
def test_lognormal_sizes_are_proportional_above_the_minimum(sigma, min_size):
    clients, total = 50, 20_000
    owned = LogNormal(sigma, min_size).assign(np.zeros(total), clients, np.random.default_rng(3))
    assert owned.sizes.sum() == total
    assert owned.sizes.min() >= min_size
    # The rule draws its weights first, so the same generator gives them. With exact shares the
    # sizes would be max(min_size, c w) for the one c at which they add up to the total, found
    # here by bisection; whole numbers are within one of it.
    weights = np.random.default_rng(3).lognormal(sigma=sigma, size=clients)
    low, high = 0.0, float(total / weights.min())
    for _ in range(200):
        middle = (low + high) / 2
        if np.maximum(min_size, middle * weights).sum() < total:
            low = middle
        else:
            high = middle
    assert (abs(owned.sizes - np.maximum(min_size, high * weights)) <= 1 + 1e-6).all()


@pytest.mark.parametrize("sigma", [300.0, 1e5, 1e308])
def test_lognormal_of_a_huge_sigma_gives_one_client_the_rest(sigma):
    """The exponentials of these draws overflow, or differ by more than floats can hold."""
    owned = LogNormal(sigma, min_size=4).assign(np.zeros(100), 5, np.random.default_rng(0))
    largest = np.random.default_rng(0).standard_normal(5).argmax()
    assert owned.sizes.tolist() == [100 - 4 * 4 if i == largest else 4 for i in range(5)]


def test_lognormal_gives_the_minimum_to_all_clients_if_no_samples_remain():
    owned = LogNormal(3.0, min_size=4).assign(np.zeros(20), 5, np.random.default_rng(0))
    assert owned.sizes.tolist() == [4] * 5


def test_natural_numbers_clients_by_ascending_ids_and_keeps_the_largest():
    ids = np.array(["b", "a", "c", "b", "c", "c"])
    rng = np.random.default_rng(0)
    owned = Natural(ids).assign(np.zeros(6), 3, rng)
    assert [owned[i].tolist() for i in range(3)] == [[1], [0, 3], [2, 4, 5]]
    # With fewer clients the ids with the most samples stay, in the order of their names.
    owned = Natural(ids).assign(np.zeros(6), 2, rng)
    assert [owned[i].tolist() for i in range(2)] == [[0, 3], [2, 4, 5]]
    # Among equals the lower id stays.
    owned = Natural([9, 5, 7, 7]).assign(np.zeros(4), 2, rng)
    assert [owned[i].tolist() for i in range(2)] == [[1], [2, 3]]


def test_wrong_client_ids_are_refused(one_line):
    rng = np.random.default_rng(0)
    with one_line("num_clients: 4; it must be at most 3, the number of different client_ids"):
        Natural([1, 2, 3, 3]).assign(np.zeros(4), 4, rng)
    with one_line("Natural.client_ids.shape: (3,); it must be (4,)"):
        Natural([1, 2, 3]).assign(np.zeros(4), 2, rng)
    with one_line("Natural.client_ids: None; it must be given"):
        Natural().assign(np.zeros(4), 2, rng)
    with one_line("Natural.client_ids.shape: (2, 2)"):
        Natural(np.zeros((2, 2))).assign(np.zeros(4), 2, rng)


@pytest.mark.parametrize(
    "ids", [[1.0, np.nan, 2.0, np.nan], ["ann", None, "bob", None], ["ann", np.nan, None, "bob"]]
)
def test_missing_client_ids_are_refused(ids, one_line):
    rule = Natural(np.array(ids, None if isinstance(ids[0], float) else object))
    with one_line("Natural.client_ids: None or NaN for 2 of 4 samples"):
        rule.assign(np.zeros(4), 2, np.random.default_rng(0))


def test_numbers_beside_text_are_refused_as_client_ids(one_line):
    with one_line("Natural.client_ids", "all ids must be numbers, or all text"):
        Natural(np.array([1, "bob"], object)).count()
    assert Natural(np.array(["ann", "bob", "ann"], object)).count() == 2


def test_wrong_arguments_of_lognormal_are_refused(one_line):
    for sigma in (-1.0, float("nan"), float("inf")):
        with one_line(f"LogNormal.sigma: {sigma}; it must be at least 0"):
            LogNormal(sigma)
    with one_line("LogNormal.min_size: 0"):
        LogNormal(1.0, min_size=0)
    with one_line("LogNormal.min_size: 10; it must be at most 8", "num_clients=5"):
        LogNormal(1.0).assign(np.zeros(44), 5, np.random.default_rng(0))


@pytest.mark.parametrize("entries", [1, 7, 100])
def test_blocks_of_clients_cover_every_client_once(entries, monkeypatch):
    monkeypatch.setattr("datamodules.partitions.index_arrays._BLOCK", entries)
    sizes = np.array([0, 5, 0, 0, 9, 1, 1, 1, 0])
    ragged = Ragged.from_sizes(np.arange(17), sizes)
    blocks = list(ragged.blocks())
    assert [i for clients in blocks for i in range(9)[clients]] == list(range(9))
    assert np.concatenate([ragged.of(clients) for clients in blocks]).tolist() == list(range(17))
    for clients in blocks:
        assert sizes[clients].sum() < entries + sizes.max()
    within = [i for clients in ragged.blocks(slice(2, 7)) for i in range(9)[clients]]
    assert within == [2, 3, 4, 5, 6]


@settings(max_examples=50, deadline=None)
@given(
    total=st.integers(1, 60),
    share=st.floats(0, 1),
    clients=st.integers(1, 200),
    seed=st.integers(0, 99),
)
def test_sampled_gives_each_client_different_samples(total, share, clients, seed):
    size = max(1, int(share * total))
    owned = Sampled(size).assign(np.zeros(total), clients, np.random.default_rng(seed))
    rows = owned.flat.reshape(clients, size)
    assert owned.sizes.tolist() == [size] * clients and owned.flat.dtype == np.int32
    assert (np.diff(rows) > 0).all()  # ascending, none twice
    assert rows.min() >= 0 and rows.max() < total
    again = Sampled(size).assign(np.zeros(total), clients, np.random.default_rng(seed))
    assert np.array_equal(owned.flat, again.flat)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])  # of 6: with repeated draws, and by shuffling
def test_sampled_makes_all_sets_equally_likely(size):
    draws = 20_000
    owned = Sampled(size).assign(np.zeros(6), draws, np.random.default_rng(1))
    sets = (1 << owned.flat.reshape(draws, size)).sum(1)
    hits = np.bincount(sets, minlength=64)[[bin(s).count("1") == size for s in range(64)]]
    assert hits.sum() == draws
    # Pearson's statistic has mean k = sets - 1 and variance 2 k (1 - 1/draws): Cantelli's
    # inequality puts it above k + 10 sqrt(2 k) with probability below 1/101, for any k.
    expected = draws / len(hits)
    k = len(hits) - 1
    assert ((hits - expected) ** 2).sum() / expected < k + 10 * np.sqrt(2 * k)


def test_sampled_clients_are_independent():
    # Two clients' sets of 3 of 6 have hypergeometric overlaps: C(3, o) C(3, 3 - o) / C(6, 3).
    owned = Sampled(3).assign(np.zeros(6), 20_000, np.random.default_rng(5))
    sets = (1 << owned.flat.reshape(-1, 3)).sum(1)
    common = [bin(s).count("1") for s in sets[::2] & sets[1::2]]
    share = np.array([1, 9, 9, 1]) / 20
    spread = 5 * np.sqrt(10_000 * share * (1 - share))
    assert (abs(np.bincount(common, minlength=4) - 10_000 * share) < spread).all()


def test_wrong_arguments_of_sampled_are_refused(one_line):
    for size in (0, 1.5):
        with one_line(f"Sampled.size: {size}; it must be a whole number"):
            Sampled(size)
    with one_line("Sampled.size: 8; it must be at most 7, the number of samples"):
        Sampled(8).assign(np.zeros(7), 3, np.random.default_rng(0))
