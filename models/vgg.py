"""VGG-11 for small images."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Literal

from torch import nn

from models.classifier import Classifier, group_norm

# Configuration A of the paper: channels of each 3x3 convolution; 0 is a 2x2 max pooling.
_LAYERS = (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0)


class VGG11(Classifier):
    """VGG-11 with one linear layer behind its eight convolutions, as usual for 32x32 images.

    Simonyan, Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition",
    ICLR 2015, configuration A. ImageNet's two linear layers of 4,096 units are left out: the head
    sees 512 features, the width that FedAgg gives for its VGG-11. Convolutions start from He's
    normal distribution (fan out), biases at 0, as in torchvision.

    Args:
        num_classes: Number of scores.
        in_channels: 1 for gray images, 3 for color.
        norm: What follows every convolution: "group" for GroupNorm, "batch" for BatchNorm, whose
            running statistics are buffers, or "none" as in the paper; only then convolutions have
            biases.
        norm_groups: Groups of every GroupNorm; without meaning otherwise.

    Shape:
        Input: [B, in_channels, H, W], H and W at least 32. Output: [B, num_classes].

    Raises:
        ValueError: ``norm`` is unknown, or ``norm_groups`` does not divide 64.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        norm: Literal["group", "batch", "none"] = "group",
        norm_groups: int = 2,
    ) -> None:
        makers: dict[str, Callable[[int], nn.Module]] = {
            "group": lambda channels: group_norm(norm_groups, channels),
            "batch": nn.BatchNorm2d,
        }
        if norm != "none" and norm not in makers:
            raise ValueError(f"norm={norm!r} is unknown; choose 'group', 'batch' or 'none'")
        body: OrderedDict[str, nn.Module] = OrderedDict()
        inputs, conv, pool = in_channels, 1, 1
        for outputs in _LAYERS:
            if outputs == 0:
                body[f"pool{pool}"] = nn.MaxPool2d(2)
                pool += 1
                continue
            body[f"conv{conv}"] = nn.Conv2d(inputs, outputs, 3, padding=1, bias=norm == "none")
            if norm in makers:
                body[f"norm{conv}"] = makers[norm](outputs)
            body[f"relu{conv}"] = nn.ReLU()
            inputs, conv = outputs, conv + 1
        body[f"pool{pool}"] = nn.AdaptiveAvgPool2d(1)  # of 1x1 for 32x32 images: nothing to do
        body["flatten"] = nn.Flatten()
        super().__init__(nn.Sequential(body), nn.Linear(inputs, num_classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
