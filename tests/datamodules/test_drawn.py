"""Index arrays that are computed on access, compared with plain Python and with stored arrays."""

import copy
import pickle
import tracemalloc
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules import (
    Drawn,
    MatchLabels,
    Partition,
    Ragged,
    Sampled,
    SharedTest,
    SplitOwn,
    TensorDataModule,
)
from pfl import FederatedLoop
from pfl.datamodules.partitions.lazy import random_bits
from pfl.datamodules.randomness import fold
from tests.draws import mixed


def drawn_set(sets, client):
    """Returns the set of one client as `Subsets` documents it: repeated draws are drawn again."""
    key = mixed(sets.key, client)
    if 2 * sets.size > sets.total:
        return sorted(sorted(range(sets.total), key=lambda i: mixed(key, i))[: sets.size])
    attempt = 0
    drawn = [mixed(key, i) % sets.total for i in range(sets.size)]
    while True:
        drawn.sort()
        twice = [i for i in range(1, sets.size) if drawn[i] == drawn[i - 1]]
        if not twice:
            return drawn
        attempt += 1
        for i in twice:
            drawn[i] = mixed(key, attempt * sets.size + i) % sets.total


def drawn_part(part, client):
    """Returns a part of a client's samples as `_stratified_order` documents it, by fractions."""
    own = drawn_set(part.whole, client)
    key = mixed(part.key, client)
    order = sorted(range(len(own)), key=lambda i: mixed(key, i) >> 28)
    if part.labels is not None:
        labels = [int(part.labels[own[i]]) for i in order]
        places = [
            Fraction(2 * labels[:n].count(label) + 1, 2 * labels.count(label))
            for n, label in enumerate(labels)
        ]
        order = [order[n] for n in sorted(range(len(own)), key=lambda n: places[n])]
    return sorted(own[i] for i in order[part.begin : part.begin + part.size])


def module(clients=100, size=6, protocol=None, seed=0, labels=None, test=0):
    """Returns a data module of 40 samples of 4 classes, or of samples with other labels."""
    labels = torch.arange(40) % 4 if labels is None else labels
    official = (torch.zeros(test, 1), torch.arange(test) % 4) if test else (None, None)
    data = (torch.zeros(len(labels), 1), labels, *official)
    protocol = SplitOwn() if protocol is None else protocol
    return TensorDataModule(
        *data, num_clients=clients, partition=Sampled(size), protocol=protocol, seed=seed
    )


def stored(partition):
    """Returns a partition with the same arrays, stored instead of computed."""
    kept = (Ragged.from_sizes(part.flat, part.sizes) for part in partition.splits.values())
    return Partition(*kept)


def test_fold_is_mixed():
    # The sequence of seed 1234567, with which implementations are commonly verified.
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [mixed(1234567, i) for i in range(3)] == known
    assert unsigned(fold(torch.tensor(1234567), torch.arange(3))) == known
    keys, data = [0, 1, -1, 2**62, -(2**63), 2**63 - 1], [0, 1, 12345, 2**40]
    for key in keys:
        expected = [mixed(key % 2**64, datum) for datum in data]
        assert unsigned(fold(torch.tensor([key]), torch.tensor(data))) == expected
    table = fold(torch.tensor(keys)[:, None], torch.tensor(data))
    assert table.dtype == torch.int64 and table.shape == (6, 4)


def unsigned(values):
    """Returns the bits of int64 values as unsigned integers."""
    return [value % 2**64 for value in values.tolist()]


def test_fold_leaves_its_arguments_unchanged_and_can_be_scripted():
    keys, data = torch.tensor([3, -4, 5]), torch.arange(3)
    expected = fold(keys, data)
    assert keys.tolist() == [3, -4, 5] and data.tolist() == [0, 1, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch recommends torch.compile
        scripted = torch.jit.script(fold)
    assert torch.equal(scripted(keys, data), expected)


def test_random_bits_are_those_of_the_folded_key_of_a_client():
    clients = np.array([7, 0, 10**6])
    actual = random_bits(2**63 - 1, clients, range(2, 6))
    expected = [
        [mixed(mixed(2**63 - 1, client), place) for place in range(2, 6)]
        for client in clients.tolist()
    ]
    assert actual.dtype == np.uint64 and actual.tolist() == expected
    assert random_bits(2**63 - 1, clients[::-1], range(2, 6)).tolist() == expected[::-1]


@settings(max_examples=60, deadline=None)
@given(
    total=st.integers(1, 40),
    share=st.floats(0, 1),
    seed=st.integers(0, 99),
    classes=st.integers(0, 5),
    shares=st.sampled_from([(0.2, 0.1), (0.5, 0.0), (0.0, 0.3), (0.3, 0.4)]),
)
def test_samples_of_every_client_are_those_of_a_plain_python_reference(
    total, share, seed, classes, shares
):
    size = max(1, int(share * total))
    rng = np.random.default_rng(seed)
    labels = torch.from_numpy(rng.integers(0, classes, total) if classes else rng.random(total))
    parts = module(7, size, SplitOwn(*shares), seed, labels).partition
    for client in range(7):
        own = drawn_set(parts.train.whole, client)
        assert len(set(own)) == size
        split = [getattr(parts, name) for name in ("train", "val", "test")]
        assert [part[client].tolist() for part in split] == [drawn_part(p, client) for p in split]
        assert sorted(np.concatenate([part[client] for part in split])) == own


@pytest.mark.parametrize("size", [1, 6, 25])  # of 40: with repeated draws, and by shuffling
@pytest.mark.parametrize("block", [1, 50, 1 << 16])
def test_samples_of_a_client_do_not_depend_on_the_other_clients_of_an_access(
    size, block, monkeypatch
):
    monkeypatch.setattr("datamodules.partitions.index_arrays._BLOCK", block)
    dm = module(50, size)
    for part in dm.partition.splits.values():
        assert isinstance(part, Drawn) and len(part) == 50
        assert part.flat.dtype == np.int32
        rows = part.flat.reshape(50, part.size)
        assert part.sizes.tolist() == [part.size] * 50
        assert part.owners.tolist() == np.repeat(np.arange(50), part.size).tolist()
        for ids in ([], [3], [49, 0], [7, 7, 2], np.random.default_rng(0).permutation(50)):
            assert part.of(np.array(ids, np.int64)).tolist() == rows[ids].ravel().tolist()
        assert part.of(slice(5, 9)).tolist() == rows[5:9].ravel().tolist()
        assert part[12].tolist() == rows[12].tolist() and part[-1].tolist() == rows[49].tolist()
        blocks = [part.of(clients) for clients in part.blocks()]
        assert np.concatenate(blocks).tolist() == part.flat.tolist()
        kept = part.select(part.owners != 3)
        assert kept.sizes[3] == 0 and kept[4].tolist() == rows[4].tolist()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.data())
def test_stored_arrays_have_the_same_access(sizes, data):
    ragged = Ragged.from_sizes(np.arange(sum(sizes)), np.array(sizes))
    shared = Ragged.shared(np.array([5, 3, 9]), len(sizes))
    ids = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=8))
    begin = data.draw(st.integers(0, len(sizes)))
    stretch = slice(begin, data.draw(st.integers(begin, len(sizes))))
    for arrays in (ragged, shared):
        for asked, clients in ((np.array(ids, np.int64), ids), (stretch, range(9)[stretch])):
            assert arrays.of(asked).tolist() == [s for i in clients for s in arrays[i].tolist()]
    assert shared.is_shared == (len(sizes) > 1) and not ragged.is_shared
    assert np.shares_memory(ragged.flat, ragged.indices) or not sum(sizes)


def test_clients_out_of_range_are_an_error():
    part = module(5).partition.train
    assert [row.tolist() for row in part] == [part[i].tolist() for i in range(5)]
    for ids in ([5], [0, -1]):
        with pytest.raises(IndexError, match="between 0 and 4"):
            part.of(np.array(ids))
    with pytest.raises(IndexError):
        part[5]


def test_every_sample_is_a_test_sample_equally_often():
    # 20,000 clients with one test sample each of 40, by six draws and a stratified choice: all
    # samples are alike (ten of each class), so hits are multinomial. Pearson's statistic has mean
    # k = 39 and variance below 2 k; Cantelli's inequality puts it above k + 10 sqrt(2 k) with
    # probability below 1/101.
    hits = np.bincount(module(20_000, protocol=SplitOwn(0.1, 0.1)).partition.test.flat)
    assert hits.sum() == 20_000 and len(hits) == 40
    assert ((hits - 500) ** 2).sum() / 500 < 39 + 10 * np.sqrt(2 * 39)


def test_samples_of_consecutive_clients_are_independent():
    # The first sample of a client is above the median of all first samples or not. For independent
    # clients, clients i and i + 1 agree with probability `share`. The pairs (0, 1), (2, 3), ... are
    # independent, so the number of agreements is binomial; the bound is five standard deviations.
    whole = module(40_000, protocol=SplitOwn(0.0, 0.0)).partition.train
    first = whole.flat.reshape(-1, 6)[:, 0]
    high = first > np.median(first)
    share = high.mean() ** 2 + (1 - high.mean()) ** 2
    agree = (high[::2] == high[1::2]).sum()
    assert abs(agree - 20_000 * share) < 5 * np.sqrt(20_000 * share * (1 - share))


def test_the_hash_changes_with_everything_that_changes_the_samples_and_only_then():
    labels = torch.arange(40) % 4
    other = labels.clone()
    other[7] = 0
    protocol = SplitOwn(0.3, 0.2)
    base = {"clients": 50, "size": 10, "protocol": protocol, "seed": 3, "labels": labels}
    reference = module(**base).partition.hash
    changes = [
        {"clients": 51},
        {"size": 11},
        {"protocol": SplitOwn(0.4, 0.2)},
        {"protocol": SplitOwn(0.3, 0.3)},
        {"protocol": SplitOwn(0.3, 0.0)},
        {"protocol": SplitOwn(0.0, 0.0)},
        {"seed": 4},
        {"labels": other},
        {"labels": labels.float()},
        {"labels": torch.arange(41) % 4},
        {"test": 4},
    ]
    hashes = [module(**{**base, **change}).partition.hash for change in changes]
    assert len({reference, *hashes}) == 1 + len(changes)
    dm = module(**{**base, "protocol": SplitOwn(0.31, 0.22)})  # 3 and 2 of 10 samples again
    assert dm.partition.hash == reference
    for again in (copy.deepcopy(dm), pickle.loads(pickle.dumps(dm))):
        assert again.partition.hash == reference
        assert again.partition.val.flat.tolist() == dm.partition.val.flat.tolist()


@pytest.mark.parametrize("protocol", [MatchLabels(5), SharedTest(), SharedTest(0.0)], ids=repr)
def test_test_sets_of_official_samples_are_stored_and_training_samples_are_computed(protocol):
    dm = module(30, 8, protocol, test=12)
    parts = dm.partition
    assert isinstance(parts.train, Drawn) and isinstance(parts.test, Ragged)
    assert parts.train.flat.max() < 40 <= parts.test.flat.min()
    assert parts.train.size + parts.val.size == 8
    for split, part in parts.splits.items():
        kept = getattr(stored(parts), split)
        assert part.flat.tolist() == kept.flat.tolist()
    assert dm.label_counts("test").sum(1).tolist() == parts.test.sizes.tolist()


def test_a_million_clients_take_no_memory_per_sample():
    # The images exist before the measurement, which does not count PyTorch's memory. Samples are
    # drawn in blocks of up to 65,536 numbers, half a MiB per array, with about a dozen arrays at a
    # time; a cohort of 10,000 clients has 21 of 30 samples for training, 0.84 MB. A temporary array
    # of eight bytes per client takes 8 MB. All index arrays together would take 120 MB.
    labels = torch.arange(60_000) % 10
    dm = TensorDataModule(
        torch.zeros(60_000, 1, dtype=torch.uint8),
        labels,
        num_clients=1_000_000,
        partition=Sampled(30),
    )
    loop = FederatedLoop(dm, clients_per_round=10_000)
    tracemalloc.start()
    try:
        loop.setup()
        ids = loop.cohort(3)
        dealt = loop.client_data(torch.device("cpu")).owned("train", ids)
        counts = dm.label_counts(clients=slice(500_000, 504_096))
        assert len(dm.partition.hash) == 64
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert dealt[0].shape == (210_000,) and len(ids) == 10_000
    assert counts.sum(1).tolist() == [21] * 4096
    assert peak < 12 * 0.6e6 + 0.84e6 + 8e6 < 17e6
