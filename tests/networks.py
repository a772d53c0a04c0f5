"""Small networks of every kind with batches for several clients, and plain PyTorch's gradients."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from models import CNN, MLP, LeNet5, LogisticRegression, ResNet18, SmallCNN
from pfl.engines.batch import Batch, default_loss
from pfl.engines.oracle import Oracle
from pfl.parameters import ParameterSpace

COUNTS = [5, 4, 4, 1]  # of four clients; a fifth has a model but no data in the batch


class Tied(nn.Module):
    """Every hidden layer has the same weights."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x.flatten(1))))))


class Unused(nn.Module):
    """One parameter that the output does not depend on, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Parameter(torch.ones(4))
        self.frozen = nn.Linear(12, 6).requires_grad_(False)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.frozen(x.flatten(1)).relu())


class Functional(nn.Module):
    """Dropout that no module shows."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 3)

    def forward(self, x):
        return self.linear(F.dropout(x.flatten(1), 0.5, self.training))


def mlp(*middle, inputs=12, outputs=3):
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, 8), *middle, nn.ReLU(), nn.Linear(8, outputs)
    )


def normalized():
    return mlp(nn.BatchNorm1d(8, momentum=0.3))


# name -> (how it is built, shape of a sample, number of classes)
NETWORKS: dict = {
    "LogisticRegression": (lambda: LogisticRegression(12, 3), (3, 2, 2), 3),
    "MLP": (lambda: MLP(12, (7, 5), 3), (3, 2, 2), 3),
    "LeNet5": (lambda: LeNet5(in_channels=2, num_classes=4, image_size=17), (2, 17, 17), 4),
    "CNN": (lambda: CNN(in_channels=2, num_classes=4, image_size=9), (2, 9, 9), 4),
    "SmallCNN": (lambda: SmallCNN(2, image_size=9, num_classes=4, width=6), (2, 9, 9), 4),
    "ResNet18": (lambda: ResNet18(num_classes=4, in_channels=2), (2, 8, 8), 4),
    "tied": (Tied, (12,), 3),
    "unused and frozen": (Unused, (12,), 3),
}


def make(network, inputs, targets, loss=default_loss, engine="sequential", num_classes=None):
    oracle = Oracle(network, ParameterSpace(network), loss, engine)
    oracle.inspect(inputs, targets, num_classes)
    return oracle


def counts_of(build):
    """Two clients are enough for the large network."""
    return [2, 1] if build is NETWORKS["ResNet18"][0] else COUNTS


def labels(classes, counts=COUNTS):
    return torch.randint(classes, (len(counts), max(counts)))


def problem(build, shape, targets, counts=COUNTS, dtype=torch.float64):
    """A network, one model more than clients, and a batch of unequal counts."""
    torch.manual_seed(0)
    network = build().to(dtype)
    inputs = torch.rand(len(counts), max(counts), *shape, dtype=dtype)
    batch = Batch(inputs, targets, list(counts))
    size = sum(p.numel() for p in network.parameters() if p.requires_grad)
    start = torch.cat([p.detach().flatten() for p in network.parameters() if p.requires_grad])
    w = start + 0.1 * torch.randn(len(counts) + 1, size, dtype=dtype)
    return network, w, batch


def put(network, w):
    """A copy of the network with the trainable values w, written without the code under test."""
    network, start = copy.deepcopy(network), 0
    with torch.no_grad():
        for p in network.parameters():
            if p.requires_grad:
                p.copy_(w[start : start + p.numel()].view(p.shape))
                start += p.numel()
    assert start == len(w)
    return network


def plain(network, w, batch, loss):
    """What PyTorch says of one client after another: copy, forward, mean, backward."""
    losses, gradients = [], []
    for c, count in enumerate(batch.counts):
        alone = put(network, w[c]).train()
        value = loss(alone(batch.inputs[c, :count]), batch.targets[c, :count]).mean()
        value.backward()
        moving = [p for p in alone.parameters() if p.requires_grad]
        g = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in moving]
        losses.append(value.detach())
        gradients.append(torch.cat(g))
    return torch.stack(losses), torch.stack(gradients)


def assert_gradient(oracle, network, w, batch, loss):
    before = w.clone()
    value, g = oracle.gradient(w, batch)
    expected_value, expected = plain(network, w, batch, loss)
    assert not value.requires_grad
    assert not g.requires_grad
    assert value.dtype == g.dtype == w.dtype
    torch.testing.assert_close(value, expected_value)
    torch.testing.assert_close(g[: batch.clients], expected)
    assert g.shape == w.shape
    assert not g[batch.clients :].any()
    assert torch.equal(w, before)


def cross_entropy(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")
