"""Steps that are recorded and replayed: what the sequential engine computes, by few recordings.

CUDA graphs need a GPU. Here `tests.recorder` records what PyTorch computes on the CPU.
"""

import copy
import gc
import itertools
import random
import weakref
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from models import LeNet5
from pfl.engines import graph
from pfl.engines.batch import Batch, Origin, StepBlock, default_loss
from pfl.engines.graph import STEPS, GraphEngine, room
from pfl.engines.local_step import Step, step_of
from pfl.engines.matrix_convolution import MatrixConv2d, MatrixVmapEngine
from pfl.engines.objective import Objective
from pfl.engines.oracle import Oracle
from pfl.engines.registry import all_engines
from pfl.engines.sequential import SequentialEngine
from pfl.engines.unrolled import UnrolledEngine
from pfl.engines.vmap import VmapEngine
from pfl.parameters import ParameterSpace
from tests.device import CPU, DEVICE, OtherDevice
from tests.recorder import Recorder

SMOOTH = nn.CrossEntropyLoss(label_smoothing=0.2)
CHAINS = {"ChainEngine": "chain", "CompiledChainEngine": "compiled chain"}
"""Engines that are recorded here, too, if they are there: their folder can be deleted."""


def recording(inner, evaluator, record):
    """An engine whose steps are recorded by `record`."""
    with patch.dict(graph.RECORDERS, {inner.runner.device.type: record}):
        return GraphEngine(inner, evaluator)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.memory = nn.LSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens):
        return self.head(self.memory(self.embedding(tokens))[0][:, -1])


class Next(nn.Module):
    """Scores [B, classes, T] of the next token, from each token alone."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Embedding(7, 5)

    def forward(self, tokens):
        return self.scores(tokens).transpose(1, 2)


class Numbered(Origin):
    """A seed for each step and row."""

    def __init__(self, step):
        self.step = step

    def seed(self, row):
        return 1000 * self.step + row - 2**60


class Case:
    """A network, its samples, and the engines that can be recorded.

    Attributes:
        sequential: The engine that says what is right.
    """

    def __init__(self, network, inputs, targets, loss=default_loss):
        torch.manual_seed(0)
        self.network = network.double()
        self.inputs = inputs
        self.targets = targets
        self.loss = loss
        oracle = Oracle(network, ParameterSpace(network), loss, "sequential")
        few = inputs[:2].clone()
        if few.dtype == torch.uint8:
            few = few.double() / 255
        oracle.inspect(few, targets[:2])
        self.few = few
        self.runner = oracle.runner
        self.sequential = oracle.engine
        assert isinstance(self.sequential, SequentialEngine)
        self.rng = np.random.default_rng(1)

    def recordable(self):
        """The engines that a GPU would record, by name."""
        runner = self.runner
        found = {"unrolled": UnrolledEngine(runner)}
        if any(isinstance(m, nn.LSTM) for m in self.network.modules()):
            return found
        found["vmap"] = VmapEngine(runner)
        products = MatrixVmapEngine.to_record(found["vmap"], 1)
        if products is not None:
            found["matrix products"] = products
        batch = Batch(self.few[None], self.targets[None, :2], [2])
        for kind in all_engines():
            if kind.__name__ in CHAINS and kind.obstacle(runner, batch, "vmap") is None:
                found[CHAINS[kind.__name__]] = kind.of(runner, batch)
        return found

    def recorded(self, name):
        """A recorded engine, and what counts its recordings."""
        recorder = Recorder()
        return recording(self.recordable()[name], self.sequential, recorder), recorder

    def models(self, clients):
        noise = self.rng.normal(size=(clients, self.runner.space.size))
        return self.runner.space.vector.detach() + 0.1 * torch.from_numpy(noise)

    def block(self, counts, lasting=True):
        """Steps [K, A] with these numbers of samples, drawn at random."""
        counts = np.array(counts)
        picks = self.rng.integers(len(self.inputs), size=(*counts.shape, counts.max()))
        for k, a in np.ndindex(*counts.shape):
            picks[k, a, counts[k, a] :] = picks[k, a, counts[k, a] - 1]  # padding
        picks = torch.from_numpy(picks)
        block = StepBlock(self.inputs, self.targets, picks, counts, torch.float64, Numbered)
        block.lasting = lasting
        return block

    def full(self, steps, clients, size=4, lasting=True):
        return self.block(np.full((steps, clients), size), lasting)


def images(rng, n=30, size=8):
    return torch.rand(n, 1, size, size, generator=rng, dtype=torch.float64)


def mlp(*layers):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), *layers, nn.Linear(6, 3))


def convolutions(*layers):
    return nn.Sequential(
        *(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), *layers, nn.Conv2d(3, 2, (2, 3)), nn.Tanh()),
        *(nn.Flatten(), nn.Linear(84, 3)),
    )


def normalized(**arguments):
    return nn.Sequential(
        *(nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3, momentum=0.3, **arguments), nn.ReLU()),
        *(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2, **arguments), nn.Tanh()),
        *(nn.Flatten(), nn.Linear(72, 3)),
    )


class Following(nn.Module):
    """Divides values by a scale that follows their sizes, a new tensor in each step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(6))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * x.detach().abs().mean(0)
            self.steps = self.steps + 1
        return x / (1 + self.scale)


def case(name):
    rng = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    targets = torch.randint(3, (30,), generator=rng)
    if name == "tokens":
        return Case(Recurrent(), torch.randint(7, (30, 6), generator=rng), targets)
    if name == "sequences":
        targets = torch.randint(5, (30, 6), generator=rng)
        for row, length in enumerate(targets[:, 0].tolist()):
            targets[row, length + 1 :] = -100
        return Case(Next(), torch.randint(7, (30, 6), generator=rng), targets)
    if name == "uint8":
        pixels = torch.randint(256, (30, 1, 8, 8), generator=rng).byte()
        return Case(convolutions(), pixels, targets)
    if name == "regression":
        network = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
        values = torch.randn(30, 2, generator=rng, dtype=torch.float64)
        return Case(network, images(rng), values, nn.MSELoss())
    if name == "dropout":
        return Case(mlp(nn.Dropout(0.5)), images(rng), targets)
    if name == "convolutions with dropout":
        return Case(convolutions(nn.Dropout(0.3)), images(rng), targets)
    if name == "LeNet5":
        return Case(LeNet5(num_classes=3, image_size=16), images(rng, size=16), targets)
    if name == "smooth loss":
        return Case(mlp(), images(rng), targets, SMOOTH)
    if name == "BatchNorm without statistics":
        return Case(normalized(track_running_stats=False), images(rng), targets)
    if name == "replaced statistics":
        return Case(mlp(Following()), images(rng), targets)
    makers = {"MLP": mlp, "convolutions": convolutions, "BatchNorm": normalized}
    return Case(makers[name](), images(rng), targets)


THERE = [CHAINS[kind.__name__] for kind in all_engines() if kind.__name__ in CHAINS]
VECTORS = ["unrolled", "vmap", *sorted(THERE)]
FASTEST = VECTORS[-1]
IMAGES = ["unrolled", "vmap", "matrix products"]
PAIRS = [
    *(("MLP", engine) for engine in VECTORS),
    *(("dropout", engine) for engine in VECTORS),
    *(("smooth loss", engine) for engine in VECTORS[:3]),
    *(("regression", engine) for engine in VECTORS[:3]),
    *(("convolutions", engine) for engine in IMAGES),
    *(("convolutions with dropout", engine) for engine in IMAGES),
    *(("LeNet5", engine) for engine in IMAGES),
    *(("uint8", engine) for engine in IMAGES),
    ("tokens", "unrolled"),
    *(("sequences", engine) for engine in ("unrolled", "vmap")),
]


@torch.no_grad()
def assert_steps(one, expected, v, blocks, step=None):
    """Two engines move v equally, with equal losses and counts; returns the result."""
    step = step or Step(0.1)
    ends = []
    for engine in (expected, one):
        moved = v.clone()
        own = step
        if step.rule is not None:  # which is changed by every step
            rule = step.rule
            copies = {name: getattr(rule, name).clone() for name in ("gradient", "first", "taken")}
            if rule.second is not None:
                copies["second"] = rule.second.clone()
            own = step._replace(rule=rule._replace(**copies))
        losses, counts = engine.descend(moved, blocks, own)
        ends.append((moved, losses, counts))
    close(ends[1][0], ends[0][0])
    close(ends[1][1], ends[0][1])
    assert ends[1][2] == ends[0][2]
    return ends[1][0]


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


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


def with_terms(problem, v, terms, lr=0.1):
    """A step that has these terms."""

    def rows():
        return 0.1 * torch.from_numpy(problem.rng.normal(size=v.shape))

    values = {
        "shrink": 1 - lr,
        "shift": rows(),
        "threshold": 0.2 * lr,
        "mask": (rows() > -0.05).double(),
        "part": torch.zeros(v.shape[1], dtype=torch.bool),
        "offset": rows(),
        "scale": rows()[:, :1],
        "decay": 3 * lr,
    }
    values["part"][problem.runner.space.layers[0].span] = True
    step = Step(lr, **{name: values[name] for name in terms})
    if step.part is not None:
        step = step._replace(moving=problem.runner.space.moving(step.part))
    return step


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


# ---- running statistics -------------------------------------------------------------------------


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
