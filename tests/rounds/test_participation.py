"""Who never trains, who fails and who is slow: draws, traces, refusals and words."""

import json
from math import sqrt
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser

from datamodules import ArrayDataModule, Natural
from pfl import FederatedLoop
from pfl.aggregation.attacks import Attackers, SignFlip
from pfl.aggregation.privacy import Privacy
from pfl.aggregation.robust import Median
from pfl.clients import Clients, LocalSchedule
from pfl.rounds.clock import Clock
from tests.refusal import refused
from tests.rounds.test_loop import SIZES, attach, datamodule, loop

EVERYONE = np.arange(10)


def failing(federation, round_index, ids=EVERYONE):
    return ids[federation.participation.fails(round_index, ids)].tolist()


def slow(federation, round_index, ids=EVERYONE):
    return ids[federation.participation.work(round_index, ids) < 1].tolist()


# ---- clients that never train --------------------------------------------------------------------


def test_nobody_is_unseen_by_default():
    assert loop().unseen_clients.tolist() == []
    assert loop().unseen_clients.dtype == np.int64
    assert loop().population.tolist() == list(range(10))


@pytest.mark.parametrize("source", ["list", "file", "array"])
def test_unseen_clients_by_id(source, tmp_path):
    unseen = [7, 2]
    if source == "file":
        (tmp_path / "ids.json").write_text("[7, 2]")
        unseen = str(tmp_path / "ids.json")
    federation = loop(unseen=np.array([7, 2]) if source == "array" else unseen)
    assert federation.unseen_clients.tolist() == [2, 7]
    assert federation.unseen_clients.dtype == np.int64
    assert federation.population.tolist() == [0, 1, 3, 4, 5, 6, 8, 9]


@pytest.mark.parametrize("source", ["list", "file", "with an id"])
def test_unseen_clients_by_name(source, tmp_path):
    unseen: list | str = ["south", "east"]
    if source == "file":
        (tmp_path / "names.json").write_text('["south", "east"]')
        unseen = str(tmp_path / "names.json")
    elif source == "with an id":
        unseen = ["south", hospitals().client_names.index("east")]
    federation = FederatedLoop(hospitals(), unseen=unseen)
    federation.setup()
    names = np.array(federation.datamodule.client_names)
    assert sorted(names[federation.unseen_clients]) == ["east", "south"]
    assert names[federation.population].tolist() == ["north"]


@pytest.mark.parametrize(
    ("unseen", "parts"),
    [
        (["nort"], ["loop.unseen: 'nort'", "the name of a client", "did you mean 'north'?"]),
        (["north", "north"], ["loop.unseen", "different"]),
        (["east", "north", "south"], ["loop.unseen", "3 clients", "some must train"]),
    ],
)
def test_impossible_names_of_unseen_clients_are_refused(unseen, parts):
    with refused(*parts):
        FederatedLoop(hospitals(), unseen=unseen).setup()


def test_a_name_of_digits_is_a_text_and_no_id(tmp_path):
    """Hospitals 1, 2 and 3 have the ids 0, 1 and 2."""
    (tmp_path / "names.json").write_text('["1"]')
    for unseen in (["1"], str(tmp_path / "names.json"), [0]):
        assert FederatedLoop(hospitals("123"), unseen=unseen).unseen_clients.tolist() == [0]
    for unseen in ([1], np.array([2]), ["3", 2]):
        with refused("loop.unseen", "id", "give names in quotes, as in"):
            FederatedLoop(hospitals("123"), unseen=unseen).setup()
    assert FederatedLoop(hospitals("012"), unseen=[1]).unseen_clients.tolist() == [1]


def test_the_command_line_keeps_a_name_of_digits_apart_from_an_id():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(FederatedLoop, skip={"datamodule"})
    given = {"unseen": ["1", 2, "north"]}
    assert parser.parse_object(given).unseen == given["unseen"]
    assert parser.parse_args(["--unseen", '["1", 2, north]']).unseen == given["unseen"]
    for what in ("trace", "dropout", "stragglers"):
        found = parser.parse_args([f"--{what}", '[["1"], [], [2, north]]'])
        assert found[what] == [["1"], [], [2, "north"]]
    found = parser.parse_args(["--attackers.attack", "SignFlip", "--attackers.clients", '["1", 2]'])
    assert found.attackers.clients == ["1", 2]
    found = parser.parse_args(["--attackers.attack", "SignFlip", "--attackers.clients", '[["1"]]'])
    assert found.attackers.clients == [["1"]]


@pytest.mark.parametrize("source", ["list", "file"])
def test_rounds_have_names_or_ids(source, tmp_path):
    """Hospitals north, south and east have the ids 1, 2 and 0."""
    rounds: list | str = [["north"], [], [0, "south"]]
    if source == "file":
        (tmp_path / "rounds.json").write_text('[["north"], [], [0, "south"]]')
        rounds = str(tmp_path / "rounds.json")
    found = FederatedLoop(hospitals(), trace=rounds)
    assert [found.cohort(r).tolist() for r in range(3)] == [[1], [], [0, 2]]
    three = np.arange(3)
    found = FederatedLoop(hospitals(), dropout=rounds)
    assert [failing(found, r, three) for r in range(3)] == [[1], [], [0, 2]]
    found = FederatedLoop(hospitals(), stragglers=rounds)
    assert [slow(found, r, three) for r in range(3)] == [[1], [], [0, 2]]
    attackers = Attackers(clients=rounds, attack=SignFlip())
    who = FederatedLoop(hospitals(), attackers=attackers).participation
    assert [three[who.attacking(r, three)].tolist() for r in range(3)] == [[1], [], [0, 2]]
    attackers = Attackers(clients=["south", 0], attack=SignFlip())
    found = FederatedLoop(hospitals(), attackers=attackers)
    assert found.participation.attacker_ids.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("one", "parts"),
    [
        (1, ["the id 0", "give names in quotes, as in ['1']"]),
        ("4", ["'4'; it must be the name of a client"]),
    ],
)
def test_impossible_clients_of_a_round_are_refused(one, parts):
    """Hospitals 1, 2 and 3 have the ids 0, 1 and 2: the number 1 may be either of two."""
    for what in ("trace", "dropout", "stragglers"):
        with refused(f"loop.{what}, round 2: {one!r}; ", *parts):
            FederatedLoop(hospitals("123"), **{what: [[], [one]]}).setup()
    for clients, where in (([one], ""), ([[], [one]], ", round 2")):
        attackers = Attackers(clients=clients, attack=SignFlip())
        with refused(f"loop.attackers.clients{where}: {one!r}; ", *parts):
            FederatedLoop(hospitals("123"), attackers=attackers).setup()


def test_a_word_that_is_no_name_is_refused(tmp_path):
    line = "'a'; it must be the name of a client"
    with refused(f"loop.trace, round 2: {line}"):
        loop(trace=[[0], ["a"]])
    (tmp_path / "attackers.json").write_text('["a"]')
    attackers = Attackers(clients=str(tmp_path / "attackers.json"), attack=SignFlip())
    with refused(f"loop.attackers.clients: {line}"):
        loop(attackers=attackers)


def hospitals(names=("north", "south", "east")):
    """Three clients with names."""
    return ArrayDataModule(
        np.zeros((12, 2), np.float32),
        np.arange(12) % 2,
        client_ids=np.array([*names] * 4),
        num_clients=None,
        partition=Natural(),
    )


@pytest.mark.parametrize(("share", "count"), [(0.2, 2), (0.25, 3), (0.01, 1), (0.9, 9), (0.94, 9)])
def test_a_share_of_unseen_clients_is_rounded_and_at_least_one(share, count):
    assert len(loop(unseen=share).unseen_clients) == count


def test_unseen_clients_are_a_function_of_the_seed():
    """Before set-up, too. Three of ten: 120 sets, of which 40 seeds find more than 20."""
    drawn = [tuple(FederatedLoop(datamodule(), unseen=0.3, seed=s).unseen_clients) for s in (4, 4)]
    assert drawn[0] == drawn[1] == tuple(loop(unseen=0.3, seed=4).unseen_clients)
    assert len({tuple(loop(unseen=0.3, seed=s).unseen_clients) for s in range(40)}) > 20
    # What cohorts are drawn from does not move the draw, nor does the number of clients a round.
    assert drawn[0] == tuple(loop(2, sampling="weighted", unseen=0.3, seed=4).unseen_clients)


@pytest.mark.parametrize("sampling", ["uniform", "bernoulli", "weighted"])
def test_unseen_clients_are_in_no_cohort(sampling):
    federation = loop(3, sampling=sampling, unseen=[0, 2, 9])
    seen = {i for r in range(200) for i in federation.cohort(r).tolist()}
    assert seen == {1, 3, 4, 5, 6, 7, 8}


def test_all_clients_are_those_that_train():
    federation = loop(unseen=[0, 2])
    assert federation.participation.cohort_size == 8
    assert federation.cohort(3).tolist() == [1, 3, 4, 5, 6, 7, 8, 9]
    federation.cohort(3)[:] = 0  # a copy
    assert federation.cohort(3).tolist() == [1, 3, 4, 5, 6, 7, 8, 9]
    federation.participation.require_all_clients("FedPD")
    with refused("loop.clients_per_round: 7", "FedPD", "all 8 clients"):
        loop(7, unseen=[0, 2]).participation.require_all_clients("FedPD")


def test_cohorts_are_drawn_as_from_data_without_the_unseen_clients():
    """The same places in a list of eight clients, for every kind of sampling."""
    rest = [1, 3, 4, 5, 6, 7, 8, 9]
    for sampling in ("uniform", "bernoulli", "weighted"):
        federation = loop(3, sampling=sampling, unseen=[0, 2])
        without = loop(3, sampling=sampling, sizes=[SIZES[i] for i in rest])
        for r in range(20):
            expected = [rest[place] for place in without.cohort(r)]
            assert federation.cohort(r).tolist() == expected


@pytest.mark.parametrize(
    ("kwargs", "parts"),
    [
        ({"unseen": 0.0}, ["loop.unseen: 0.0", "between 0 and 1"]),
        ({"unseen": 1}, ["loop.unseen: 1", "between 0 and 1"]),
        ({"unseen": -0.2}, ["loop.unseen: -0.2", "between 0 and 1"]),
        ({"unseen": float("nan")}, ["loop.unseen: nan", "between 0 and 1"]),
        ({"unseen": True}, ["loop.unseen: True", "between 0 and 1"]),
        ({"unseen": 0.96}, ["loop.unseen: 0.96", "leaves some of the 10 clients"]),
        ({"unseen": list(range(10))}, ["loop.unseen", "10 clients", "some must train"]),
        ({"unseen": [10]}, ["loop.unseen: [10]", "0 to 9"]),
        ({"unseen": [-1]}, ["loop.unseen: [-1]", "0 to 9"]),
        ({"unseen": [3, 3]}, ["loop.unseen: [3, 3]", "different"]),
        ({"unseen": [0.5]}, ["loop.unseen: [0.5]", "client ids"]),
        ({"unseen": "nowhere.json"}, ["loop.unseen: nowhere.json", "JSON"]),
        ({"unseen": [4], "clients_per_round": 10}, ["loop.clients_per_round: 10", "1 to 9"]),
        ({"unseen": [4], "trace": [[1], [2, 4]]}, ["loop.trace: round 2", "client 4"]),
    ],
    ids=str,
)
def test_impossible_unseen_clients_are_refused(kwargs, parts):
    with refused(*parts):
        loop(**kwargs)


def test_weighted_sampling_needs_clients_with_samples_that_train():
    owned = [3, 0, 2, 2]
    federation = FederatedLoop(datamodule(SIZES), 2, sampling="weighted", unseen=[0])
    federation.setup()
    federation.datamodule.partition.train.sizes[:4] = owned
    federation.datamodule.partition.train.sizes[4:] = 0
    federation.participation.check(None)  # clients 2 and 3
    federation = FederatedLoop(federation.datamodule, 2, sampling="weighted", unseen=[0, 2])
    with refused("loop.clients_per_round: 2", "only 1 have some"):
        federation.participation.check(None)


# ---- clients that fail, and slow clients ---------------------------------------------------------


@pytest.mark.parametrize("what", ["dropout", "stragglers"])
def test_a_draw_depends_on_seed_round_and_client_only(what):
    """Not on the other clients of the cohort, on their order, or on the other draw."""
    who = failing if what == "dropout" else slow
    federation = loop(**{what: 0.4})
    whole = [who(federation, r) for r in range(50)]
    assert whole == [who(loop(3, unseen=[0], dropout=0.4, stragglers=0.4), r) for r in range(50)]
    some = np.array([8, 1, 5])
    for r in range(50):
        assert who(federation, r, some) == [i for i in some if i in whole[r]]
    assert whole != [who(loop(**{what: 0.4}, seed=1), r) for r in range(50)]
    assert len({tuple(one) for one in whole}) > 25


def test_failing_and_being_slow_are_independent_and_as_frequent_as_they_say():
    """4000 draws each of 10 clients: 6 standard deviations of binomial numbers; p = 0.3 and 0.6,
    and 0.18 both."""
    federation, rounds = loop(dropout=0.3, stragglers=0.6), 4000
    who = federation.participation
    fails = np.array([who.fails(r, EVERYONE) for r in range(rounds)])
    late = np.array([who.work(r, EVERYONE) < 1 for r in range(rounds)])
    for counts, p in ((fails, 0.3), (late, 0.6), (fails & late, 0.18)):
        bound = 6 * sqrt(rounds * p * (1 - p))
        assert np.abs(counts.sum(0) - rounds * p).max() < bound
    # Neighbouring clients and rounds are independent as well: 0.09 for a pair.
    bound = 6 * sqrt(rounds * 0.09 * 0.91)
    assert np.abs((fails[:, 1:] & fails[:, :-1]).sum(0) - rounds * 0.09).max() < bound
    assert np.abs((fails[1:] & fails[:-1]).sum(0) - rounds * 0.09).max() < bound


@pytest.mark.parametrize("what", ["dropout", "stragglers"])
@pytest.mark.parametrize("source", ["list", "file"])
def test_a_trace_names_clients_by_round(what, source, tmp_path):
    trace = [[3, 1], [], [9]]
    if source == "file":
        (tmp_path / "trace.json").write_text(json.dumps(trace))
    given = str(tmp_path / "trace.json") if source == "file" else trace
    federation = loop(**{what: given})
    who = failing if what == "dropout" else slow
    assert [who(federation, r) for r in range(3)] == [[1, 3], [], [9]]
    assert who(federation, 0, np.array([0, 1])) == [1]
    federation.trainer = SimpleNamespace(max_epochs=4)
    with refused("trainer.max_epochs: 4", f"loop.{what} has only 3 rounds"):
        federation.setup("fit")
    federation.trainer = SimpleNamespace(max_epochs=-1)  # Lightning's number for a run without end
    with refused("trainer.max_epochs: -1 (no end)", f"loop.{what} has only 3 rounds"):
        federation.setup("fit")


@pytest.mark.parametrize("what", ["dropout", "stragglers"])
@pytest.mark.parametrize("value", [-0.1, 1.0, 1.5, float("nan"), True, False], ids=str)
def test_impossible_shares_are_refused(what, value):
    with refused(f"loop.{what}: {value}", "at least 0 and below 1"):
        loop(**{what: value})


@pytest.mark.parametrize("what", ["dropout", "stragglers"])
@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ([[0], [10]], ["round 2", "[10]", "0 to 9"]),
        ([[0, 0]], ["round 1", "different"]),
        ([3, 4], ["[3, 4]", "list of lists"]),
        ("nowhere.json", ["nowhere.json", "JSON"]),
        (None, ["None", "list of lists"]),
    ],
    ids=str,
)
def test_impossible_traces_are_refused(what, value, parts):
    with refused(f"loop.{what}", *parts):
        loop(**{what: value})


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, float("nan"), 2])
def test_impossible_work_is_refused(value):
    with refused(f"loop.straggler_work: {value}", "positive and below 1"):
        loop(straggler_work=value)


# ---- what is left to do --------------------------------------------------------------------------


def chunk(federation, ids, round_index=0):
    data = federation.client_data(torch.device("cpu"))
    return Clients(np.array(ids), round_index, data)


def test_a_chunk_is_split_by_what_happens_to_its_clients():
    """In the order of the chunk, so that the largest client stays first; the first part counts even
    if it is empty, since somebody must give the shapes of the sums."""
    ids = [2, 5, 9, 8, 0, 6]
    federation = loop(dropout=[[5, 0], ids], stragglers=[[9, 0, 2], []], straggler_work=0.3)

    def parts(round_index):
        split = federation.participation.parts(chunk(federation, ids, round_index))
        return [(clients.ids.tolist(), clients.work, arrives) for clients, arrives in split]

    assert parts(0) == [([8, 6], 1, True), ([2, 9], 0.3, True), ([5], 1, False), ([0], 0.3, False)]
    assert parts(1) == [([], 1, True), (ids, 1, False)]


def test_a_chunk_stays_whole_without_failures():
    federation = loop(dropout=[[]], stragglers=0.0)
    clients = chunk(federation, [2, 5])
    ((same, arrives),) = federation.participation.parts(clients)
    assert same is clients and arrives


def test_rows_of_states_follow_their_clients():
    federation = loop(dropout=[[5]])
    clients = chunk(federation, [2, 5, 9])
    clients.state = {"w": torch.arange(6.0).view(3, 2)}
    clients.buffers = torch.arange(3.0)[:, None]
    (kept, _), (lost, _) = federation.participation.parts(clients)
    assert kept.state["w"].tolist() == [[0, 1], [4, 5]]
    assert kept.buffers.tolist() == [[0], [2]]
    assert lost.state["w"].tolist() == [[2, 3]]


@pytest.mark.parametrize(
    ("work", "steps", "expected"),
    [
        (0.5, 5, 3),
        (0.5, 4, 2),
        (0.5, 1, 1),
        (0.01, 3, 1),
        (0.07, 100, 7),  # 0.07 * 100 is 7.000000000000001
        (0.29, 100, 29),  # 0.29 * 100 is 28.999999999999996
        (0.999, 7, 7),
    ],
)
def test_a_straggler_rounds_its_steps_up(work, steps, expected):
    clients = chunk(loop(), [2])
    clients.work = work
    schedule = LocalSchedule(4, steps=steps)
    assert clients.steps_of(schedule).tolist() == [expected]
    assert len(list(clients.batches(schedule))) == expected
    complete = LocalSchedule(4, steps=steps, complete=True)
    assert clients.steps_of(complete).tolist() == [steps]
    assert len(list(clients.batches(complete))) == steps


def test_steps_of_stragglers_by_their_own_number_of_samples():
    """9, 4, 1 and no samples in batches of 2: 5, 2, 1 and 0 steps an epoch, two epochs."""
    federation = loop()
    federation.datamodule.partition.train.sizes[7] = 0
    clients = chunk(federation, [2, 0, 1, 7])
    schedule = LocalSchedule(2, epochs=2)
    assert clients.steps_of(schedule).tolist() == [10, 4, 2, 0]
    clients.work = 0.3
    assert clients.steps_of(schedule).tolist() == [3, 2, 1, 0]
    assert [batch.clients for batch in clients.batches(schedule)] == [3, 2, 1]


@pytest.mark.parametrize(
    ("stragglers", "expected"),
    [
        # Costs 8 4 4 2, largest first: 8 | 4 4, then 2 goes to the process with fewer clients.
        ([[]], [[0, 3], [1, 2]]),
        # Costs 4 4 4 2 with client 0 at half of its work: 4 | 4, then 4 | and | 2.
        ([[0]], [[0, 2], [1, 3]]),
    ],
)
def test_processes_share_clients_by_what_they_will_do(stragglers, expected):
    shares = []
    for rank in range(2):
        federation = loop(sizes=[8, 4, 4, 2], stragglers=stragglers)
        attach(federation, 0, (rank, 2)).stateful = False
        (cohort,) = federation.train_dataloader()
        (chunk,) = cohort.chunks
        shares.append(sorted(chunk.tolist()))
    assert shares == expected


# ---- privacy -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"clients_per_round": 4}, ("uniform", 4, 10, 1)),
        ({"clients_per_round": 4, "sampling": "bernoulli"}, ("bernoulli", 4, 10, 1)),
        ({"clients_per_round": 4, "sampling": "bernoulli", "unseen": [3]}, ("bernoulli", 4, 9, 1)),
        # Which clients these draw depends on their sizes, or on nothing: no amplification.
        ({"clients_per_round": 4, "sampling": "weighted"}, ("weighted", 4, 10, 1)),
        ({"clients_per_round": 10, "sampling": "weighted"}, ("all", 10, 10, 1)),
        ({"clients_per_round": 3, "sampling": "cyclic"}, ("all", 3, 10, 4)),
        ({"sampling": "bernoulli"}, ("all", 10, 10, 1)),
        ({"trace": [[0, 1], [2]], "sampling": "bernoulli"}, ("all", 2, 10, 1)),
        ({"trace": [[0, 1], [2]], "sampling": "cyclic"}, ("all", 2, 10, 1)),
    ],
    ids=str,
)
def test_epsilon_counts_how_cohorts_are_drawn(kwargs, expected):
    privacy = Privacy(clip=1.0, noise_multiplier=1.5, delta=1e-4)
    found = loop(privacy=privacy, **kwargs).participation.private_mean(None).accountant
    assert (found.sampling, found.cohort, found.population, found.every) == expected
    assert (found.noise_multiplier, found.delta) == (1.5, 1e-4)
    assert (found.uses is None) == ("trace" not in kwargs)
    if "trace" in kwargs:
        assert found.uses.tolist() == [1, 1]


def test_delta_follows_from_the_number_of_clients_that_train():
    made = loop(4, privacy=Privacy(clip=1.0, noise_multiplier=1.0), unseen=[0, 1])
    accountant = made.participation.private_mean(None).accountant
    assert accountant.delta == pytest.approx(8**-1.1)
    assert loop(4).participation.private_mean(None) is None


# ---- messages as they come -----------------------------------------------------------------------


def test_a_round_ends_with_its_buffer(tmp_path):
    """Clients of 4, 2 and 1 samples take 2 gradients for each, at 2, 1 and 4 a second after 1, 0
    and 0 seconds: 5, 4 and 0.5 seconds. All train at a time, and two messages end a round: client
    2's at 0.5, which then waits for the move of the model, and client 1's at 4."""
    clock = Clock(clients=[[2.0, 1.0], [1.0, 0.0], [4.0, 0.0]])
    who = loop(sizes=[4, 2, 1], clock=clock).participation
    who.pace(lambda sizes: 2 * sizes, buffer=2)
    assert (who.cohort_size, who.at_once) == (2, 3)
    first = who.arrivals(0)
    assert sorted(first.ids.tolist()) == [1, 2]
    assert (first.time, who.end(0)) == (4.0, 4.0)
    assert who.cohort(0).tolist() == first.ids.tolist()
    # At 4 clients 1 and 2 begin again; client 2 arrives at 4.5, and client 0 at 5.
    second = who.arrivals(1)
    assert second.ids.tolist() == [0, 2]
    assert (second.versions.tolist(), second.time, who.end(1)) == ([0, 1], 5.0, 5.0)
    who.pace(lambda sizes: 2 * sizes)
    assert who.arrivals(0) is None
    assert [who.end(index) for index in (1, 0)] == [10.0, 5.0]  # the slowest, again and again


def test_a_buffer_needs_a_clock_and_no_trace():
    for kwargs in ({}, {"clock": Clock(), "trace": [[0]]}):
        who = loop(**kwargs).participation
        who.pace(np.asarray, buffer=2)
        assert who.timetable is None
        who.check_buffer(99, "FedBuff")


@pytest.mark.parametrize(
    ("kwargs", "buffer", "parts"),
    [
        ({"unseen": [0]}, 10, ["model.buffer_size: 10", "at most 9"]),
        ({"sampling": "bernoulli"}, 9, ["loop.sampling: bernoulli; FedBuff", "use uniform"]),
        ({"stragglers": 0.5}, 9, ["loop.stragglers: clients of FedBuff are slow by loop.clock"]),
    ],
)
def test_options_without_meaning_beside_a_buffer_are_refused(kwargs, buffer, parts):
    loop(clock=Clock(), unseen=[0]).participation.check_buffer(9, "FedBuff")
    with refused(*parts):
        loop(clock=Clock(), **kwargs).participation.check_buffer(buffer, "FedBuff")


# ---- words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"dropout": 0.1}, "all clients; each client with probability 0.1 fails after its"),
        ({"stragglers": 0.1}, "all clients; each client with probability 0.1 takes only 0.5 of"),
        ({"trace": [[0], [1]]}, "a replayed trace of 2 rounds"),
        ({"clients_per_round": 4, "sampling": "weighted"}, "4 clients a round, weighted sampling"),
        ({"aggregation": Median()}, "all clients; Median in place of means"),
        (
            {"attackers": Attackers([3], SignFlip())},
            "all clients; 1 clients attack (SignFlip), and are not scored",
        ),
    ],
)
def test_each_part_of_a_description(kwargs, words):
    text = loop(**kwargs).participation.describe()
    assert text.startswith(words)
    assert ("fails" in text, "takes only" in text) == ("dropout" in kwargs, "stragglers" in kwargs)


def test_describe_says_who_fails_who_is_slow_and_who_never_trains():
    text = loop(3, unseen=[4, 5], dropout=0.1, stragglers=0.25, straggler_work=0.3).describe()
    assert (
        "Training: 3 clients a round, uniform sampling; 2 of the 10 clients never train; "
        "each client with probability 0.1 fails after its training; "
        "each client with probability 0.25 takes only 0.3 of its local steps; seed 0." in text
    )
    assert "Training: all clients; 1 of the 10 clients never train" in loop(unseen=[0]).describe()
    text = loop(dropout=[[1]], stragglers=[[2]]).describe()
    assert "each client of a trace fails" in text and "each client of a trace takes only" in text
