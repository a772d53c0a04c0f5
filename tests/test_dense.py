"""The engine for chains of linear layers: which networks it takes, and that it is right."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from models import MLP, LogisticRegression, SmallCNN
from pfl.dense import DenseChain, cross_entropy
from pfl.oracle import Batch, Oracle, default_loss
from pfl.parameters import ParameterSpace


class Doubled(nn.Linear):
    """Looks like a linear layer, and is another."""

    def forward(self, x):
        return 2 * super().forward(x)


class Twice(nn.Sequential):
    def forward(self, x):
        return super().forward(super().forward(x))


def shared():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer)


def frozen():
    network = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    network[0].weight.requires_grad_(False)
    return network


def hooked():
    network = nn.Sequential(nn.Linear(4, 2))
    network[0].register_forward_hook(lambda module, inputs, output: -output)
    return network


CHAINS = {
    "logistic": lambda: LogisticRegression(4, 3),
    "without bias": lambda: LogisticRegression(4, 3, bias=False),
    "MLP": lambda: MLP(4, (5, 6), 3),
    "one layer": lambda: nn.Linear(4, 3),
    "nested": lambda: nn.Sequential(
        OrderedDict(
            flat=nn.Flatten(),
            inner=nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Identity()),
            act=nn.Sigmoid(),
            out=nn.Linear(5, 3),
            last=nn.Tanh(),
        )
    ),
}
OTHERS = {
    "convolutions": SmallCNN,
    "a subclass of a layer": lambda: nn.Sequential(Doubled(4, 3)),
    "a subclass of Sequential": lambda: Twice(nn.Linear(4, 4)),
    "a shared layer": shared,
    "a frozen parameter": frozen,
    "a hook": hooked,
    "another activation": lambda: nn.Sequential(nn.Linear(4, 3), nn.Softplus()),
    "dropout": lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout()),
    "inputs of another width": lambda: nn.Linear(2, 3),  # works on the last axis alone
}


@pytest.mark.parametrize("name", CHAINS)
def test_chains_are_recognized(name):
    network = CHAINS[name]()
    assert DenseChain.of(network, ParameterSpace(network), 4) is not None


@pytest.mark.parametrize("name", OTHERS)
def test_other_networks_are_not(name):
    network = OTHERS[name]()
    assert DenseChain.of(network, ParameterSpace(network), 4) is None


def batch(targets, counts=(6, 6, 4, 1)):
    rng = torch.Generator().manual_seed(1)
    inputs = torch.randn(len(counts), max(counts), 2, 2, generator=rng, dtype=torch.float64)
    if targets == "classes":
        values = torch.randint(3, inputs.shape[:2], generator=rng)
    else:
        values = torch.randn(*inputs.shape[:2], 3, generator=rng, dtype=torch.float64)
    return Batch(inputs, values, list(counts))


@pytest.mark.parametrize("loss", [default_loss, nn.CrossEntropyLoss(label_smoothing=0.2)])
@pytest.mark.parametrize("targets", ["classes", "values"])
@pytest.mark.parametrize("name", [name for name in CHAINS if name != "one layer"])
def test_gradients_equal_those_of_one_client_after_another(name, targets, loss):
    """More models than rows of the batch: the gradients of the others are 0."""
    network = CHAINS[name]()
    if name == "nested" and targets == "classes":
        network = nn.Sequential(network, nn.Linear(3, 3))
    network = nn.Sequential(nn.Flatten(), network).double()
    space, given = ParameterSpace(network), batch(targets)
    w = torch.randn(5, space.size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = {}
    for engine in ("loop", "vmap"):
        oracle = Oracle(network, space, loss, engine)
        oracle.inspect(given.inputs[0], given.targets[0])
        assert oracle.chain is not None
        torch.set_default_dtype(torch.float64)  # as Lightning does it in double precision
        try:
            found[engine] = (*oracle.gradient(w, given), *oracle.evaluate(w[:4], given))
        finally:
            torch.set_default_dtype(torch.float32)
    for one, other in zip(found["loop"], found["vmap"], strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-12, equal_nan=True)
    assert not found["vmap"][1][4].any() and found["vmap"][1][3].any()


def test_cross_entropy_and_its_derivative():
    """-log softmax at the target, and softmax less the indicator of the target."""
    rng = np.random.default_rng(0)
    outputs, targets = rng.normal(size=(2, 3, 4)), rng.integers(0, 4, (2, 3))
    weights = rng.uniform(size=(2, 3))
    p = np.exp(outputs) / np.exp(outputs).sum(2, keepdims=True)
    at_target = np.take_along_axis(p, targets[..., None], 2)[..., 0]
    loss, d = cross_entropy(*map(torch.from_numpy, (outputs, targets, weights)))
    np.testing.assert_allclose(loss, -(weights * np.log(at_target)).sum(1), rtol=1e-12)
    expected = weights[..., None] * (p - np.eye(4)[targets])
    np.testing.assert_allclose(d, expected, rtol=0, atol=1e-14)
