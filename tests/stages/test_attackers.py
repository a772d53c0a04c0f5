"""What an attacker's stage changes of messages."""

from types import SimpleNamespace

import numpy as np
import torch

from pfl.aggregation.attacks import LittleIsEnough, RandomMessage, SignFlip
from pfl.communication import Message
from pfl.context import RunContext
from pfl.randomness import generator
from pfl.stages.attackers import ChangedMessages
from pfl.stages.stage import Served
from tests.refusal import refused

W = torch.arange(3.0).double()


def stage_of(attack, *, seed=5, pooled=False):
    """A stage in which client 3 attacks in round 2, after the server has sent W."""
    stage = ChangedMessages(attack, lambda number, ids: (ids == 3) & (number == 2))
    context = RunContext(seed, np.arange(4), np.ones(4), None, torch.device("cpu"))
    stage.set_up(Served("Method", context, size=3, cohort_size=2, pooled=pooled))
    stage.begin(2)
    sent = {"w": Message(W, 24)}
    assert stage.down(sent) is sent
    return stage


def messages():
    """Models of clients 1 and 3, and two values more of each."""
    return {
        "w": Message(W + torch.tensor([[1.0], [-2.0]]).double(), 24),
        "c": Message(torch.ones(2, 2).double(), 16),
    }


def sent_by(stage, number=2):
    clients = SimpleNamespace(round=number, ids=np.array([1, 3]))
    return stage.sent(clients, messages())


def test_an_attacker_changes_all_messages_measured_from_what_it_received():
    """All values joined, w less W and c: those of client 3 are -2, -2, -2, 1, 1."""
    sent = sent_by(stage_of(SignFlip(3.0)))
    assert sent["w"].values.tolist() == [(W + 1).tolist(), (W + 6).tolist()]
    assert sent["c"].values.tolist() == [[1, 1], [-3, -3]]
    assert sent["w"].nbytes == 24


def test_draws_follow_from_seed_round_and_client():
    sent = sent_by(stage_of(RandomMessage(0.5)))
    drawn = 0.5 * generator(5, "attack", 2, 3).standard_normal(5)
    np.testing.assert_array_equal(sent["w"].values[1], W.numpy() + drawn[:3])
    np.testing.assert_array_equal(sent["c"].values[1], drawn[3:])


def test_without_attackers_or_a_change_messages_stay():
    for sent in (sent_by(stage_of(SignFlip()), number=1), sent_by(stage_of(LittleIsEnough()))):
        for name, message in messages().items():
            assert sent[name].values.equal(message.values)


def test_methods_that_send_nothing_are_refused():
    with refused("loop.attackers: Method trains on the samples of all clients in one place"):
        stage_of(SignFlip(), pooled=True)
