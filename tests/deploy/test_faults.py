"""Faults of parties and server, against the simulation."""

import json
import warnings

import numpy as np
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from pfl.aggregation.attacks import Attackers, SignFlip
from pfl.callbacks import LocalBaseline
from pfl.deploy.schema import one_line
from pfl.deploy.wire import pack, unpack
from pfl.deploy.worker import difference
from pfl.errors import ConfigError
from pfl.rounds.clock import Clock
from pfl.scores.neighbours import Neighbours
from pfl.stages import compression
from tests.algorithms.methods import METHODS
from tests.deploy.conftest import Ended
from tests.refusal import refused

SLOW = ["FedAvg", "FedPer", "FedAMP", "FedPAC", "FedSLR", "Ditto"]
KINDS = ["SCAFFOLD, option I", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
# Client 1's message of the second round is lost. The samples it trained on are not known.
UNKNOWN = {"samples_seen", "row train/samples"}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("fault", ["before", "within", "after"])
def test_a_party_that_ends_is_one_that_drops_out(simulate, federation, name, fault):
    expected = simulate(name, dropout=[[], [1], [], []])
    parties = federation(name, faults={(1, "train", 1): fault})
    with pytest.warns(UserWarning, match=r"party 1 is left out \(train\): the worker has ended"):
        parties.train()
    assert parties.differing(expected) <= UNKNOWN


@pytest.mark.parametrize("name", ["SCAFFOLD, option I", "Ditto"])
def test_a_party_that_ends_after_its_upload_has_its_states(simulate, federation, name):
    """Its new states are pending in a file until the server says that the message counted."""
    parties = federation(name, faults={(1, "train", 1): "later", (2, "train", 3): "later"})
    assert parties.train().differing(simulate(name)) == set()


def test_a_party_that_comes_later_is_in_the_trace_from_then_on(simulate, federation):
    expected = simulate("SCAFFOLD, option I", trace=[[0, 1, 2], [0, 1, 2], *2 * [[0, 1, 2, 3]]])
    parties = federation("SCAFFOLD, option I", absent={3: [0, 1]}).train(enough=3)
    assert parties.differing(expected) <= {"row dropped"}


def test_a_party_without_an_answer_in_time_is_left_out(simulate, federation):
    expected = simulate("FedAvg", dropout=[[], [1], [], []])
    parties = federation("FedAvg", faults={(1, "train", 1): "late"})
    with pytest.warns(UserWarning, match="party 1 is left out .*: no answer within 600 s"):
        parties.train()
    assert parties.differing(expected) <= UNKNOWN


def changed(change):
    """A fault that replaces a party's answer by another one."""

    def fault(answer):
        value = unpack(answer)
        return change(value) or pack(value)

    return fault


def set_values(values):
    def change(answer):
        answer["messages"]["w"][0] = values(answer["messages"]["w"][0])

    return changed(change)


@pytest.mark.parametrize(
    "fault, words",
    [
        (set_values(lambda w: w * np.nan), "the message 'w' is not finite"),
        (
            set_values(lambda w: w[:, 1:]),
            r"the message 'w' is .* \[1, 25\]; it must be .* \[1, 26\]",
        ),
        (set_values(lambda w: w.astype(np.float32)), "float32 .*; it must be .*float64"),
        (set_values(lambda w: "w"), "0 is not a ndarray"),
        (changed(lambda answer: answer["messages"].clear()), "the answer lacks 'w'"),
        (changed(lambda answer: answer["losses"].update(train=[])), "the answer lacks 0"),
        (changed(lambda answer: answer.update(taken="5")), "the answer's 'taken' is not a int"),
        (changed(lambda answer: answer.update(taken=-1)), "-1 sample gradients"),
        (changed(lambda _: bytes(100)), "not a message of pfl"),
        (changed(lambda _: pack(np.ones(1 << 24))), "the message has .* at most"),
        (changed(lambda _: pack(5)), "the answer is not one of pfl"),
    ],
)
def test_a_party_with_an_unfit_answer_is_named_and_left_out(simulate, federation, fault, words):
    expected = simulate("FedAvg", dropout=[[], [1], [], []])
    parties = federation("FedAvg", faults={(1, "train", 1): fault})
    with pytest.warns(UserWarning, match=f"party 1 is left out .*: .*{words}"):
        parties.train()
    assert parties.differing(expected) <= UNKNOWN


HUGE = 10**30


def forged_loss(name="train", losses=(1.0,), counts=(1,)):
    """A fault that replaces the losses of an answer."""
    return changed(lambda answer: answer.update(losses={name: [np.array(losses), list(counts)]}))


def table_of(name, **columns):
    rows = {key: np.array(column) for key, column in columns.items()}
    return changed(lambda answer: answer.update(tables={name: [rows]}))


@pytest.mark.parametrize(
    "fault, words",
    [
        (
            changed(lambda a: a["messages"]["w"].__setitem__(1, HUGE)),
            "the bytes of the message 'w'",
        ),
        (changed(lambda a: a["messages"]["w"].__setitem__(1, 1 << 62)), "it must be from 0 to"),
        (changed(lambda a: a["messages"]["w"].__setitem__(1, -1)), "it must be from 0 to"),
        (set_values(lambda w: w * 0 + 1e300), "has the value 1e.300, with which a mean overflows"),
        (set_values(lambda w: w * 0 - 1e20), "has the value 1e.20, far beyond those of others"),
        (forged_loss(losses=[-1e40]), "the losses 'train': 1e.40; it must be from 0 to 1e.30"),
        (forged_loss("test/global"), "the loss 'test/global' is not one of the method"),
        (changed(lambda a: a.update(taken=HUGE)), "sample gradients"),
        (changed(lambda a: a.update(tables={"x": [5]})), "the table 'x' is not one of the method"),
        (changed(lambda a: a.update(tables=5)), "'tables' is not a dict"),
        (changed(lambda a: a.update(losses=[])), "'losses' is not a dict"),
        (changed(lambda a: a.update(gradients=np.nan)), "gradients: nan; it must be from 0"),
        (changed(lambda a: a.update(gradients="many")), "'gradients' is not a float"),
        (forged_loss("evil,\n=cmd|x"), "is not one of the method"),
        (forged_loss("=1+1"), "is not one of the method"),
        (forged_loss(counts=[-5]), "the counts of the losses 'train': -5"),
        (forged_loss(counts=[HUGE]), "the counts of the losses 'train': 1000"),
        (forged_loss(losses=[np.nan]), "the losses 'train' are not finite"),
        (forged_loss(losses=[np.inf]), "the losses 'train' are not finite"),
    ],
)
def test_a_value_out_of_its_range_is_named_and_left_out(simulate, federation, fault, words):
    expected = simulate("FedAvg", dropout=[[], [1], [], []])
    parties = federation("FedAvg", faults={(1, "train", 1): fault})
    with pytest.warns(UserWarning, match=f"party 1 is left out .*: .*{words}"):
        parties.train()
    assert parties.differing(expected) <= UNKNOWN


@pytest.mark.parametrize(
    "table, columns, words",
    [
        ("clusters", dict(client=[2], cluster=[0]), "rows of another client"),
        ("clusters", dict(client=[1], cluster=[np.nan]), "not one of finite numbers"),
        ("clusters", dict(client=[1, 1], cluster=[0]), "different lengths"),
        ("clusters", dict(client=[1], more=[0]), "has other columns than"),
        ("clusters", {"client": [1], "=cmd": [0]}, "is not the name of a column"),
        ("others", dict(client=[1]), "is not one of the method"),
    ],
)
def test_rows_of_a_table_are_a_partys_own(federation, table, columns, words):
    """IFCA's clients tell their cluster; client 0 has the columns client and cluster."""
    name = next(name for name in METHODS if name.startswith("IFCA"))
    parties = federation(name, faults={(1, "train", 1): table_of(table, **columns)})
    with pytest.warns(UserWarning, match=f"party 1 is left out .*: .*{words}"):
        parties.train()


def set_score(name, value):
    def change(answer):
        answer["scores"][0][2][name] = value

    return changed(change)


@pytest.mark.parametrize(
    "fault, words",
    [
        (set_score("accuracy", 50.0), "accuracy: 50.0; it must be from 0 to 1"),
        (set_score("accuracy", np.inf), "accuracy: inf; it must be finite"),
        (set_score("count", -1.0), "count: -1.0; it must be from 0"),
        (set_score("count", 1e300), "count: 1e.300; it must be from 0"),
        (set_score("count", np.nan), "count: nan; it must be from 0"),
        (set_score("count", 1.5), "count: 1.5; it must be a whole number"),
        (set_score("loss", np.nan), "loss: it is not a number, and there are samples"),
        (set_score("loss", -np.inf), "loss: -inf; it must be finite"),
        (set_score("loss", "0"), "'loss' is not a float"),
        (set_score("loss", 1e40), "loss: 1e.40; it must be from -1e.30 to 1e.30"),
        (changed(lambda answer: answer.update(numbers=[1e300, 1.0])), "numbers: 1e.300"),
        (changed(lambda answer: answer.update(scores=5)), "'scores' is not a list"),
    ],
)
def test_a_score_out_of_its_range_is_named_and_left_out(federation, fault, words):
    parties = federation("FedAvg", faults={(1, "evaluate", 4): fault})
    with pytest.warns(UserWarning, match=f"party 1 is left out .evaluation.: .*{words}"):
        parties.train()
    ((_, scores),) = parties.method.evaluation.scores.items()
    assert scores["count"][1] == 0 and np.isnan(scores["loss"][1])
    assert scores["count"][0] == 3  # `small_world` has three test samples for all


WRONG_FACTS: list[tuple[str, object, str]] = [
    ("sizes", [5], "sizes: 1 numbers; they must be three"),
    ("sizes", "many", "'sizes' is not a list"),
    ("sizes", [np.nan, 0, 1], "0 is not a int"),
    ("sizes", [HUGE, 0, 1], "sizes: 1000"),
    ("sizes", [10**18, 0, 1], "sizes: 1000"),
    ("sizes", [-5, 0, 1], "sizes: -5; it must be from 1"),
    ("sizes", None, "'sizes' is not a list"),
    ("classes", "two", "'classes' is not a int"),
    ("classes", -3, "classes: -3; it must be from 1"),
    ("hides", None, "'hides' is not a bool"),
    ("input", ["float64", [1 << 40]], "is no type and shape of a sample"),
    ("input", ["object", [3]], "is no type and shape of a sample"),
    ("target", ["float64"], "the answer lacks 1"),
    ("class_names", [5], "0 is not a str"),
    ("levels", None, "'levels' is not a dict"),
    ("levels", {"ward": ["A", 5]}, "1 is not a str"),
    ("levels", {"ward": []}, "the number of levels: 0"),
    ("client", 4, "client 4; it must be from 0 to 3"),
    ("client", True, "'client' is not a int"),
]


@pytest.mark.parametrize("key, value, words", WRONG_FACTS)
def test_facts_out_of_their_range_end_no_run(simulate, federation, key, value, words):
    """A party that comes in the third round, and tells them then, stays outside."""
    expected = simulate("FedAvg", trace=4 * [[0, 1, 2]])
    fault = changed(lambda answer: answer.update({key: value}))
    parties = federation("FedAvg", absent={3: [0, 1]}, faults={(3, "hello", 2): fault})
    with pytest.warns(UserWarning, match=f"a party is refused: .*{words}"):
        parties.train(enough=3)
    scores = {key for key in parties.differing(expected) if key.startswith(("score", "row test"))}
    assert parties.differing(expected) - scores <= {"row dropped"}


def set_part(name, change):
    """A fault in a part of the payload of the message "w"."""

    def fault(answer):
        payload = answer["messages"]["w"][0]
        payload[name] = change(payload[name])

    return changed(fault)


# P = 26: places have 5 bits, and levels from 0 to 2 have 2 bits with a third for the sign.
@pytest.mark.parametrize(
    "stage, fault, words",
    [
        (
            ["TopK", {"share": 0.3}],
            set_part("places", lambda x: x | 255),
            "a message cannot be read by loop.stages: TopK: index 31 is out of bounds",
        ),
        (
            ["TopK", {"share": 0.3}],
            set_part("values", lambda x: x[:, 1:]),
            r"the message 'w.values' is .* \[1, 7\]; it must be .* \[1, 8\]",
        ),
        (
            ["TopK", {"share": 0.3}],
            set_values(lambda payload: payload["values"]),
            "the answer lacks 'values'",
        ),
        (
            ["QSGD", {"levels": 2}],
            set_part("codes", lambda x: x | 255),
            "a message cannot be read by loop.stages: QSGD: level 3 of 2",
        ),
        (
            ["QSGD", {"levels": 2}],
            set_part("norm", lambda x: x * np.inf),
            "the message 'w' is not finite",
        ),
    ],
)
def test_a_party_with_an_unfit_payload_is_named_and_left_out(
    simulate, federation, stage, fault, words
):
    name, arguments = stage
    made = [getattr(compression, name)(**arguments)]
    expected = simulate("FedAvg", dropout=[[], [1], [], []], stages=made)
    parties = federation("FedAvg", faults={(1, "train", 1): fault}, stages=[stage])
    with pytest.warns(UserWarning, match=f"party 1 is left out .*: .*{words}"):
        parties.train()
    assert parties.differing(expected) <= UNKNOWN


def test_a_payload_has_the_bytes_that_are_counted(federation):
    parties = federation("FedAvg", stages=[["TopK", {"share": 0.3}]]).train()
    sent = [0, 0, 0, 0]
    for client, request, answer in parties.channel.told:
        if request["do"] == "train":
            payload, _ = unpack(answer)["messages"]["w"]
            sent[client] += sum(part.nbytes for part in payload.values())
    assert parties.method.progress.ledger.uplink.tolist() == sent
    assert sent == [4 * (8 * 8 + 5)] * 4  # 8 of 26 values, float64, and 8 places of 5 bits


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", ["SCAFFOLD, option I", "FedPAC"])
def test_a_server_continues_from_its_checkpoint(simulate, federation, name, every):
    """It ends in the fourth round; the parties' states are then ahead of the checkpoint's."""
    parties = federation(name, faults={(2, "train", 3): "server"})

    def checkpoints():
        return ModelCheckpoint(every_n_epochs=every, filename="last", enable_version_counter=False)

    with pytest.raises(Ended):
        parties.train(checkpoints())
    (last,) = parties.folder.glob("run/checkpoints/last.ckpt")
    parties.train(checkpoints(), ckpt_path=last)
    assert parties.differing(simulate(name)) == set()


def test_a_method_that_needs_all_clients_ends_where_one_is_away(federation):
    parties = federation("FedPD", faults={(1, "train", 1): "before"})
    with (
        pytest.warns(UserWarning, match="party 1 is left out"),
        refused("party 1 is away in round 2, and FedPD needs all clients in every round"),
    ):
        parties.train()


def test_the_columns_of_a_table_are_those_of_most_parties(federation):
    """Client 0 answers first, with columns of its own; the others have client and cluster."""
    name = next(name for name in METHODS if name.startswith("IFCA"))
    forged = table_of("clusters", client=[0], more=[0])
    parties = federation(name, faults={(0, "train", 0): forged})
    with pytest.warns(UserWarning) as said:
        parties.train()
    lines = [str(one.message) for one in said if "left out" in str(one.message)]
    assert len(lines) == 1 and lines[0].startswith("party 0 is left out (round 1): the table")


def test_a_party_that_breaks_the_protocol_three_times_is_not_asked_again(simulate, federation):
    """Its first three messages are forged; in the fourth round it is one that drops out."""
    expected = simulate("FedAvg", dropout=[[1], [1], [1], [1]])
    forged = set_values(lambda w: w * np.nan)
    faults = {(1, "train", index): forged for index in range(3)}
    parties = federation("FedAvg", faults=faults)
    with pytest.warns(UserWarning) as said:
        parties.train()
    lines = [str(one.message) for one in said]
    assert len([line for line in lines if "party 1 has broken the protocol 3 times" in line]) == 1
    told = parties.channel.told
    asked = [r["task"]["round"] for client, r, _ in told if (client, r["do"]) == (1, "train")]
    assert asked == [0, 1, 2]
    np.testing.assert_array_equal(parties.method.global_model, expected.global_model)


@pytest.mark.parametrize("name", METHODS)
def test_methods_declare_the_losses_that_they_log(simulate, name):
    if METHODS[name].pooled:
        pytest.skip("it has no parties")
    method = simulate(name)
    assert {*method._loss_names} <= {*method.losses}


def test_what_a_party_writes_is_a_part_of_one_line():
    text = "no\nparty 2 is left out (train): \x1b[31mforged\u2028line\r" + "x" * 10_000
    line = one_line(text)
    assert line.isprintable() and len(line) <= 500
    assert line.startswith("no party 2 is left out (train): [31mforged line x")


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("key, value", [("name", "FedPer"), ("rounds", 9), ("more", 1)])
def test_parties_that_do_not_agree_are_refused_at_both_ends(federation, capfd, key, value):
    parties = federation("FedAvg")
    parties.channel.workers[2].agreed[key] = value
    with (
        pytest.warns(UserWarning, match="a party is refused"),
        refused(f"3 of 4 parties are there; a party is refused: {key}: {value} at the party and"),
    ):
        parties.train(timeout=0.2)
    assert f"party 2: refused: {key}: {value} at the party and" in capfd.readouterr().err


def test_a_party_with_samples_of_another_shape_is_refused(federation):
    parties = federation("FedAvg")
    parties.channel.workers[3].facts["input"] = ["float64", [7]]
    line = r"input: party 3 has \['float64', \[7\]\], and party 0 has \['float64', \[3\]\]"
    with pytest.warns(UserWarning, match=line), pytest.raises(ConfigError, match=line):
        parties.train(timeout=0.2)


def test_a_line_for_each_party_says_who_is_there(federation, capsys):
    """The samples are those of `small_world`: 5, 1, 4 and 2, and three that all are tested on."""
    parties = federation("FedAvg", absent={3: [0]})
    parties.channel.stranger = pack({"refused": "another network"})
    with pytest.warns(UserWarning, match="a party is refused: another network"):
        parties.train(enough=3)
    assert capsys.readouterr().out.splitlines()[:5] == [
        "party 0: 5 samples to train with, 0 to validate, 3 to test",
        "party 1: 1 samples to train with, 0 to validate, 3 to test",
        "party 2: 4 samples to train with, 0 to validate, 3 to test",
        "party 3: is not there",
        "outside: a party is refused: another network",
    ]


def test_no_difference_between_equals():
    assert difference({"a": 1}, {"a": 1}) is None


def test_a_stranger_before_the_first_round_is_only_refused(simulate, federation):
    """A fifth peer says that it is client 1, or nothing that can be read."""
    expected = simulate("FedAvg")
    for answer in (b"PFL1", pack({"refused": "go\naway"}), None):
        parties = federation("FedAvg")
        parties.channel.stranger = answer
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            parties.train(timeout=5)
        lines = [str(one.message) for one in said if "refused" in str(one.message)]
        assert len(lines) == (answer is not None), lines
        assert parties.differing(expected) == set()


def test_a_number_belongs_to_a_node(simulate, federation):
    """A fifth peer with another key says that it is client 1, before client 1 is there."""
    parties = federation("FedAvg", absent={1: [0]})
    hello = parties.channel.workers[1].answer(pack({"do": "hello", "agreed": parties.what}))
    parties.channel.stranger = hello
    line = "a party is refused: node 4 says that it is client 1, which is another node"
    with pytest.warns(UserWarning, match=line):
        parties.train(enough=3, nodes=[0, 1, 2, 3])
    trace = [[0, 2, 3], *3 * [[0, 1, 2, 3]]]
    expected = simulate("FedAvg", trace=trace)
    np.testing.assert_array_equal(parties.method.global_model, expected.global_model)


def test_a_party_that_is_mended_is_taken(federation):
    """Its file names another method at first; the same peer is asked again."""
    parties = federation("FedAvg")
    right = parties.channel.workers[2].agreed
    parties.channel.workers[2].agreed = right | {"name": "FedPer"}

    def mend(answer):
        parties.channel.workers[2].agreed = right
        return answer

    parties.channel.faults[2, "hello", 0] = mend
    with pytest.warns(UserWarning, match="a party is refused: name: FedPer"):
        parties.train(timeout=30)
    assert {client for client, *_ in parties.channel.told} == {0, 1, 2, 3}
    assert parties.server.parties.peers.keys() == {0, 1, 2, 3}


def test_one_client_cannot_be_there_twice(federation):
    parties = federation("FedAvg")
    parties.channel.workers[2].client = 1
    with (
        pytest.warns(UserWarning, match="client 1 is there twice"),
        refused("3 of 4 parties are there; a party is refused: client 1 is there twice"),
    ):
        parties.train(timeout=0.2)


def test_a_party_without_the_counted_states_is_left_out(federation):
    parties = federation("SCAFFOLD, option I")

    def lose(answer):
        for path in parties.folder.glob("party-1/*/client-1/*.npz"):
            path.unlink()
        return answer

    parties.channel.faults[0, "train", 1] = lose
    with pytest.warns(UserWarning, match="party 1 is left out .* has no states of round 1"):
        parties.train()


def test_sizes_stay_at_the_party_where_the_weights_are_uniform(federation):
    parties = federation("FedAvg")
    for worker in parties.channel.workers.values():
        worker.sizes, worker.facts = False, worker.facts | {"sizes": [1, 0, 1]}
    line = "model.weighting: samples; party . does not tell its number of samples"
    with pytest.warns(UserWarning, match=line), refused(line.replace("party .", "party 0")):
        parties.train(timeout=0.2)
    parties.what["settings"]["weighting"] = "uniform"
    parties.train()
    answers = [unpack(a) for _, request, a in parties.channel.told if request["do"] == "train"]
    assert [len(answer["losses"]["train"][0]) for answer in answers] == [1] * 16
    assert {tuple(answer["losses"]["train"][1]) for answer in answers} == {(1,)}


def test_nothing_but_declared_arrays_travels(federation):
    """Down: the method's messages. Up: its messages, losses with counts, and scores."""
    parties = federation("SCAFFOLD, option I").train()
    for _, request, answer in parties.channel.told:
        if request["do"] in ("train", "evaluate"):
            assert {*request["task"]["received"]} == {"w", "c"}
            plain = {**request, "task": {**request["task"], "received": {}}}
            assert json.dumps(plain)
        answer = unpack(answer)
        if request["do"] == "train":
            sent = {name: one[0].shape for name, one in answer.pop("messages").items()}
            assert sent == {"y": (1, 26), "c": (1, 26)}
            losses = answer.pop("losses").values()
            assert all(values.shape == (len(counts),) for values, counts in losses)
        assert json.dumps(answer)


def test_what_needs_samples_is_refused_at_the_server(federation):
    with refused("trainer.callbacks: LocalBaseline needs the clients' samples"):
        federation("FedAvg").train(LocalBaseline())
    given = {"unseen": [1], "clock": Clock(), "attackers": Attackers([0], SignFlip())}
    for key, value in {**given, "neighbours": Neighbours()}.items():
        with refused(f"loop.{key}: it is for simulations"):
            federation("FedAvg", **{key: value}).train()
    with refused("loop.evaluate: train; parties tell scores of val and test only"):
        federation("FedAvg", evaluate=("train", "test")).train()
