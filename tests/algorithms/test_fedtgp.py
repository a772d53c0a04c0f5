"""FedTGP against plain PyTorch modules, its margin, its bytes, and networks of the clients' own."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from models import MLP, Family
from pfl.algorithms import FedTGP, LocalTrain
from pfl.randomness import generator
from tests.algorithms.class_world import (
    CLASSES,
    ENGINES,
    FEATURES,
    LABELS,
    LOCAL,
    TRACE,
    descend,
    near_means,
    network,
    rate,
    samples,
    several_labels,
    start,
    world,
    z_of,
)
from tests.refusal import refused

PENALTY, LR, EPOCHS, BATCH, HIDDEN = 0.8, 0.3, 4, 3, 5
SERVER = dict(server_lr=LR, server_epochs=EPOCHS, server_batch_size=BATCH, hidden=HIDDEN)


def margin_of(pairs, most):
    """The largest of the classes' distances from the nearest other class; they are means."""
    means = {c: torch.stack([z for z, own in pairs if own == c]).mean(0) for _, c in pairs}
    if len(means) < 2:
        return most
    gaps = [min((p - q).norm() for k, q in means.items() if k != c) for c, p in means.items()]
    return min(float(max(gaps)), most)


def slow(values, most):
    """The prototypes, and all w_i, after each round, by modules and PyTorch's SGD."""
    table = nn.Embedding(CLASSES, FEATURES)
    layers = nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, FEATURES)
    made = nn.Sequential(table, *layers).double()
    nn.utils.vector_to_parameters(values, made.parameters())
    sgd = torch.optim.SGD(made.parameters(), lr=LR)
    everyone = torch.arange(CLASSES)
    known, models, history = {}, [start() for _ in LABELS], []
    for t, cohort in enumerate(TRACE):
        pairs = []
        for i in cohort:
            x, y = samples()[i]
            loss = partial(near_means, x=x, y=y, known=known, penalty=PENALTY)
            models[i] = descend(models[i], loss, rate(t), LOCAL["local_steps"])
            z = z_of(models[i], x)
            pairs += [(z[y == c].mean(0), c) for c in sorted(set(LABELS[i]))]
        rng = generator(0, "pairs", t)  # the order of the pairs; all that this has of the method
        margin = margin_of(pairs, most) if pairs else 0.0
        for _ in range(EPOCHS if pairs else 0):
            order = rng.permutation(len(pairs))
            for begin in range(0, len(pairs), BATCH):
                total = 0.0
                batch = [pairs[k] for k in order[begin : begin + BATCH]]
                for z, c in batch:
                    away = torch.stack([(z - p).norm() for p in made(everyone)])
                    near = torch.exp(-away[c] - margin)
                    others = sum(torch.exp(-away[k]) for k in range(CLASSES) if k != c)
                    total = total - torch.log(near / (near + others)) / len(batch)
                sgd.zero_grad()
                total.backward()
                sgd.step()
        if pairs:
            known = dict(enumerate(made(everyone).detach()))
        table_now = made(everyone).detach() if known else torch.zeros(CLASSES, FEATURES)
        history.append((table_now.numpy(), torch.stack(models).numpy()))
    return history


def first_of(fit, **given):
    """The first values of v and F: those after a round in which nobody reports."""
    method = fit(FedTGP(network(), **given), world(), 1, trace=[[]])
    return nn.utils.parameters_to_vector(method.trainable.parameters()).clone()


@ENGINES
@pytest.mark.parametrize("most", [100.0, 0.05])
def test_rounds_equal_plain_pytorch(fit, watch, engine, most):
    given = dict(penalty=PENALTY, margin=most, **SERVER)
    expected = slow(first_of(fit, **given), most)
    method = FedTGP(network(), batch_size=None, engine=engine, **given, **LOCAL)
    history = watch(method, world(), len(TRACE), trace=TRACE)
    for row, (prototypes, models) in zip(history.rounds, expected, strict=True):
        np.testing.assert_allclose(row["prototypes"], prototypes, rtol=0, atol=1e-12)
        np.testing.assert_allclose(row["w_i"], models, rtol=0, atol=1e-12)


def test_the_margin_is_the_gap_of_the_class_that_lies_furthest_from_the_others():
    """Classes at 0, 1 and 5 on a line, of two clients: the gaps to the nearest are 1, 1 and 4."""
    method = FedTGP(MLP(4, (1,), 4), margin=10.0)
    rows = torch.zeros(2, 4, 2)
    rows[:, 0, 0] = 1
    rows[0, 1] = torch.tensor([1.0, 1.0])
    rows[0, 2] = torch.tensor([1.0, 4.0])
    rows[1, 2] = torch.tensor([1.0, 6.0])
    assert method.margin_of(rows) == pytest.approx(4.0)
    assert FedTGP(MLP(4, (1,), 4), margin=0.5).margin_of(rows) == 0.5
    assert method.margin_of(rows[:, :1]) == 10.0


def test_the_ledger_books_all_prototypes_and_the_classes_of_a_client(watch):
    """Numbers of 8 bytes. Down 3 features of each of 3 classes, once there are prototypes; up 3
    features and the class's number for each class of the client."""
    method = FedTGP(network(), batch_size=None, server_epochs=1)
    history = watch(method, world(), 6, trace=TRACE)
    classes = np.array([len(set(labels)) for labels in LABELS])
    visits = np.array([[i in cohort for i in range(4)] for cohort in TRACE])
    assert np.array_equal(history["up"], 8 * 4 * classes * visits.cumsum(0))
    known = visits.copy()
    known[0] = False
    assert np.array_equal(history["down"], 8 * 9 * known.cumsum(0))


def test_no_penalty_is_local_training(watch):
    settings = LOCAL | dict(batch_size=2, engine="sequential", weight_decay=0.0)
    tgp = FedTGP(network(), penalty=0.0, server_epochs=1, **settings)
    methods = tgp, LocalTrain(network(), **settings)
    ends = [watch(method, world(), 6, trace=TRACE)["w_i"][-1] for method in methods]
    assert np.array_equal(*ends)


def test_networks_of_the_clients_own(watch):
    """Two networks with 3 features: a full step alone, and one towards the common prototypes."""

    def networks():
        torch.manual_seed(2)
        return {"wide": MLP(4, (6, 3), 3).double(), "flat": MLP(4, (3,), 3).double()}

    method = FedTGP(Family(networks()), penalty=PENALTY, lr=0.1, batch_size=None, **SERVER)
    history = watch(method, world(), 2, trace=[[0, 1], [0, 1]])
    for i, (name, own) in enumerate(networks().items()):
        x, y = samples()[i]
        for number in range(2):
            loss = cross_entropy(own(x), y)
            if number:
                prototypes = torch.from_numpy(history.rounds[0]["prototypes"])
                away = (own.body(x) - prototypes[y]).square().mean(1)
                loss = loss + PENALTY * away.mean()
            grads = torch.autograd.grad(loss, list(own.parameters()))
            with torch.no_grad():
                for p, g in zip(own.parameters(), grads, strict=True):
                    p -= 0.1 * g
        expected = nn.utils.parameters_to_vector(own.parameters()).detach()
        row = method.client_rows("w", np.array([i]))[0]
        torch.testing.assert_close(row[: len(expected)], expected, rtol=0, atol=1e-13, msg=name)


def test_refusals(fit):
    with refused("model.margin: -1"):
        FedTGP(network(), margin=-1)
    with refused("model.server_epochs: 0"):
        FedTGP(network(), server_epochs=0)
    other, data = several_labels()
    with refused("FedTGP needs one"):
        fit(FedTGP(other), data, 1)
