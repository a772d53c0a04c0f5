"""FedCP against plain PyTorch with layers written out, its kernel distance, bytes and refusals."""

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pfl.algorithms import FedCP
from pfl.algorithms.partial.fedcp import distance_slopes
from tests.algorithms.class_world import (
    CLASSES,
    ENGINES,
    FEATURES,
    LABELS,
    LOCAL,
    TRACE,
    mean_values,
    network,
    rate,
    samples,
    world,
)
from tests.refusal import refused

LAMBDA, DECAY = 0.8, LOCAL["weight_decay"]
OWN = ("head.own.weight", "head.own.bias")
COMMON = ("head.common.weight", "head.common.bias")


def made(**kw):
    torch.manual_seed(2)
    return FedCP(network(), **{"penalty": LAMBDA, "batch_size": None, **LOCAL, **kw})


def features(v, x):
    return torch.tanh(x @ v["body.body.weight"].T + v["body.body.bias"])


def scores(v, x, context):
    found = []
    for z in features(v, x):
        a = v["policy.0.weight"] @ (z * context) + v["policy.0.bias"]
        a = (a - a.mean()) / (((a - a.mean()) ** 2).mean() + 1e-5).sqrt()
        a = torch.clamp(a * v["policy.1.weight"] + v["policy.1.bias"], min=0)
        one, two = a[:FEATURES].exp(), a[FEATURES:].exp()
        r, s = one / (one + two), two / (one + two)
        own = v["head.own.weight"] @ (r * z) + v["head.own.bias"]
        found.append(own + v["head.common.weight"] @ (s * z) + v["head.common.bias"])
    return torch.stack(found)


def distance(z, other):
    """The mean over all pairs, one after another."""

    def k(a, b):
        return sum(torch.exp(-((a - b) ** 2).sum() / (2 * width)) for width in (10, 15, 20, 50))

    n = range(len(z))
    pairs = [k(z[i], z[j]) + k(other[i], other[j]) - 2 * k(z[i], other[j]) for i in n for j in n]
    return sum(pairs) / len(pairs)


def context_of(v):
    total = v["head.own.weight"].sum(0)
    return total / total.norm()


def slow(method, steps=LOCAL["local_steps"]):
    """All shared values after each round, and the heads of all clients."""
    w = {name: value.clone() for name, value in method.space.split(method.global_model).items()}
    heads = [{name: w[name] for name in OWN} for _ in LABELS]
    history = []
    for t, cohort in enumerate(TRACE):
        models = []
        for i in cohort:
            x, y = samples()[i]
            v = {**w, **heads[i]}
            context = context_of(v)
            moving = [name for name in v if name not in (*COMMON, "context")]
            for _ in range(steps):
                at = {name: v[name].clone().requires_grad_() for name in moving}
                full = v | at
                total = cross_entropy(scores(full, x, context), y)
                total = total + LAMBDA * distance(features(full, x), features(w, x))
                slopes = torch.autograd.grad(total, list(at.values()))
                for name, slope in zip(moving, slopes, strict=True):
                    v[name] = v[name] - rate(t) * (slope + DECAY * v[name])
            heads[i] = {name: v[name] for name in OWN}
            for own, common in zip(OWN, COMMON, strict=True):
                v[common] = 0.5 * v[own] + 0.5 * v[common]
            models.append(v)
        w = mean_values(cohort, models, w, (*OWN, "context"))
        history.append((w, [dict(head) for head in heads]))
    return history


@ENGINES
def test_rounds_equal_plain_pytorch(watch, engine):
    method = made(engine=engine)
    expected = slow(method)
    history = watch(method, world(), len(TRACE), trace=TRACE)
    context = method.personal_part[: len(method.global_model)]
    order = [layer for layer in method.space.layers if context[layer.span.start]]
    for row, (w, heads) in zip(history.rounds, expected, strict=True):
        flat = torch.cat([w[layer.name].flatten() for layer in method.space.layers])
        np.testing.assert_allclose(row["w"], flat, rtol=0, atol=1e-12)
        at = 0
        for layer in order:
            size = layer.span.stop - layer.span.start
            if layer.name in OWN:
                own = torch.stack([head[layer.name].flatten() for head in heads])
                np.testing.assert_allclose(row["head"][:, at : at + size], own, rtol=0, atol=1e-12)
            at += size
    (clients,) = method.iter_clients("train")
    for i, model in zip(clients.ids, method.personalized(clients), strict=True):
        x, _ = samples()[i]
        v = {**w, **heads[i]}
        actual = torch.func.functional_call(method.network, method.space.split(model), (x,))
        torch.testing.assert_close(actual, scores(v, x, context_of(v)), rtol=0, atol=1e-12)


def test_slopes_of_the_kernel_distance_with_padding():
    """Against autograd through the double loop, for clients with 5 and 3 of 5 samples."""
    z, other = torch.from_numpy(np.random.default_rng(4).normal(size=(2, 2, 5, 3)))
    weights = torch.from_numpy(np.array([[0.2] * 5, [1 / 3] * 3 + [0.0] * 2]))
    slopes = distance_slopes(z, other, weights)
    for client, n in enumerate((5, 3)):
        at = z[client, :n].clone().requires_grad_()
        (expected,) = torch.autograd.grad(distance(at, other[client, :n]), at)
        torch.testing.assert_close(slopes[client, :n], n * expected, rtol=0, atol=1e-14)


def test_a_round_sends_all_but_the_personal_head_and_the_context(watch):
    history = watch(made(), world(), len(TRACE), trace=TRACE)
    visits = np.array([[i in cohort for i in range(4)] for cohort in TRACE]).cumsum(0)
    plain = FEATURES * 4 + FEATURES + CLASSES * FEATURES + CLASSES
    policy = 2 * FEATURES * FEATURES + 3 * 2 * FEATURES
    for way in ("down", "up"):
        assert np.array_equal(history[way], 8 * (plain + policy) * visits)


def test_refusals():
    with refused("model.network: FedCP: the head '0' is a Conv1d; the method needs a linear layer"):
        FedCP(nn.Sequential(nn.Conv1d(2, 3, 1)))
    with refused("model.penalty: -1"):
        FedCP(network(), penalty=-1)
