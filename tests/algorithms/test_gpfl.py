"""GPFL against plain PyTorch with layers written out, its conditions, bytes and refusals."""

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pfl.algorithms import GPFL
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
    several_labels,
    world,
)
from tests.refusal import refused

LAMBDA, MU, DECAY = 0.7, 0.3, LOCAL["weight_decay"]
GIVEN = dict(penalty=LAMBDA, shared_decay=MU)
OWN = ("head.own.weight", "head.own.bias")
CONDITIONS = ("conditions.common", "conditions.personal")


def made(**kw):
    torch.manual_seed(2)
    return GPFL(network(), batch_size=None, **GIVEN, **{**LOCAL, **kw})


def named(method, w):
    """A model [P] as tensors by name, copied."""
    return {name: value.clone() for name, value in method.space.split(w).items()}


def layers(v, name, c):
    """Linear, ReLU and LayerNorm of a condition c."""
    x = torch.clamp(v[f"valve.{name}.0.weight"] @ c + v[f"valve.{name}.0.bias"], min=0)
    x = (x - x.mean()) / (((x - x.mean()) ** 2).mean() + 1e-5).sqrt()
    return x * v[f"valve.{name}.2.weight"] + v[f"valve.{name}.2.bias"]


def valve(v, z, c):
    return torch.clamp((1 + layers(v, "gamma", c)) * z + layers(v, "beta", c), min=0)


def loss(v, x, y, g, p, received):
    """The three terms, sample by sample."""
    total = 0
    for one, label in zip(x, y, strict=True):
        z = torch.tanh(v["body.body.weight"] @ one + v["body.body.bias"])
        scores = v["head.own.weight"] @ valve(v, z, p) + v["head.own.bias"]
        common = valve(v, z, g)
        cosines = torch.zeros(CLASSES).double()  # where ReLU has switched all units off
        if common.any():
            cosines = torch.stack([common @ e / common.norm() / e.norm() for e in v["vectors"]])
        total = total + cross_entropy(scores[None], label[None])
        total = total + cross_entropy(cosines[None], label[None])
        total = total + LAMBDA * ((common - received[label]) ** 2).sum().sqrt()
    return total / len(y)


def conditions(labels, vectors):
    shares = torch.bincount(torch.tensor(labels), minlength=CLASSES).double() / len(labels)
    return vectors.mean(0), sum(s * e for s, e in zip(shares, vectors, strict=True))


def slow(method):
    """The shared values after each round, and the heads of all clients."""
    w = named(method, method.global_model)
    heads = [{name: w[name] for name in OWN} for _ in LABELS]
    history = []
    for t, cohort in enumerate(TRACE):
        models = []
        for i in cohort:
            x, y = samples()[i]
            v = {**w, **heads[i]}
            g, p = conditions(LABELS[i], w["vectors"])
            moving = [name for name in v if name not in CONDITIONS]
            for _ in range(LOCAL["local_steps"]):
                at = {name: v[name].clone().requires_grad_() for name in moving}
                slopes = torch.autograd.grad(
                    loss(at, x, y, g, p, w["vectors"]),
                    [at[name] for name in moving],
                    materialize_grads=True,
                )
                for name, slope in zip(moving, slopes, strict=True):
                    shared = name.startswith(("valve", "vectors"))
                    decay = DECAY + (MU if shared else 0)
                    v[name] = v[name] - rate(t) * (slope + decay * v[name])
            heads[i] = {name: v[name] for name in OWN}
            models.append(v)
        w = mean_values(cohort, models, w, OWN + CONDITIONS)
        history.append((w, [dict(head) for head in heads]))
    return history


@ENGINES
def test_rounds_equal_plain_pytorch(watch, engine):
    method = made(engine=engine)
    expected = slow(method)
    history = watch(method, world(), len(TRACE), trace=TRACE)
    for row, (w, heads) in zip(history.rounds, expected, strict=True):
        flat = torch.cat([w[layer.name].flatten() for layer in method.space.layers])
        np.testing.assert_allclose(row["w"], flat, rtol=0, atol=1e-12)
        own = torch.stack([torch.cat([h[name].flatten() for name in OWN]) for h in heads])
        np.testing.assert_allclose(row["head"][:, : own.shape[1]], own, rtol=0, atol=1e-12)
    # Personalized: the scores with the newest shared values, and the conditions of these.
    (clients,) = method.iter_clients("train")
    for i, model in zip(clients.ids, method.personalized(clients), strict=True):
        x, _ = samples()[i]
        v = {**w, **heads[i]}
        _, p = conditions(LABELS[i], w["vectors"])
        z = torch.tanh(x @ v["body.body.weight"].T + v["body.body.bias"])
        scores = torch.stack([v["head.own.weight"] @ valve(v, one, p) for one in z])
        actual = torch.func.functional_call(method.network, method.space.split(model), (x,))
        torch.testing.assert_close(actual, scores + v["head.own.bias"], rtol=0, atol=1e-12)


def test_a_round_sends_all_but_the_head_and_the_conditions(watch):
    """Down and up: the body, 4 (K^2 + 3K) / 2 values of the valve and K for each class."""
    history = watch(made(), world(), len(TRACE), trace=TRACE)
    visits = np.array([[i in cohort for i in range(4)] for cohort in TRACE]).cumsum(0)
    body = FEATURES * 4 + FEATURES
    shared = body + 2 * (FEATURES**2 + 3 * FEATURES) + CLASSES * FEATURES
    for way in ("down", "up"):
        assert np.array_equal(history[way], 8 * shared * visits)


def test_a_client_without_samples_keeps_its_head(watch):
    history = watch(made(), world(5), 2, trace=[[0, 1], [4]])
    one, two = history.rounds
    assert np.array_equal(two["w"], one["w"])
    first = torch.nn.utils.parameters_to_vector(network().out.parameters()).detach()
    np.testing.assert_array_equal(two["head"][4][: len(first)], first)


def test_refusals():
    with refused("model.network: GPFL: the head '0' is a Conv1d; the method needs a linear layer"):
        GPFL(nn.Sequential(nn.Conv1d(2, 3, 1)))
    with refused("model.network: GPFL: a Unflatten comes after the head '1'"):
        GPFL(several_labels()[0])
    with refused("model.penalty: -1"):
        GPFL(network(), penalty=-1)
    with refused("model.clip: 1.0; GPFL has local steps of its own"):
        GPFL(network(), clip=1.0)
