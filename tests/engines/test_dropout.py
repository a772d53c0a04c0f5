"""Dropout of chains: draws that depend on client, step, layer and sample alone, on every engine."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from datamodules import DigitsDataModule, Sizes
from models import MLP
from pfl.algorithms import FedProx
from pfl.engines.batch import Batch, Origin, StepBlock, default_loss
from pfl.engines.dropout import KeyedDropout, drawing, dropout_factors
from pfl.engines.local_step import Step
from pfl.engines.objective import Objective
from pfl.engines.oracle import Oracle
from pfl.engines.vmap import VmapEngine
from pfl.parameters import ParameterSpace
from tests.problems import run


class Numbered(Origin):
    def __init__(self, first=0):
        self.first = first

    def seed(self, row):
        return 1000 * self.first + row - 2**60


NETWORKS = {
    "vectors": lambda: nn.Sequential(
        nn.Dropout(0.2), nn.Flatten(), nn.Linear(64, 9), nn.Tanh(), nn.Dropout(0.5), nn.Linear(9, 3)
    ),
    "ends": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Dropout(0.7)),
    "images": lambda: nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout(0.3), nn.MaxPool2d(2), nn.Dropout(0.1)),
        *(nn.Flatten(), nn.Dropout(0.0), nn.Linear(36, 7), nn.Dropout(0.5), nn.Linear(7, 3)),
    ),
}


def problem(name):
    """Four models and a batch of unequal counts in float64; the fifth model takes no step."""
    torch.manual_seed(0)
    network = NETWORKS[name]().double()
    space, rng = ParameterSpace(network), torch.Generator().manual_seed(1)
    inputs = torch.randn(4, 5, 1, 8, 8, generator=rng, dtype=torch.float64)
    targets = torch.randint(3, (4, 5), generator=rng)
    batch = Batch(inputs, targets, [5, 5, 3, 1], Numbered(1))
    w = space.vector.detach() + 0.1 * torch.randn(5, space.size, generator=rng).double()
    return network, space, batch, w


def oracle_of(network, space, batch, engine, loss=default_loss):
    oracle = Oracle(network, space, loss, engine)
    oracle.inspect(batch.inputs[0], batch.targets[0])
    return oracle


def reference(network, x, seed):
    """The network in training, with the factors of its dropout layers written here."""
    number = 0
    for layer in network:
        if not isinstance(layer, nn.Dropout):
            x = layer(x)
        elif layer.p > 0:
            kept = round((1 - layer.p) * 65536)
            size = x[0].numel()
            factors = dropout_factors(torch.tensor([seed]), number, kept, len(x), size, x.dtype)
            x = x * factors.view(x.shape)
            number += 1
    return x


@pytest.mark.parametrize("loss", [default_loss, nn.CrossEntropyLoss(label_smoothing=0.2)])
@pytest.mark.parametrize("name", NETWORKS)
def test_all_engines_have_the_gradients_of_the_same_draws(name, loss):
    network, space, batch, w = problem(name)
    value = nn.CrossEntropyLoss(label_smoothing=getattr(loss, "label_smoothing", 0.0))
    expected = []
    for c, n in enumerate(batch.counts):
        at = w[c].clone().requires_grad_()
        own = space.split(at)
        for parameter, values in zip(network.parameters(), own.values(), strict=True):
            parameter.data = values.detach()
        seed = batch.origin.seed(c)
        result = value(reference(network, batch.inputs[c, :n], seed), batch.targets[c, :n])
        pieces = torch.autograd.grad(result, list(network.parameters()))
        expected.append(torch.cat([piece.flatten() for piece in pieces]))
    for engine in ("sequential", "auto", "debug", "vmap"):
        oracle = oracle_of(network, space, batch, engine, loss)
        assert oracle.runner.has_keys and not oracle.runner.is_stochastic
        if engine == "vmap" and name == "images":
            assert isinstance(oracle.engine, VmapEngine)
        state = torch.get_rng_state()
        _, g = oracle.gradient(w, batch)
        assert torch.equal(torch.get_rng_state(), state)
        torch.testing.assert_close(g[:4], torch.stack(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NETWORKS)
def test_steps_draw_anew_and_end_where_the_plain_loop_ends(name):
    network, space, batch, w = problem(name)
    flat = batch.inputs.flatten(0, 1), batch.targets.flatten(0, 1)
    picks = torch.arange(20).view(1, 4, 5).repeat(3, 1, 1)
    block = StepBlock(*flat, picks, np.array([batch.counts] * 3), w.dtype, Numbered)
    ends = []
    for engine in ("sequential", "auto", "vmap"):
        oracle = oracle_of(network, space, batch, engine)
        v = w.clone()
        losses, _ = oracle.descend(v, [block], Step(0.1))
        ends.append((losses, v))
    for losses, v in ends[1:]:
        torch.testing.assert_close(losses, ends[0][0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(v, ends[0][1], rtol=1e-12, atol=1e-12)
    oracle = oracle_of(network, space, batch, "auto")
    firsts = [
        oracle.gradient(w, Batch(*flat_of(batch), origin))[1] for origin in map(Numbered, (0, 1))
    ]
    assert not torch.allclose(*firsts, atol=1e-3)


def flat_of(batch):
    return batch.inputs, batch.targets, batch.counts


@pytest.mark.parametrize("name", NETWORKS)
def test_evaluation_draws_nothing(name):
    network, space, batch, w = problem(name)
    few = Batch(batch.inputs[:, :1], batch.targets[:, :1], [1] * 4)
    for engine in ("sequential", "auto", "vmap"):
        outputs = oracle_of(network, space, batch, engine).evaluate(w[:4], few)[2]
        for c in range(4):
            alone = torch.func.functional_call(network.eval(), space.split(w[c]), (few.inputs[c],))
            torch.testing.assert_close(outputs[c], alone, rtol=1e-12, atol=1e-12)


def test_a_layer_that_is_used_twice_draws_twice():
    layer = KeyedDropout(0.5)
    with drawing(torch.tensor([3])):
        one, two = layer(torch.ones(4, 50)), layer(torch.ones(4, 50))
    with drawing(torch.tensor([3])):
        again = layer(torch.ones(4, 50))
    assert torch.equal(one, again) and not torch.equal(one, two)


SHARES = [0.5, 0.9, 0.2]


@pytest.mark.parametrize("share", SHARES)
def test_factors_have_their_rate_and_are_independent(share):
    """Means and correlations over clients, steps, layers, samples and places, to 5 deviations."""
    kept = round(share * 65536)
    p = kept / 65536
    seeds = torch.arange(40)  # steps of clients whose seeds are next to each other
    layers = [dropout_factors(seeds, n, kept, 21, 83, torch.float64) for n in range(3)]
    x = torch.stack(layers)  # [layer, client, sample, place]
    assert sorted(x.unique().tolist()) == pytest.approx([0, 1 / p])
    z = (x - 1) / ((1 - p) / p) ** 0.5
    n = z.numel()
    assert abs(z.sum()) < 5 * n**0.5
    for axis in range(4):
        others = [d for d in range(4) if d != axis]
        means = z.sum(others) / (n / x.shape[axis]) ** 0.5
        assert means.abs().max() < 5
        one, two = z.narrow(axis, 0, x.shape[axis] - 1), z.narrow(axis, 1, x.shape[axis] - 1)
        assert abs((one * two).sum()) < 5 * one.numel() ** 0.5
    for i, j in itertools.combinations(range(4), 2):  # the four draws of one hash
        lanes = z.flatten(0, 2)[:, :80].unflatten(1, (4, 20))
        assert abs((lanes[:, i] * lanes[:, j]).sum()) < 5 * lanes[:, i].numel() ** 0.5


def test_a_factor_depends_on_its_own_client_and_sample_only():
    seeds = torch.tensor([7, -8, 9])
    many = dropout_factors(seeds, 1, 40000, 6, 10, torch.float32)
    for c in range(3):
        few = dropout_factors(seeds[c : c + 1], 1, 40000, 2, 10, torch.float32)
        assert torch.equal(few[0], many[c, :2])


@pytest.mark.parametrize(("kept", "values"), [(0, {0.0}), (1, {0.0, 65536.0}), (65535, {0.0, 1.0})])
def test_rates_at_the_ends_of_their_range(kept, values):
    factors = dropout_factors(torch.arange(9), 0, kept, 9, 99, torch.float32)
    assert {round(x) for x in factors.unique().tolist()} <= {round(x) for x in values}


@pytest.mark.parametrize("size", [2, 6])
def test_a_run_depends_neither_on_engine_threads_nor_chunks(tmp_path, threads, size):
    ends = []
    for number, engine in ((1, "sequential"), (1, "auto"), (2, "auto"), (2, "sequential")):
        threads(number)
        torch.manual_seed(number)  # which is no part of the run's seed
        network = nn.Sequential(MLP(64, (8,)).body, nn.Dropout(0.5), nn.Linear(8, 10))
        torch.manual_seed(0)
        for layer in (network[0][1], network[2]):
            layer.reset_parameters()
        method = FedProx(network, lr=0.05, batch_size=10, engine=engine)
        data = DigitsDataModule(None, Sizes([60, 50, 40, 30, 20, 10]))
        settings = {"clients_per_round": 4, "clients_at_once": size}
        run(method, data, 2, root=tmp_path / f"{number}{engine}", evaluate=(), **settings)
        ends.append(method.global_model)
    for w in ends[1:]:
        torch.testing.assert_close(w, ends[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NETWORKS)
def test_objectives_see_the_same_draws(name):
    """A model's own pass draws, an older model's does not."""
    network, space, batch, w = problem(name)

    def losses(outputs, features, samples, own):
        older = own["older"].outputs.softmax(1)
        return nn.functional.cross_entropy(outputs, older, reduction="none")

    objective = Objective(losses, older={"older": w[4]})
    found = []
    for engine in ("sequential", "auto", "vmap"):
        oracle = oracle_of(network, space, batch, engine)
        found.append(oracle.gradient(w, batch, objective=objective))
    for value, g in found[1:]:
        torch.testing.assert_close(value, found[0][0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(g, found[0][1], rtol=1e-12, atol=1e-12)
