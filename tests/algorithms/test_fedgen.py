"""FedGen against plain PyTorch modules, its bytes, its limits, and bodies of the clients' own."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

from models import MLP, Family
from pfl.algorithms import FedAvg, FedGen, LGFedAvg
from pfl.randomness import generator
from tests.algorithms.class_world import (
    BODY,
    CLASSES,
    ENGINES,
    FEATURES,
    LABELS,
    LOCAL,
    SIZE,
    TRACE,
    assert_same_end,
    mean_model,
    network,
    rate,
    samples,
    several_labels,
    start,
    world,
)
from tests.refusal import refused

ALPHA, COUNT, NOISE, HIDDEN, STEPS, BATCH, LR = 0.7, 4, 2, 5, 3, 6, 0.05
SIZES = {"generated": COUNT, "noise": NOISE, "hidden": HIDDEN}
SERVER = {"server_steps": STEPS, "server_batch_size": BATCH, "server_lr": LR}
VALUES = HIDDEN * (NOISE + CLASSES) + HIDDEN + FEATURES * HIDDEN + FEATURES


def make(given, **arguments):
    settings = {"regularization": ALPHA, "batch_size": None}
    return FedGen(given, **settings | SIZES | SERVER | LOCAL | arguments)


class Makes(nn.Module):
    """Features of labels and noise, by PyTorch's layers."""

    def __init__(self):
        super().__init__()
        layers = nn.Linear(NOISE + CLASSES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, FEATURES)
        self.layers = nn.Sequential(*layers).double()
        rng = generator(0, "generator")
        for layer in (self.layers[0], self.layers[2]):
            bound = layer.in_features**-0.5
            for p in (layer.weight, layer.bias):
                p.data = torch.from_numpy(rng.uniform(-bound, bound, p.numel())).view_as(p)

    def forward(self, labels, noise):
        return self.layers(torch.cat([noise, one_hot(labels, CLASSES).double()], 1))


def drawn(rng, shares, count):
    labels = rng.choice(CLASSES, count, p=shares)
    return torch.from_numpy(labels), torch.from_numpy(rng.normal(size=(count, NOISE)))


def train_client(own, i, t, made, shares):
    """Plain steps on the client's own loss and α times that of made features."""
    x, y = samples()[i]
    rng = generator(0, "features", t, i)
    for _ in range(LOCAL["local_steps"]):
        loss = cross_entropy(own(x), y)
        if shares is not None:
            labels, noise = drawn(rng, shares, COUNT)
            loss = loss + ALPHA * cross_entropy(own.out(made(labels, noise).detach()), labels)
        gradients = torch.autograd.grad(loss, list(own.parameters()))
        with torch.no_grad():
            for p, g in zip(own.parameters(), gradients, strict=True):
                p -= rate(t) * (g + LOCAL["weight_decay"] * p)


def train_server(made, heads, weights, shares, t):
    """PyTorch's Adam on the loss of the mean of all clients' scores."""
    adam = torch.optim.Adam(made.parameters(), lr=LR)
    rng = generator(0, "features of the server", t)
    for _ in range(STEPS):
        labels, noise = drawn(rng, shares, BATCH)
        z = made(labels, noise)
        scores = sum(n * head(z) for n, head in zip(weights, heads, strict=True))
        adam.zero_grad()
        cross_entropy(scores, labels).backward()
        adam.step()


def values_of(module):
    return nn.utils.parameters_to_vector(module.parameters()).detach().clone()


def slow(weighting="samples"):
    """w, p̂ and θ after each round."""
    w = start()
    made = Makes()
    shares = None
    history = []
    for t, cohort in enumerate(TRACE):
        trained = []
        for i in cohort:
            own = network()
            nn.utils.vector_to_parameters(w.clone(), own.parameters())
            train_client(own, i, t, made, shares)
            trained.append(own)
        models = [values_of(own) for own in trained]
        if cohort:
            sizes = np.array([float(len(LABELS[i])) for i in cohort])
            if weighting == "uniform":
                sizes = np.ones(len(cohort))
                w = torch.stack(models).mean(0)
            else:
                w = mean_model(cohort, models, w)
            labels = np.concatenate([LABELS[i] for i in cohort])
            shares = np.bincount(labels, minlength=CLASSES) / len(labels)
            train_server(made, [own.out for own in trained], sizes / sizes.sum(), shares, t)
        history.append((w.numpy(), shares, values_of(made).numpy()))
    return history


@ENGINES
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_rounds_equal_plain_pytorch(watch, engine, weighting):
    """The server's loss is that of the mean of all scores, head by head."""
    method = make(network(), engine=engine, weighting=weighting)
    history = watch(method, world(), len(TRACE), trace=TRACE)
    names = ("w", "label_shares", "generator")
    for row, expected in zip(history.rounds, slow(weighting), strict=True):
        for name, value in zip(names, expected, strict=True):
            np.testing.assert_allclose(row[name], value, rtol=0, atol=1e-12, err_msg=name)


def test_the_ledger_books_the_generator_and_label_shares(watch):
    """Numbers of 8 bytes: the model and 3 shares up; the model down, and once labels are known θ
    and 3 shares."""
    history = watch(make(network()), world(), 6, trace=TRACE)
    visits = np.array([[i in cohort for i in range(4)] for cohort in TRACE])
    assert np.array_equal(history["up"], 8 * (SIZE + CLASSES) * visits.cumsum(0))
    later = visits.copy()
    later[0] = False
    expected = SIZE * visits.cumsum(0) + (VALUES + CLASSES) * later.cumsum(0)
    assert np.array_equal(history["down"], 8 * expected)


def test_with_the_head_alone_bodies_stay(watch):
    """The head and 3 shares up. A client's body is that of its last round."""
    method = make(network(), shared="head")
    history = watch(method, world(), 6, trace=TRACE)
    visits = np.array([[i in cohort for i in range(4)] for cohort in TRACE])
    assert np.array_equal(history["up"], 8 * (SIZE - BODY + CLASSES) * visits.cumsum(0))
    assert method.has_personalized and not method.has_global
    assert torch.equal(method.global_model[:BODY], start()[:BODY])
    assert not np.isclose(method.client_rows("body", np.arange(4)), start()[:BODY]).any()


def test_without_features_it_is_fedavg_or_lg_fedavg(fit):
    settings = LOCAL | {"batch_size": 2}
    one = make(network(), **settings | {"regularization": 0.0})
    assert_same_end(fit, one, FedAvg(network(), **settings))
    assert one.personalization_penalty == math.inf
    one = make(network(), **settings | {"regularization": 0.0, "shared": "head"})
    assert_same_end(fit, one, LGFedAvg(network(), **settings), atol=1e-15)
    everyone = np.arange(4)
    other = LGFedAvg(network(), **settings)
    fit(other, world(), len(TRACE), trace=TRACE)
    bodies = one.client_rows("body", everyone), other.client_rows("head", everyone)
    torch.testing.assert_close(*bodies, rtol=0, atol=1e-14)


def test_the_generator_learns_features_that_the_mean_head_knows(fit):
    losses = [
        fit(make(network(), server_steps=n), world(), 1, trace=[[0, 1, 2, 3]]).row for n in (1, 300)
    ]
    assert losses[1]["generator/loss"] < 0.7 * losses[0]["generator/loss"]


def test_networks_of_the_clients_own_share_a_head(watch):
    """A first full step alone, and in the second one made features for the common head."""

    def networks():
        torch.manual_seed(2)
        return {"wide": MLP(4, (6, 3), 3).double(), "flat": MLP(4, (3,), 3).double()}

    given = {"shared": "head", "weight_decay": 0.0, "lr_decay": 1.0, "local_steps": 1}
    method = make(Family(networks()), **given)
    history = watch(method, world(), 2, trace=[[0, 1], [0, 1]])
    head = nn.utils.parameters_to_vector(networks()["wide"].head.parameters()).detach()
    theta = torch.from_numpy(history.rounds[0]["generator"])
    made = Makes()
    nn.utils.vector_to_parameters(theta, made.parameters())
    shares = history.rounds[0]["label_shares"]
    bodies = list(networks().values())
    for number in range(2):
        sent = []
        for i, own in enumerate(bodies):
            nn.utils.vector_to_parameters(head.clone(), own.head.parameters())
            x, y = samples()[i]
            loss = cross_entropy(own(x), y)
            if number:
                labels, noise = drawn(generator(0, "features", 1, i), shares, COUNT)
                loss = loss + ALPHA * cross_entropy(own.head(made(labels, noise)), labels)
            gradients = torch.autograd.grad(loss, list(own.parameters()))
            with torch.no_grad():
                for p, g in zip(own.parameters(), gradients, strict=True):
                    p -= LOCAL["lr"] * g
            sent.append(nn.utils.parameters_to_vector(own.head.parameters()).detach().clone())
        sizes = torch.tensor([float(len(LABELS[i])) for i in (0, 1)]).double()
        head = (sizes / sizes.sum()) @ torch.stack(sent)
    torch.testing.assert_close(method.global_model[-len(head) :], head, rtol=0, atol=1e-13)
    for i, own in enumerate(bodies):
        expected = nn.utils.parameters_to_vector(own.body.parameters()).detach()
        row = method.client_rows("body", np.array([i]))[0]
        torch.testing.assert_close(row[: len(expected)], expected, rtol=0, atol=1e-13)


def test_refusals(fit):
    with refused("model.shared: 'body'"):
        make(network(), shared="body")
    with refused("model.clip: 1.0; FedGen has local steps of its own"):
        make(network(), clip=1.0)
    frozen = network()
    frozen.out.weight.requires_grad_(False)
    with refused("model.network: the head is frozen; FedGen trains it"):
        make(frozen)
    scaled = nn.Sequential(*network(), nn.Unflatten(1, (3, 1)), nn.Flatten(), nn.Tanh()).double()
    with refused("is not that of its last layer '2', which the method trains by itself"):
        fit(make(scaled), world(), 1)
    other, data = several_labels()
    with refused("FedGen needs one"):
        fit(FedGen(other), data, 1)
    with refused("model.network: Family: the clients have the networks", "'w'", "FedGen"):
        fit(make(Family({"a": MLP(4, (6, 3), 3), "b": MLP(4, (3,), 3)})), world(), 1)
