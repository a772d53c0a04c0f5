"""Steps that are recorded and replayed: what the sequential engine computes, by few recordings.

CUDA graphs need a GPU. Here `tests.recorder` records what PyTorch computes on the CPU.
"""

import gc
import itertools
import random
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from pfl.engines import graph
from pfl.engines.batch import StepBlock, default_loss
from pfl.engines.graph import STEPS, room
from pfl.engines.local_step import Step, step_of
from pfl.engines.matrix_convolution import MatrixConv2d
from pfl.engines.objective import Objective
from pfl.engines.oracle import Oracle
from pfl.engines.vmap import VmapEngine
from pfl.parameters import ParameterSpace
from tests.device import CPU, DEVICE, OtherDevice
from tests.engines.recorded import (
    FASTEST,
    PAIRS,
    SMOOTH,
    Case,
    assert_steps,
    case,
    close,
    mlp,
    recording,
    with_terms,
)
from tests.recorder import Recorder

# ---- the values ---------------------------------------------------------------------------------


@pytest.mark.parametrize("lasting", [True, False], ids=["lasting", "copied"])
@pytest.mark.parametrize(("name", "engine"), PAIRS)
def test_recorded_steps_are_those_of_the_sequential_engine(name, engine, lasting):
    """Five clients; batches are unequal, clients leave, and the last one takes no step at all."""
    problem = case(name)
    one, _ = problem.recorded(engine)
    v = problem.models(6)
    blocks = [
        problem.block([[4, 4, 3, 3, 1], [4, 2, 2, 4, 3]], lasting),
        problem.block([[4, 3, 2]] * 3, lasting),
        problem.block([[5]], lasting),
    ]
    moved = assert_steps(one, problem.sequential, v, blocks)
    assert torch.equal(moved[5], v[5])
    assert not torch.isclose(moved[:5], v[:5]).all(1).any()
    left = v.clone()
    with torch.no_grad():
        one.descend(left, blocks[:1], Step(0.1))
    assert torch.equal(moved[3:5], left[3:5])  # they keep their bits


@pytest.mark.parametrize(("name", "engine"), PAIRS)
def test_recorded_gradients_are_those_of_the_sequential_engine(name, engine):
    problem = case(name)
    one, recorder = problem.recorded(engine)
    with torch.no_grad():
        for counts in ([3, 3, 2, 1, 1], [3, 3, 1, 1, 1]):
            (batch,) = problem.block([counts])
            w = problem.models(5)
            before = w.clone()
            loss, g = one.gradient(w, batch)
            expected = problem.sequential.gradient(w, batch)
            close(loss, expected[0])
            close(g, expected[1])
            assert torch.equal(w, before)
            kept = g.clone()
            one.gradient(problem.models(5), batch)
            assert torch.equal(g, kept)  # a result is the caller's own
    assert recorder.count == 1


def drawn(seed):
    """A network of layers drawn at random, and samples for it."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    channels = rng.randint(1, 3)
    size = rng.randint(5, 8)
    inputs = torch.randn(20, channels, size, size, dtype=torch.float64)
    layers = []
    activations = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.GELU, nn.Identity)
    x = inputs[:2].float()
    for _ in range(rng.randint(0, 2)):
        kernel = (rng.randint(1, 3), rng.randint(1, 3))
        padding = (rng.randint(0, 2), rng.randint(0, 2))
        out = rng.randint(1, 4)
        stride = rng.choice([1, 1, 2])
        bias = rng.random() < 0.5
        layers.append(nn.Conv2d(x.shape[1], out, kernel, stride, padding, bias=bias))
        layers.append(rng.choice(activations)())
        if rng.random() < 0.3:
            layers.append(nn.AvgPool2d(2))
        x = nn.Sequential(*layers)(inputs[:2].float())
    layers.append(nn.Flatten())
    width = x[0].numel()
    for _ in range(rng.randint(0, 2)):
        out = rng.randint(2, 7)
        layers += [nn.Linear(width, out), rng.choice(activations)()]
        width = out
    classes = rng.randint(2, 4)
    layers.append(nn.Linear(width, classes))
    targets = torch.randint(classes, (20,))
    loss = rng.choice([default_loss, SMOOTH])
    return rng, Case(nn.Sequential(*layers), inputs, targets, loss)


@pytest.mark.parametrize("seed", range(8))
def test_networks_and_steps_drawn_at_random(seed):
    rng, problem = drawn(seed)
    for name in problem.recordable():
        one, _ = problem.recorded(name)
        for _ in range(2):
            clients = rng.randint(1, 6)
            v = problem.models(clients)
            blocks = []
            active = clients
            for _ in range(rng.randint(1, 3)):
                active = rng.randint(1, active)
                shape = (rng.randint(1, 3), active)
                counts = problem.rng.integers(1, 5, size=shape)
                blocks.append(problem.block(counts, rng.random() < 0.5))
            step = Step(rng.choice([0.1, 0.3]), rng.choice([1.0, 0.9]))
            assert_steps(one, problem.sequential, v, blocks, step)


# ---- the terms of a step ------------------------------------------------------------------------

TERMS = ("shrink", "shift", "threshold", "mask", "part")
AT = ((), ("offset",), ("offset", "scale"), ("offset", "decay"), ("offset", "scale", "decay"))


@pytest.mark.parametrize("at", AT, ids="+".join)
@pytest.mark.parametrize("engine", sorted({"vmap", FASTEST}))
def test_every_combination_of_terms(engine, at):
    """With other values in the second call, which needs no recording of its own."""
    problem = case("MLP")
    one, recorder = problem.recorded(engine)
    v = problem.models(4)
    blocks = [problem.full(2, 4), problem.full(1, 2)]
    for size in range(len(TERMS) + 1):
        for terms in itertools.combinations(TERMS, size):
            step = with_terms(problem, v, (*terms, *at))
            moved = assert_steps(one, problem.sequential, v, blocks, step)
            if step.part is not None:
                assert torch.equal(moved[:, ~step.part], v[:, ~step.part])
            if step.mask is not None and step.part is None:
                assert not moved[step.mask == 0].any()
            known = recorder.count
            other = with_terms(problem, v, (*terms, *at), lr=0.03)
            assert_steps(one, problem.sequential, v, blocks, other)
            assert recorder.count == known


@pytest.mark.parametrize("kind", [SGD, Adam])
@pytest.mark.parametrize("name", ["MLP", "dropout"])
def test_momentum_and_adam(name, kind):
    """Their gradients are recorded, and their own steps are not."""
    problem = case(name)
    one, recorder = problem.recorded(FASTEST)
    v = problem.models(4)
    parameter = nn.Parameter(v.clone())
    optimizer = kind([parameter], lr=0.1, **({"momentum": 0.9} if kind is SGD else {}))
    blocks = [problem.full(3, 4), problem.full(2, 2)]
    for lr in (0.1, 0.02):
        step = step_of(optimizer, v, lr, pull=0.1)
        assert step.rule is not None
        assert_steps(one, problem.sequential, v, blocks, step)
    assert recorder.count == 2  # for four clients, and for two


# ---- samples ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lasting", [True, False], ids=["lasting", "copied"])
@pytest.mark.parametrize("name", ["MLP", "dropout"])
def test_more_steps_than_are_laid_out_at_a_time(name, lasting):
    problem = case(name)
    one, recorder = problem.recorded(FASTEST)
    steps = 2 * STEPS + 3
    blocks = [problem.full(steps, 3, 2, lasting), problem.full(1, 3, 2, lasting)]
    assert_steps(one, problem.sequential, problem.models(3), blocks)
    assert recorder.count == 1


def test_few_steps_are_laid_out_at_a_time_where_they_have_many_samples(monkeypatch):
    """Room for two steps of 2 x 3 samples."""
    monkeypatch.setattr(graph, "PICKS", 13)
    problem = case("MLP")
    one, _ = problem.recorded("vmap")
    assert_steps(one, problem.sequential, problem.models(2), [problem.full(5, 2, 3)])


@pytest.mark.parametrize("lasting", [True, False], ids=["lasting", "copied"])
def test_data_sets_that_come_and_go(lasting):
    """Each is as large as the one before, whose memory it would get if nobody kept that."""
    problem = case("MLP")
    one, _ = problem.recorded("vmap")
    for _ in range(6):
        problem.inputs = torch.rand(30, 1, 8, 8, dtype=torch.float64)
        problem.targets = torch.randint(3, (30,))
        assert_steps(one, problem.sequential, problem.models(3), [problem.full(2, 3, 4, lasting)])


def test_weights_in_place_of_counts():
    problem = case("MLP")
    one, _ = problem.recorded("vmap")
    block = problem.full(2, 3)
    block.weights = torch.rand(2, 3, 4, dtype=torch.float64)
    other = problem.recordable()["unrolled"]  # the sequential engine takes counts only
    assert_steps(one, other, problem.models(3), [block])


# ---- rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "engine"), PAIRS)
def test_a_row_that_nobody_reads_changes_no_other(name, engine):
    """The tenth client leaves with a model that is not finite; nine clients have room for ten."""
    assert room(9) == 10
    problem = case(name)
    one, recorder = problem.recorded(engine)
    v = problem.models(10)
    v[9] = torch.inf
    blocks = [problem.full(1, 10, 2), problem.full(3, 9, 2)]
    moved = assert_steps(one, problem.sequential, v, blocks)
    assert moved[:9].isfinite().all() and not moved[9].isfinite().any()
    assert recorder.count == 1
    assert_steps(one, problem.sequential, problem.models(9), [problem.full(2, 9, 2)])
    assert recorder.count == 1


def test_groups_that_grow_and_shrink():
    problem = case("MLP")
    one, _ = problem.recorded(FASTEST)
    for clients in (3, 9, 2, 10, 11, 1):
        v = problem.models(clients)
        step = with_terms(problem, v, ("shift", "offset", "mask"))
        assert_steps(one, problem.sequential, v, [problem.full(2, clients)], step)


def test_clients_that_come_back():
    problem = case("MLP")
    one, _ = problem.recorded("vmap")
    blocks = [problem.full(2, 10), problem.full(2, 9), problem.full(2, 10)]
    assert_steps(one, problem.sequential, problem.models(10), blocks)


def test_no_steps_at_all():
    problem = case("MLP")
    one, recorder = problem.recorded("vmap")
    v = problem.models(3)
    before = v.clone()
    losses, counts = one.descend(v, [], Step(0.1))
    assert len(losses) == 0 and counts == []
    assert torch.equal(v, before) and recorder.count == 0


# ---- what is not recorded -----------------------------------------------------------------------


def older_model(problem):
    def losses(outputs, features, samples, own):
        return nn.functional.cross_entropy(outputs, samples.targets, reduction="none") * own["a"]

    own = torch.arange(1.0, 4.0, dtype=torch.float64)
    return Objective(losses, own={"a": own})


@torch.no_grad()
def test_objectives_and_evaluations_go_to_the_evaluator():
    """In turns with recorded steps, since evaluations put the network into another mode."""
    problem = case("dropout")
    one, recorder = problem.recorded("vmap")
    assert one.serves_objectives
    block = problem.full(2, 3)
    batch = next(iter(block))
    w = problem.models(3)
    for _ in range(2):
        assert_steps(one, problem.sequential, w, [block])
        known = recorder.count
        ends = []
        for engine in (one, problem.sequential):
            v = w.clone()
            losses, counts = engine.descend(v, [block], Step(0.1), None, older_model(problem))
            gradient = engine.gradient(w, batch, None, older_model(problem))
            outputs = engine.outputs(w, batch)
            scores = engine.scores(outputs[0], batch.targets[0])
            alone = engine.predict(w[1], batch.inputs[1])
            ends.append((v, losses, *gradient, outputs, *scores, alone))
            assert counts == 6 * [4]
        for actual, expected in zip(*ends, strict=True):
            close(actual, expected)
        assert recorder.count == known
        one.gradient(w, batch)
    new = problem.full(1, 2)  # which is recorded after an evaluation
    assert_steps(one, problem.sequential, problem.models(2), [new])


# ---- how often steps are recorded ---------------------------------------------------------------


def test_rounds_of_equal_shapes_are_recorded_once():
    problem = case("MLP")
    one, recorder = problem.recorded("vmap")
    for lr in (0.1, 0.1, 0.05):
        v = problem.models(6)
        assert_steps(one, problem.sequential, v, [problem.full(3, 6), problem.full(2, 4)], Step(lr))
        assert recorder.count == 2


@pytest.mark.parametrize("sizes", [range(8, 4, -1), range(64, 32, -1)])
def test_cohorts_of_changing_size_need_few_recordings(sizes):
    """Of 5 to 8 clients 4 sizes, and of 33 to 64 clients 4, too: 40, 48, 56 and 64."""
    problem = case("MLP")
    one, recorder = problem.recorded(FASTEST)
    for _ in range(2):
        for clients in sizes:
            with torch.no_grad():
                one.descend(problem.models(clients), [problem.full(1, clients, 2)], Step(0.1))
        assert recorder.count == len({room(n) for n in sizes}) == 4


def test_batches_of_changing_size_need_few_recordings():
    """From 33 to 64 samples there are 8 sizes: 36, 40, ... and 64."""
    problem = case("MLP")
    one, recorder = problem.recorded(FASTEST)
    for size in range(33, 65):
        assert_steps(one, problem.sequential, problem.models(2), [problem.full(1, 2, size)])
    assert recorder.count == 8


def test_room_is_never_too_small():
    for n in range(1, 300):
        for digits in (3, 4):
            assert n <= room(n, digits) <= n * (1 + 2 ** (1 - digits))
            assert room(room(n, digits), digits) == room(n, digits)


def test_the_least_used_recording_goes_first(monkeypatch):
    monkeypatch.setattr(graph, "RECORDED", 3)
    problem = case("MLP")
    one, recorder = problem.recorded("vmap")
    counts = []
    for size in (1, 2, 3, 1, 4, 3, 1, 4, 2):  # for 4, 2 goes
        assert_steps(one, problem.sequential, problem.models(3), [problem.full(1, 3, size)])
        counts.append(recorder.count)
    assert counts == [1, 2, 3, 3, 4, 4, 4, 4, 5]


# ---- memory -------------------------------------------------------------------------------------


def test_released_memory_is_free_and_steps_go_on():
    problem = case("MLP")
    one, recorder = problem.recorded(FASTEST)
    v = problem.models(3)
    assert_steps(one, problem.sequential, v, [problem.full(2, 3)])
    seen = weakref.ref(problem.inputs)
    problem.inputs = problem.inputs.clone()
    gc.collect()
    assert seen() is not None  # else other samples could get the address that is recorded
    one.release()
    gc.collect()
    assert seen() is None
    assert_steps(one, problem.sequential, v, [problem.full(2, 3)])
    assert recorder.count == 2


def test_a_recording_that_fails_leaves_the_models_and_the_engine_as_they_were():
    problem = case("MLP")
    fails = [True]
    recorder = Recorder()

    def record(work, device, pool):
        if fails[0]:
            work()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return recorder(work, device, pool)

    one = recording(VmapEngine(problem.runner), problem.sequential, record)
    v = problem.models(3)
    before = v.clone()
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
        one.descend(v, [problem.full(2, 3)], Step(0.1))
    assert torch.equal(v, before)
    fails[0] = False
    assert_steps(one, problem.sequential, v, [problem.full(2, 3)])


def test_models_of_another_dtype_have_places_of_their_own():
    problem = case("MLP")
    one, recorder = problem.recorded("vmap")
    v = problem.models(3)
    assert_steps(one, problem.sequential, v, [problem.full(2, 3)])
    block = problem.full(2, 3)
    low = v.float()
    with torch.no_grad():
        one.descend(low, [replace(block, dtype=torch.float32)], Step(0.1))
        problem.sequential.descend(v, [block], Step(0.1))
    torch.testing.assert_close(low.double(), v, rtol=1e-4, atol=1e-5)
    assert recorder.count == 2


# ---- the stand-in, and a device -----------------------------------------------------------------


def test_a_replay_runs_nothing_of_python():
    x = torch.ones(3)
    factor = [2.0]

    def work():
        x.mul_(factor[0]).add_(x.sum() * 0)

    replay = Recorder()(work, CPU, None)  # x is 4 now
    factor[0] = 100.0
    replay()
    assert x.tolist() == [8, 8, 8]
    with pytest.raises(RuntimeError, match="waits"):
        Recorder()(lambda: float(x.sum()), CPU, None)


def test_convolutions_are_recorded_as_matrix_products_with_dropout_by_key():
    problem = case("convolutions with dropout")
    network = problem.recordable()["matrix products"].runner.network
    assert sum(isinstance(m, MatrixConv2d) for m in network.modules()) == 2
    assert [type(m).__name__ for m in network.modules()].count("KeyedDropout") == 1


def test_no_step_waits_for_the_device():
    """However many steps there are, the simulated device is waited for as often."""

    def again(work, device, pool):
        work()
        return work

    def waits(steps):
        problem = case("MLP")
        v = problem.models(3)
        block = problem.full(steps, 3)
        expected = v.clone()
        with torch.no_grad():
            problem.sequential.descend(expected, [block], Step(0.1))
        with OtherDevice() as device, torch.no_grad():
            network = mlp().double()
            network.load_state_dict(problem.network.state_dict())
            network.to(DEVICE)
            oracle = Oracle(network, ParameterSpace(network), default_loss, "vmap")
            x = problem.inputs.to(DEVICE)
            y = problem.targets.to(DEVICE)
            oracle.inspect(x[:2], y[:2])
            one = recording(oracle.engine, oracle.engine, again)
            moved = v.to(DEVICE)
            there = StepBlock(x, y, block.picks.to(DEVICE), block.counts, v.dtype)
            there.lasting = True
            device.waits.clear()
            one.descend(moved, [there], Step(0.1))
            count = len(device.waits)
            close(moved.to(CPU), expected)
        return count

    assert waits(3) == waits(12)
