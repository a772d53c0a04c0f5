"""FedRoD against plain PyTorch, its balanced softmax, and refusals."""

from collections import OrderedDict

import numpy as np
import torch
from torch import nn

from pfl.algorithms import FedRoD
from tests.algorithms.class_world import (
    BODY,
    CLASSES,
    ENGINES,
    LABELS,
    LOCAL,
    SIZE,
    TRACE,
    assert_rounds,
    mean_model,
    network,
    rate,
    samples,
    scores,
    start,
    world,
    z_of,
)
from tests.refusal import refused

DECAY = LOCAL["weight_decay"]


def balanced(scores, y, counts):
    """-log of n_c exp(s_c) / sum_k n_k exp(s_k), in which a class without samples has no term."""
    weighted = counts * scores.exp()
    return -(weighted[torch.arange(len(y)), y] / weighted.sum(1)).log().mean()


def slow():
    """w and all p_i after each round. The personal loss gets detached outputs and features."""
    w, heads, history = start(), [torch.zeros(SIZE - BODY).double() for _ in LABELS], []
    for t, cohort in enumerate(TRACE):
        models = []
        for i in cohort:
            x, y = samples()[i]
            counts = torch.tensor([float(LABELS[i].count(c)) for c in range(CLASSES)]).double()
            v, p = w.clone(), heads[i].clone()
            for _ in range(LOCAL["local_steps"]):
                v.requires_grad_(), p.requires_grad_()
                z = z_of(v, x)
                generic = scores(z, v[BODY:])
                personal = generic.detach() + scores(z.detach(), p)
                wrong = nn.functional.cross_entropy(personal, y)
                (g,) = torch.autograd.grad(balanced(generic, y, counts), v)
                (g_p,) = torch.autograd.grad(wrong, p)
                v, p = v.detach(), p.detach()
                v, p = v - rate(t) * (g + DECAY * v), p - rate(t) * (g_p + DECAY * p)
            models.append(v)
            heads[i] = p
        w = mean_model(cohort, models, w)
        history.append((w.numpy(), torch.stack(heads).numpy()))
    return history


@ENGINES
def test_rounds_equal_plain_pytorch(watch, engine):
    method = FedRoD(network(), batch_size=None, engine=engine, **LOCAL)
    assert_rounds(watch, method, slow(), "w", "head")
    # Personalized: the generic model's outputs and those of the personal head.
    w, heads = map(torch.from_numpy, slow()[-1])
    (clients,) = method.iter_clients("train")
    for i, model in zip(clients.ids, method.personalized(clients), strict=True):
        x, _ = samples()[i]
        expected = scores(z_of(w, x), w[BODY:]) + scores(z_of(w, x), heads[i])
        actual = scores(z_of(model, x), model[BODY:])
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_a_client_without_samples_sends_what_it_received(watch):
    history = watch(FedRoD(network(), **LOCAL), world(5), 2, trace=[[0, 1], [4]])
    one, two = history.rounds
    assert np.array_equal(two["w"], one["w"])
    assert not two["head"][4].any()


def test_the_optimizer_of_the_user_trains_both(watch):
    """Heavy-ball momentum on one client that sees full batches: two slow lines."""
    momentum = 0.5
    optimizer = lambda parameters: torch.optim.SGD(parameters, momentum=momentum)  # noqa: E731
    settings = LOCAL | dict(batch_size=None, optimizer=optimizer, weight_decay=0.0)
    history = watch(FedRoD(network(), **settings), world(), 1, trace=[[0]])
    x, y = samples()[0]
    counts = torch.bincount(y, minlength=CLASSES)
    v, p = start(), torch.zeros(SIZE - BODY).double()
    speed, speed_p = torch.zeros_like(v), torch.zeros_like(p)
    for _ in range(LOCAL["local_steps"]):
        at, at_p = v.clone().requires_grad_(), p.clone().requires_grad_()
        z = z_of(at, x)
        generic = scores(z, at[BODY:])
        personal = generic.detach() + scores(z.detach(), at_p)
        loss = balanced(generic, y, counts) + nn.functional.cross_entropy(personal, y)
        g, g_p = torch.autograd.grad(loss, [at, at_p])
        speed, speed_p = momentum * speed + g, momentum * speed_p + g_p
        v, p = v - rate(0) * speed, p - rate(0) * speed_p
    np.testing.assert_allclose(history["w"][0], v, rtol=0, atol=1e-12)
    np.testing.assert_allclose(history["head"][0][0], p, rtol=0, atol=1e-12)


def test_a_round_costs_two_passes():
    method = FedRoD(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), local_epochs=3)
    assert method.cost(np.array([10, 20])).tolist() == [60, 120]


def test_a_frozen_head_is_refused():
    frozen = nn.Sequential(OrderedDict(body=nn.Linear(4, 3), head=nn.Linear(3, 2)))
    frozen.head.requires_grad_(False)
    with refused("model.network: the head is frozen; FedRoD trains it"):
        FedRoD(frozen)
