"""The list of engines: what a user asks for, and an engine of the user's own."""

import pytest
import torch
from torch import nn

from pfl.engines import Engine, Oracle, default_loss, register, registry
from pfl.engines.debug import DebugEngine
from pfl.engines.registry import all_engines, engines_for
from pfl.engines.sequential import SequentialEngine
from pfl.engines.vmap import VmapEngine
from pfl.parameters import ParameterSpace
from tests.refusal import refused


class Mine(Engine):
    """A user's engine."""

    name = "mine"
    factor = 1.0

    def gradient(self, w, batch, buffers=None, objective=None):
        loss, g = SequentialEngine(self.runner).gradient(w, batch, buffers)
        return loss, self.factor * g


class Wrong(Mine):
    name = "wrong"
    factor = 1.2


class Unwilling(Mine):
    name = "unwilling"

    @classmethod
    def obstacle(cls, runner, batch, asked):
        return f"it was asked for by {asked}"


@pytest.fixture
def entries(monkeypatch):
    """The list, which is as before afterwards."""
    monkeypatch.setattr(registry, "_entries", registry._entries.copy())


def oracle(asked, network=None):
    """An oracle that has chosen its engine; a network that is no chain of common layers."""
    network = network or nn.Sequential(nn.Linear(4, 3), nn.Softplus())
    made = Oracle(network, ParameterSpace(network), default_loss, asked)
    made.inspect(torch.randn(3, 4), torch.tensor([0, 1, 2]))
    return made


@pytest.mark.parametrize("asked", ["sequential", "debug"])
def test_a_name_gives_one_engine(asked):
    (kind,) = engines_for(asked)
    assert kind in (SequentialEngine, DebugEngine) and kind.name == asked


def test_the_sequential_engine_is_the_last_resort():
    assert engines_for("auto")[-1] is SequentialEngine
    assert engines_for("vmap")[-1] is VmapEngine


def test_an_engine_of_the_user_is_asked_for_by_its_name(entries):
    register(Mine)
    assert type(oracle("mine").engine) is Mine
    assert type(oracle("auto").engine) is VmapEngine


def test_auto_tries_an_engine_of_the_user_before_another(entries):
    register(Mine, "auto", before="vmap")
    known = all_engines()
    assert known.index(Mine) + 1 == known.index(VmapEngine)
    assert type(oracle("auto").engine) is Mine
    with refused("engine", "'mine'", "is unknown"):
        oracle("mine")


def test_auto_leaves_out_what_is_wrong_or_does_not_fit(entries):
    register(Wrong, "auto", before="vmap")
    register(Unwilling, "auto", before="vmap")
    assert type(oracle("auto").engine) is VmapEngine


def test_an_engine_can_be_given_by_its_path():
    path = f"{__name__}.Mine"
    made = oracle("pfl.engines.vmap.VmapEngine", nn.Linear(4, 3))
    assert type(made.engine) is VmapEngine  # `vmap` takes a chain where there is one
    assert [kind.name for kind in engines_for(path)] == ["mine"]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Wrong, ["cannot train Sequential", "its gradient for padded samples"]),
        (Unwilling, ["cannot train Sequential", "it was asked for by unwilling"]),
    ],
)
def test_an_engine_that_was_asked_for_is_refused_in_words(entries, kind, words):
    register(kind)
    with refused("engine", kind.name, *words, "use sequential"):
        oracle(kind.name)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("fast", ["'fast' is unknown", "auto, vmap, sequential, debug", "as in mine.Fast"]),
        ("no_such_file.Fast", ["cannot be imported", "No module named 'no_such_file'"]),
        ("pfl.engines.Fast", ["cannot be imported", "'Fast'"]),
        ("pfl.engines.Oracle", ["is no class of engines"]),
        ("torch.nn", ["is no class of engines"]),
        ("..", ["cannot be imported"]),
    ],
)
def test_what_is_unknown_is_refused(asked, words):
    with refused("engine", *words):
        engines_for(asked)


def test_images_that_are_normalized_before_they_are_flat_are_no_chain():
    """BatchNorm2d has no number of inputs to compare with the samples'."""
    network = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(16, 3))
    made = Oracle(network, ParameterSpace(network), default_loss)
    made.inspect(torch.randn(3, 1, 4, 4), torch.tensor([0, 1, 2]))
    assert made.engine.name == "sequential"
