"""Test protocols: no sample repeats, and every client has the samples that the protocol states."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules import (
    IID,
    ArrayDataModule,
    ClassesPerClient,
    Dirichlet,
    LogNormal,
    MatchLabels,
    Natural,
    OfficialSplit,
    Sampled,
    Shards,
    SharedTest,
    SplitOwn,
    TensorDataModule,
)
from models import LogisticRegression
from pfl.algorithms import FedAvg
from tests.problems import run

RULES = [
    IID(),
    Dirichlet(1.0, min_size=1),
    Dirichlet(0.3, over="labels", min_size=1),
    Dirichlet(0.1, min_size=1, equal_sizes=True),
    ClassesPerClient(1),
    Shards(2),
    LogNormal(1.0, min_size=1),
    Natural(),
]
PROTOCOLS = [
    SplitOwn(),
    SplitOwn(test=0.5, validation=0.0),
    SplitOwn(test=0.0, validation=0.3),
    MatchLabels(7),
    MatchLabels(None, validation=0.25),
    SharedTest(),
]


def module(train, test, rule, protocol, clients, seed=0):
    """Returns a data module whose inputs are zeros and whose labels are given."""
    test_args = (
        (torch.zeros(len(test), 1), torch.tensor(test)) if test is not None else (None, None)
    )
    return TensorDataModule(
        torch.zeros(len(train), 1),
        torch.tensor(train),
        *test_args,
        client_ids=np.arange(len(train)) % clients,
        num_clients=clients,
        partition=rule,
        protocol=protocol,
        seed=seed,
    )


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=repr)
@pytest.mark.parametrize("rule", RULES, ids=repr)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_no_sample_occurs_twice_in_the_splits_of_clients(rule, protocol, data):
    clients = data.draw(st.integers(1, 4), "clients")
    labels = st.integers(0, 4)
    train = data.draw(st.lists(labels, min_size=40, max_size=70), "train")
    test = data.draw(st.lists(labels, min_size=1, max_size=30), "test")
    parts = module(train, test, rule, protocol, clients, data.draw(st.integers(0, 99))).partition
    official = set(range(len(train), len(train) + len(test)))
    seen: set[int] = set()
    for client in range(clients):
        own = [parts.train[client].tolist(), parts.val[client].tolist()]
        tested = parts.test[client].tolist()
        assert own[0], "every client trains"
        if isinstance(protocol, SplitOwn):
            own.append(tested)
        else:
            assert set(tested) <= official
            assert len(set(tested)) == len(tested)
        held = [sample for part in own for sample in part]
        assert len(set(held)) == len(held)
        assert not seen & set(held)
        seen |= set(held)
    if not isinstance(protocol, SplitOwn):
        assert not seen & official
    else:  # every sample that the rule assigns is in some split
        pool = np.array(train + test)
        pool = pool[: len(train)] if isinstance(rule, Natural) else pool
        assigning = Natural(np.arange(len(train)) % clients) if isinstance(rule, Natural) else rule
        owned = assigning.assign(pool, clients, np.random.default_rng(0))
        assert isinstance(rule, ClassesPerClient) or len(seen) == owned.sizes.sum()


def part_sizes(held, shares):
    """Returns the sizes of the parts as `Protocol` documents them, by exact fractions."""
    left, parts = held, []
    for share in map(Fraction, shares):
        part = int(share * held + Fraction(1, 2))  # nearest, halves up
        if share > 0:
            part = max(part, 1)
        part = min(part, left - 1)
        left -= part
        parts.append(part)
    return [*parts, left]


@pytest.mark.parametrize(("test", "val"), [(0.25, 0.125), (0.5, 0.0), (0.0, 0.25), (0.75, 0.125)])
def test_sizes_of_own_splits_are_rounded_as_documented(test, val):
    # Client i holds i + 1 samples, by its id.
    ids = np.repeat(np.arange(30), np.arange(1, 31))
    dm = module([0] * len(ids), None, Natural(ids), SplitOwn(test, val), 30)
    sizes = np.stack([dm.partition.test.sizes, dm.partition.val.sizes, dm.partition.train.sizes])
    assert sizes.T.tolist() == [part_sizes(held, (test, val)) for held in range(1, 31)]


def is_sainte_lague(seats, votes):
    """Returns whether Sainte-Laguë's method can give a split of seats, however ties are broken.

    The seats belong to the highest quotients votes / (2 s + 1), s = 0, 1, ...: no quotient
    without a seat is above a quotient with a seat.
    """
    won = [Fraction(int(v), 2 * int(s) - 1) for s, v in zip(seats, votes, strict=True) if s]
    lost = [Fraction(int(v), 2 * int(s) + 1) for s, v in zip(seats, votes, strict=True) if s < v]
    return not won or not lost or max(lost) <= min(won)


@settings(max_examples=30, deadline=None)
@given(
    labels=st.lists(st.integers(0, 4), min_size=4, max_size=80),
    clients=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_own_splits_are_stratified(labels, clients, seed):
    dm = module(labels, None, IID(), SplitOwn(0.25, 0.125), clients, seed)
    train, val, test = (dm.label_counts(split) for split in ("train", "val", "test"))
    for client in range(clients):
        votes = train[client] + val[client] + test[client]
        assert is_sainte_lague(test[client], votes)
        assert is_sainte_lague(test[client] + val[client], votes)


def test_ties_in_stratification_are_broken_uniformly():
    # Four samples of four labels: the one test sample is each of them equally often, 1/4.
    hits = np.zeros(4)
    for seed in range(800):
        hits += module([0, 1, 2, 3], None, IID(), SplitOwn(0.25, 0), 1, seed).label_counts("test")[
            0
        ]
    assert (abs(hits - 200) < 5 * np.sqrt(800 * 0.25 * 0.75)).all()


def largest_remainder(counts, samples):
    """Splits `samples` in the ratio of `counts` by exact fractions."""
    quotas = [Fraction(int(c) * samples, int(sum(counts))) for c in counts]
    parts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(counts)), key=lambda k: (parts[k] - quotas[k], k))
    for k in by_remainder[: samples - sum(parts)]:
        parts[k] += 1
    return parts


@settings(max_examples=40, deadline=None)
@given(
    train=st.lists(st.integers(0, 5), min_size=20, max_size=80),
    test=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    samples=st.integers(1, 30),
    seed=st.integers(0, 99),
)
def test_match_labels_keeps_the_training_ratio(train, test, samples, seed):
    rule = Dirichlet(0.5, over="labels", min_size=1)
    dm = module(train, test, rule, MatchLabels(samples), 3, seed)
    available = np.bincount(test, minlength=dm.num_classes)
    for counts, actual in zip(dm.label_counts("train"), dm.label_counts("test"), strict=True):
        expected = np.minimum(largest_remainder(counts, samples), available)
        assert actual.tolist() == expected.tolist()


@settings(max_examples=40, deadline=None)
@given(
    train=st.lists(st.integers(0, 3), min_size=20, max_size=60),
    test=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    seed=st.integers(0, 99),
)
def test_match_labels_takes_the_most_that_keep_the_ratio(train, test, seed):
    dm = module(train, test, Dirichlet(1.0, over="labels", min_size=1), MatchLabels(None), 3, seed)
    available = np.bincount(test, minlength=dm.num_classes)
    for counts, actual in zip(dm.label_counts("train"), dm.label_counts("test"), strict=True):
        usable = [k for k in range(dm.num_classes) if counts[k] and available[k]]
        # Every usable class must have enough samples for its exact quota, c_k / n of the test set.
        most = 0
        while usable and all((most + 1) * counts[k] <= available[k] * sum(counts) for k in usable):
            most += 1
        expected = np.minimum(largest_remainder(counts, most), available)
        assert actual.tolist() == expected.tolist()


def test_match_labels_draws_uniformly_and_clients_overlap():
    hits = np.zeros(12)
    clients, seeds = 10, 200
    for seed in range(seeds):
        dm = module([0, 1] * 50, [0, 1] * 6, IID(), MatchLabels(8, 0.0), clients, seed)
        hits += np.bincount(dm.partition.test.flat - 100, minlength=12)
    # All samples of a label are equally likely, so the hits of a label spread evenly. A sample's
    # hits are a sum of independent draws of variance at most 1/4 per client and seed.
    spread = 5 * np.sqrt(clients * seeds / 4)
    for label in (0, 1):
        assert abs(hits[label::2] - hits[label::2].mean()).max() < spread
    assert hits.min() > seeds  # some clients of a seed share a test sample


def test_shared_test_is_stored_once():
    parts = module([0, 1] * 500, [0] * 50, IID(), SharedTest(), 100).partition
    assert parts.test.indices.tolist() == list(range(1000, 1050))
    assert all(parts.test[i].tolist() == list(range(1000, 1050)) for i in range(100))
    assert np.shares_memory(parts.test[0], parts.test[99])


def test_own_splits_pool_training_and_official_test_samples():
    dm = module([0] * 30, [0] * 30, IID(), SplitOwn(), 3)
    assert dm.partition.train.sizes.sum() + dm.partition.val.sizes.sum() > 30
    assert sorted(np.concatenate([part.flat for part in dm.partition.splits.values()])) == list(
        range(60)
    )


@pytest.mark.parametrize("protocol", [MatchLabels(), SharedTest()], ids=repr)
def test_protocols_of_official_samples_are_refused_without_them(protocol, one_line):
    with one_line(f"TensorDataModule.protocol: {protocol!r}; it must be SplitOwn"):
        module([0] * 30, None, IID(), protocol, 3).setup()


def test_match_labels_is_refused_without_labels(one_line):
    dm = module([0.5] * 30, [0.5] * 30, IID(), MatchLabels(), 3)
    with one_line("protocol: MatchLabels", "integer label"):
        dm.setup()
    assert module([0.5] * 30, [0.5] * 30, IID(), SharedTest(), 3).partition.test.sizes[0] == 30


def test_wrong_arguments_of_protocols_are_refused(one_line):
    for share in (-0.1, 1.0, float("nan")):
        with one_line(f"SplitOwn.test: {share}; it must be at least 0 and below 1"):
            SplitOwn(test=share)
        with one_line(f"SharedTest.validation: {share}; it must be at least 0 and below 1"):
            SharedTest(validation=share)
    with one_line("SplitOwn.test + SplitOwn.validation: 1.0; it must be below 1"):
        SplitOwn(0.5, 0.5)
    for samples in (0, -3, 2.5):
        with one_line(f"MatchLabels.samples: {samples}; it must be a whole number of at least 1"):
            MatchLabels(samples)


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=repr)
def test_splits_of_clients_that_share_samples_do_not_overlap_within_a_client(protocol):
    # 500 clients of 6 of 40 training samples (and 20 official test samples).
    dm = module([0, 1, 2, 3] * 10, [0, 1, 2, 3] * 5, Sampled(6), protocol, 500, seed=3)
    parts = dm.partition
    held = parts.train.sizes + parts.val.sizes
    if isinstance(protocol, SplitOwn):
        held = held + parts.test.sizes
    assert (held == 6).all()
    for client in range(500):
        own = [*parts.train[client], *parts.val[client], *parts.test[client]]
        assert len(set(own)) == len(own)  # a client's splits never overlap
    shared = np.bincount(parts.train.flat, minlength=60)
    reach = 60 if isinstance(protocol, SplitOwn) else 40
    assert (shared[:reach] > 1).all() and not shared[reach:].any()
    assert "clients share" in dm.describe()
    for split in ("train", "val", "test"):
        targets = dm.samples.targets.numpy()
        rows = [np.bincount(targets[getattr(parts, split)[i]], minlength=4) for i in range(500)]
        assert dm.label_counts(split).tolist() == np.array(rows).tolist()
    assert sorted(dm.train_dataloader().dataset.indices.tolist()) == list(range(reach))
    again = module([0, 1, 2, 3] * 10, [0, 1, 2, 3] * 5, Sampled(6), protocol, 500, seed=3)
    assert again.partition.hash == parts.hash


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=repr)
def test_the_size_of_blocks_does_not_change_the_partition(protocol, monkeypatch):
    labels = np.random.default_rng(0).integers(0, 5, 300).tolist()
    whole = module(labels, [0, 1] * 20, LogNormal(1.0, min_size=1), protocol, 30).partition.hash
    monkeypatch.setattr("datamodules.partitions.index_arrays._BLOCK", 16)
    cut = module(labels, [0, 1] * 20, LogNormal(1.0, min_size=1), protocol, 30)
    assert cut.partition.hash == whole


def test_a_client_with_official_test_samples_only_is_a_newcomer(tmp_path):
    """A hospital that comes after the training: the samples 4 and 5 of the official test set."""
    inputs = np.arange(12, dtype=np.float32).reshape(6, 2) / 12
    targets, ids = np.array([0, 1, 0, 1, 0, 1]), np.array(["a", "a", "c", "c", "b", "b"])
    data = ArrayDataModule(
        inputs[:4], targets[:4], inputs[4:], targets[4:], ids, partition=Natural(),
        protocol=OfficialSplit(validation=0.0),
    )  # fmt: skip
    told = r"1 of 3 clients have official test samples only, and never train; loop.unseen: \[1\]"
    with pytest.warns(UserWarning, match=told):
        assert data.client_names == ["a", "b", "c"]
    assert [data.partition.train[i].tolist() for i in range(3)] == [[0, 1], [], [2, 3]]
    assert [data.partition.test[i].tolist() for i in range(3)] == [[], [4, 5], []]
    method = run(FedAvg(LogisticRegression(2, 2), lr=0.1), data, 1, root=tmp_path, precision=None,
                 unseen=[1], finetune=0)  # fmt: skip
    (row,) = method.trainer.recorder.rows
    assert row["train/samples"] == 4
    assert "test/unseen/0/accuracy" in row and "test/global/accuracy" not in row


@pytest.mark.parametrize(("share", "words"), [(0.2, "20%"), (0.125, "12.5%"), (1 / 3, "33.3333%")])
def test_shares_are_told_as_they_are(share, words):
    """0.001 is 0.1 %, and not 0 %; 0.125 is 12.5 %, and not 12 %."""
    told = SplitOwn(share, 0.001).describe()
    assert told == (
        f"each client is tested on {words} of its own samples, validated on 0.1% of its own"
    )
    assert SharedTest(share).describe().endswith(f", validated on {words} of its own")
