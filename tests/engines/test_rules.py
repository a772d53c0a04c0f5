"""Steps of known optimizers inside the engines: for every client what `torch.optim` does alone."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from datamodules import DigitsDataModule, Sizes
from models import MLP, LeNet5
from pfl.algorithms import FedProx
from pfl.engines.batch import Batch, StepBlock, default_loss
from pfl.engines.local_step import follow, follow_adam, step_of
from pfl.engines.oracle import Oracle
from pfl.method import local_training
from pfl.parameters import ParameterSpace
from tests.engines.test_steps import Everything, Functional, soft
from tests.problems import run

KNOWN = {
    "momentum": partial(SGD, momentum=0.9),
    "dampened": partial(SGD, momentum=0.7, dampening=0.3, weight_decay=0.2),
    "Nesterov": partial(SGD, momentum=0.9, nesterov=True),
    "decayed": partial(SGD, weight_decay=0.2),
    "Adam": partial(Adam, betas=(0.8, 0.9), eps=0.01, weight_decay=0.1),
    "AdamW": partial(AdamW, weight_decay=0.3),
}
NETWORKS = {
    "MLP": lambda: MLP(256, (4,), 3),
    "LeNet5": lambda: LeNet5(num_classes=3, image_size=16),
    "no chain": lambda: nn.Sequential(nn.Flatten(), nn.Linear(256, 3), nn.Softplus()),
}
RATE = 0.05


def problem(network):
    """Models of five clients, of which the last takes no step, and three steps of the others."""
    torch.manual_seed(0)
    model = NETWORKS[network]().double()
    space, rng = ParameterSpace(model), torch.Generator().manual_seed(1)

    def rows():
        return 0.1 * torch.randn(5, space.size, generator=rng, dtype=torch.float64)

    batches = []
    for counts in ([5, 5, 3, 1], [4, 2, 1], [3, 3, 2]):
        inputs = torch.randn(len(counts), counts[0], 1, 16, 16, generator=rng, dtype=torch.float64)
        targets = torch.randint(3, inputs.shape[:2], generator=rng)
        batches.append(Batch(inputs, targets, counts))
    return model, space, space.vector.detach() + rows(), rows, batches


def reference(model, space, start, batches, factory, terms):
    """Each client alone, with an optimizer of its own that is given g + pull v - drift."""
    v, moves, losses = start.clone(), terms["moves"], []
    for c in range(4):
        alone = nn.Parameter(start[c].clone())
        optimizer = factory([alone], lr=RATE)
        for k, batch in enumerate(batches):
            if c >= batch.clients:
                break
            before = alone.detach().clone()
            at = (before + terms["offset"][c]).requires_grad_()
            n = batch.counts[c]
            outputs = torch.func.functional_call(model, space.split(at), (batch.inputs[c, :n],))
            loss = nn.functional.cross_entropy(outputs, batch.targets[c, :n])
            (g,) = torch.autograd.grad(loss, at)
            alone.grad = g + terms["pull"] * before - terms["drift"][c]
            optimizer.step()
            with torch.no_grad():
                moved = soft(alone, terms["threshold"]) * terms["mask"][c]
                alone.copy_(torch.where(moves, moved, before))
            losses.append((k, c, loss.detach()))
        v[c] = alone.detach()
    return v, torch.stack([loss for _, _, loss in sorted(losses, key=lambda one: one[:2])])


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("factory", KNOWN)
@pytest.mark.parametrize("network", NETWORKS)
def test_engines_take_the_steps_of_torch_optim(network, factory, everything):
    """With a pull, a drift, an offset, a threshold, a mask and a part, and with none of them."""
    model, space, start, rows, batches = problem(network)
    moves = torch.ones(space.size, dtype=torch.bool)
    terms = {"pull": 0.0, "threshold": 0.0, "moves": moves}
    terms |= {"drift": 0 * start, "offset": 0 * start, "mask": torch.ones_like(start)}
    if everything:
        moves[space.layers[0].span] = False
        terms = {"pull": 0.3, "threshold": 0.002, "moves": moves}
        terms |= {"drift": rows(), "offset": rows(), "mask": (rows() > 0).double()}
    expected, losses = reference(model, space, start, batches, KNOWN[factory], terms)
    for engine in ("sequential", "vmap", "auto", "debug", "own"):
        if engine == "vmap" and network == "LeNet5":
            continue  # convolutions: `auto` is the chain
        oracle = Oracle(model, space, default_loss, "sequential" if engine == "own" else engine)
        oracle.inspect(batches[0].inputs[0], batches[0].targets[0])
        v = start.clone()
        optimizer = KNOWN[factory]([nn.Parameter(torch.zeros(1, 1))])
        if everything:
            step = step_of(optimizer, v, RATE, 0.3, terms["drift"])
            names = ("offset", "threshold", "mask")
            step = step._replace(part=moves, **{name: terms[name] for name in names})
        else:
            step = step_of(optimizer, v, RATE)
        descend = Functional(oracle.runner).descend if engine == "own" else oracle.descend
        seen, counts = descend(v, [StepBlock.of(batch, v.dtype) for batch in batches], step)
        torch.testing.assert_close(v, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(seen, losses, rtol=1e-12, atol=1e-12)
        assert counts == [n for batch in batches for n in batch.counts]
        assert torch.equal(v[4], start[4])
        assert torch.equal(v[:, ~moves], start[:, ~moves])


class Tuned(SGD):
    """Looks like SGD, and may be another."""


def watched(parameters):
    optimizer = SGD(parameters, momentum=0.9)
    optimizer.register_step_post_hook(lambda *arguments: None)
    return optimizer


OTHERS = {
    "a subclass": partial(Tuned, momentum=0.9),
    "a hook": watched,
    "upward": partial(SGD, momentum=0.9, maximize=True),
    "amsgrad": partial(Adam, amsgrad=True),
    "another": torch.optim.RMSprop,
}


@pytest.mark.parametrize("factory", OTHERS)
def test_other_optimizers_have_no_step(factory):
    optimizer = OTHERS[factory]([nn.Parameter(torch.zeros(1, 1))])
    assert step_of(optimizer, torch.zeros(2, 3), RATE) is None


def test_adam_of_a_gpu_is_adam_of_a_cpu():
    """Two formulas, of which GPUs have the one without PyTorch's kernel; three steps in float64."""
    rng = torch.Generator().manual_seed(0)
    ends = []
    start = torch.randn(3, 7, generator=rng, dtype=torch.float64)
    gradients = torch.randn(3, 3, 7, generator=rng, dtype=torch.float64)
    for one in (True, False):
        v = start.clone()
        rule = step_of(KNOWN["Adam"]([nn.Parameter(torch.zeros(1))]), v, RATE).rule
        rule = rule._replace(pull=0.0)
        for g in gradients:
            rule.gradient.copy_(g)
            if one:
                follow(rule, v, RATE, 1.0)
            else:
                rule.taken.add_(1)
                follow_adam(rule, v, rule.second, RATE)
        ends.append((v, rule.first, rule.second))
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-14)


def test_options_that_are_tensors_have_no_step():
    optimizer = Adam([nn.Parameter(torch.zeros(1, 1))])
    assert step_of(optimizer, torch.zeros(2, 3), RATE) is not None
    optimizer.param_groups[0]["eps"] = torch.tensor(0.1)
    assert step_of(optimizer, torch.zeros(2, 3), RATE) is None


def test_a_memory_stays_where_its_client_stopped():
    """Of three clients the last two stop after a step; another one's memory is no other's."""
    model, space, start, _, batches = problem("MLP")
    oracle = Oracle(model, space, default_loss)
    oracle.inspect(batches[0].inputs[0], batches[0].targets[0])
    step = step_of(Adam([nn.Parameter(torch.zeros(1, 1))]), start, RATE)
    v = start.clone()
    first = StepBlock.of(batches[0], v.dtype)
    oracle.descend(v, [first], step)
    kept = [x.clone() for x in (step.rule.first, step.rule.second, step.rule.taken)]
    assert kept[2].flatten().tolist() == [1, 1, 1, 1, 0]
    alone = Batch(batches[0].inputs[:1], batches[0].targets[:1], [5])
    oracle.descend(v, [StepBlock.of(alone, v.dtype)] * 2, step)
    assert step.rule.taken.flatten().tolist() == [3, 1, 1, 1, 0]
    for one, before in zip((step.rule.first, step.rule.second), kept[:2], strict=True):
        assert torch.equal(one[1:], before[1:]) and not torch.equal(one[0], before[0])


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("factory", ["momentum", "dampened", "Adam", "AdamW"])
@pytest.mark.parametrize("kind", [Everything, FedProx])
def test_a_run_is_that_of_the_optimizer_itself(
    tmp_path, monkeypatch, threads, kind, factory, number
):
    """Clients of unequal sizes in one and two threads, against `LocalOptimizer`, in 64-true."""
    threads(number)
    ends = []
    for known in (True, False):
        if not known:
            monkeypatch.setattr(local_training, "step_of", lambda *arguments: None)
        torch.manual_seed(0)
        method = kind(
            MLP(64, (8,)), lr=0.05, weight_decay=0.1, batch_size=10, optimizer=KNOWN[factory]
        )
        data = DigitsDataModule(None, Sizes([60, 50, 40, 30, 20, 10]))
        run(method, data, 2, root=tmp_path / str(known), evaluate=(), clients_per_round=4)
        ends.append((method.global_model, method.row["train/loss"]))
    torch.testing.assert_close(ends[0][0], ends[1][0], rtol=1e-10, atol=1e-12)
    assert ends[0][1] == pytest.approx(ends[1][1], rel=1e-10)
