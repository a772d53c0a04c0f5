"""Two thin layers for one: equal outputs, and the numbers of values of the formula."""

import pytest
import torch
from torch import nn

from models import MLP, SmallCNN
from pfl.models.factored import factored, load_factored


def low_rank(rows, columns, rank):
    return torch.randn(rows, rank, dtype=torch.float64) @ torch.randn(
        rank, columns, dtype=torch.float64
    )


def kernel(o, i, d1, d2, rank):
    """w[o,i,u,v] = W[(o,u),(i,v)] with W of this rank."""
    return low_rank(o * d1, i * d2, rank).reshape(o, d1, i, d2).transpose(1, 2)


CONVOLUTIONS = {
    "padded": {"kernel_size": 3, "padding": 1},
    "strided": {"kernel_size": (3, 5), "stride": (2, 3), "padding": (2, 1)},
    "dilated": {"kernel_size": 3, "dilation": (2, 1), "bias": False},
}


@pytest.mark.parametrize("settings", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
@pytest.mark.parametrize("with_sparse", [False, True])
def test_a_convolution_of_low_rank_is_two_thin_ones(settings, with_sparse):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(6, 8, **settings)).double()
    weight = network[0].weight
    part = torch.where(torch.rand_like(weight) < 0.1, torch.randn_like(weight), 0.0).detach()
    with torch.no_grad():
        weight.copy_(kernel(*weight.shape, rank=2))
        weight.add_(part) if with_sparse else None
    thin = factored(network, {"0.weight": 2}, {"0.weight": part} if with_sparse else None)
    x = torch.rand(2, 6, 11, 13, dtype=torch.float64)
    torch.testing.assert_close(thin(x), network(x))
    o, i, d1, d2 = weight.shape
    bias = 8 if settings.get("bias", True) else 0
    assert sum(p.numel() for p in thin.parameters()) == 2 * (o * d1 + i * d2) + bias
    assert thin[0].nonzero == (int((part != 0).sum()) if with_sparse else 0)


def test_layers_that_would_not_be_smaller_stay():
    """8 x 64 and 10 x 8: with rank 4, 288 < 512 values, and 72 < 80; with rank 5, 360, and 90."""
    network = MLP(64, (8,))
    for rank, expected in ((4, 288 + 72), (5, 360 + 80)):
        thin = factored(network, {"body.linear1.weight": rank, "head.weight": rank})
        assert sum(p.numel() for p in thin.parameters()) == expected + 8 + 10


def test_a_vanished_layer_has_rank_one_of_zeros():
    network = MLP(64, (8,))
    nn.init.zeros_(network.body.linear1.weight)
    thin = factored(network, {"body.linear1.weight": 0})
    x = torch.rand(3, 64)
    torch.testing.assert_close(thin(x), network(x))


def test_a_file_of_a_factored_network_loads_into_a_plain_one():
    torch.manual_seed(0)
    network = SmallCNN().double()
    weight = network.body.conv2.weight
    part = torch.zeros_like(weight)
    part[3, 4, 1, 2], part[0, 0, 0, 0] = 2.0, -1.0
    with torch.no_grad():
        weight.copy_(kernel(*weight.shape, rank=3) + part)
    thin = factored(network, {"body.conv2.weight": 3}, {"body.conv2.weight": part})
    tensors = thin.state_dict()
    assert tensors["body.conv2.index"].tolist() == [0, (3 * 16 + 4) * 9 + 1 * 3 + 2]
    assert tensors["body.conv2.values"].tolist() == [-1.0, 2.0]
    again = load_factored(SmallCNN().double(), tensors)
    x = torch.rand(3, 1, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(again(x), network(x))
