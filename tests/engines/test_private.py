"""Which mini-batches private gradients may be of, and how they are counted."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pfl.engines.private import PrivateEngine
from pfl.randomness import Seeded
from tests.refusal import refused


def engine(batch_size=4):
    inner = SimpleNamespace(
        runner=None,
        name="inner",
        batched=True,
        max_threads=3,
        outputs=lambda w, batch, buffers: "outputs",
        group_size=lambda clients, threads: clients * threads,
        samples_at_once=lambda size: 2 * size,
    )
    return PrivateEngine(inner, 1.0, 0.5, batch_size, Seeded(0))


def batch(step, number=0, batch_size=4, expected=(4.0, 2.0, 3.0), ids=(7, 2, 5)):
    """A mini-batch of the first two of three clients; the seed of a row names its step."""
    origin = SimpleNamespace(
        batch_size=batch_size,
        round=number,
        ids=np.array(ids),
        seed=lambda row: 100 * row + step,
    )
    if expected is not None:
        origin.expected = np.array(expected)
    return SimpleNamespace(clients=2, origin=origin)


def test_gradients_are_counted_by_client_since_they_were_last_read():
    private = engine()
    for step in (0, 1, 2):
        assert private._register(batch(step)).tolist() == [4, 2]
    private._register(batch(3, ids=(7, 5, 2)))
    ids = np.array([2, 5, 7, 9])
    assert private.take_counts(ids).tolist() == [[3], [1], [4], [0]]
    assert private.take_counts(ids).tolist() == [[0]] * 4


def test_steps_of_another_round_are_other_steps():
    private = engine()
    private._register(batch(0, number=0))
    private._register(batch(0, number=1))
    with refused("loop.sample_privacy: the method takes two gradients of one mini-batch"):
        private._register(batch(0, number=1))


@pytest.mark.parametrize("other", [{"batch_size": 5}, {"expected": None}, {"batch_size": None}])
def test_gradients_of_other_samples_are_refused(other):
    with refused("loop.sample_privacy: the method takes gradients of other samples than mini"):
        engine()._register(batch(0, **other))


def test_outputs_of_training_samples_are_refused():
    with refused("loop.sample_privacy: the method looks at its training samples beside their"):
        engine().outputs(torch.zeros(2, 3), batch(0))
    assert engine().outputs(torch.zeros(2, 3), batch(0, expected=None)) == "outputs"


def test_groups_are_those_of_the_engine_inside():
    private = engine()
    assert (private.name, private.batched, private.max_threads) == ("inner", True, 3)
    assert private.group_size(5, 2) == 10
    assert private.samples_at_once(50) == 100
