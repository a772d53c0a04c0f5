"""Where running statistics begin, travel and stay, with statistics of two values."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from pfl.communication import dense
from pfl.context import RunContext
from pfl.stages.stage import Served
from pfl.stages.statistics import RunningStatistics
from tests.refusal import refused

GLOBAL = torch.tensor([0.5, 2.0], dtype=torch.float64)
NAN = float("nan")


class Buffers:
    """The statistics of a network."""

    def __init__(self):
        self.now = GLOBAL.clone()

    def read(self, network, like):
        return self.now.to(like)

    def write(self, network, values):
        self.now = values


class Group:
    """Three clients, the second of them without samples."""

    def __init__(self, received=None, personal_messages=(), **state):
        self.state = state
        self.received = {} if received is None else {"buffers": received}
        self.personal_messages = set(personal_messages)
        self.buffers = None
        self.empty = torch.tensor([False, True, False])

    def __len__(self):
        return 3


def stage_of(*, travel=True, kept=False, personal=None, pooled=False):
    space = SimpleNamespace(vector=torch.zeros(4, dtype=torch.float64))
    oracle = SimpleNamespace(buffers=Buffers())
    stage = RunningStatistics(
        nn.Linear(1, 1), space, oracle, travel=travel, kept=kept, personal=personal
    )
    context = RunContext(0, np.arange(3), np.ones(3), None, torch.device("cpu"))
    stage.set_up(Served("Method", context, 4, cohort_size=3, pooled=pooled))
    return stage, oracle


def rows(*first):
    return torch.tensor([[value, 10 * value] for value in first], dtype=torch.float64)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, {}),
        ({"kept": True}, {"buffers": [0.5, 2.0]}),
        ({"personal": "initial"}, {"personal_buffers": [0.5, 2.0]}),
        ({"personal": "received"}, {"personal_buffers": [NAN, NAN]}),
        (
            {"kept": True, "personal": "initial"},
            {"buffers": [0.5, 2.0], "personal_buffers": [0.5, 2.0]},
        ),
    ],
    ids=str,
)
def test_states_begin_as_those_of_the_global_model_or_untrained(given, names):
    states = stage_of(**given)[0].states()
    assert states.keys() == names.keys()
    for name, first in names.items():
        np.testing.assert_array_equal(states[name](), first)


def test_statistics_are_never_rounded_and_go_to_clients_with_the_model():
    model = {"w": dense(torch.zeros(4))}
    stage, _ = stage_of()
    assert not stage.rounded
    sent = stage.down(model)
    assert sent.keys() == {"w", "buffers"} and sent["w"] is model["w"]
    assert sent["buffers"].values.equal(GLOBAL) and sent["buffers"].nbytes == 2 * 8
    assert stage.down({"c": model["w"]}).keys() == {"c"}
    assert stage_of(travel=False)[0].down(model).keys() == {"w"}
    assert stage_of(pooled=True)[0].down(model)["buffers"].nbytes == 0


def test_clients_have_their_own_statistics_or_those_they_received():
    stage, _ = stage_of(personal="received")
    own = rows(NAN, 2.0, 3.0)
    clients = Group(received=GLOBAL, personal_buffers=own)
    stage.received(clients)
    assert clients.buffers.tolist() == [GLOBAL.tolist()] * 3
    assert clients.state["personal_buffers"].tolist() == [[0.5, 2.0], [2.0, 20.0], [3.0, 30.0]]
    kept = Group(received=GLOBAL, buffers=rows(1.0, 2.0, 3.0))
    stage.received(kept)
    assert kept.buffers is kept.state["buffers"]
    sent = rows(4.0, 5.0, 6.0)  # each client has got a model of its own
    mine = Group(received=sent, personal_messages=["buffers"], buffers=rows(1.0, 2.0, 3.0))
    stage.received(mine)
    assert mine.buffers.equal(sent) and mine.buffers is not sent
    nothing = Group(personal_buffers=own)
    stage.received(nothing)
    assert nothing.buffers is None and nothing.state["personal_buffers"] is own


def test_what_clients_send_and_keep():
    message = {"w": dense(torch.zeros(3, 4))}
    trained = rows(7.0, 8.0, 9.0)
    stage, _ = stage_of()
    clients = Group(received=GLOBAL)
    clients.buffers = trained
    sent = stage.sent(clients, message)
    assert sent["buffers"].values is trained and sent["w"] is message["w"]
    assert clients.state == {}
    assert stage.sent(clients, {}) == {}
    local, _ = stage_of(travel=False, kept=True)
    clients = Group(buffers=rows(1.0, 2.0, 3.0))
    clients.buffers = trained
    assert local.sent(clients, message) is message
    assert clients.state["buffers"] is trained
    unknown = Group()  # of a method that has given the clients statistics itself
    unknown.buffers = trained
    assert stage.sent(unknown, message) is message
    with refused("model.buffers: average; Method sends its clients no model", "of Linear"):
        stage.sent(Group(), message)


def test_clients_without_samples_have_trained_no_statistics():
    for personal, expected in (("received", NAN), ("initial", 2.0)):
        stage, _ = stage_of(personal=personal)
        clients = Group(personal_buffers=rows(1.0, 2.0, 3.0))
        stage.keep(clients)
        np.testing.assert_array_equal(clients.state["personal_buffers"][:, 0], [1, expected, 3])


def test_the_global_model_gets_the_mean():
    stage, oracle = stage_of()
    means = {"w": torch.zeros(4), "buffers": torch.tensor([1.0, 3.0])}
    stage.read(means, {})
    assert means.keys() == {"w"} and oracle.buffers.now.tolist() == [1, 3]
    stage.read(means, {})
    assert oracle.buffers.now.tolist() == [1, 3]
