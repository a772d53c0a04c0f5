"""Networks, samples and steps of which recordings are compared with the sequential engine."""

from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from models import LeNet5
from pfl.engines import graph
from pfl.engines.batch import Batch, Origin, StepBlock, default_loss
from pfl.engines.graph import GraphEngine
from pfl.engines.local_step import Step
from pfl.engines.matrix_convolution import MatrixVmapEngine
from pfl.engines.oracle import Oracle
from pfl.engines.registry import all_engines
from pfl.engines.sequential import SequentialEngine
from pfl.engines.unrolled import UnrolledEngine
from pfl.engines.vmap import VmapEngine
from pfl.parameters import ParameterSpace
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
