"""Federated data modules: samples, partition, loaders, description and errors."""

import copy
import hashlib
import pickle
import random
import struct
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from datamodules import (
    IID,
    ClassesPerClient,
    DatasetSamples,
    DigitsDataModule,
    Dirichlet,
    FederatedDataModule,
    FedSLRDirichlet,
    Loaded,
    LogNormal,
    MatchLabels,
    Natural,
    Partition,
    Partitioner,
    Ragged,
    Shards,
    SharedTest,
    SplitOwn,
    TensorDataModule,
    TensorSamples,
    Within,
)

RULES = [
    IID(),
    Dirichlet(0.5),
    Dirichlet(0.5, over="labels"),
    ClassesPerClient(2),
    Shards(2),
    LogNormal(0.5),
]


def batches(loader):
    return [(x, y) for x, y in loader]


class Small(FederatedDataModule):
    """A small data set of a user, in which the input of a sample is the index of the sample."""

    loads = 0

    def load(self):
        self.loads += 1
        x, y = torch.arange(130.0)[:, None], torch.arange(130) % 3
        return Loaded(TensorSamples(x[:100], y[:100]), TensorSamples(x[100:], y[100:]))


class Streamed(FederatedDataModule):
    """The data of `Small`, read one sample at a time."""

    def load(self):
        x, y = torch.arange(130.0)[:, None], torch.arange(130) % 3
        train, test = TensorDataset(x[:100], y[:100]), TensorDataset(x[100:], y[100:])
        return Loaded(DatasetSamples(train, y[:100]), DatasetSamples(test, y[100:]))


def test_properties_need_no_setup_and_data_are_loaded_once():
    dm = Small(num_clients=4)
    assert dm.num_clients == 4
    assert dm.loads == 0
    assert len(dm.client(3).train) == dm.client_sizes[3]
    dm.setup()
    dm.setup("fit")
    assert dm.loads == 1
    assert dm.num_classes == 3
    assert dm.input_shape == (1,)
    assert len(dm.samples) == 130
    assert dm.client_sizes.dtype == np.int64
    assert len(dm.partition) == 4


def test_data_are_prepared_before_they_are_loaded_on_first_use():
    class Downloaded(Small):
        ready = False

        def prepare_data(self):
            self.ready = True

        def load(self):
            assert self.ready
            return super().load()

    assert len(Downloaded(num_clients=2).partition) == 2


@pytest.mark.parametrize("protocol", [SplitOwn(), MatchLabels(9), SharedTest()], ids=repr)
def test_label_counts_equal_those_of_a_loop_over_samples(protocol):
    dm = Small(num_clients=5, partition=Dirichlet(0.5, min_size=2), protocol=protocol)
    for split in ("train", "val", "test"):
        counts = np.zeros((5, 3), int)
        for client in range(5):
            for sample in getattr(dm.partition, split)[client]:
                counts[client, sample % 3] += 1
        assert dm.label_counts(split).tolist() == counts.tolist()
        assert dm.label_counts(split).dtype == np.int64


@pytest.mark.parametrize("protocol", [SplitOwn(), MatchLabels(9), SharedTest()], ids=repr)
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_partition_depends_on_the_seed_only(rule, protocol):
    def build(seed):
        return DigitsDataModule(5, rule, protocol, seed=seed)

    reference = build(1).partition.hash
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
    dm = build(1)
    assert dm.partition.hash == reference
    batches(dm.client(0).train_dataloader())
    batches(dm.train_dataloader())
    batches(dm.test_dataloader())
    after = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])
    assert build(2).partition.hash != reference
    assert build(None).partition.hash == build(0).partition.hash


def test_hash_is_sha256_of_all_arrays_as_little_endian_int64():
    parts = Partition(
        Ragged.from_sizes(np.array([4, 1, 2]), np.array([1, 2])),
        Ragged.from_sizes(np.array([3]), np.array([0, 1])),
        Ragged.shared(np.array([7, 8]), 2),
    )
    digest = hashlib.sha256()
    for name, starts, sizes, indices in (
        ("train", [0, 1], [1, 2], [4, 1, 2]),
        ("val", [0, 0], [0, 1], [3]),
        ("test", [0, 0], [2, 2], [7, 8]),
    ):
        for array in (starts, sizes, indices):
            digest.update(f"{name}:{len(array)};".encode())
            digest.update(struct.pack(f"<{len(array)}q", *array))
    assert parts.hash == digest.hexdigest()


def test_hash_changes_when_a_sample_moves():
    def build(train, train_sizes, val):
        empty = Ragged.from_sizes(np.array([], int), np.array([0, 0]))
        val = Ragged.from_sizes(np.array(val, int), np.array([len(val), 0]))
        return Partition(Ragged.from_sizes(np.array(train), np.array(train_sizes)), val, empty).hash

    assert build([0, 1, 2], [1, 2], []) == build([0, 1, 2], [1, 2], [])
    moved = [
        build([0, 1, 2], [1, 2], []),
        build([0, 1, 2], [2, 1], []),  # sample 1 to the other client
        build([0, 1, 3], [1, 2], []),  # another sample
        build([0, 2], [1, 1], [1]),  # sample 1 to validation
    ]
    assert len(set(moved)) == 4


def test_a_million_indices_are_stored_in_a_few_arrays():
    clients = 100_000
    dm = TensorDataModule(
        torch.zeros(10 * clients, 1, dtype=torch.uint8),
        torch.zeros(10 * clients, dtype=torch.int64),
        num_clients=clients,
    )
    before = sys.getallocatedblocks()
    parts = dm.partition
    # One Python object per client would be 100,000 blocks.
    assert sys.getallocatedblocks() - before < 5000
    for ragged in (parts.train, parts.val, parts.test):
        arrays = vars(ragged)
        assert set(arrays) == {"indices", "starts", "sizes"}
        assert all(type(a) is np.ndarray and a.dtype == np.int64 for a in arrays.values())
    # Ten samples each: 2 test, 1 validation, 7 training.
    assert (parts.train.sizes == 7).all()
    assert np.shares_memory(parts.train[5], parts.train.indices)


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda dm: pickle.loads(pickle.dumps(dm))])
def test_copies_have_the_same_partition_and_order(duplicate, ready):
    dm = DigitsDataModule(5, seed=4)
    if ready:
        dm.setup()
    assert duplicate(dm).partition.hash == dm.partition.hash
    loader = duplicate(dm.client(2)).train_dataloader()
    assert torch.equal(batches(loader)[0][0], batches(dm.client(2).train_dataloader())[0][0])


def loaded_samples(loader):
    return [int(v) for x, _ in loader for v in x.flatten()]


@pytest.mark.parametrize("kind", [Small, Streamed])
def test_loaders_give_each_sample_once(kind):
    dm = kind(num_clients=4, batch_size=8, protocol=SplitOwn(0.2, 0.1))
    parts = dm.partition
    for client in range(4):
        data = dm.client(client)
        for loader, indices in (
            (data.train_dataloader(), parts.train[client]),
            (data.val_dataloader(), parts.val[client]),
            (data.test_dataloader(), parts.test[client]),
        ):
            assert type(loader) is DataLoader
            assert len(loader) == -(-len(indices) // 8)
            assert sorted(loaded_samples(loader)) == indices.tolist()
            for x, y in loader:
                assert torch.equal(y, x.squeeze(1).long() % 3)
                assert len(x) <= 8
    for loader, ragged in (
        (dm.train_dataloader(), parts.train),
        (dm.val_dataloader(), parts.val),
        (dm.test_dataloader(), parts.test),
    ):
        assert sorted(loaded_samples(loader)) == sorted(ragged.indices.tolist())


def test_training_order_is_a_function_of_seed_and_epoch():
    def loader(seed=0, client=0):
        return Small(num_clients=2, seed=seed).client(client).train_dataloader()

    first = loader()
    epochs = [loaded_samples(first) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    other = loader()
    other.sampler.set_epoch(2)  # as Lightning does, also when it resumes
    assert loaded_samples(other) == epochs[2]
    assert sorted(epochs[0]) == sorted(epochs[1])
    ranks = [np.argsort(loaded_samples(loader(seed))).tolist() for seed in (0, 1)]
    assert ranks[0] != ranks[1]
    pooled = Small(num_clients=2).train_dataloader()
    assert loaded_samples(pooled) != loaded_samples(pooled)


def test_batch_size_none_loads_all_samples_as_one_batch():
    dm = Small(num_clients=4, batch_size=None, protocol=SplitOwn(validation=0))
    (batch,) = batches(dm.client(1).train_dataloader())
    assert len(batch[0]) == dm.client_sizes[1]
    (batch,) = batches(dm.train_dataloader())
    assert len(batch[0]) == dm.client_sizes.sum()
    assert batches(dm.client(1).val_dataloader()) == []


def test_worker_processes_do_not_change_the_batches():
    alone, helped = (
        Streamed(num_clients=2, num_workers=n).client(1).train_dataloader() for n in (0, 1)
    )
    assert loaded_samples(alone) == loaded_samples(helped)


def test_the_pooled_test_loader_has_each_sample_once():
    for protocol in (SharedTest(), MatchLabels(20)):
        dm = Small(num_clients=4, protocol=protocol)
        tested = loaded_samples(dm.test_dataloader())
        assert len(tested) == len(set(tested))
        assert set(tested) == set(dm.partition.test.flat.tolist())


def test_the_number_of_natural_clients_is_that_of_the_ids():
    x, y, ids = torch.zeros(12, 1), torch.zeros(12), np.array([5, 5, 5, 7, 7, 7, 7, 9, 9, 9, 9, 9])
    dm = TensorDataModule(x, y, client_ids=ids, partition=Natural(), protocol=SplitOwn(0, 0))
    assert dm.num_clients == 3
    assert dm.client_sizes.tolist() == [3, 4, 5]
    own = TensorDataModule(x, y, client_ids=ids, partition=Natural([1] * 12), num_clients=1)
    assert len(own.partition) == 1


def test_natural_ids_may_cover_the_official_test_set():
    x, y = torch.zeros(6, 1), torch.zeros(6)
    test = (torch.zeros(4, 1), torch.zeros(4))

    def build(ids, protocol):
        dm = TensorDataModule(
            x, y, *test, client_ids=np.array(ids), partition=Natural(), protocol=protocol
        )
        return sum(part.sizes.sum() for part in (dm.partition.train, dm.partition.val))

    every = [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]
    assert build(every, SplitOwn(0, 0)) == 10
    assert build(every[:6], SplitOwn(0, 0)) == 6
    assert build(every, SharedTest(0)) == 6


def test_regression_data_have_no_classes():
    x, y = torch.zeros(60, 2), torch.linspace(0, 1, 60)
    for rule in (IID(), LogNormal(0.5), Natural(np.arange(60) % 3)):
        dm = TensorDataModule(x, y, num_clients=3, partition=rule)
        assert dm.num_classes is None
        assert batches(dm.client(0).train_dataloader())[0][1].dtype == torch.float32

    class Unknown(FederatedDataModule):
        def load(self):
            return Loaded(DatasetSamples(TensorDataset(x, y)))

    dm = Unknown(num_clients=3)
    assert dm.num_classes is None
    assert len(batches(dm.client(0).test_dataloader())[0][0]) == dm.partition.test.sizes[0]


def test_targets_with_more_axes_have_classes_but_no_label_counts(one_line):
    dm = TensorDataModule(torch.zeros(60, 2), torch.arange(120).reshape(60, 2), num_clients=3)
    assert dm.num_classes == 120
    with one_line("label_counts", "(60, 2)"):
        dm.label_counts()


def test_description_names_rule_protocol_and_seed():
    dm = DigitsDataModule(7, Dirichlet(0.3), MatchLabels(50, validation=0.25), seed=9)
    text = dm.describe()
    for part in ("7 clients", "alpha=0.3", "50 samples of the official test set", "25%", "seed 9"):
        assert part in text
    assert "\n" not in text


def test_wrong_arguments_are_refused_by_the_constructor(one_line):
    for key, value in [
        ("num_clients", 0),
        ("num_clients", 2.0),
        ("batch_size", 0),
        ("seed", -1),
        ("num_workers", -1),
    ]:
        with one_line(f"Small.{key}: {value}; it must be a whole number"):
            Small(**{"num_clients": 3, key: value})
    with one_line("Small.num_clients: None", "Natural()"):
        Small()
    with one_line("Small.partition: 'Dirichlet'", "Partitioner"):
        Small(num_clients=3, partition="Dirichlet")
    with one_line("Small.protocol: ", "Protocol"):
        Small(num_clients=3, protocol=SplitOwn)


def test_wrong_data_are_refused_when_loaded(one_line):
    with one_line("num_clients: 131; it must be from 1 to 130"):
        Small(num_clients=131).setup()
    for client in (-1, 3):
        with one_line(f"client: {client}; it must be from 0 to 2"):
            Small(num_clients=3).client(client)
    with one_line("label_counts.split: 'valid'", "'val'"):
        Small(num_clients=3).label_counts("valid")
    with one_line("smallest target: -1; it must be at least 0"):
        TensorDataModule(torch.zeros(9, 1), torch.arange(9) - 1, num_clients=2).setup()
    with one_line("Natural.client_ids.shape: (5,); it must be (9,), one id per training sample"):
        TensorDataModule(
            torch.zeros(9, 1), torch.zeros(9), client_ids=np.arange(5), partition=Natural()
        ).setup()
    with one_line("Natural.client_ids: None; it must be given"):
        TensorDataModule(torch.zeros(9, 1), torch.zeros(9), partition=Natural()).setup()
    with one_line("partition: Dirichlet", "float32", "IID"):
        TensorDataModule(
            torch.zeros(90, 1), torch.zeros(90), num_clients=2, partition=Dirichlet(1.0)
        ).setup()
    with one_line("label_counts", "float32"):
        TensorDataModule(torch.zeros(9, 1), torch.zeros(9), num_clients=2).label_counts()


class Returned(Partitioner):
    """A rule that returns what it is given."""

    words = "as given"

    def __init__(self, owned):
        self._owned = owned

    def assign(self, targets, num_clients, rng):
        return self._owned


@pytest.mark.parametrize(
    ("owned", "parts"),
    [
        ([np.arange(3), np.arange(3, 6)], ["list", "IndexArrays"]),
        (Ragged.from_sizes(np.arange(6), np.array([2, 2, 2])), ["3 clients", "of 2 clients"]),
        (Ragged.from_sizes(np.arange(6), np.array([6])), ["1 clients", "of 2 clients"]),
        (Ragged.from_sizes(np.array([0, 1, 2, -1]), np.array([2, 2])), ["from -1 to 2", "to 9"]),
        (Ragged.from_sizes(np.array([0, 1, 2, 10]), np.array([2, 2])), ["from 0 to 10", "to 9"]),
        (Ragged.from_sizes(np.array([0, 1, 2.5]), np.array([2, 1])), ["float64", "whole numbers"]),
    ],
    ids=["list", "more clients", "fewer clients", "negative", "beyond the samples", "floating"],
)
def test_what_a_rule_of_ones_own_returns_is_checked(owned, parts, one_line):
    data = TensorDataModule(
        torch.rand(10, 2), torch.zeros(10).long(), num_clients=2, partition=Returned(owned)
    )
    with one_line("Returned.assign", *parts):
        data.setup()


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([0, 1, 1, 2, 3, 4], "client 0 has the sample 1 several times"),
        ([0, 1, 2, 3, 4, 2], "clients 0 and 1 both have the sample 2"),
    ],
)
def test_samples_that_overlap_are_those_of_a_rule_that_says_so(samples, words, one_line):
    rule = Returned(Ragged.from_sizes(np.array(samples), np.array([3, 3])))
    with one_line(f"Returned.assign: {words}; each sample must be of one client, once", "overlaps"):
        TensorDataModule(torch.rand(9, 2), torch.zeros(9), num_clients=2, partition=rule).setup()
    rule.overlaps = True
    data = TensorDataModule(
        torch.rand(9, 2), torch.zeros(9), num_clients=2, partition=rule, protocol=SplitOwn(0, 0)
    )
    assert data.partition.train.flat.tolist() == samples


def test_rules_of_rules_overlap_where_one_of_them_does():
    assert Within(FedSLRDirichlet(0.1), IID(), groups=2).overlaps
    assert Within(IID(), FedSLRDirichlet(0.1), groups=2).overlaps
    assert not Within(IID(), IID(), groups=2).overlaps


def test_a_rule_without_words_is_told_so(one_line):
    class Silent(Partitioner):
        def owners(self, targets, num_clients, rng):
            return np.zeros(len(targets), int)

    data = TensorDataModule(torch.rand(4, 2), torch.zeros(4), num_clients=1, partition=Silent())
    with one_line("Silent: it has no words", "describe"):
        data.setup()


@pytest.mark.parametrize("client", ["2", "north", 1.0, None, True])
def test_a_client_is_a_number(client, one_line):
    data = DigitsDataModule(num_clients=3)
    with one_line(f"client: {client!r}", "the number of a client, from 0 to 2"):
        data.client(client)
    assert data.client(np.int64(2)).client == 2
