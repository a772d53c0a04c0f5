"""One optimizer of [C, P] is C optimizers of its rows."""

from functools import partial

import pytest
import torch
from torch import nn

from models import LogisticRegression
from pfl.algorithms import FedAvg
from pfl.engines.local_step import LocalOptimizer, check_elementwise
from tests.refusal import refused

OPTIMIZERS = {
    "plain": None,
    "SGD": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "Nesterov": partial(torch.optim.SGD, momentum=0.9, dampening=0, nesterov=True),
    "Adam": torch.optim.Adam,
    "AdamW": partial(torch.optim.AdamW, weight_decay=0.3),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.5),
    "Adadelta": torch.optim.Adadelta,
    "NAdam": torch.optim.NAdam,
    "Rprop": torch.optim.Rprop,
}
STEPS = [4, 4, 2, 0]  # of each client, in 4 steps in all


def gradients():
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(max(STEPS), len(STEPS), 5, generator=generator, dtype=torch.float64)
    for c, steps in enumerate(STEPS):
        g[steps:, c] = 0  # as the oracle gives them
    return g


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("factory", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_rows_move_as_if_each_were_alone(factory, weight_decay):
    start = torch.randn(4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    w, g = start.clone(), gradients()
    optimizer = LocalOptimizer(w, lr=0.05, weight_decay=weight_decay, factory=factory)
    with torch.no_grad():  # as the framework calls it
        for step in range(max(STEPS)):
            given = g[step].clone()
            optimizer.step(g[step], sum(s > step for s in STEPS))
            assert torch.equal(g[step], given)
    for c, steps in enumerate(STEPS):
        alone = nn.Parameter(start[c].clone())
        # The learning rate and weight decay are the method's; the factory has the rest.
        reference = (factory or torch.optim.SGD)([alone])
        reference.param_groups[0]["lr"] = 0.05
        for step in range(steps):
            alone.grad = g[step, c] + weight_decay * alone.detach()
            reference.step()
        torch.testing.assert_close(w[c], alone.detach(), rtol=1e-10, atol=1e-12)
    assert torch.equal(w[3], start[3])
    assert not torch.allclose(w[2], start[2])


@pytest.mark.parametrize("factory", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_rows_without_data_keep_their_place(factory):
    """Also with momentum, weight decay, and a direction that does not vanish there."""
    w = torch.ones(3, 2)
    optimizer = LocalOptimizer(w, lr=0.1, weight_decay=0.5, factory=factory)
    optimizer.step(torch.ones(3, 2), 3)
    after = w.clone()
    assert (after < 1).all()
    for _ in range(3):
        optimizer.step(torch.ones(3, 2), 1)
    assert torch.equal(w[1:], after[1:])
    assert (w[0] < after[0]).all()
    optimizer.step(torch.ones(3, 2), 0)
    assert torch.equal(w[1:], after[1:])


def test_sgd_by_hand():
    """w - lr (g + weight_decay w) = 2 - 0.1 (3 + 0.5 * 2) = 1.6, in place."""
    w = torch.tensor([[2.0], [2.0]])
    LocalOptimizer(w, lr=0.1, weight_decay=0.5).step(torch.tensor([[3.0], [3.0]]), 1)
    torch.testing.assert_close(w, torch.tensor([[1.6], [2.0]]))


def test_the_learning_rate_is_the_methods_not_the_factorys():
    w = torch.zeros(1, 1)
    LocalOptimizer(w, lr=0.25, factory=partial(torch.optim.SGD, lr=100.0)).step(torch.ones(1, 1), 1)
    assert w.item() == -0.25


MIXING = [n for n in ("LBFGS", "Adafactor", "Muon", "SparseAdam") if hasattr(torch.optim, n)]


@pytest.mark.parametrize("name", MIXING)
def test_optimizers_that_mix_entries_are_refused(name):
    with refused("optimizer", name, "elementwise", "Adam"):
        LocalOptimizer(torch.zeros(2, 2), lr=0.1, factory=getattr(torch.optim, name))


@pytest.mark.parametrize("name", MIXING)
def test_they_are_refused_before_anything_is_trained(name):
    with refused("optimizer", name):
        FedAvg(LogisticRegression(4, 2), optimizer=getattr(torch.optim, name))


@pytest.mark.parametrize("name", [n for n in MIXING if n != "Adafactor"])
def test_a_server_optimizer_must_step_from_a_gradient(name):
    with refused("model.server_optimizer: ", "SGD, Adam"):
        FedAvg(LogisticRegression(4, 2), server_optimizer=getattr(torch.optim, name))


def test_the_server_may_mix_the_entries_of_its_one_vector():
    """Adafactor, which clients may not have; PyTorch has had it since 2.5."""
    FedAvg(LogisticRegression(4, 2), server_optimizer=getattr(torch.optim, "Adafactor", None))


def test_a_subclass_of_one_that_mixes_is_refused():
    class Tuned(torch.optim.LBFGS):
        pass

    with refused("optimizer", "Tuned"):
        check_elementwise(Tuned([nn.Parameter(torch.zeros(1))]))


def test_an_elementwise_optimizer_passes_the_check():
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))])
    assert check_elementwise(optimizer) is optimizer


@pytest.mark.parametrize("factory", [None, partial(torch.optim.SGD, lr=1.0, momentum=0.9)])
def test_a_part_moves_as_if_it_were_the_model(factory):
    """And follows what others do to it between two steps; the rest keeps its bits."""
    rng = torch.Generator().manual_seed(0)
    w, part = torch.randn(3, 5, generator=rng), torch.tensor([True, False, True, True, False])
    start, alone = w.clone(), w[:, part]
    settings = {"lr": 0.1, "weight_decay": 0.5, "factory": factory}
    one, other = LocalOptimizer(w, part=part, **settings), LocalOptimizer(alone, **settings)
    for active in (3, 2, 2):
        g = torch.randn(3, 5, generator=rng)
        one.step(g, active)
        other.step(g[:, part], active)
        w[:, part] += 1.0
        alone += 1.0
        assert torch.equal(w[:, part], alone)
        assert torch.equal(w[:, ~part], start[:, ~part])
