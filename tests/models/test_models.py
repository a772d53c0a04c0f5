"""Networks: parameter counts by hand, and equal results in all forms of execution."""

import re
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from jsonargparse import ArgumentParser
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

import models
from models import (
    CIFAR10CNN,
    CNN,
    FEMNISTCNN,
    MLP,
    VGG11,
    AlexNet,
    CelebACNN,
    DenseNet121,
    FedCLUPCNN,
    GoogLeNet,
    LeNet5,
    LinearRegression,
    LogisticRegression,
    PenalizedLogisticRegression,
    ResNet18,
    SmallCNN,
    Timm,
    TorchVision,
    UNet,
)
from pfl.models.classifier import Classifier
from tests.commands import ROOT

# name -> (constructor, shape of a sample, number of classes)
NETWORKS = {
    "LogisticRegression": (lambda: LogisticRegression(12, num_classes=3), (3, 2, 2), 3),
    "LogisticRegression-linear": (lambda: LogisticRegression(12, 3, bias=False), (3, 2, 2), 3),
    "LinearRegression": (lambda: LinearRegression(12), (3, 2, 2), 1),
    "LinearRegression-affine": (lambda: LinearRegression(12, bias=True), (12,), 1),
    "PenalizedLogisticRegression": (lambda: penalized(12), (3, 2, 2), 2),
    "MLP": (lambda: MLP(12, hidden=(7, 5), num_classes=3), (3, 2, 2), 3),
    "LeNet5": (lambda: LeNet5(in_channels=2, num_classes=4, image_size=17), (2, 17, 17), 4),
    "CNN": (lambda: CNN(in_channels=2, num_classes=4, image_size=9), (2, 9, 9), 4),
    "CNN-3x3": (lambda: CNN(2, 4, image_size=9, kernel_size=3, hidden=7), (2, 9, 9), 4),
    "SmallCNN": (lambda: SmallCNN(2, image_size=9, num_classes=4, width=6), (2, 9, 9), 4),
    "ResNet18": (lambda: ResNet18(num_classes=4, in_channels=2, width=8), (2, 8, 8), 4),
    "ResNet18-large": (
        lambda: ResNet18(4, 2, norm_groups=4, small_images=False, width=8),
        (2, 40, 33),
        4,
    ),
    "VGG11": (lambda: VGG11(num_classes=4, in_channels=2), (2, 32, 32), 4),
    "VGG11-none": (lambda: VGG11(4, 2, norm="none"), (2, 33, 64), 4),
    "FedCLUPCNN": (lambda: FedCLUPCNN(5, 2, 4, image_size=9), (2, 9, 9), 4),
    "CIFAR10CNN": (lambda: CIFAR10CNN(4, 2, image_size=9, dropout=0.0), (2, 9, 9), 4),
    "FEMNISTCNN": (lambda: FEMNISTCNN(4, image_size=9), (1, 9, 9), 4),
    "CelebACNN": (lambda: CelebACNN(4, 9, 2, width=6, norm="group"), (2, 9, 9), 4),
    "AlexNet": (lambda: AlexNet(4, 2, hidden=8, dropout=0.0), (2, 16, 16), 4),
    "GoogLeNet": (lambda: GoogLeNet(4, 2, dropout=0.0), (2, 8, 8), 4),
    "DenseNet121": (lambda: DenseNet121(4, 2), (2, 8, 8), 4),
    "TorchVision": (lambda: TorchVision("resnet18", 4, 2, "group"), (2, 32, 33), 4),
    "Timm": (lambda: Timm("resnet10t", 4, 2, norm="group"), (2, 32, 32), 4),
}
WRAPPED = {"AlexNet", "GoogLeNet", "DenseNet121", "TorchVision", "Timm"}
OURS = {name: case for name, case in NETWORKS.items() if name not in {*WRAPPED, "VGG11-none"}}
SEQUENCES = {"LSTM", "CharLSTM", "Sent140LSTM"}  # see test_recurrent.py
PIXELS = {"UNet"}  # below
OTHERS = {"Family", "HalfSquaredError", "PenalizedCrossEntropy", "replace_batch_norm", "Pretrained"}
OTHERS |= {"WeightedBinaryCrossEntropy", "WeightedCrossEntropy"}  # in test_losses.py
OTHERS |= {"Trainable", "LoRA", "Delta", "Bottleneck", "SoftPrompt"}  # tested in test_adapters.py
BATCH_NORM = (lambda: ResNet18(4, 2, norm="batch", width=8), (2, 8, 8), 4)


def penalized(in_features: int) -> PenalizedLogisticRegression:
    """Returns a network with random weights instead of zeros."""
    network = PenalizedLogisticRegression(in_features, alpha=2.0, beta=0.3)
    nn.init.normal_(network.head.weight)
    return network


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def conv(inputs: int, outputs: int, side: int, bias: bool = True) -> int:
    return outputs * inputs * side * side + outputs * bias


def linear(inputs: int, outputs: int) -> int:
    return (inputs + 1) * outputs


def test_every_public_network_is_tested():
    of_classes = {name.split("-")[0] for name in NETWORKS}
    assert of_classes | SEQUENCES | PIXELS == set(models.__all__) - OTHERS


@pytest.mark.parametrize(("build", "shape", "classes"), OURS.values(), ids=OURS)
def test_vmap_over_parameters_equals_a_loop(build, shape, classes):
    """Scores and gradients are compared in float64, in which rounding errors are negligible."""
    torch.manual_seed(0)
    networks = [build().double() for _ in range(2)]
    params, buffers = stack_module_state(networks)
    assert not buffers
    x = torch.rand(2, 2, *shape, dtype=torch.float64)

    def loss(p, x):
        return functional_call(networks[0], p, (x,)).square().sum()

    scores = vmap(lambda p, x: functional_call(networks[0], p, (x,)))(params, x)
    gradients = vmap(grad(loss))(params, x)
    for i, network in enumerate(networks):
        expected = network(x[i])
        torch.testing.assert_close(scores[i], expected)
        expected.square().sum().backward()
        for name, parameter in network.named_parameters():
            torch.testing.assert_close(gradients[name][i], parameter.grad)


@pytest.mark.parametrize(("build", "shape", "classes"), NETWORKS.values(), ids=NETWORKS)
def test_scores_of_a_sample_do_not_depend_on_the_batch(build, shape, classes):
    """No network mixes the samples of a batch, not even in training mode."""
    torch.manual_seed(0)
    network = build().double().train()
    x = torch.rand(3, *shape, dtype=torch.float64)
    scores = network(x)
    assert scores.shape == (3, classes) and scores.dtype == torch.float64
    torch.testing.assert_close(scores[1:2], network(x[1:2]))


@pytest.mark.parametrize(
    ("build", "shape", "classes"), [*NETWORKS.values(), BATCH_NORM], ids=[*NETWORKS, "batch"]
)
def test_the_head_is_the_last_layer(build, shape, classes):
    """Scores are constants of the right shape, and float32, if its weights are 0."""
    network = build()
    assert isinstance(network, Classifier)
    nn.init.zeros_(network.head.weight)
    constant = 0.0
    if network.head.bias is not None:
        constant = 5.0
        nn.init.constant_(network.head.bias, constant)
    assert torch.equal(network(torch.rand(2, *shape)), torch.full((2, classes), constant))


def test_logistic_regression_is_an_affine_map():
    network = LogisticRegression(12, num_classes=3)
    assert count(network) == 12 * 3 + 3
    x = torch.rand(5, 3, 4)
    w, b = network.head.weight, network.head.bias
    torch.testing.assert_close(network(x), x.reshape(5, 12) @ w.T + b)


def test_regressions_without_bias_are_a_matrix_in_row_order():
    """Parameters in the order of a problem's true models: row by row."""
    x = torch.rand(5, 3, 4)
    for network, outputs in ((LogisticRegression(12, 3, bias=False), 3), (LinearRegression(12), 1)):
        w = nn.utils.parameters_to_vector(network.parameters())
        torch.testing.assert_close(network(x), x.reshape(5, 12) @ w.view(outputs, 12).T)
    assert count(LinearRegression(12, bias=True)) == 13


@pytest.mark.parametrize(
    ("hidden", "expected"),
    [
        ((), linear(784, 10)),
        ((200,), linear(784, 200) + linear(200, 10)),
        # "199,210 total parameters" (McMahan et al. 2017, Section 3)
        ((200, 200), 199_210),
        ([30, 20, 40], linear(784, 30) + linear(30, 20) + linear(20, 40) + linear(40, 10)),
    ],
)
def test_mlp_has_the_parameters_of_its_layers(hidden, expected):
    assert count(MLP(784, hidden=hidden)) == expected


def test_mlp_is_affine_maps_with_relu_between_them():
    network = MLP(3, hidden=(4, 5), num_classes=2).double()
    x = torch.randn(6, 3, dtype=torch.float64)
    y = x
    for layer in (network.body.linear1, network.body.linear2):
        y = (y @ layer.weight.T + layer.bias).clamp_min(0)
    torch.testing.assert_close(network(x), y @ network.head.weight.T + network.head.bias)


@pytest.mark.parametrize(
    ("channels", "image_size", "side"),
    [(1, 28, 4), (1, 32, 5), (3, 32, 5), (1, 16, 1), (1, 17, 1), (1, 19, 1), (1, 20, 2)],
)
def test_lenet_has_the_parameters_of_its_layers(channels, image_size, side):
    """The side after 5x5 convolution, halving, 5x5 convolution, halving: by hand."""
    expected = (
        conv(channels, 6, 5)
        + conv(6, 16, 5)
        + linear(16 * side * side, 120)
        + linear(120, 84)
        + linear(84, 10)
    )
    network = LeNet5(channels, image_size=image_size)
    assert count(network) == expected
    assert network(torch.rand(1, channels, image_size, image_size)).shape == (1, 10)


def test_cnn_has_the_parameters_of_the_paper():
    """1,663,370 is the number that McMahan et al. (2017, Section 3) give."""
    expected = conv(1, 32, 5) + conv(32, 64, 5) + linear(3136, 512) + linear(512, 10)
    assert expected == 1_663_370
    assert count(CNN()) == expected


@pytest.mark.parametrize(
    ("channels", "image_size", "values"), [(1, 28, 1024), (3, 32, 1600), (3, 64, 10816)]
)
def test_cnn_without_padding_is_that_of_pfllib(channels, image_size, values):
    """The numbers of values before its linear layer stand in PFLlib's main.py (`dim=`)."""
    network = CNN(channels, image_size=image_size, padding=0)
    own = nn.Sequential(
        nn.Sequential(nn.Conv2d(channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        nn.Sequential(nn.Linear(values, 512), nn.ReLU()),
        nn.Linear(512, 10),
    )
    assert [p.shape for p in network.parameters()] == [p.shape for p in own.parameters()]
    own.load_state_dict(dict(zip(own.state_dict(), network.parameters(), strict=True)))
    images = torch.rand(2, channels, image_size, image_size)
    assert torch.equal(network(images), own(images))


@pytest.mark.parametrize(
    ("network", "arguments", "message"),
    [
        (CNN, {"image_size": 7, "channels": (4, 4, 4)}, "image_size: 7; it must be at least 8"),
        (CNN, {"image_size": 15, "padding": 0}, "image_size: 15; it must be at least 16"),
        (CNN, {"padding": -1}, "padding: -1; it must be 0 or more, or null"),
        (CNN, {"channels": ()}, "channels: (); it must have a number per convolution"),
        (CNN, {"channels": (4, 4), "pools": 3}, "pools: 3; it must be 0 to 2, or null"),
        (CNN, {"kernel_size": 4}, "kernel_size: 4; it must be odd and positive"),
        (CNN, {"kernel_size": -1}, "kernel_size: -1; it must be odd and positive"),
        (ResNet18, {"norm": "layer"}, "norm: 'layer'; it must be 'group' or 'batch'"),
        (ResNet18, {"norm": "GROUP"}, "norm: 'GROUP'; it must be 'group' or 'batch'"),
        (CelebACNN, {"norm": "layer"}, "norm: 'layer'; it must be 'group' or 'batch'"),
        (VGG11, {"norm": "layer"}, "norm: 'layer'; it must be 'group', 'batch' or 'none'"),
        (FedCLUPCNN, {"convolutions": 4}, "convolutions: 4; it must be 2, 3 or 5"),
        (LeNet5, {"image_size": 15}, "image_size: 15; it must be at least 16"),
        (CNN, {"image_size": 3}, "image_size: 3; it must be at least 4"),
        (SmallCNN, {"image_size": 3}, "image_size: 3; it must be at least 4"),
        *[
            (kind, {"norm_groups": groups}, f"norm_groups: {groups}; it must divide {channels}")
            for kind, channels in ((SmallCNN, 16), (ResNet18, 64), (VGG11, 64))
            for groups in (0, -2, 3)
        ],
        (UNet, {"depth": 0}, "depth: 0; it must be at least 1"),
        (UNet, {"norm_groups": 3}, "norm_groups: 3; it must divide 8"),
        (LeNet5, {"image_size": 11, "padding": 2}, "image_size: 11; it must be at least 12"),
    ],
)
def test_wrong_arguments_are_refused(network, arguments, message):
    message = rf"^{re.escape(f'{network.__name__}.{message}')}(, the channels of a layer)?$"
    with pytest.raises(ValueError, match=message):
        network(**arguments)


def test_unet_has_the_parameters_of_its_layers():
    """Two levels of 8 and 16 channels, the lowest with 32, and back with the skipped channels."""
    expected = conv(8, 2, 1)
    for inputs, outputs in ((1, 8), (8, 16), (16, 32), (32 + 16, 16), (16 + 8, 8)):
        expected += conv(inputs, outputs, 3, bias=False) + conv(outputs, outputs, 3, bias=False)
        expected += 2 * 2 * outputs
    assert count(UNet()) == expected


@pytest.mark.parametrize("size", [(4, 4), (7, 13)])
def test_unet_scores_each_pixel_of_images_of_any_size(size):
    """A network of zeros but for the bias of its head gives this bias everywhere; an image's scores
    do not depend on the others of the batch, also in one call for several models."""
    torch.manual_seed(0)
    network = UNet(in_channels=2, num_classes=3, depth=2).double()
    x = torch.rand(3, 2, *size, dtype=torch.float64)
    scores = network(x)
    assert scores.shape == (3, 3, *size)
    torch.testing.assert_close(scores[1:2], network(x[1:2]))
    parameters = {name: value.detach()[None] for name, value in network.named_parameters()}
    call = vmap(lambda own: functional_call(network, own, (x,)))
    torch.testing.assert_close(call(parameters)[0], scores)
    nn.init.zeros_(network.head.weight)
    nn.init.constant_(network.head.bias, 5.0)
    assert torch.equal(network(x), torch.full_like(scores, 5.0))


def test_small_cnn_has_the_parameters_of_its_layers():
    norms = 2 * 16 + 2 * 32
    expected = conv(1, 16, 3, bias=False) + conv(16, 32, 3, bias=False) + norms
    assert count(SmallCNN()) == expected + linear(32 * 2 * 2, 10)


@pytest.mark.parametrize(("network", "least"), [(LeNet5, 16), (CNN, 4), (SmallCNN, 4)])
def test_the_smallest_images_have_scores(network, least):
    assert network(image_size=least)(torch.rand(1, 1, least, least)).shape == (1, 10)


def test_resnet18_has_the_parameters_of_fedslr():
    """The costs in Table 2 of FedSLR follow from 11,173,962; here layer by layer."""

    def norm(channels):
        return 2 * channels

    def block(inputs, outputs):
        total = conv(inputs, outputs, 3, bias=False) + norm(outputs)
        total += conv(outputs, outputs, 3, bias=False) + norm(outputs)
        if inputs != outputs:
            total += conv(inputs, outputs, 1, bias=False) + norm(outputs)
        return total

    expected = conv(3, 64, 3, bias=False) + norm(64) + linear(512, 10)
    for inputs, outputs in [(64, 64), (64, 128), (128, 256), (256, 512)]:
        expected += block(inputs, outputs) + block(outputs, outputs)
    assert expected == 11_173_962
    assert count(ResNet18()) == count(ResNet18(norm="batch")) == expected
    assert count(ResNet18(small_images=False)) == expected + (7 * 7 - 3 * 3) * 3 * 64
    narrow = conv(3, 8, 3, bias=False) + norm(8) + linear(64, 10)
    narrow += sum(block(*pair) for pair in [(8, 8), (8, 16), (16, 32), (32, 64)])
    assert count(ResNet18(width=8, blocks=1)) == narrow


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("small_images", [True, False])
def test_resnet18_equals_torchvision(norm, small_images):
    """With the same parameters, torchvision's implementation gives the same scores."""
    from torchvision.models import resnet18

    torch.manual_seed(0)
    normalize = nn.BatchNorm2d if norm == "batch" else lambda channels: nn.GroupNorm(2, channels)
    reference = resnet18(num_classes=10, norm_layer=normalize)
    if small_images:
        reference.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
        reference.maxpool = nn.Identity()
    network = ResNet18(norm=norm, small_images=small_images)
    # Both register their layers in the order of the forward pass, shortcuts last in their block.
    ours, theirs = network.state_dict(), reference.state_dict()
    assert [v.shape for v in ours.values()] == [v.shape for v in theirs.values()]
    network.load_state_dict(dict(zip(ours, theirs.values(), strict=True)))
    x = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(network.double()(x), reference.double()(x))


@pytest.mark.parametrize(("norm", "per_channel"), [("none", 1), ("group", 2), ("batch", 2)])
def test_vgg11_has_the_parameters_of_configuration_a(norm, per_channel):
    """Configuration A of Simonyan & Zisserman; each channel has a bias, or a scale and a shift."""
    widths = [3, 64, 128, 256, 256, 512, 512, 512, 512]
    expected = sum(i * o * 9 + per_channel * o for i, o in pairwise(widths)) + linear(512, 10)
    assert count(VGG11(norm=norm)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["none", "batch"])
def test_vgg11_equals_torchvision(norm):
    """With the same parameters, torchvision's implementation gives the same features."""
    from torchvision.models import vgg11, vgg11_bn

    torch.manual_seed(0)
    reference = (vgg11 if norm == "none" else vgg11_bn)(init_weights=False).features.double()
    network = VGG11(norm=norm).double()
    if norm == "batch":  # a bias before BatchNorm, as in torchvision, has no effect
        for module in reference:
            if isinstance(module, nn.Conv2d):
                module.bias = None
    ours, theirs = network.body.state_dict(), reference.state_dict()
    assert [v.shape for v in ours.values()] == [v.shape for v in theirs.values()]
    network.body.load_state_dict(dict(zip(ours, theirs.values(), strict=True)))
    x = torch.rand(3, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(network.body(x), reference(x).flatten(1))


def test_vgg11_and_resnet18_start_from_he_normal():
    """Standard deviation sqrt(2 / fan out); 2.4 million draws leave 0.2 % to chance."""
    torch.manual_seed(0)
    last, expected = VGG11(norm="none").body.conv8, (2 / (512 * 3 * 3)) ** 0.5
    for layer in (last, ResNet18().body.stage4[1].conv2):
        assert layer.weight.std().item() == pytest.approx(expected, rel=2e-3)
    assert not last.bias.any()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("LogisticRegression", {"in_features": 6, "num_classes": 3, "bias": False}),
        ("LinearRegression", {"in_features": 6, "bias": True}),
        ("PenalizedLogisticRegression", {"in_features": 6, "alpha": 2.0, "beta": 0.5}),
        ("HalfSquaredError", {}),
        ("PenalizedCrossEntropy", {}),
        ("MLP", {"in_features": 6, "hidden": [5, 4], "num_classes": 3}),
        ("LeNet5", {"in_channels": 2, "num_classes": 3, "image_size": 16}),
        ("CNN", {"in_channels": 2, "num_classes": 3, "image_size": 8}),
        ("SmallCNN", {"in_channels": 2, "image_size": 4, "num_classes": 3, "width": 8}),
        ("ResNet18", {"num_classes": 3, "in_channels": 2, "norm": "batch", "small_images": False}),
        ("VGG11", {"num_classes": 3, "in_channels": 2, "norm": "none"}),
        ("FedCLUPCNN", {"convolutions": 5, "image_size": 8}),
        ("CIFAR10CNN", {"num_classes": 3, "image_size": 8}),
        ("FEMNISTCNN", {"num_classes": 3, "image_size": 8}),
        ("CelebACNN", {"num_classes": 3, "image_size": 8, "norm": "group"}),
        ("AlexNet", {"num_classes": 3, "hidden": 4}),
        ("GoogLeNet", {"num_classes": 3, "norm": "batch"}),
        ("DenseNet121", {"num_classes": 3, "norm": "batch"}),
        ("TorchVision", {"name": "resnet18", "arguments": {"width_per_group": 64}}),
        ("Timm", {"name": "resnet10t", "small_images": True, "arguments": {"drop_rate": 0.1}}),
        ("LSTM", {"vocabulary": 5, "hidden": 3, "features": 2, "every_token": True}),
        ("CharLSTM", {"num_classes": 7, "hidden": 3}),
        ("Sent140LSTM", {"vocabulary": 5, "hidden": 3, "embeddings": None}),
    ],
)
def test_a_yaml_file_can_describe_every_public_class(name, arguments):
    """Plain values build a class, and their dump to YAML builds the same class again."""
    parser = ArgumentParser()
    parser.add_argument("--network", type=nn.Module)
    given = {"class_path": f"models.{name}", "init_args": arguments}
    dumped = parser.dump(parser.parse_object({"network": given}))
    # jsonargparse 4.49 renamed the method.
    build = getattr(parser, "instantiate", None) or parser.instantiate_classes
    network = build(parser.parse_string(dumped)).network
    expected = getattr(models, name)(**arguments)
    assert type(network) is type(expected)
    assert [p.shape for p in network.parameters()] == [p.shape for p in expected.parameters()]


def test_networks_are_imported_with_pytorch_and_numpy_alone():
    """As where an exported model is loaded, and in the environments of the benchmarks' peers."""
    others = ("yaml", "lightning", "jsonargparse", "torchmetrics", "torchvision", "scipy")
    hidden = "; ".join(f"sys.modules[{name!r}] = None" for name in others)
    code = f"import sys; {hidden}; import pfl.models"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
