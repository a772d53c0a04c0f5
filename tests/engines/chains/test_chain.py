"""Chains of layers: which networks are one, and that their derivatives are right."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from models import CNN, MLP, LeNet5, LogisticRegression, ResNet18, SmallCNN
from pfl.engines.batch import Batch, StepBlock, default_loss
from pfl.engines.chains.chain import Chain
from pfl.engines.chains.engine import ChainEngine
from pfl.engines.chains.kernels import cross_entropy, pool_pairs
from pfl.engines.local_step import Step
from pfl.engines.oracle import Oracle
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
CONVOLUTIONS = {
    "LeNet5": lambda: LeNet5(image_size=16),
    "CNN": lambda: CNN(image_size=16, kernel_size=3, hidden=8),
    "SmallCNN": lambda: SmallCNN(image_size=16, width=4),
    # ReLU and pooling next to each other, apart and at the ends; strides, groups, no bias.
    "everything": lambda: nn.Sequential(
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(1, 4, (3, 2), stride=2, padding=(1, 0), bias=False),
        nn.ReLU(),
        nn.GroupNorm(2, 4, eps=0.1),
        nn.ReLU(),
        nn.MaxPool2d((2, 1), padding=(1, 0), ceil_mode=True),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 2, 2, groups=2, dilation=1),
        nn.GroupNorm(1, 2, affine=False),
        nn.Flatten(),
        nn.Linear(4, 3),
        nn.ReLU(),
    ),
    # Pooled as one kernel: sides 16 x 16, 18 x 12, 9 x 6, 9 x 4, 4 x 2, odd ones too.
    "narrow": lambda: nn.Sequential(
        nn.Conv2d(1, 3, (3, 5), padding=(2, 0), bias=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Tanh(),
        nn.Conv2d(3, 20, (1, 5), padding=(0, 1)),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(160, 3),
    ),
    "no linear layer": lambda: nn.Sequential(nn.Conv2d(1, 3, 16), nn.Flatten()),
}
OTHERS = {
    "statistics of the batch alone": lambda: nn.Sequential(
        nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2, track_running_stats=False), nn.Flatten()
    ),
    "normalized rows": lambda: nn.Sequential(nn.BatchNorm1d(1), nn.Flatten(), nn.Linear(4, 3)),
    "normalized vectors": lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.GroupNorm(2, 4)),
    "residuals": ResNet18,
    "padding by reflection": lambda: nn.Sequential(
        nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"), nn.Flatten(), nn.Linear(4, 2)
    ),
    "a subclass of a layer": lambda: nn.Sequential(Doubled(4, 3)),
    "a subclass of Sequential": lambda: Twice(nn.Linear(4, 4)),
    "a shared layer": shared,
    "a frozen parameter": frozen,
    "a hook": hooked,
    "another activation": lambda: nn.Sequential(nn.Linear(4, 3), nn.Softplus()),
    "dropout of channels": lambda: nn.Sequential(nn.Conv2d(1, 2, 1), nn.Dropout2d(), nn.Flatten()),
    "inputs of another width": lambda: nn.Linear(2, 3),  # works on the last axis alone
}


def chain_of(network, side):
    return Chain.of(network, ParameterSpace(network), torch.zeros(2, 1, side, side))


@pytest.mark.parametrize("name", [*CHAINS, *CONVOLUTIONS])
def test_chains_of_common_layers_are_recognized(name):
    """Without convolutions, many models run at once."""
    make, side = (CHAINS[name], 2) if name in CHAINS else (CONVOLUTIONS[name], 16)
    chain = chain_of(make(), side)
    assert chain is not None and chain.batched == (name in CHAINS)


@pytest.mark.parametrize("name", OTHERS)
def test_other_networks_are_not_chains(name):
    assert chain_of(OTHERS[name](), 2) is None


def test_layers_that_flatten_nothing_are_one_for_vectors():
    """Of a row of four values a linear layer makes a row, which a chain would not."""
    network = nn.Linear(4, 3)
    for shape, chained in (((2, 4), True), ((2, 1, 4), False)):
        chain = Chain.of(network, ParameterSpace(network), torch.zeros(shape))
        assert (chain is not None) == chained


@pytest.mark.parametrize(
    "layers",
    [
        [nn.MaxPool2d(1), nn.Flatten(), nn.Linear(4, 3)],
        [nn.Conv2d(1, 2, 1), nn.Linear(2, 3), nn.Flatten()],
        [nn.Linear(2, 2), nn.Conv2d(1, 2, 1), nn.Flatten()],
    ],
    ids=["pooling without convolutions", "a linear layer of maps", "one before all others"],
)
def test_layers_that_take_more_than_a_chain_knows(layers):
    assert chain_of(nn.Sequential(*layers), 2) is None


def test_images_without_channels_are_no_chain():
    network = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten(0), nn.Linear(3, 2))
    assert Chain.of(network, ParameterSpace(network), torch.zeros(1, 2, 2)) is None


@pytest.mark.parametrize("targets", ["classes", "values"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_have_the_gradients_of_autograd(name, targets):
    """`auto` against the plain loop: losses, gradients, and where three steps of descent end."""
    torch.manual_seed(0)
    network = CONVOLUTIONS[name]().double()
    space, rng = ParameterSpace(network), torch.Generator().manual_seed(1)
    counts = [5, 5, 3, 1]
    inputs = torch.randn(4, 5, 1, 16, 16, generator=rng, dtype=torch.float64)
    width = network(inputs[0]).shape[1]
    labels = torch.randint(width, (4, 5), generator=rng)
    values = torch.randn(4, 5, width, generator=rng, dtype=torch.float64)
    given = Batch(inputs, labels if targets == "classes" else values, counts)
    w = space.vector.detach() + 0.1 * torch.randn(5, space.size, generator=rng).double()
    actual = []
    for engine in ("sequential", "auto"):
        oracle = Oracle(network, space, default_loss, engine)
        oracle.inspect(given.inputs[0], given.targets[0])
        is_chain = isinstance(oracle.engine, ChainEngine)
        assert is_chain == (engine == "auto") and not oracle.engine.batched
        loss, g = oracle.gradient(w, given)
        moved = w.clone()
        losses, seen = oracle.descend(moved, [StepBlock.of(given, w.dtype)] * 3, Step(0.1, 0.999))
        assert seen == 3 * counts
        actual.append((loss, g, moved, losses))
    for one, other in zip(*actual, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)
    assert not actual[1][1][4].any() and torch.equal(actual[1][2][4], w[4])


def test_the_first_of_equal_outputs_has_the_derivative():
    """As in PyTorch's pooling: on images of one value each, all outputs of a channel are equal."""
    network = LeNet5(image_size=16, padding=1).double()
    space = ParameterSpace(network)
    given = Batch(
        torch.tensor([0.0, 1, -1]).double().view(1, 3, 1, 1, 1).expand(-1, -1, -1, 16, 16),
        torch.tensor([[0, 1, 2]]),
        [3],
    )
    found = []
    for engine in ("sequential", "auto"):
        oracle = Oracle(network, space, default_loss, engine)
        oracle.inspect(given.inputs[0], given.targets[0])
        found.append(oracle.gradient(space.vector.detach()[None], given)[1])
    assert "pooled convolution" in oracle.engine.chain.layers.kinds
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


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
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("counts", [(6, 6, 4, 1), (6,)])
def test_gradients_and_steps_equal_those_of_the_plain_loop(counts, name, targets, loss):
    """Several models at once, and one alone; for rows that the batch does not have they are 0."""
    network = CHAINS[name]()
    if name == "nested" and targets == "classes":
        network = nn.Sequential(network, nn.Linear(3, 3))
    network = nn.Sequential(nn.Flatten(), network).double()
    space, given, A = ParameterSpace(network), batch(targets, counts), len(counts)
    w = torch.randn(5, space.size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    actual = {}
    for engine in ("sequential", "vmap"):
        oracle = Oracle(network, space, loss, engine)
        oracle.inspect(given.inputs[0], given.targets[0])
        assert isinstance(oracle.engine, ChainEngine) == (engine == "vmap")
        torch.set_default_dtype(torch.float64)  # as Lightning does it in double precision
        try:
            actual[engine] = (*oracle.gradient(w, given), *oracle.evaluate(w[:A], given)[:2])
            moved, blocks = w.clone(), [StepBlock.of(given, w.dtype)] * 3
            actual[engine] += (oracle.descend(moved, blocks, Step(0.1, 0.999))[0], moved)
        finally:
            torch.set_default_dtype(torch.float32)
    for one, other in zip(actual["sequential"], actual["vmap"], strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-12, equal_nan=True)
    assert not actual["vmap"][1][A:].any() and actual["vmap"][1][A - 1].any()


def test_cross_entropy_and_its_derivative():
    """-log softmax at the target, and softmax less the indicator of the target."""
    rng = np.random.default_rng(0)
    outputs, targets = rng.normal(size=(2, 3, 4)), rng.integers(0, 4, (2, 3))
    p = np.exp(outputs) / np.exp(outputs).sum(2, keepdims=True)
    at_target = np.take_along_axis(p, targets[..., None], 2)[..., 0]
    chosen = torch.from_numpy(targets).unsqueeze(-2)
    minus_one = torch.full(chosen.shape, -1.0, dtype=torch.float64)
    log, d = cross_entropy(torch.from_numpy(outputs), chosen, minus_one)
    np.testing.assert_allclose(log.squeeze(-2), np.log(at_target), rtol=1e-12)
    np.testing.assert_allclose(d.mT, p - np.eye(4)[targets], rtol=0, atol=1e-14)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [(6, 4), (7, 5), (2, 3), (1, 4)])
def test_maxima_of_four_pixels_are_those_of_max_pooling(size, layout):
    x = torch.randn(2, 3, *size).to(memory_format=layout)
    x[0, 0, 0, 0], x[1, 1] = torch.nan, 0.0
    if 1 in size:
        assert pool_pairs(x).shape == (2, 3, 0, 2)  # which max_pool2d refuses
    else:
        expected = nn.functional.max_pool2d(x, 2)
        torch.testing.assert_close(pool_pairs(x), expected, rtol=0, atol=0, equal_nan=True)
