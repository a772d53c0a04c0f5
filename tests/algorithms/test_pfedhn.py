"""pFedHN against plain PyTorch modules, and newcomers."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from pfl.algorithms import pFedHN
from pfl.method.transport import chunks_of
from tests.algorithms.class_world import (
    LOCAL,
    SIZE,
    TRACE,
    descend,
    entropy,
    network,
    rate,
    samples,
    start,
    world,
)

WIDTH, LR, MOMENTUM, DECAY = 6, 0.2, 0.7, 0.03
ARGUMENTS = dict(
    server_lr=LR, server_momentum=MOMENTUM, server_weight_decay=DECAY, width=WIDTH, embedding=5
)


def hypernetwork(values, hidden=2, embedding=5, clients=4):
    """An embedding and linear layers, with ReLU after all but the first and the last."""
    layers = [nn.Linear(embedding, WIDTH)]
    for _ in range(hidden):
        layers += [nn.ReLU(), nn.Linear(WIDTH, WIDTH)]
    made = nn.ModuleList([nn.Embedding(clients, embedding), *layers, nn.Linear(WIDTH, SIZE)])
    made = made.double()
    nn.utils.vector_to_parameters(torch.as_tensor(values), made.parameters())
    return made


def models(made, ids):
    return nn.Sequential(*made)(torch.as_tensor(ids))


def slow(values, hidden):
    """The hypernetwork's values after each round, by autograd and PyTorch's SGD."""
    made, history = hypernetwork(values, hidden), []
    sgd = torch.optim.SGD(made.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    for t, cohort in enumerate(TRACE):
        if cohort:
            theta, changes = models(made, cohort), []
            for i, model in zip(cohort, theta.detach(), strict=True):
                x, y = samples()[i]
                loss = partial(entropy, x=x, y=y)
                changes.append(descend(model, loss, rate(t), LOCAL["local_steps"]) - model)
            sgd.zero_grad()
            theta.backward(-torch.stack(changes) / len(cohort))
            sgd.step()
        history.append(nn.utils.parameters_to_vector(made.parameters()).detach().numpy().copy())
    return history


def values_of(method):
    return nn.utils.parameters_to_vector(method.hypernetwork.parameters())


def first_of(fit, method):
    """The first values of the hypernetwork: those after a round in which nobody reports."""
    return values_of(fit(method, world(), 1, trace=[[]]))


@pytest.mark.parametrize(
    ("hidden", "engine"), [(2, "auto"), (2, "sequential"), (2, "vmap"), (0, "auto"), (3, "auto")]
)
def test_rounds_equal_plain_pytorch(fit, watch, hidden, engine):
    arguments = ARGUMENTS | dict(hidden_layers=hidden)
    first = first_of(fit, pFedHN(network(), **arguments))
    method = pFedHN(network(), batch_size=None, engine=engine, **arguments, **LOCAL)
    history = watch(method, world(), len(TRACE), trace=TRACE)
    expected = slow(first, hidden)
    np.testing.assert_allclose(history["hypernetwork"], expected, rtol=0, atol=1e-11)
    made = hypernetwork(expected[-1], hidden)
    (clients,) = method.iter_clients("train")
    theta = models(made, clients.ids).detach()
    torch.testing.assert_close(method.personalized(clients), theta, rtol=0, atol=1e-11)


def test_first_values(fit):
    """Vectors of the standard normal distribution; layers uniform within 1 / sqrt of their inputs;
    the last biases are the network's values, to which W times the last features is added."""
    method = pFedHN(network(), width=50, embedding=40)
    first_of(fit, method)
    vectors = method.hypernetwork.vectors
    layers = [(layer.weight, layer.bias) for layer in method.hypernetwork.layers]
    assert vectors.shape == (4, 40)
    assert abs(vectors.mean()) < 0.3
    assert abs(vectors.std() - 1) < 0.2
    assert [tuple(weight.shape) for weight, _ in layers] == [(50, 40), *[(50, 50)] * 3, (27, 50)]
    for number, (weight, bias) in enumerate(layers):
        bound = weight.shape[1] ** -0.5
        assert 0.9 * bound < weight.abs().max() <= bound
        assert abs(weight.mean()) < 0.1 * bound
        if number < 4:
            assert 0.8 * bound < bias.abs().max() <= bound
    assert torch.equal(layers[-1][1], start())


def test_the_length_of_a_vector(fit):
    """1 + M / 4: 2 with four clients of which all train, 1 with three."""
    for loop, expected in (({}, (4, 2)), ({"unseen": [0]}, (3, 1))):
        method = pFedHN(network(), width=WIDTH)
        fit(method, world(), 1, trace=[[1]], **loop)
        assert method.hypernetwork.vectors.shape == expected


def test_a_newcomer_has_the_model_of_the_mean_vector(fit):
    """Of the clients 1 to 3, which train; there are as many vectors as clients."""
    method = pFedHN(network(), **ARGUMENTS, hidden_layers=2)
    fit(method, world(), 2, trace=[[1, 2], [3]], unseen=[0])
    made = hypernetwork(values_of(method), clients=3)
    x = nn.Sequential(*made[1:])(made[0].weight.mean(0))
    (newcomers,) = chunks_of(method, method.run.loop, np.array([0]), "train")
    method.load_state(newcomers)
    torch.testing.assert_close(method.newcomer(newcomers)[0], x.detach(), rtol=0, atol=1e-12)
