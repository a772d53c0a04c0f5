"""Runs with compressors: what changes no bit, what a lost message leaves, who is refused."""

from dataclasses import replace

import numpy as np
import pytest

from models import HalfSquaredError
from pfl import FederatedLoop
from pfl.aggregation.privacy import Privacy
from pfl.aggregation.robust import Median
from pfl.algorithms import FedAvg, FedPer
from pfl.errors import ConfigError
from pfl.stages.compression import QSGD, PowerSGD, RandomK, SignEF, TopK
from pfl.stages.stage import Stage
from tests.algorithms.methods import (
    BATCHES,
    METHODS,
    differing,
    everything,
    normalized_network,
    small_network,
    small_world,
)
from tests.problems import quiet, run
from tests.refusal import refused

STAGES = {
    "TopK": lambda: TopK(0.3),
    "RandomK": lambda: RandomK(0.3),
    "QSGD": lambda: QSGD(3),
    "SignEF": lambda: SignEF(),
    "PowerSGD": lambda: PowerSGD(1),
}
EVERY_STAGE = pytest.mark.parametrize("name", STAGES)
# The network has P = 26 values: weights 4 x 3 and 2 x 4, biases 4 and 2, in float64. 8 values and
# 8 places of 5 bits; 8 values; a norm and 26 codes of 3 bits; a number and 26 bits; factors of
# 4 + 3 and 2 + 4 values, and 6 values of biases.
NBYTES = {"TopK": 64 + 5, "RandomK": 64, "QSGD": 8 + 10, "SignEF": 8 + 4, "PowerSGD": 19 * 8}


@pytest.fixture
def train(tmp_path):
    """Trains a method on the small world."""

    def train(stages, rounds=3, kind=FedAvg, network=None, arguments=(), classes=False, **loop):
        given = dict(loss=HalfSquaredError(), engine="sequential", **BATCHES)
        method = kind(network or small_network(), **(given | dict(arguments)))
        loop = {"evaluate": ("test",), "clients_at_once": 1} | loop
        data = small_world(classes=classes)
        return run(method, data, rounds, root=tmp_path, stages=stages, **loop)

    return train


def without(algorithm, *words):
    """All that a run has computed, but entries whose names begin with some words."""
    found = everything(algorithm)
    return {name: value for name, value in found.items() if not name.startswith(words)}


# ---- the identity -------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [TopK(1.0), RandomK(1.0), PowerSGD(2)], ids=["top", "random", ""])
@pytest.mark.parametrize("kind", [FedAvg, FedPer])
def test_a_compressor_that_leaves_nothing_out_changes_no_bit(train, stage, kind):
    """Factors of rank 2 have (4 + 3) 2 > 12 and (2 + 4) 2 > 8 values."""
    memory = tuple(f"{what} {state}" for what in ("client", "seen") for state in stage.states())
    expected = everything(train([], kind=kind))
    assert differing(without(train([stage], kind=kind), *memory), expected) == set()


# ---- bytes --------------------------------------------------------------------------------------


@EVERY_STAGE
def test_bytes_are_those_of_the_payload(train, name):
    method = train([STAGES[name]()], trace=[[0, 1], [1, 2], [1]])
    assert method.progress.ledger.uplink.tolist() == [
        NBYTES[name] * rounds for rounds in (1, 3, 1, 0)
    ]
    assert method.row["comm/uplink_bytes"] == 5 * NBYTES[name]


def test_running_statistics_are_sent_as_they_are(train):
    """With P = 30 values, of which 9 travel with 5 bits each; means, variances, a count."""
    method = train([TopK(0.3)], trace=[[1]], rounds=1, network=normalized_network())
    assert method.progress.ledger.uplink.tolist() == [0, 9 * 8 + 6 + 5 * 8, 0, 0]


def test_personal_parts_are_not_sent(train):
    """The body has 16 values: 5 of them, with 4 bits each."""
    method = train([TopK(0.3)], trace=[[1]], rounds=1, kind=FedPer)
    assert method.progress.ledger.uplink.tolist() == [0, 5 * 8 + 3, 0, 0]


# ---- what does not matter -----------------------------------------------------------------------


@EVERY_STAGE
def test_chunks_and_threads_do_not_matter(train, threads, name):
    loop = dict(trace=[[0, 1, 2, 3], [1, 3], [0, 1, 2]])
    expected = everything(train([STAGES[name]()], **loop))
    chunks = train([STAGES[name]()], clients_at_once=4, **loop)
    assert differing(everything(chunks), expected) == set()
    threads(2)
    two = train([STAGES[name]()], clients_at_once=2, **loop)
    assert differing(everything(two), expected) == set()


@EVERY_STAGE
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, name):
    def begin(folder, rounds, ckpt_path=None):
        method = FedAvg(small_network(), loss=HalfSquaredError(), **BATCHES)
        loop = FederatedLoop(small_world(), clients_per_round=3, stages=[STAGES[name]()])
        trainer = quiet(folder, rounds, precision="64-true")
        trainer.fit(method, datamodule=loop, ckpt_path=ckpt_path)
        return method

    expected = begin(tmp_path / "straight", 4)
    early = begin(tmp_path / "parts", 2)
    last = early.trainer.run_dir / "checkpoints" / "last.ckpt"
    actual = begin(tmp_path / "parts", 4, last)
    assert differing(everything(actual), everything(expected)) == set()


# ---- lost messages ------------------------------------------------------------------------------


def test_what_a_lost_message_left_out_is_forgotten(train):
    """Client 1's message of the second round is lost: its memory is that of the first round."""
    trace = [[0, 1], [0, 1]]
    early = train([TopK(0.3)], rounds=1, trace=trace[:1])
    late = train([TopK(0.3)], rounds=2, trace=trace, dropout=[[], [1]])
    states = []
    for method in (early, late):
        states.append(method.store.read("TopK memory of w", np.arange(4)))
    assert states[0][:2].abs().amax(1).min() > 0
    assert states[1][1].equal(states[0][1])
    assert not states[1][0].equal(states[0][0])
    assert not states[1][2:].any()


# ---- methods ------------------------------------------------------------------------------------

KEPT = "keeps the messages of single clients"
SINGLE = "by itself, and only messages that it adds up"
FREE = "has no bytes, since the server can compute it from the others"
WIDE = "and the memory of the stage as many as the model"
POOLED = "trains on the samples of all clients in one place"


REFUSED = {
    **dict.fromkeys(["FedGH", "FedTGP", "FedDF", "CFL", "pFedHN", "FedBuff", "FedAsync"], SINGLE),
    **dict.fromkeys(["FedAgg", "FedAgg, aggregated"], FREE),
    "IFCA": WIDE,
}
# The messages of the methods that send no message "w" to be added up.
NAMED = {
    "SCAFFOLD": ["y", "c"],
    "SCAFFOLD, option I": ["y", "c"],
    "FedNova": ["d", "norm"],
    "FedNova, proximal": ["d", "norm"],
    "FedProto": ["sums"],
    "FedMD": ["scores"],
    "FedAS": ["moved", "trace"],
}


def outcome(train, name):
    """Why a method is refused with TopK; the messages that are compressed if it is not."""
    entry = METHODS[name]
    messages = ["w"]
    given = {"arguments": {"loss": entry.loss, **entry.arguments}, "classes": entry.classes}
    while True:
        stage = TopK(0.5, messages)
        try:
            train([stage], rounds=2, kind=entry.kind, evaluate=(), **given)
            return messages
        except ConfigError as error:
            line = str(error)
            assert "\n" not in line
            assert line.startswith("loop.stages: TopK"), line
            if "give some of these" not in line:
                return line
            sent = line.partition(" send ")[2].partition(";")[0].split(", ")
            assert sent != messages
            messages = sent


def test_a_message_without_bytes_beside_others_is_refused(train):
    """FedDyn's clients send the change of their rounded states beside their models."""
    loop = dict(kind=METHODS["FedDyn"].kind, state_dtype="float32")
    with refused("loop.stages: TopK: the message 'g' of FedDyn has no bytes"):
        train([TopK(0.5)], **loop)


def test_compression_before_clipping_is_refused(train):
    words = "needs messages as the clients have computed them, which loop.stages: TopK takes away"
    with refused(f"loop.stages: TopK: loop.privacy {words}"):
        privacy = Privacy(clip=1.0, noise_multiplier=1.0)
        train([TopK(0.5)], clients_per_round=2, sampling="bernoulli", privacy=privacy)


def test_two_compressors_are_refused(train):
    with refused("loop.stages: QSGD", "loop.stages: TopK", "leave one of them out"):
        train([TopK(0.5), QSGD(4)])


def test_a_rule_reads_what_the_server_reads(train):
    """The median of decoded messages: with the identity it is the median of the messages."""
    expected = without(train([], aggregation=Median()))
    memory = ("client TopK", "seen TopK")
    assert differing(without(train([TopK(1.0)], aggregation=Median()), *memory), expected) == set()


class Half(Stage):
    """Halves what clients send."""

    def sent(self, clients, messages):
        return {name: replace(m, values=m.values / 2) for name, m in messages.items()}


def test_a_stage_after_a_compressor_in_the_list_acts_before_it(train):
    expected = everything(train([Half(), TopK(0.3)]))
    assert differing(everything(train([TopK(0.3), Half()])), expected) == set()


def test_the_engine_debug_compares_clients_before_compression(train):
    method = train([SignEF()], arguments={"engine": "debug"}, clients_at_once=4)
    assert method.transport.compared


@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_or_is_refused_in_one_line(train, name):
    found = outcome(train, name)
    entry = METHODS[name]
    method = entry.make(small_network())
    reason = REFUSED.get(name)
    if method.pooled:
        reason = POOLED
    elif method.states.messages:
        reason = KEPT
    if reason is None:
        assert found == NAMED.get(name, ["w"])
    else:
        assert reason in found
