"""Chains with BatchNorm: values, gradients and running statistics are those of the plain loop."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from datamodules import DigitsDataModule, Sizes
from pfl.algorithms import FedAvg, FedBN
from pfl.engines.batch import Batch, Origin, StepBlock, default_loss
from pfl.engines.chains.engine import ChainEngine
from pfl.engines.local_step import Step, step_of
from pfl.engines.oracle import Oracle
from pfl.parameters import ParameterSpace
from tests.problems import run

SOFT = nn.CrossEntropyLoss(label_smoothing=0.2)


class Numbered(Origin):
    def __init__(self, step):
        self.step = step

    def seed(self, row):
        return 1000 * self.step + row


def drawn(number):
    """A chain for images [2, 8, 8] and three classes, of layers that are drawn at random."""
    rng = random.Random(number)
    layers, channels, side = [], 2, 8
    momenta = (0.1, 0.7, None)

    def after(norm, width):
        some = []
        if rng.random() < 0.7:
            some.append(
                norm(
                    width,
                    eps=rng.choice((1e-5, 0.1)),
                    momentum=rng.choice(momenta),
                    affine=rng.random() < 0.8,
                )
            )
        some.append(rng.choice((nn.ReLU, nn.Tanh, nn.Sigmoid))())
        if rng.random() < 0.4:
            some.append(nn.Dropout(rng.choice((0.2, 0.5))))
        rng.shuffle(some)
        return some

    if number % 3:
        for _ in range(rng.choice((1, 2))):
            width = rng.choice((3, 6))
            bias = rng.random() < 0.5
            layers += [
                nn.Conv2d(channels, width, 3, padding=1, bias=bias),
                *after(nn.BatchNorm2d, width),
            ]
            channels = width
            if rng.random() < 0.6:
                layers.append(nn.MaxPool2d(2))
                side //= 2
    layers.append(nn.Flatten())
    width = channels * side * side
    if rng.random() < 0.3:
        layers.append(nn.BatchNorm1d(width))
    for _ in range(rng.choice((0, 1, 2))):
        layers += [nn.Linear(width, 7, bias=rng.random() < 0.7), *after(nn.BatchNorm1d, 7)]
        width = 7
    layers.append(nn.Linear(width, 3))
    if not any(isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d) for layer in layers):
        layers.insert(-1, nn.BatchNorm1d(width, momentum=0.3))
    return nn.Sequential(*layers)


def pooled(padding=1, kernel=3, bias=True, affine=True):
    """Narrow convolutions with 2x2 pooling, one with BatchNorm between and one without."""
    return nn.Sequential(
        nn.Conv2d(2, 3, kernel, padding=padding, bias=bias),
        nn.BatchNorm2d(3, affine=affine, momentum=0.3),
        *(nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 1), nn.MaxPool2d(2), nn.Tanh()),
        *(nn.Flatten(), nn.LazyLinear(3)),
    )


GIVEN = {
    "squares": pooled,
    "without parameters": lambda: pooled(0, 5, bias=False, affine=False),
    "odd sides": lambda: pooled(0, 2),
    "sides without a pair": lambda: pooled(1, (3, 2)),
}
SQUARES = {"squares": True, "without parameters": True, "odd sides": False}


@pytest.mark.parametrize("name", SQUARES)
def test_squares_are_pooled_where_they_cover_all_outputs(name):
    network, space, batch, _ = problem(name)
    _, oracle = oracles(network, space, batch)
    kinds = oracle.engine.chain.layers.kinds
    assert ("batch norm of squares" in kinds) == SQUARES[name]
    assert ("pooling" in kinds) != SQUARES[name]


def problem(number):
    """Models of five clients, the last without samples, with statistics of their own."""
    seed = number if isinstance(number, int) else 0
    torch.manual_seed(seed)
    network = (GIVEN[number]() if number in GIVEN else drawn(number)).double()
    network.eval()(torch.zeros(1, 2, 8, 8).double())  # a lazy layer has its width now
    space, rng = ParameterSpace(network), torch.Generator().manual_seed(seed)
    counts = [5, 5, 3, 2]
    inputs = torch.randn(4, 5, 2, 8, 8, generator=rng, dtype=torch.float64)
    targets = torch.randint(3, (4, 5), generator=rng)
    batch = Batch(inputs, targets, counts, Numbered(0))
    w = space.vector.detach() + 0.1 * torch.randn(5, space.size, generator=rng).double()
    return network, space, batch, w


def oracles(network, space, batch, loss=default_loss):
    made = []
    for engine in ("sequential", "auto"):
        oracle = Oracle(network, space, loss, engine)
        oracle.inspect(batch.inputs[0], batch.targets[0])
        made.append(oracle)
    assert isinstance(made[1].engine, ChainEngine) and not made[1].engine.batched
    return made


def buffers_of(oracle):
    rng = torch.Generator().manual_seed(3)
    names, rows = oracle.buffers.names, torch.rand(5, oracle.buffers.size, generator=rng).double()
    sizes = [oracle.runner.network.get_buffer(name).numel() for name in names]
    for name, piece in zip(names, rows.split(sizes, 1), strict=True):
        if name.endswith("tracked"):  # a mean of numbers is no integer
            piece.mul_(7)
    return rows


@pytest.mark.parametrize("loss", [default_loss, SOFT], ids=["cross entropy", "another"])
@pytest.mark.parametrize("number", [*range(18), *GIVEN])
def test_random_chains_agree_with_the_plain_loop(number, loss):
    network, space, batch, w = problem(number)
    found = []
    for oracle in oracles(network, space, batch, loss):
        buffers = buffers_of(oracle)
        value, g = oracle.gradient(w, batch, buffers)
        after_one = buffers.clone()
        flat = batch.inputs.flatten(0, 1), batch.targets.flatten(0, 1)
        picks = torch.arange(20).view(1, 4, 5).repeat(3, 1, 1)
        counts = np.array([[5, 5, 3, 2], [5, 4, 3, 2], [2, 4, 3, 2]])
        v = w.clone()
        block = StepBlock(*flat, picks, counts, w.dtype, Numbered)
        losses, _ = oracle.descend(v, [block], Step(0.1, 0.99), buffers)
        scores = oracle.evaluate(v[:4], batch, buffers[:4])
        found.append((value, g, after_one, losses, v, buffers, *scores))
    few = [slice(0, n) for n in batch.counts]
    for place, (one, other) in enumerate(zip(*found, strict=True)):
        if place == 8:  # outputs for padding have no meaning
            one, other = (torch.cat([x[c, few[c]] for c in range(4)]) for x in (one, other))
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-10, equal_nan=True)
    start = buffers_of(oracle)
    assert torch.equal(found[1][5][4], start[4]) and not torch.equal(found[1][5][3], start[3])


@pytest.mark.parametrize("number", [0, 1, 4, "squares", "without parameters"])
def test_parts_offsets_and_optimizers_agree_too(number):
    network, space, batch, w = problem(number)
    found = []
    for oracle in oracles(network, space, batch):
        for kind in ("part", "offset", "momentum"):
            buffers, v = buffers_of(oracle), w.clone()
            step = Step(0.1)
            if kind == "part":
                moves = torch.zeros(space.size, dtype=torch.bool)
                for layer in space.layers[-2:]:
                    moves[layer.span] = True
                step = Step(0.1, part=moves)
            elif kind == "offset":
                step = Step(0.1, offset=0.1 * w.flip(1))
            else:
                momentum = torch.optim.SGD([nn.Parameter(torch.zeros(1))], momentum=0.9)
                step = step_of(momentum, v, 0.1)
            oracle.descend(v, [StepBlock.of(batch, w.dtype)] * 3, step, buffers)
            found.append((v, buffers))
    for one, other in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-10)


def test_a_batch_of_one_sample_is_refused():
    network, space, batch, w = problem(0)
    _, oracle = oracles(network, space, batch)
    alone = Batch(batch.inputs[:1, :1], batch.targets[:1, :1], [1])
    with pytest.raises((torch.jit.Error, AssertionError), match="more than one value"):
        oracle.gradient(w[:1], alone, buffers_of(oracle))


@pytest.mark.parametrize(
    ("kind", "own"),
    [(FedAvg, {}), (FedAvg, {"buffers": "local"}), (FedBN, {})],
    ids=["average", "local", "FedBN"],
)
def test_a_run_ends_where_the_sequential_engine_ends(tmp_path, threads, kind, own):
    """With one thread and with two; momentum `None` counts batches, whose means are averaged."""
    ends = []
    for number, engine in ((1, "sequential"), (1, "auto"), (2, "auto")):
        threads(number)
        torch.manual_seed(0)
        network = nn.Sequential(
            *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8, momentum=None)),
            *(nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 10)),
        )
        method = kind(network, lr=0.05, batch_size=11, engine=engine, **own)
        data = DigitsDataModule(None, Sizes([60, 50, 40, 30, 20, 10]))
        root = tmp_path / f"{number}{engine}"
        run(method, data, 2, root=root, clients_per_round=4)
        name = method.oracle.engine.name
        assert (name == "sequential") == (engine == "sequential")
        ends.append((method.global_model, method.global_buffers, method.row["train/loss"]))
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=1e-9, atol=1e-11)


def test_two_samples_are_enough_to_choose_the_engine():
    """In float32, where BatchNorm of two samples is all but a sign."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.BatchNorm1d(40), nn.ReLU())
    network = nn.Sequential(network, nn.Linear(40, 40), nn.BatchNorm1d(40), nn.ReLU())
    network.append(nn.Linear(40, 3))
    for _ in range(20):
        oracle = Oracle(network, ParameterSpace(network), default_loss)
        oracle.inspect(torch.randn(2, 1, 8, 8), torch.tensor([0, 1]))
        assert oracle.engine.name == "compiled chain"


def test_objectives_go_to_the_plain_loop():
    network, space, batch, w = problem(1)
    found = []
    for oracle in oracles(network, space, batch):
        buffers = buffers_of(oracle)

        def losses(outputs, features, samples, own):
            return nn.functional.cross_entropy(outputs, samples.targets, reduction="none")

        found.append((*oracle.gradient(w, batch, buffers, losses), buffers))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)


def test_statistics_of_states_in_16_bits(tmp_path):
    """The statistics that clients keep are rounded where they are stored, not where they move."""
    ends = []
    for engine in ("sequential", "auto"):
        torch.manual_seed(0)
        network = nn.Sequential(
            *(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
        )
        method = FedBN(network, lr=0.05, batch_size=11, engine=engine)
        data = DigitsDataModule(None, Sizes([60, 50, 40, 30, 20, 10]))
        run(method, data, 2, root=tmp_path / engine, evaluate=(), state_dtype="bfloat16")
        assert (method.oracle.engine.name == "sequential") == (engine == "sequential")
        ends.append(method.global_model)
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-9, atol=1e-11)
