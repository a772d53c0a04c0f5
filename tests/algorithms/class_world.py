"""Four clients with three classes, and plain PyTorch for them: what tests of features share."""

from collections import OrderedDict
from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from datamodules import Partitioner, SplitOwn, TensorDataModule
from tests.problems import owned

INPUTS, FEATURES, CLASSES = 4, 3, 3
LABELS = [[0, 1, 2, 0, 2], [0, 2, 2], [1, 1], [0, 1]]  # of the clients; some lack a class
TRACE = [
    [2, 3],
    [0, 2],
    [],
    [2, 3],
    [0, 1, 2, 3],
    [1, 3],
]  # class 2 is in the cohorts of 1, 4 and 5
KNOWN = [0, 2, 3, 3, 3, 3]  # classes that a client has had before each round
BODY = FEATURES * INPUTS + FEATURES  # values of the body, the first ones
SIZE = BODY + CLASSES * FEATURES + CLASSES
ENGINES = pytest.mark.parametrize("engine", ["vmap", "debug"])  # debug also trains one by one
LOCAL = dict(lr=0.3, lr_decay=0.9, weight_decay=0.05, local_steps=3)


def start():
    """The first model w [P]."""
    return torch.from_numpy(0.7 * np.random.default_rng(1).normal(size=SIZE))


def network():
    """Scores A tanh(B x + b) + c, with the first model."""
    layers = {
        "body": nn.Linear(INPUTS, FEATURES),
        "act": nn.Tanh(),
        "out": nn.Linear(FEATURES, CLASSES),
    }
    made = nn.Sequential(OrderedDict(layers)).double()
    nn.utils.vector_to_parameters(start(), made.parameters())
    return made


def samples():
    """Inputs [n_i, 4] and labels [n_i] of each client."""
    rng = np.random.default_rng(0)
    return [(torch.from_numpy(rng.normal(size=(len(y), INPUTS))), torch.tensor(y)) for y in LABELS]


class Owners(Partitioner):
    """The samples in order, and nothing for clients beyond the fourth."""

    def owners(self, targets, num_clients, rng):
        return np.repeat(np.arange(4), [len(labels) for labels in LABELS])

    def describe(self):
        return "given"


def world(num_clients=4):
    """These samples for training; nothing is held out."""
    inputs, labels = torch.cat([x for x, _ in samples()]), torch.tensor([*chain(*LABELS)])
    parts = dict(num_clients=num_clients, partition=Owners(), protocol=SplitOwn(0.0, 0.0))
    return TensorDataModule(inputs, labels, **parts)


def several_labels():
    """A network and data with two labels for each sample."""
    layers = (nn.Linear(INPUTS, FEATURES), nn.Linear(FEATURES, 4), nn.Unflatten(1, (2, 2)))
    labels = torch.ones(4, 2, dtype=torch.int64)
    data = owned(np.arange(4), torch.rand(4, INPUTS).double(), labels)
    return nn.Sequential(*layers).double(), data


def z_of(w, x):
    """The features [n, 3] of inputs by a model w [P]."""
    b = w[: FEATURES * INPUTS].view(FEATURES, INPUTS)
    return torch.tanh(x @ b.T + w[FEATURES * INPUTS : BODY])


def entropy(w, x, y):
    """The mean cross entropy of the model's scores."""
    a = w[BODY:-CLASSES].view(CLASSES, FEATURES)
    return cross_entropy(z_of(w, x) @ a.T + w[-CLASSES:], y)


def descend(w, loss, lr, steps, moving=slice(None)):
    """The model after plain steps on loss(w) with weight decay, in the values `moving`."""
    for _ in range(steps):
        at = w.clone().requires_grad_()
        (g,) = torch.autograd.grad(loss(at), at)
        w = w.clone()
        w[moving] -= lr * (g + LOCAL["weight_decay"] * w)[moving]
    return w


def rate(t):
    """The learning rate of a round."""
    return LOCAL["lr"] * LOCAL["lr_decay"] ** t


def mean_model(cohort, models):
    """The clients' models weighted by their numbers of samples."""
    sizes = torch.tensor([float(len(LABELS[i])) for i in cohort]).double()
    return (sizes / sizes.sum()) @ torch.stack(models)


def averaged(loss):
    """w after each round where client i descends on loss(v, x, y, i, w) from the round's w."""
    w, history = start(), []
    for t, cohort in enumerate(TRACE):
        own = [(lambda v, i=i, w=w: loss(v, *samples()[i], i, w)) for i in cohort]
        models = [descend(w, one, rate(t), LOCAL["local_steps"]) for one in own]
        w = mean_model(cohort, models) if cohort else w
        history.append(w.numpy())
    return history
