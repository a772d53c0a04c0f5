"""The parameters of the networks of FedCLUP, FedAgg and LEAF, and of torchvision and timm."""

import re
from pathlib import Path

import pytest
import torch
import torchvision
from jsonargparse import ArgumentParser
from torch import nn

import models
from models import (
    CIFAR10CNN,
    CNN,
    FEMNISTCNN,
    AlexNet,
    CelebACNN,
    DenseNet121,
    FedCLUPCNN,
    GoogLeNet,
    LeNet5,
    Timm,
    TorchVision,
    replace_batch_norm,
)
from tests.models.test_models import conv, count, linear

# ---- the papers' own networks --------------------------------------------------------------------


def test_fedclup_has_two_three_or_five_convolutions():
    """Images of 28 x 28 are halved twice, to 7 x 7, or three times, to 3 x 3."""
    two = conv(1, 32, 3) + conv(32, 64, 3) + linear(64 * 7 * 7, 128) + linear(128, 10)
    three = conv(1, 32, 3) + conv(32, 64, 3) + conv(64, 128, 3) + linear(128 * 3 * 3, 128)
    five = conv(1, 32, 3) + conv(32, 64, 3) + conv(64, 64, 3) + conv(64, 128, 3)
    five += conv(128, 128, 3) + linear(128 * 7 * 7, 128) + linear(128, 47)
    assert count(FedCLUPCNN(2)) == count(CNN(kernel_size=3, hidden=128)) == two
    assert count(FedCLUPCNN(3)) == three + linear(128, 10)
    assert count(FedCLUPCNN(5, num_classes=47)) == five
    network = FedCLUPCNN(5)
    assert sum(isinstance(module, nn.Conv2d) for module in network.modules()) == 5
    assert network(torch.rand(2, 1, 28, 28)).shape == (2, 10)


def test_pools_are_those_of_the_first_convolutions():
    network = CNN(image_size=8, channels=(4, 4, 4), pools=1)
    kinds = [name for name, _ in network.body.named_children()]
    assert [name for name in kinds if name.startswith(("conv", "pool"))] == [
        *("conv1", "pool1", "conv2", "conv3")
    ]
    assert network.body.linear1.in_features == 4 * 4 * 4


def test_lenet_of_fedagg_has_32_maps_of_5x5_before_120_84_26():
    network = LeNet5(num_classes=26, channels=(16, 32), padding=2)
    layers = [m for m in network.modules() if isinstance(m, nn.Linear)]
    assert [m.in_features for m in layers] == [5 * 5 * 32, 120, 84]
    expected = conv(1, 16, 5) + conv(16, 32, 5) + linear(800, 120) + linear(120, 84)
    assert count(network) == expected + linear(84, 26)
    LeNet5(image_size=12, padding=2)(torch.rand(1, 1, 12, 12))


def test_cnn_of_fedagg_halves_32_pixels_three_times():
    """The print: 4 x 4 x 64 features, 512 units, 10 scores, and two dropout layers."""
    expected = conv(3, 32, 3) + conv(32, 64, 3) + conv(64, 64, 3)
    assert count(CIFAR10CNN()) == expected + linear(64 * 4 * 4, 512) + linear(512, 10)
    kinds = [type(module).__name__ for module in CIFAR10CNN(dropout=0.25).body][9:]
    assert kinds == ["Flatten", "Dropout", "Linear", "ReLU", "Dropout"]
    assert all(m.p == 0.25 for m in CIFAR10CNN(dropout=0.25).body if isinstance(m, nn.Dropout))


def test_femnist_cnn_is_that_of_leaf():
    """LEAF's code: 5x5 convolutions of 32 and 64, 7 * 7 * 64 values, 2,048 units, 62 classes."""
    expected = conv(1, 32, 5) + conv(32, 64, 5) + linear(7 * 7 * 64, 2048) + linear(2048, 62)
    assert count(FEMNISTCNN()) == expected == 6_603_710


def test_celeba_cnn_is_that_of_leaf():
    """LEAF's code: 84 pixels are halved four times, rounded up: 42, 21, 11, 6."""
    norms = 4 * 2 * 32
    expected = conv(3, 32, 3) + 3 * conv(32, 32, 3) + norms + linear(32 * 6 * 6, 2)
    assert count(CelebACNN()) == count(CelebACNN(norm="group")) == expected == 31_202
    kinds = [type(module).__name__ for module in CelebACNN().body]
    assert kinds == [*(["Conv2d", "BatchNorm2d", "MaxPool2d", "ReLU"] * 4), "Flatten"]


# ---- torchvision and timm ------------------------------------------------------------------------


@pytest.mark.slow
def test_alexnet_has_the_parameters_of_its_layers():
    stem, others = conv(3, 64, 3), conv(64, 192, 5) + conv(192, 384, 3) + conv(384, 256, 3)
    others += conv(256, 256, 3)
    expected = linear(256 * 36, 4096) + linear(4096, 4096) + linear(4096, 10)
    assert count(AlexNet()) == stem + others + expected
    assert count(AlexNet(small_images=False)) == conv(3, 64, 11) + others + expected
    small = linear(256 * 36, 8) + linear(8, 8) + linear(8, 3)
    assert count(AlexNet(3, 1, hidden=8)) == conv(1, 64, 3) + others + small


def inception(inputs, one, red3, three, red5, five, pool):
    """Parameters of an inception block without biases, each convolution with a scale and a shift.

    torchvision has 3x3 convolutions in the place of 5x5.
    """
    convolutions = [(inputs, one, 1), (inputs, red3, 1), (red3, three, 3)]
    convolutions += [(inputs, red5, 1), (red5, five, 3), (inputs, pool, 1)]
    return sum(i * o * k * k + 2 * o for i, o, k in convolutions)


def test_googlenet_has_the_parameters_of_the_papers_table_1():
    """Szegedy et al. (2015), Table 1: #1x1, #3x3 reduce, #3x3, #5x5 reduce, #5x5, pool proj."""
    table = [(64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64), (192, 96, 208, 16, 48, 64)]
    table += [(160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64), (112, 144, 288, 32, 64, 64)]
    table += [(256, 160, 320, 32, 128, 128)] * 2 + [(384, 192, 384, 48, 128, 128)]
    total, inputs = 64 * 64 + 2 * 64 + 64 * 192 * 9 + 2 * 192, 192
    for row in table:
        total += inception(inputs, *row)
        inputs = row[0] + row[2] + row[4] + row[5]
    assert inputs == 1024
    head = linear(1024, 10)
    small, large = 3 * 64 * 9 + 2 * 64, 3 * 64 * 49 + 2 * 64
    assert count(GoogLeNet()) == count(GoogLeNet(norm="batch")) == total + small + head
    assert count(GoogLeNet(small_images=False)) == total + large + head


def test_densenet121_has_the_parameters_of_the_papers_table_1():
    """Huang et al. (2017), Table 1: blocks of 6, 12, 24, 16 layers, growth 32, halved between."""
    total, width = 0, 64
    for number, layers in enumerate((6, 12, 24, 16)):
        for _ in range(layers):  # norm, 1x1 to 128, norm, 3x3 to 32
            total += 2 * width + width * 128 + 2 * 128 + 128 * 32 * 9
            width += 32
        if number < 3:
            total += 2 * width + width * (width // 2)
            width //= 2
    assert width == 1024
    total += 2 * 1024 + linear(1024, 10)
    assert count(DenseNet121()) == total + 3 * 64 * 9 + 2 * 64
    assert count(DenseNet121(norm="batch", small_images=False)) == total + 3 * 64 * 49 + 2 * 64


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "alexnet"])
def test_networks_of_torchvision_give_torchvisions_scores(name):
    """The head at another place: the parameters in their order are the same."""
    torch.manual_seed(0)
    reference = getattr(torchvision.models, name)(num_classes=5).eval()
    network = TorchVision(name, num_classes=5).eval()
    values = nn.utils.parameters_to_vector(reference.parameters())
    nn.utils.vector_to_parameters(values, network.parameters())
    x = torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(network(x), reference(x))
    assert isinstance(network.head, nn.Linear) and network.head.out_features == 5


@pytest.mark.slow
@pytest.mark.parametrize("build", [TorchVision, Timm])
def test_images_may_be_gray_and_small(build):
    network = build("resnet18", num_classes=5, in_channels=1, small_images=True)
    stem = next(m for m in network.modules() if isinstance(m, nn.Conv2d))
    assert (stem.in_channels, stem.kernel_size, stem.stride) == (1, (3, 3), (1, 1))
    assert not any(isinstance(m, nn.MaxPool2d) for m in network.modules())
    assert network(torch.rand(2, 1, 16, 16)).shape == (2, 5)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TorchVision("resnet17"), "TorchVision.name: 'resnet17'; torchvision.models has"),
        (
            lambda: TorchVision("resnet18", norm="x"),  # type: ignore[arg-type]
            "resnet18.norm: 'x'; it must be 'group' or",
        ),
        (lambda: TorchVision("resnet18", norm="group", norm_groups=3), "it must divide 64, the"),
        (
            lambda: TorchVision("squeezenet1_0"),
            "is a Conv2d, not a linear layer; give the class itself",
        ),
        pytest.param(
            lambda: TorchVision("vgg11", small_images=True),
            "its first convolution has stride 1",
            marks=pytest.mark.slow,
        ),
        (lambda: Timm("nothing"), "Timm.name: 'nothing'; timm has no such network"),
    ],
)
def test_networks_that_do_not_fit_are_refused(build, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build()


# ---- GroupNorm for BatchNorm ---------------------------------------------------------------------


def batch_normalized() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3),
        nn.BatchNorm2d(6, eps=0.1),
        nn.Sequential(nn.BatchNorm2d(6, affine=False)),
    )


def test_group_norm_takes_the_place_of_batch_norm():
    """By hand: each of two groups of three channels has mean 0 and variance 1, then the scale."""
    torch.manual_seed(0)
    network = batch_normalized()
    nn.init.uniform_(network[1].weight)
    nn.init.uniform_(network[1].bias)
    scale, shift = network[1].weight.detach().clone(), network[1].bias.detach().clone()
    assert replace_batch_norm(network, groups=2) is network
    x = torch.rand(4, 2, 5, 5)
    y = network[0](x).view(4, 2, -1)
    y = (y - y.mean(2, keepdim=True)) / (y.var(2, correction=0, keepdim=True) + 0.1).sqrt()
    y = y.view(4, 6, 3, 3) * scale[:, None, None] + shift[:, None, None]
    torch.testing.assert_close(network[1](network[0](x)), y)
    assert list(network[2][0].parameters()) == [] and not list(network.buffers())


def test_a_lone_batch_norm_becomes_a_group_norm():
    assert isinstance(replace_batch_norm(nn.BatchNorm1d(4)), nn.GroupNorm)


def test_groups_that_do_not_divide_the_channels_are_refused():
    message = r"^replace_batch_norm\.groups: 4; it must divide 6, the channels of layer 1$"
    with pytest.raises(ValueError, match=message):
        replace_batch_norm(batch_normalized(), groups=4)


@pytest.mark.slow
def test_the_activation_in_timms_layers_of_norm_and_activation_stays():
    from timm.layers import BatchNormAct2d

    norm = replace_batch_norm(nn.Sequential(BatchNormAct2d(4)))
    x = torch.randn(3, 4, 5, 5)
    torch.testing.assert_close(norm(x), nn.GroupNorm(2, 4)(x).relu())


def test_a_yaml_file_can_convert_any_network():
    parser = ArgumentParser()
    parser.add_argument("--network", type=nn.Module)
    inner = {
        "class_path": "torchvision.models.DenseNet",
        "init_args": {"block_config": [1, 1, 1, 1]},
    }
    given = {"class_path": "models.replace_batch_norm", "init_args": {"network": inner}}
    build = getattr(parser, "instantiate", None) or parser.instantiate_classes
    network = build(parser.parse_object({"network": given})).network
    kinds = {type(module) for module in network.modules()}
    assert nn.GroupNorm in kinds and nn.BatchNorm2d not in kinds


@pytest.mark.slow
def test_the_document_has_the_numbers_of_parameters():
    """The first network of every row of docs/networks.md that gives a number."""
    text = (Path(__file__).parents[2] / "docs" / "networks.md").read_text()
    rows = re.findall(r"^\| `(\w+\([^`]*\))`.*\| ([\d,]+)(?:;[^|]*)? \|", text, re.M)
    assert len(rows) > 15
    for code, number in rows:
        network = eval(code, dict(vars(models)))
        assert count_trained(network) == int(number.replace(",", "")), code


def count_trained(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)
