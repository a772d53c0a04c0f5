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
TRACE = [[2, 3], [0, 2], [], [2, 3], [0, 1, 2, 3], [1, 3]]  # class 2: in rounds 1, 4 and 5
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
    body, head = nn.Linear(INPUTS, FEATURES), nn.Linear(FEATURES, CLASSES)
    made = nn.Sequential(OrderedDict(body=body, act=nn.Tanh(), out=head)).double()
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


def scores(z, head):
    """A z + c with the values of a head."""
    return z @ head[:-CLASSES].view(CLASSES, FEATURES).T + head[-CLASSES:]


def entropy(w, x, y):
    """The mean cross entropy of the model's scores."""
    return cross_entropy(scores(z_of(w, x), w[BODY:]), y)


def slope(w, x, y):
    """The mean cross entropy, and its gradient."""
    at = w.clone().requires_grad_()
    loss = entropy(at, x, y)
    return float(loss.detach()), *torch.autograd.grad(loss, at)


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


def mean_model(cohort, models, w):
    """The clients' models weighted by their numbers of samples; without clients w."""
    sizes = torch.tensor([float(len(LABELS[i])) for i in cohort]).double()
    return (sizes / sizes.sum()) @ torch.stack(models) if cohort else w


def mean_values(cohort, models, w, own):
    """w by name, with the means of the clients' values in the place of all but those of `own`."""
    if not cohort:
        return w
    sizes = [len(LABELS[i]) / sum(len(LABELS[j]) for j in cohort) for i in cohort]
    mean = {}
    for name in w:
        if name not in own:
            mean[name] = sum(n * v[name] for n, v in zip(sizes, models, strict=True))
    return w | mean


def averaged(loss):
    """w after each round where client i descends on loss(v, x, y, i, w) from the round's w."""
    w, history = start(), []
    for t, cohort in enumerate(TRACE):
        own = [(lambda v, i=i, w=w: loss(v, *samples()[i], i, w)) for i in cohort]
        models = [descend(w, one, rate(t), LOCAL["local_steps"]) for one in own]
        w = mean_model(cohort, models, w)
        history.append((w.numpy(),))
    return history


def near_means(v, x, y, known, penalty):
    """The cross entropy, and λ times the mean distance from the known means of the classes."""
    away = sum(
        ((z - known[int(c)]) ** 2).sum() / FEATURES
        for z, c in zip(z_of(v, x), y, strict=True)
        if int(c) in known
    )
    return entropy(v, x, y) + penalty * away / len(x)


def class_means(cohort, models):
    """The mean features of the classes, over all samples of the cohort."""
    means = {}
    for label in set(chain(*(LABELS[i] for i in cohort))):
        own = [z_of(models[i], samples()[i][0])[samples()[i][1] == label] for i in cohort]
        means[label] = torch.cat(own).mean(0)
    return means


def as_sent(known):
    """Whether each class is known, and its mean [C, 1 + K], 0 where it is not."""
    unknown = [0.0] * (1 + FEATURES)
    return np.array([[1.0, *known[c]] if c in known else unknown for c in range(CLASSES)])


def assert_rounds(watch, method, expected, *names, atol=1e-12):
    """The entries of these names are as expected after each round of TRACE."""
    history = watch(method, world(), len(TRACE), trace=TRACE)
    for row, values in zip(history.rounds, expected, strict=True):
        for name, value in zip(names, values, strict=True):
            np.testing.assert_allclose(row[name], value, rtol=0, atol=atol, err_msg=name)


def assert_same_end(fit, one, other, trace=TRACE, atol=0.0):
    """Both methods have the same global model in the end."""
    ends = [fit(method, world(), len(trace), trace=trace).global_model for method in (one, other)]
    torch.testing.assert_close(*ends, rtol=0, atol=atol)
