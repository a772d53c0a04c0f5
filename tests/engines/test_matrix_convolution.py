"""Convolutions as matrix products: PyTorch's values and gradients, and which ones are replaced."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from pfl.engines.matrix_convolution import MatrixConv2d, use_matrix_products

SHAPES = [  # channels, outputs, kernel, padding, height and width of an image
    (1, 1, 1, 0, (1, 1)),
    (3, 2, 1, 0, (4, 6)),
    (2, 3, 1, 1, (4, 5)),
    (2, 3, 2, 0, (5, 4)),
    (3, 4, 3, 1, (6, 6)),
    (2, 2, 4, 3, (5, 7)),
    (2, 5, 5, 2, (6, 8)),
    (1, 2, 5, 0, (5, 5)),
    (2, 3, (1, 3), (0, 1), (4, 6)),
    (2, 3, (4, 2), (3, 1), (7, 5)),
    (3, 2, (2, 5), (1, 0), (3, 9)),
]
IDS = [f"{shape[2]} padded by {shape[3]}" for shape in SHAPES]


def layers(shape, bias=True):
    """PyTorch's convolution, the one that replaces it, and images for three clients."""
    channels, outputs, kernel, padding, size = shape
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(channels, outputs, kernel, padding=padding, bias=bias)).double()
    products = copy.deepcopy(plain)
    assert use_matrix_products(products)
    assert type(products[0]) is MatrixConv2d and type(plain[0]) is nn.Conv2d
    return plain, products, torch.randn(3, 4, channels, *size, dtype=torch.float64)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_values_and_gradients_are_those_of_pytorch(shape, bias):
    plain, products, x = layers(shape, bias)
    ends = []
    for network in (plain, products):
        images = x[0].clone().requires_grad_()
        outputs = network(images)
        outputs.square().sum().backward()
        ends.append((outputs, images.grad, *(p.grad for p in network.parameters())))
    for actual, expected in zip(*ends, strict=True):
        assert actual.shape == expected.shape
        close(actual, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_clients_with_kernels_and_images_of_their_own(shape):
    """Three kernels at once, against PyTorch's convolution with one after another."""
    plain, products, x = layers(shape)
    models = {name: torch.randn(3, *p.shape).double() for name, p in plain.named_parameters()}

    def total(network):
        def loss(model, images):
            return functional_call(network, model, (images,)).sin().sum()

        return grad_and_value(loss, argnums=(0, 1))

    found = vmap(total(products))(models, x)
    for c in range(3):
        own = {name: p[c] for name, p in models.items()}
        (g, dx), loss = total(plain)(own, x[c])
        close(found[1][c], loss)
        close(found[0][1][c], dx)
        for name, values in g.items():
            close(found[0][0][name][c], values)


def test_second_derivatives():
    """Of methods that differentiate a gradient, such as Per-FedAvg's."""
    plain, products, x = layers(SHAPES[4])
    ends = []
    for network in (plain, products):
        weight = network[0].weight
        loss = network(x[0]).sin().sum()
        (g,) = torch.autograd.grad(loss, weight, create_graph=True)
        ends.append(torch.autograd.grad(g.square().sum(), weight)[0])
    close(ends[1], ends[0])


def test_under_autocast():
    """In bfloat16, with 8 bits: values and gradients to 1 percent, in the dtypes of PyTorch."""
    plain, products, x = layers(SHAPES[4])
    ends = []
    for network in (plain.float(), products.float()):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = network(x[0].float())
            loss = outputs.float().square().sum()
            (g,) = torch.autograd.grad(loss, network[0].weight)
        ends.append((outputs, g))
    for actual, expected in zip(*ends, strict=True):
        assert actual.dtype == expected.dtype
        assert (actual - expected).norm() < 0.01 * expected.norm()


REFUSED = {
    "stride": nn.Conv2d(2, 4, 3, stride=2),
    "stride of one axis": nn.Conv2d(2, 4, 3, stride=(1, 2)),
    "dilation": nn.Conv2d(2, 4, 3, dilation=2),
    "groups": nn.Conv2d(2, 4, 3, groups=2),
    "padding by reflection": nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"),
    "padding by name": nn.Conv2d(2, 4, 3, padding="same"),
    "one axis": nn.Conv1d(2, 4, 3),
    "a class of its own": type("Own", (nn.Conv2d,), {})(2, 4, 3),
    "no convolution": nn.Linear(2, 4),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_layers_stay_as_they_are(name):
    layer = copy.deepcopy(REFUSED[name])
    network = nn.Sequential(layer, nn.ReLU())
    assert not use_matrix_products(network)
    assert type(network[0]) is type(layer)


def test_every_eligible_layer_is_replaced_and_keeps_its_parameters():
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sequential(nn.Conv2d(2, 2, 1)))
    network.append(nn.Conv2d(2, 2, 3, stride=2))
    before = list(network.parameters())
    assert use_matrix_products(network)
    assert [type(m) is MatrixConv2d for m in (network[0], network[1][0], network[2])] == [
        *(True, True, False)
    ]
    assert all(new is old for new, old in zip(network.parameters(), before, strict=True))
