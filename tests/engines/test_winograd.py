"""Convolutions by tiles against PyTorch's own, and where they are used."""

import copy

import pytest
import torch
from torch import Tensor, nn

import models
import pfl.engines.winograd
from pfl.engines.batch import Batch, default_loss
from pfl.engines.oracle import Oracle
from pfl.engines.winograd import WinogradConv2d, tile_size, use_winograd
from pfl.parameters import ParameterSpace


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch):
    """Sets the tiles' size (None for the direct way), and the floats of a block."""

    def set_to(m: int | None, block: int = 1 << 20) -> None:
        monkeypatch.setattr(pfl.engines.winograd, "tile_size", lambda *_: m)
        monkeypatch.setattr(pfl.engines.winograd, "_BLOCK", block)

    return set_to


def convolution(C: int, K: int, bias: bool = True, dtype: torch.dtype = torch.float64) -> nn.Module:
    """One that is computed by tiles, with its parameters from a normal distribution."""
    layer = nn.Conv2d(C, K, 3, padding=1, bias=bias).to(dtype)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    layer.__class__ = WinogradConv2d
    return layer


def answers(layer: nn.Module, x: Tensor, d: Tensor) -> list[Tensor]:
    """Output, and the derivatives of its product with d by x and by the parameters."""
    x = x.detach().requires_grad_()
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], d)]


@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize(
    "shape",
    [
        (3, 5, 8, 8),  # whole tiles
        (2, 4, 5, 7),  # tiles that reach over the edges
        (1, 2, 1, 9),  # an image lower than a tile
        (4, 1, 4, 4),
    ],
)
@pytest.mark.parametrize("block", [1, 1 << 20])  # one image at a time; all
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_values_and_derivatives_are_those_of_the_direct_way(tiles, m, shape, block, layout):
    torch.manual_seed(0)
    N, C, H, W = shape
    layer = convolution(C, 3)
    x = torch.randn(shape, dtype=torch.float64).to(memory_format=layout)
    d = torch.randn(N, 3, H, W, dtype=torch.float64).to(memory_format=layout)
    tiles(None)
    expected = answers(layer, x, d)
    tiles(m, block)
    for actual, right in zip(answers(layer, x, d), expected, strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", ["input", "filter"])
def test_a_frozen_input_or_filter_is_no_obstacle(tiles, frozen):
    torch.manual_seed(0)
    layer, x = convolution(2, 2, bias=False), torch.randn(3, 2, 6, 6, dtype=torch.float64)
    layer.requires_grad_(frozen == "input")
    x.requires_grad_(frozen == "filter")
    by, actual = x if frozen == "filter" else layer.weight, []
    for m in (None, 4):
        tiles(m)
        actual.append(torch.autograd.grad(layer(x).square().sum(), [by])[0])
    torch.testing.assert_close(actual[1], actual[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("m", "times"), [(2, 1), (4, 10)])
def test_rounding_in_float32_is_bounded(tiles, m, times):
    """Within a factor of two, errors are as many times the direct way's as the module says."""
    torch.manual_seed(0)
    layer, x = convolution(64, 64, bias=False), torch.randn(8, 64, 16, 16, dtype=torch.float64)
    errors = []
    with torch.no_grad():
        tiles(None)
        exact = layer(x)
        for way in (None, m):
            tiles(way)
            errors.append((layer.float()(x.float()) - exact).square().mean().sqrt())
    assert 0 < errors[1] < 2 * times * errors[0]


def test_few_channels_few_tiles_and_small_batches_stay_with_the_direct_way():
    assert tile_size(20, (64, 64), 32, 32) == 4
    assert tile_size(20, (512, 512), 4, 4) == 2  # 20 tiles of 4 x 4 for 512 * 512 filters
    assert tile_size(20, (32, 64), 32, 32) is None
    assert tile_size(1, (64, 64), 32, 32) is None
    assert tile_size(4, (512, 512), 4, 4) is None


def test_only_convolutions_of_its_kind_are_replaced():
    same = {"kernel_size": 3, "padding": 1}
    others = [
        nn.Conv2d(64, 64, 3),
        nn.Conv2d(64, 64, 5, padding=2),
        nn.Conv2d(64, 64, stride=2, **same),
        nn.Conv2d(64, 64, groups=2, **same),
        nn.Conv2d(64, 64, 3, padding=2, dilation=2),
        nn.Conv2d(64, 64, padding_mode="reflect", **same),
        nn.Conv2d(3, 64, **same),
        nn.Linear(64, 64),
    ]
    network = nn.Sequential(nn.Conv2d(64, 64, **same), *others)
    use_winograd(network)
    assert [type(layer) for layer in network] == [WinogradConv2d, *map(type, others)]


def test_mixed_precision_stays_with_the_direct_way(tiles):
    layer, x = convolution(64, 64, dtype=torch.float32), torch.randn(2, 64, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        tiles(None)
        expected = layer(x)
        tiles(4)
        assert torch.equal(layer(x), expected) and expected.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["auto", "sequential"])
def test_a_resnet_runs_with_winograd_and_has_the_same_gradient(engine):
    """In float64 both ways agree to rounding; the network that was handed in stays as it was."""
    torch.manual_seed(0)
    network = models.ResNet18().double()
    plain = copy.deepcopy(network)
    space = ParameterSpace(network)
    oracle = Oracle(network, space, default_loss, engine)
    x, y = torch.randn(20, 3, 8, 8, dtype=torch.float64), torch.arange(20) % 10
    oracle.inspect(x[:2], y[:2])
    fast = [m for m in oracle.runner.network.modules() if type(m) is WinogradConv2d]
    assert len(fast) == 13 and not any(type(m) is WinogradConv2d for m in network.modules())
    assert oracle.engine.name == "sequential" and oracle.runner.channels_last

    loss, g = oracle.gradient(space.vector.detach()[None], Batch(x[None], y[None], [20]))
    expected = nn.functional.cross_entropy(plain(x), y)
    pieces = torch.autograd.grad(expected, list(plain.parameters()))
    torch.testing.assert_close(loss[0], expected.detach(), rtol=1e-10, atol=0)
    torch.testing.assert_close(g[0], torch.cat([p.flatten() for p in pieces]), rtol=1e-8, atol=1e-9)


def test_vmap_keeps_the_layers_of_the_network():
    network = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.Flatten(), nn.Linear(64 * 16, 2))
    oracle = Oracle(network, ParameterSpace(network), default_loss, "vmap")
    oracle.inspect(torch.randn(2, 64, 4, 4), torch.tensor([0, 1]))
    assert type(oracle.runner.network[0]) is nn.Conv2d and oracle.engine.name == "vmap"
