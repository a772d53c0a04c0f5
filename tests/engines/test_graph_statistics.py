"""Recorded steps of networks with BatchNorm: running statistics, and batches without padding."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from pfl.engines.local_step import Step, step_of
from pfl.engines.vmap import VmapEngine
from tests.engines.recorded import assert_steps, case, close, with_terms


def statistics(problem, clients):
    """Running statistics that differ from client to client, [C, Q], of 5 batches so far."""
    runner = problem.runner
    start = runner.buffers.read(problem.network, problem.models(clients)).repeat(clients, 1)
    noise = torch.from_numpy(problem.rng.random(start.shape))
    places = runner.buffers.read(count_batches(problem.network), start) == 5
    return torch.where(places, start + 5, start + noise)


def count_batches(network):
    """A copy of a network whose integer buffers alone are 5."""
    copied = copy.deepcopy(network)
    for buffer in copied.buffers():
        buffer.fill_(5 - 5 * buffer.is_floating_point())
    return copied


@torch.no_grad()
def assert_statistics(problem, one, v, buffers, blocks, step=None):
    """Two engines move models and their running statistics equally."""
    ends = []
    for engine in (problem.sequential, one):
        moved = v.clone()
        own = buffers.clone()
        losses, counts = engine.descend(moved, blocks, step or Step(0.1), own)
        ends.append((moved, own, losses, torch.tensor(counts)))
    for actual, expected in zip(*ends[::-1], strict=True):
        close(actual, expected)
    return ends[1]


@pytest.mark.parametrize("lasting", [True, False], ids=["lasting", "copied"])
def test_running_statistics_move_in_recorded_steps(lasting):
    """Steps in which a client has fewer samples than another are not recorded."""
    problem = case("BatchNorm")
    one, recorder = problem.recorded("unrolled")
    v = problem.models(6)
    buffers = statistics(problem, 6)
    blocks = [
        problem.block([[4] * 5, [4] * 5, [4, 2, 2, 4, 3], [3] * 5], lasting),
        problem.block([[4, 3, 2], [4, 4, 4]], lasting),
        problem.block([[5]], lasting),
    ]
    moved, own, _, _ = assert_statistics(problem, one, v, buffers, blocks)
    assert torch.equal(own[5], buffers[5]) and torch.equal(moved[5], v[5])
    assert not torch.isclose(own[:5], buffers[:5]).all(1).any()
    assert recorder.count == 4  # of five clients with 4 and with 3 samples, of three, and of one
    assert_statistics(problem, one, v, buffers, blocks)
    assert recorder.count == 4


def test_statistics_that_a_network_replaces_are_kept():
    """Some layers put a new tensor in the place of a buffer, which BatchNorm changes in place."""
    problem = case("replaced statistics")
    one, recorder = problem.recorded("unrolled")
    v = problem.models(3)
    buffers = statistics(problem, 3)
    blocks = [problem.full(3, 3), problem.block([[4, 3, 2], [3, 3, 3]])]
    _, own, _, _ = assert_statistics(problem, one, v, buffers, blocks)
    assert recorder.count == 2
    assert torch.equal(own[:, 6], buffers[:, 6] + 5)  # the number of steps


def test_padding_changes_no_sample_beside_it():
    """BatchNorm without running statistics takes the mean of the batch, too."""
    problem = case("BatchNorm without statistics")
    assert not problem.runner.buffers.size
    one, recorder = problem.recorded("unrolled")
    v = problem.models(4)
    counts = [[4, 4, 4], [4, 2, 3], [3, 3, 3]]
    assert_steps(one, problem.sequential, v, [problem.block(counts), problem.full(2, 1, size=9)])
    assert recorder.count == 3
    (batch,) = problem.block([[5, 3]])
    with torch.no_grad():
        found = one.gradient(v[:2], batch)
        expected = problem.sequential.gradient(v[:2], batch)
    for actual, right in zip(found, expected, strict=True):
        close(actual, right)
    assert recorder.count == 3
    assert "BatchNorm" in VmapEngine.obstacle(problem.runner, batch, "vmap")


def test_running_statistics_move_with_recorded_gradients():
    problem = case("BatchNorm")
    one, recorder = problem.recorded("unrolled")
    buffers = statistics(problem, 3)
    w = problem.models(3)
    known = 0
    for counts, recorded in (([4, 4, 4], 1), ([4, 3, 2], 0), ([2, 2, 2], 1)):
        (batch,) = problem.block([counts])
        ends = []
        for engine in (problem.sequential, one):
            own = buffers.clone()
            with torch.no_grad():
                ends.append((*engine.gradient(w, batch, own), own))
        for actual, expected in zip(*ends[::-1], strict=True):
            close(actual, expected)
        known += recorded
        assert recorder.count == known


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_running_statistics_with_momentum_and_adam(kind):
    problem = case("BatchNorm")
    one, recorder = problem.recorded("unrolled")
    v = problem.models(3)
    buffers = statistics(problem, 3)
    arguments = {"momentum": 0.9} if kind is SGD else {}
    blocks = [problem.full(3, 3), problem.block([[4, 2, 1], [3, 3, 2]])]
    ends = []
    for engine in (problem.sequential, one):
        moved = v.clone()
        own = buffers.clone()
        step = step_of(kind([nn.Parameter(v.clone())], lr=0.1, **arguments), moved, 0.1)
        with torch.no_grad():
            engine.descend(moved, blocks, step, own)
        ends.append((moved, own))
    for actual, expected in zip(*ends, strict=True):
        close(actual, expected)
    assert recorder.count == 1


def test_every_row_has_room_for_its_own_statistics():
    """Nine clients have room for ten; later there are fewer, and more."""
    problem = case("BatchNorm")
    one, _ = problem.recorded("unrolled")
    for clients in (9, 2, 11):
        v = problem.models(clients)
        step = with_terms(problem, v, ("shift", "offset", "mask"))
        equal = [4] * clients
        unequal = [3, *equal[1:]]
        blocks = [problem.full(2, clients), problem.block([equal, unequal])]
        assert_statistics(problem, one, v, statistics(problem, clients), blocks, step)
