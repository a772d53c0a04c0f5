"""Stages that make means of a few messages, by hand; what they need of each other."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pfl.aggregation.accountant import Accountant
from pfl.aggregation.attacks import InnerProduct
from pfl.aggregation.privacy import Privacy, PrivateMean
from pfl.aggregation.robust import Krum, Median
from pfl.communication import Message
from pfl.context import RunContext
from pfl.randomness import Seeded
from pfl.stages.mean import Arrived, Stages, WeightedMean, client_weights
from pfl.stages.private import ClippedSum, CountedGradients
from pfl.stages.robust import BoundedMean, RuledMean
from pfl.stages.stage import Place, References, Served, Stage
from tests.refusal import refused

IDS = np.array([1, 4, 6])
SIZES = np.array([2, 1, 5])
LIKE = torch.zeros(2, dtype=torch.float64)
W = torch.tensor([1.0, -1.0], dtype=torch.float64)
# Changes of norms 5, 0.5 and 10.
CHANGES = torch.tensor([[3.0, 4.0], [0.3, 0.4], [-6.0, 8.0]], dtype=torch.float64)


def served(**known):
    context = RunContext(0, np.arange(9), np.ones(9), None, torch.device("cpu"))
    return Served("Method", context, 2, **{"cohort_size": 3, **known})


def arrived(sums=None, rows=None, ids=IDS, sizes=SIZES):
    return Arrived(ids, sizes, float(sizes.sum()), sums or {}, rows or {})


def begun(stage, number=0):
    """A stage after the server has sent W in a round."""
    stage.set_up(served())
    stage.begin(number)
    stage.down({"w": Message(W.clone(), 16)})
    return stage


def sent(changes=CHANGES):
    return {"w": Message(W + changes, 16)}


# ---- weighted -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("weighting", "p"), [("samples", [2, 1, 5]), ("uniform", [1, 1, 1])])
def test_each_message_has_its_own_weights_or_those_of_the_method(weighting, p):
    mean = WeightedMean(weighting)
    messages = {
        "w": Message(CHANGES, 16),
        "c": Message(CHANGES, 16, weighting="uniform"),
        "s": Message(CHANGES, 16, weighting="samples"),
    }
    parts = []
    for k in (slice(0, 2), slice(2, 3)):
        some = {name: replace(m, values=m.values[k]) for name, m in messages.items()}
        parts.append(mean.sums(some, SIZES[k], LIKE))
    sums = {name: parts[0][name] + parts[1][name] for name in messages}
    means = mean.means(arrived(sums), {})
    for name, weights in (("w", p), ("c", [1, 1, 1]), ("s", [2, 1, 5])):
        expected = np.average(CHANGES.numpy(), axis=0, weights=weights)
        np.testing.assert_allclose(means[name], expected, rtol=1e-15)
    assert mean.participants(3) == 3
    assert client_weights(weighting, SIZES).tolist() == p


def test_nothing_is_averaged_over_clients_without_weight():
    none = np.zeros(3, np.int64)
    for weighting, empty in (("samples", True), ("uniform", False)):
        for mean in (WeightedMean(weighting), begun(BoundedMean(weighting, 1.0))):
            sums = mean.sums(sent(), none, LIKE)
            found = mean.means(arrived(sums, sizes=none), {})
            assert (found is None) == empty
    nobody = arrived(ids=IDS[:0], sizes=SIZES[:0])
    assert WeightedMean("uniform").means(nobody, {}) is None


def test_a_message_that_weighs_samples_is_zero_where_nobody_has_any():
    """As its sum is, beside a plain mean of the others; attackers that collude change nothing."""
    none = np.zeros(3, np.int64)
    messages = {"w": Message(CHANGES, 16), "s": Message(0 * CHANGES, 16, weighting="samples")}
    rows = {name: message.values for name, message in messages.items()}
    attackers = RuledMean("uniform", None, InnerProduct(0.5), lambda index, ids: ids < 0)
    attackers.set_up(served())
    for mean in (WeightedMean("uniform"), attackers):
        sums = mean.sums(messages, none, LIKE)
        found = mean.means(arrived(sums, rows, sizes=none), {})
        np.testing.assert_allclose(found["w"], CHANGES.numpy().mean(0), rtol=1e-15)
        assert found["s"].tolist() == [0, 0]


def test_only_rules_and_colluding_attackers_need_messages_one_by_one():
    """Others add them up as they come."""
    assert RuledMean.one_by_one
    assert not (WeightedMean.one_by_one or BoundedMean.one_by_one or ClippedSum.one_by_one)
    nothing = Arrived(IDS, SIZES, 8.0)
    assert nothing.sums == nothing.rows == {}


# ---- measured from what was sent ----------------------------------------------------------------


def test_a_bounded_mean_scales_changes_and_divides_by_the_clients():
    """Norms 5, 0.5 and 10 with the limit 2: factors 2/5, 1 and 1/5, whatever the sizes are."""
    mean = begun(BoundedMean("samples", 2.0))
    row = {}
    means = mean.means(arrived(mean.sums(sent(), SIZES, LIKE)), row)
    expected = W + (0.4 * CHANGES[0] + CHANGES[1] + 0.2 * CHANGES[2]) / 3
    torch.testing.assert_close(means["w"], expected)
    assert row == {"not_finite": 0.0}
    changes = CHANGES.clone()
    changes[1] = math.nan
    mean = begun(mean)
    means = mean.means(arrived(mean.sums(sent(changes), SIZES, LIKE)), row)
    torch.testing.assert_close(means["w"], W + (0.4 * CHANGES[0] + 0.2 * CHANGES[2]) / 3)
    assert row == {"not_finite": 1.0}
    assert mean.key == "loop.aggregation"


@pytest.mark.parametrize(("weighting", "p"), [("samples", [2, 1, 5]), ("uniform", [1, 1, 1])])
def test_attackers_that_collude_keep_their_weights(weighting, p):
    """Client 4 sends -0.5 times the mean of the others' changes, in round 3 only."""
    for number in (3, 2):
        attacking = lambda index, ids: (ids == 4) & (index == 3)  # noqa: E731
        mean = begun(RuledMean(weighting, None, InnerProduct(0.5), attacking), number)
        assert mean.key == "loop.attackers"
        assert mean.sums(sent(), SIZES, LIKE) == {}
        row = {}
        means = mean.means(arrived(rows={"w": W + CHANGES}), row)
        rows = CHANGES.numpy().copy()
        if number == 3:
            rows[1] = -0.5 * (rows[0] + rows[2]) / 2
        expected = W.numpy() + np.average(rows, axis=0, weights=p)
        np.testing.assert_allclose(means["w"], expected, rtol=1e-14)
        assert row == {"not_finite": 0}


def test_a_rule_takes_all_messages_of_a_round():
    mean = begun(RuledMean("samples", Median(), None, lambda index, ids: ids < 0))
    assert mean.key == "loop.aggregation"
    mean.sums(sent(), SIZES, LIKE)
    means = mean.means(arrived(rows={"w": W + CHANGES}), {})
    assert means["w"].tolist() == [1 + 0.3, -1 + 4.0]
    assert mean.means(arrived(), {}) == {}
    none = np.zeros(3, np.int64)
    assert mean.means(arrived(rows={"w": W + CHANGES}, sizes=none), {}) is None


def test_a_rule_says_how_many_clients_it_needs_before_the_first_round():
    stage = RuledMean("samples", Krum(1), None, lambda index, ids: ids < 0)
    with refused("Krum needs at least 5 clients' messages in a round"):
        stage.set_up(served(cohort_size=4))
    stage.set_up(served(cohort_size=5))


def test_a_rule_needs_a_mean():
    stage = BoundedMean("samples", 1.0)
    stage.set_up(served(kept=["w"], sends_first=True))
    for messages in ({}, sent(), {"c": Message(CHANGES, 16, reduce="rows")}):
        with refused("loop.aggregation: the server of Method gets every client's messages by"):
            stage.sent(None, messages)
    stage.set_up(served())
    assert stage.sent(None, {}) == {}
    messages = sent()
    assert stage.sent(None, messages) is messages
    with refused("loop.aggregation: Method trains on the samples of all clients in one place"):
        stage.set_up(served(pooled=True))


# ---- private ------------------------------------------------------------------------------------


def clipped(**arguments):
    privacy = Privacy(**{"clip": 2.0, "noise_multiplier": 0.0, **arguments})
    accountant = Accountant(privacy.noise_multiplier, 1e-5, "all", 4, 4)
    return ClippedSum(PrivateMean(privacy, accountant, Seeded(0), None))


def test_a_private_mean_is_over_the_expected_clients():
    mean = begun(clipped(), 6)
    row = {}
    means = mean.means(arrived(mean.sums(sent(), SIZES, LIKE)), row)
    expected = W + (0.4 * CHANGES[0] + CHANGES[1] + 0.2 * CHANGES[2]) / 4
    torch.testing.assert_close(means["w"], expected)
    assert row == {"not_finite": 0.0, "privacy/epsilon": math.inf, "privacy/clip": 2.0}
    assert mean.participants(3) == 4
    assert mean.key == "loop.privacy"


def test_what_was_sent_in_the_round_before_is_forgotten():
    for mean in (begun(clipped()), begun(BoundedMean("uniform", 2.0))):
        mean.means(arrived(mean.sums(sent(), SIZES, LIKE)), {})
        mean.begin(1)
        sums = mean.sums({"w": Message(CHANGES[1:2], 16)}, SIZES[1:2], LIKE)
        means = mean.means(arrived(sums, ids=IDS[1:2], sizes=SIZES[1:2]), {})
        torch.testing.assert_close(means["w"], CHANGES[1] / mean.participants(1))


def test_gradients_are_counted_from_zero():
    """One number for each client."""
    stage = CountedGradients([SimpleNamespace(engine=None)])
    assert [first().tolist() for first in stage.states().values()] == [[0.0]]
    messages = sent()
    assert stage.sent(None, messages) is messages


def test_epsilon_of_a_row_is_that_after_its_round():
    mean = begun(clipped(noise_multiplier=1.5), 6)
    row = {}
    mean.means(arrived(mean.sums(sent(), SIZES, LIKE)), row)
    assert row["privacy/epsilon"] == Accountant(1.5, 1e-5, "all", 4, 4).epsilon(7)


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({"kept": ["w"]}, "the server of Method reads the messages of single clients"),
        ({"statistics": True}, "model.buffers: average; running statistics with noise"),
        ({"pooled": True}, "Method trains on the samples of all clients in one place"),
    ],
)
def test_what_noise_does_not_hide_is_refused(known, words):
    with refused(f"loop.privacy: {words}"):
        clipped().set_up(served(**known))


def test_messages_of_single_clients_are_refused():
    stage = begun(clipped())
    messages = sent()
    assert stage.sent(None, messages) is messages
    with refused("loop.privacy: the server of Method gets the message 'c' of every client"):
        stage.sent(None, messages | {"c": Message(CHANGES, 16, reduce="rows")})


# ---- stages together ----------------------------------------------------------------------------


def at(place, needs=(), takes=()):
    kind = type(f"At{place.name}", (Stage,), {"place": place})
    stage = kind()
    stage.needs = frozenset(needs)
    stage.takes = frozenset(takes)
    return stage


def test_stages_act_in_the_order_of_their_places():
    stages = [at(place) for place in (Place.WIRE, Place.MODEL, Place.CODE, Place.CLIENT)]
    found = Stages([*stages, at(Place.CODE)], "uniform")
    assert [stage.place.name for stage in found] == ["MODEL", "CLIENT", "CODE", "CODE", "WIRE"]
    assert found[2] is stages[2]
    assert isinstance(found.mean, WeightedMean) and found.mean.weighting == "uniform"
    bounded = BoundedMean("samples", 1.0)
    assert Stages([bounded, *stages], "samples").mean is bounded


def test_two_stages_that_make_means_are_refused():
    with refused("loop.stages: WeightedMean: loop.aggregation makes the means as well; leave"):
        Stages([BoundedMean("samples", 1.0), WeightedMean("uniform")], "samples")


def test_a_stage_that_takes_what_another_needs_is_refused():
    needs = at(Place.MODEL, needs=["single messages"], takes=["single messages"])
    taking = at(Place.CODE, takes=["single messages"])
    assert len(Stages([needs, at(Place.CODE, takes=["products"])], "samples")) == 2
    words = "loop.stages: AtCODE: loop.stages: AtMODEL needs the messages of single clients"
    for stages in ([needs, taking], [taking, needs]):
        with refused(words, "which loop.stages: AtCODE takes away"):
            Stages(stages, "samples")


def test_references_of_messages():
    """Those that are named, and for "w" what was sent, if it has the same width."""
    references = References()
    model = Message(W.clone(), 16)
    references.note({"c": model})
    assert references.of(sent()) == {}
    references.note({"w": model})
    model.values.zero_()  # the server may write into what it sent
    assert references.of(sent())["w"].equal(W)
    own = {"w": Message(CHANGES, 16, reference=2 * W), "c": Message(CHANGES, 16, reference=W)}
    found = references.of(own)
    assert found["w"].equal(2 * W) and found["c"].equal(W)
    assert references.of({"c": Message(CHANGES, 16)}) == {}
    assert references.of({"w": Message(torch.zeros(3, 5), 40)}) == {}
    references.begin()
    assert references.of(sent()) == {}


def test_a_stage_that_overrides_nothing_does_nothing():
    stage = Stage()
    messages = sent()
    clients = SimpleNamespace()
    assert stage.down(messages) is messages
    assert stage.sent(clients, messages) is messages
    assert stage.arrived(clients, messages) is messages
    assert stage.states() == {} and stage.place is Place.CLIENT and stage.rounded
    assert (stage.key, stage.describe()) == ("loop.stages: Stage", "Stage")
