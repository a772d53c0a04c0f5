"""The federated loop: who trains when, in which chunks, on which process."""

import json
from dataclasses import replace
from math import sqrt
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from datamodules import Ragged, SharedTest, SplitOwn, TensorDataModule
from pfl import FederatedLoop
from pfl.datamodules.rules.partitioner import Partitioner
from pfl.datamodules.rules.sample_values import Natural
from pfl.rounds.loop import ChunkLoader
from tests.refusal import refused

SIZES = [4, 1, 9, 2, 2, 7, 3, 1, 5, 6]  # of training samples


def datamodule(sizes=SIZES, protocol=None, seed=0, partition=None):
    owners = np.repeat(np.arange(len(sizes)), sizes)
    x = torch.arange(len(owners)).float()[:, None]
    y = torch.from_numpy(owners) % 3
    arguments = dict(client_ids=owners, seed=seed, partition=partition or Natural())
    return TensorDataModule(
        x, y, x[:5], y[:5] * 0, protocol=protocol or SharedTest(validation=0), **arguments
    )


def loop(*args, sizes=SIZES, protocol=None, seed=0, world=(0, 1), **kwargs):
    federation = FederatedLoop(datamodule(sizes, protocol), *args, seed=seed, **kwargs)
    federation.setup()
    federation.place = lambda: world
    return federation


def frequencies(federation, rounds):
    counts = np.zeros(federation.num_clients)
    for r in range(rounds):
        counts[federation.cohort(r)] += 1
    return counts


# ---- cohorts -------------------------------------------------------------------------------------


KINDS = [
    {"clients_per_round": 4},
    {"clients_per_round": 4, "sampling": "bernoulli"},
    {"clients_per_round": 4, "sampling": "weighted"},
    {"clients_per_round": None},
    {"trace": [[3, 1], [], [5], [0, 9, 2]]},
]


@pytest.mark.parametrize("kwargs", KINDS, ids=str)
def test_a_cohort_is_a_function_of_seed_and_round(kwargs):
    federation = loop(**kwargs)
    cohorts = [federation.cohort(r).tolist() for r in range(4)]
    torch.manual_seed(3)
    np.random.seed(3)
    assert [federation.cohort(r).tolist() for r in (3, 1, 0, 2)] == [
        cohorts[r] for r in (3, 1, 0, 2)
    ]
    assert [loop(**kwargs).cohort(r).tolist() for r in range(4)] == cohorts
    for cohort in cohorts:
        assert cohort == sorted(set(cohort))
        assert set(cohort) <= set(range(10))


@pytest.mark.parametrize("sampling", ["uniform", "bernoulli", "weighted"])
def test_rounds_and_seeds_differ(sampling):
    """100 rounds of 4 among 10: two equal sequences have no measurable probability."""
    a, b = (loop(4, sampling=sampling, seed=s) for s in (0, 1))
    first = [tuple(a.cohort(r)) for r in range(100)]
    assert len(set(first)) > 30  # of at least 210 sets
    assert first != [tuple(b.cohort(r)) for r in range(100)]


def test_the_seed_of_the_data_counts_where_no_other_is_given():
    given = loop(4, seed=5)
    for taken in (
        FederatedLoop(datamodule(seed=5), 4),
        FederatedLoop(datamodule(seed=9), 4, seed=5),
    ):
        early = [taken.cohort(r).tolist() for r in range(20)]  # before setup: the same
        taken.setup()
        assert taken.seed == 5
        assert [taken.cohort(r).tolist() for r in range(20)] == early
        assert early == [given.cohort(r).tolist() for r in range(20)]


def test_uniform_cohorts_have_one_size_and_everyone_is_as_likely():
    """A client is in a cohort with probability 0.3: Binomial(3000, 0.3), 6 standard deviations."""
    federation, rounds = loop(3), 3000
    assert {len(federation.cohort(r)) for r in range(rounds)} == {3}
    counts = frequencies(federation, rounds)
    assert counts.sum() == 3 * rounds
    assert np.abs(counts - 0.3 * rounds).max() < 6 * sqrt(rounds * 0.3 * 0.7)


def test_pairs_of_clients_meet_as_often_as_they_should():
    """Two given clients are both among 3 of 10 with probability 3 * 2 / (10 * 9) = 1 / 15."""
    federation, rounds = loop(3), 3000
    pairs = np.zeros((10, 10))
    for r in range(rounds):
        pairs[np.ix_(federation.cohort(r), federation.cohort(r))] += 1
    above = pairs[np.triu_indices(10, 1)]
    assert np.abs(above - rounds / 15).max() < 6 * sqrt(rounds / 15 * 14 / 15)


def test_bernoulli_clients_decide_alone():
    """p = 0.4; given that somebody takes part (1 - 0.6^10 = 0.994), p / 0.994 for each client."""
    federation, rounds = loop(4, sampling="bernoulli"), 3000
    sizes = np.array([len(federation.cohort(r)) for r in range(rounds)])
    assert sizes.min() >= 1
    p = 0.4 / (1 - 0.6**10)
    counts = frequencies(federation, rounds)
    assert np.abs(counts - p * rounds).max() < 6 * sqrt(rounds * p * (1 - p))
    # Sizes vary like a binomial number (variance 2.4); a fixed number would not.
    assert 1.9 < sizes.var() < 2.9


def test_a_bernoulli_cohort_is_never_empty():
    federation = loop(1, sampling="bernoulli")  # 0.1 each: nobody in 0.9^10 = 35 % of the draws
    assert min(len(federation.cohort(r)) for r in range(300)) == 1


def test_weighted_sampling_is_proportional_to_the_sizes():
    """Chi-square with 9 degrees of freedom: mean 9, variance 18, 6 standard deviations."""
    federation, rounds = loop(1, sampling="weighted"), 4000
    expected = rounds * np.array(SIZES) / sum(SIZES)
    counts = frequencies(federation, rounds)
    assert counts.sum() == rounds
    assert ((counts - expected) ** 2 / expected).sum() < 9 + 6 * sqrt(18)


def test_weighted_cohorts_have_no_client_twice():
    federation = loop(4, sampling="weighted")
    for r in range(200):
        assert len(set(federation.cohort(r))) == 4
    counts = frequencies(federation, 500)
    assert counts[2] > counts[1]  # 9 samples against 1


class OneEmpty(Partitioner):
    """Client 2 of 3 owns nothing."""

    def owners(self, targets, num_clients, rng):
        return np.arange(len(targets)) % 2

    def describe(self):
        return "one empty"


def test_weighted_sampling_needs_enough_clients_with_samples():
    data = TensorDataModule(
        torch.zeros(8, 1), torch.zeros(8).long(), num_clients=3, partition=OneEmpty()
    )
    federation = FederatedLoop(data, 2, sampling="weighted")
    federation.setup()
    assert federation.cohort(0).tolist() == [0, 1]
    # Four clients of whom two own something: three cannot be drawn.
    data = TensorDataModule(
        torch.zeros(8, 1), torch.zeros(8).long(), num_clients=4, partition=OneEmpty()
    )
    federation = FederatedLoop(data, 3, sampling="weighted")
    with refused("loop.clients_per_round", "3", "2"):
        federation.setup()
        federation.cohort(0)


@pytest.mark.parametrize(("count", "size"), [(None, 10), (10, 10), (1, 1), (np.int64(3), 3)])
def test_a_cohort_has_the_given_number_of_clients(count, size):
    federation = loop(count)
    assert federation.participation.cohort_size == size
    assert len(federation.cohort(0)) == size
    if size == 10:
        assert federation.cohort(7).tolist() == list(range(10))


def test_describe_says_who_trains():
    assert "Training: all clients; seed 0." in loop().describe()
    assert (
        "Training: 3 clients a round, weighted sampling; seed 4."
        in loop(3, sampling="weighted", seed=4).describe()
    )
    assert "a replayed trace of 2 rounds" in loop(trace=[[1], [2]]).describe()
    assert loop().describe().startswith(loop().datamodule.describe())


def test_a_trace_needs_no_sampling():
    """It may hold clients without samples, whatever `sampling` says."""
    data = TensorDataModule(
        torch.zeros(8, 1), torch.zeros(8).long(), num_clients=4, partition=OneEmpty()
    )
    federation = FederatedLoop(data, sampling="weighted", trace=[[0, 1, 2]])
    federation.setup()
    assert federation.cohort(0).tolist() == [0, 1, 2]


# ---- traces --------------------------------------------------------------------------------------


TRACE = [[3, 1], [], [9], [0, 5, 2]]


@pytest.mark.parametrize("source", ["list", "file"])
def test_a_trace_is_replayed(source, tmp_path):
    trace = TRACE
    if source == "file":
        path = tmp_path / "trace.json"
        path.write_text(json.dumps(TRACE))
        trace = str(path)
    federation = loop(2, trace=trace)  # it goes before the number of clients
    assert [federation.cohort(r).tolist() for r in range(4)] == [sorted(cohort) for cohort in TRACE]
    assert federation.cohort(1).dtype == np.int64
    assert federation.participation.cohort_size == 3


def test_a_trace_must_be_as_long_as_the_run():
    federation = loop(trace=TRACE)
    federation.trainer = SimpleNamespace(max_epochs=4)
    federation.setup("fit")
    federation.trainer = SimpleNamespace(max_epochs=5)
    with refused("trainer.max_epochs", "5", "loop.trace", "4 rounds"):
        federation.setup("fit")
    federation.setup("test")  # nothing is trained


@pytest.mark.parametrize("cohort", [[10], [-1], [2, 2], [0.5], [1.0], [None]], ids=str)
def test_impossible_traces_are_refused(cohort):
    with refused("loop.trace", "round 2", str(cohort), "0 to 9"):
        loop(trace=[[0], cohort])


@pytest.mark.parametrize(
    "content", ["{", '{"a": [1]}', "[1, 2]", "3", "", "[" * 5000], ids=lambda text: text[:9]
)
def test_files_without_a_trace_are_refused(content, tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(content)
    with refused("loop.trace", str(path)):
        loop(trace=str(path))


def test_a_missing_trace_file_is_refused(tmp_path):
    with refused("loop.trace", "nothing.json"):
        loop(trace=str(tmp_path / "nothing.json"))


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "parts"),
    [
        ({"clients_per_round": 0}, ["loop.clients_per_round", "0", "1 to 10"]),
        ({"clients_per_round": 11}, ["loop.clients_per_round", "11", "1 to 10"]),
        ({"clients_per_round": -1}, ["loop.clients_per_round", "-1", "1 to 10"]),
        ({"clients_per_round": 0.3}, ["loop.clients_per_round", "0.3", "whole number"]),
        ({"clients_per_round": 1.0}, ["loop.clients_per_round", "1.0", "whole number"]),
        ({"clients_per_round": 2.5}, ["loop.clients_per_round", "2.5", "whole number"]),
        ({"clients_per_round": float("nan")}, ["loop.clients_per_round", "nan"]),
        ({"sampling": "random"}, ["loop.sampling", "'random'", "uniform, bernoulli, weighted"]),
        ({"clients_at_once": 0}, ["loop.clients_at_once", "0", "at least 1"]),
        ({"evaluate": ["val", "all"]}, ["loop.evaluate", "all", "train, val and test"]),
        ({"state_memory": -0.5}, ["loop.state_memory", "-0.5", "at least 0"]),
        ({"state_dtype": "float64"}, ["loop.state_dtype", "'float64'", "float32 or float16"]),
    ],
    ids=str,
)
def test_impossible_settings_are_refused(kwargs, parts):
    with refused(*parts):
        loop(**kwargs)


# ---- the loader ----------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [None, "float32", "float16", "bfloat16"])
def test_the_dtype_of_states_is_read(given):
    assert loop(state_dtype=given).state_dtype is getattr(torch, given or "", None)
    assert loop(state_memory=0.0).state_memory == 0


def attach(federation, round_index, world=(0, 1)):
    """Stand in for the Trainer."""
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    federation.trainer = SimpleNamespace(
        current_epoch=round_index, strategy=strategy, global_rank=world[0], world_size=world[1]
    )
    vars(federation).pop("place", None)  # the stand-in of `loop`
    return federation


@pytest.mark.parametrize("stateful", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("at_once", [None, 1, 2, 4])
@pytest.mark.parametrize("kwargs", KINDS, ids=str)
def test_a_round_is_one_batch_with_the_cohort_in_chunks(kwargs, at_once, world, stateful):
    for round_index in range(4):
        seen = []
        for rank in range(world):
            federation = attach(loop(clients_at_once=at_once, **kwargs), round_index, (rank, world))
            federation.stateful = stateful
            loader = federation.train_dataloader()
            assert len(loader) == 1  # processes have equally many batches
            (cohort,) = loader
            assert cohort.round == round_index
            assert cohort.ids.tolist() == federation.cohort(round_index).tolist()
            assert cohort.chunks  # one that may be empty, where this process has no client
            if at_once:
                assert max(len(chunk) for chunk in cohort.chunks) <= at_once
            mine = np.concatenate(cohort.chunks).tolist()
            assert not stateful or all(i % world == rank for i in mine)
            seen += mine
        assert sorted(seen) == federation.cohort(round_index).tolist()


@pytest.mark.parametrize("stateful", [True, False])
def test_who_owns_state_trains_and_evaluates_it(stateful):
    """Sizes 9 7 6 5 4 3 2 2 1 1; without state the training clients are dealt out by size."""
    for rank in range(2):
        federation = attach(loop(), 0, (rank, 2))
        federation.stateful = stateful
        (cohort,) = federation.train_dataloader()
        (train,) = cohort.chunks
        (test,) = federation.test_dataloader()
        owned = list(range(rank, 10, 2))
        dealt = [[2, 8, 6, 3, 1], [5, 9, 0, 4, 7]][rank]  # 9 5 3 2 1 and 7 6 4 2 1, 20 each
        assert sorted(test.ids.tolist()) == owned
        assert sorted(train.tolist()) == (owned if stateful else sorted(dealt))


def test_clients_with_test_samples_of_their_own_are_tested_where_their_states_are():
    """Sizes of two thirds of 4, 1, 9 and so on would be dealt out in another way."""
    for rank in range(2):
        federation = attach(loop(protocol=SplitOwn(test=0.6, validation=0)), 0, (rank, 2))
        (test,) = federation.test_dataloader()
        assert sorted(test.ids.tolist()) == list(range(rank, 10, 2))
        sizes = federation.datamodule.partition.test.sizes
        assert (np.diff(sizes[test.ids]) <= 0).all() and len(np.unique(sizes)) > 2


def test_set_up_sets_up_the_data(monkeypatch):
    data = datamodule()
    stages = []
    set_up = data.setup

    def setup(stage=None):
        stages.append(stage)
        set_up(stage)

    monkeypatch.setattr(data, "setup", setup)
    FederatedLoop(data).setup("test")
    assert "test" in stages


def test_a_trace_without_clients_has_one_empty_chunk():
    federation = attach(loop(trace=[[], []]), 0)
    (cohort,) = federation.train_dataloader()
    assert [len(chunk) for chunk in cohort.chunks] == [0]


@pytest.mark.parametrize("sampling", ["uniform", "weighted"])
@pytest.mark.parametrize("at_once", [1, 3, 4])
def test_no_chunk_has_more_clients_than_asked_for(at_once, sampling):
    federation = attach(loop(7, sampling=sampling, clients_at_once=at_once), 0)
    (cohort,) = federation.train_dataloader()
    assert max(len(chunk) for chunk in cohort.chunks) <= at_once


def test_nothing_is_built_before_it_is_iterated():
    """Lightning calls iter() before the round number is right after a resume."""
    federation = attach(loop(3), 0)
    loader = iter(federation.train_dataloader())
    federation.trainer.current_epoch = 5
    assert next(loader).round == 5


def test_evaluation_visits_every_client_for_every_split():
    federation = attach(loop(2, protocol=SharedTest(validation=0.5), clients_at_once=4), 3)
    loader = federation.val_dataloader()
    assert isinstance(loader, ChunkLoader)
    chunks = list(loader)
    assert len(chunks) == len(loader) == 2 * 3  # ceil(10 / 4) for each split
    for split in ("val", "test"):
        part = [c for c in chunks if c.split == split]
        assert sorted(i for c in part for i in c.ids.tolist()) == list(range(10))
    assert {c.split for c in federation.test_dataloader()} == {"test"}


def test_splits_without_samples_are_left_out():
    federation = attach(loop(protocol=SharedTest(validation=0)), 0)
    assert {c.split for c in federation.val_dataloader()} == {"test"}
    federation.evaluate = ("val",)
    assert federation.val_dataloader() == []
    federation.evaluate = ()
    assert federation.val_dataloader() == []


def test_testing_without_test_samples_is_refused():
    federation = loop()
    untested = Ragged.shared(np.arange(0), len(SIZES))
    federation.datamodule._partition = replace(federation.datamodule.partition, test=untested)
    with refused("data.protocol", "test"):
        federation.test_dataloader()


def test_samples_are_moved_to_a_device_once():
    federation = loop()
    device = torch.device("cpu")
    assert federation.client_data(device) is federation.client_data(torch.device("cpu"))
    assert federation.client_data(torch.device("meta")) is not federation.client_data(device)
    assert federation.client_data(device).seed == 0
