"""FedDF against plain PyTorch, its bytes, its limit, and one model of each network of a family."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from models import MLP, Family
from pfl.algorithms import FedAvg, FedDF
from pfl.randomness import generator
from tests.algorithms.class_world import (
    ENGINES,
    LABELS,
    LOCAL,
    TRACE,
    assert_rounds,
    assert_same_end,
    network,
    rate,
    samples,
    several_labels,
    world,
)
from tests.algorithms.test_fedmd import DRAWN, descend, drawn, entropy, public
from tests.refusal import refused

STEPS, BATCH, LR = 5, 3, 0.02
SERVER = {"server_steps": STEPS, "server_batch_size": BATCH, "server_lr": LR}


def make(given, **arguments):
    settings = {"public": public(), "public_samples": DRAWN, "batch_size": None}
    return FedDF(given, **settings | SERVER | LOCAL | arguments)


def batches(t, size):
    """Places of the mini-batches of a round: orders of all inputs, cut at a size."""
    rng = generator(0, "public order", t)
    places = []
    while len(places) < STEPS:
        order = rng.permutation(DRAWN)
        places += [order[k : k + size] for k in range(0, DRAWN, size)]
    return places[:STEPS]


def distil(student, teachers, t, size=BATCH):
    """PyTorch's Adam and cosine on the KL divergence from the softmax of the mean scores."""
    x = drawn(t)
    with torch.no_grad():
        target = torch.stack([teacher(x) for teacher in teachers]).mean(0)
    adam = torch.optim.Adam(student.parameters(), lr=LR)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, STEPS)
    for places in batches(t, size):
        p = target[places].softmax(1)
        q = student(x[places]).softmax(1)
        loss = (p * (p / q).log()).sum(1).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        cosine.step()


def with_values(module, values):
    """The module, which has a copy of the values."""
    nn.utils.vector_to_parameters(values.clone(), module.parameters())
    return module


def values_of(module):
    return nn.utils.parameters_to_vector(module.parameters()).detach().clone()


def slow(networks, number):
    """All models of the server, by name, after each round; client i has the network number(i)."""
    models = {name: values_of(one) for name, one in networks().items()}
    history = []
    for t, cohort in enumerate(TRACE):
        trained = {}
        for i in cohort:
            trained[i] = with_values(networks()[number(i)], models[number(i)])
            descend(trained[i], entropy(*samples()[i]), rate(t), LOCAL["local_steps"])
        for name, student in networks().items():
            w = models[name]
            own = [i for i in cohort if number(i) == name]
            if own:
                sizes = torch.tensor([float(len(LABELS[i])) for i in own]).double()
                w = (sizes / sizes.sum()) @ torch.stack([values_of(trained[i]) for i in own])
            with_values(student, w)
            if cohort:
                distil(student, list(trained.values()), t)
            models[name] = values_of(student)
        history.append(dict(models))
    return history


@ENGINES
def test_rounds_equal_plain_pytorch(watch, engine):
    """One network for all: Algorithm 1."""
    expected = slow(lambda: {"all": network()}, lambda i: "all")
    rows = [(models["all"].numpy(),) for models in expected]
    assert_rounds(watch, make(network(), engine=engine), rows, "w")


def networks():
    torch.manual_seed(2)
    return {"deep": MLP(4, (3, 2), 3).double(), "wide": MLP(4, (5,), 3).double()}


def of_client(i):
    """Clients 0 and 2 have the deep one, 1 and 3 the wide one, which has more values."""
    return ("deep", "wide")[i % 2]


def test_a_family_has_a_mean_of_each_network_and_one_ensemble(fit, watch):
    """Algorithm 3. In the last round nobody has the deep one, which is distilled all the same."""
    method = make(Family(networks()))
    watch(method, world(), len(TRACE), trace=TRACE)
    expected = slow(networks, of_client)[-1]
    assert not [i for i in TRACE[-1] if of_client(i) == "deep"]
    for name, member in zip(networks(), method.members, strict=True):
        torch.testing.assert_close(member.global_model, expected[name], rtol=0, atol=1e-12)
    assert torch.equal(method.global_model, method.members[0].global_model)


def test_the_ledger_books_a_model_of_the_clients_network(watch):
    """23 values of 8 bytes of the deep network (15 + 8), 43 of the wide one (25 + 18)."""
    history = watch(make(Family(networks())), world(), 6, trace=TRACE)
    sizes = {name: len(values_of(made)) for name, made in networks().items()}
    booked = np.zeros(4)
    for row, cohort in zip(history.rounds, TRACE, strict=True):
        for i in cohort:
            booked[i] += 8 * sizes[of_client(i)]
        assert row["down"].tolist() == row["up"].tolist() == booked.tolist()


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_without_steps_of_the_server_it_is_fedavg(fit, weighting):
    settings = LOCAL | {"batch_size": 2, "weighting": weighting}
    one = make(network(), **settings | {"server_steps": 0})
    assert_same_end(fit, one, FedAvg(network(), **settings), atol=1e-14)
    assert one.personalization_penalty == math.inf


def test_the_server_brings_the_mean_near_the_ensemble(fit):
    """The divergence of the last step lies below that of the mean of the models."""
    first, last = (
        fit(make(network(), server_steps=n), world(), 1, trace=[[0, 1, 2, 3]]).row for n in (1, 200)
    )
    assert last["distillation/loss"] < 0.5 * first["distillation/loss"]


def test_statistics_of_batchnorm_belong_to_each_teacher(fit):
    """Their mean is the model's; a teacher is run with its own. The steps do not move them."""

    def made():
        torch.manual_seed(4)
        layers = nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 3)
        return nn.Sequential(*layers).double()

    given = {"lr": 0.1, "weight_decay": 0.0, "local_steps": 1, "server_batch_size": 2}
    method = fit(make(made(), **given), world(), 1, trace=[[0, 1]])
    trained = []
    for i in (0, 1):
        x, y = samples()[i]
        own = made()
        grads = torch.autograd.grad(nn.functional.cross_entropy(own(x), y), [*own.parameters()])
        with torch.no_grad():
            for p, g in zip(own.parameters(), grads, strict=True):
                p -= 0.1 * g
        trained.append(own.eval())
    sizes = torch.tensor([float(len(LABELS[i])) for i in (0, 1)]).double()
    shares = sizes / sizes.sum()
    student = with_values(made(), shares @ torch.stack([values_of(own) for own in trained]))
    distil(student, trained, 0, 2)  # BatchNorm takes no batch of one
    torch.testing.assert_close(method.global_model, values_of(student), rtol=0, atol=1e-12)
    for name in ("running_mean", "running_var"):
        means = shares @ torch.stack([getattr(own[1], name) for own in trained])
        found = getattr(method.network[1], name)
        torch.testing.assert_close(found, means, rtol=0, atol=1e-13)


def test_refusals(fit):
    with refused("model.server_steps: -1"):
        make(network(), server_steps=-1)
    with refused("model.server_lr: 0"):
        make(network(), server_lr=0.0)
    with refused("model.public: the inputs of TensorDataModule have the shape [5] and those of"):
        fit(make(network(), public=public(width=5)), world(), 1)
    other, data = several_labels()
    with refused("FedDF needs one"):
        fit(FedDF(other, public=public()), data, 1)
    with refused("model.server_lr: 1e+308; the training at the server of FedDF gave values"):
        fit(make(network(), server_lr=1e308), world(), 1)
