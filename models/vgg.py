"""VGG-11 for small images."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Literal

from torch import nn

from .classifier import Classifier, group_norm

# Configuration A of the paper: the channels of each 3x3 convolution; 0 means 2x2 max pooling.
_LAYERS = (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0)


class VGG11(Classifier):
    """VGG-11 with one linear layer after its eight convolutions, as is usual for 32x32 images.

    Simonyan, Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition",
    ICLR 2015, configuration A. The two linear layers of 4,096 units for ImageNet are omitted: the
    head has 512 inputs, the width that FedAgg states for its VGG-11. The weights of convolutions
    are initialized by He's normal distribution (fan out), biases by 0, as in torchvision.

    Args:
        num_classes: The number of scores.
        in_channels: The number of channels of an image: 1 for gray, 3 for color.
        norm: The layer after every convolution: "group" for GroupNorm, "batch" for BatchNorm, whose
            running statistics are buffers, or "none" as in the paper. Only with "none" the
            convolutions have biases.
        norm_groups: The number of groups of every GroupNorm, a divisor of 64; ignored for other
            values of `norm`.

    Shape:
        Input: [B, in_channels, H, W], H and W at least 32. Output: [B, num_classes].

    Example:
        >>> VGG11(num_classes=100)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 100])
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        norm: Literal["group", "batch", "none"] = "group",
        norm_groups: int = 2,
    ) -> None:
        makers: dict[str, Callable[[int], nn.Module]] = {
            "group": lambda channels: group_norm("VGG11", norm_groups, channels),
            "batch": nn.BatchNorm2d,
        }
        if norm != "none" and norm not in makers:
            raise ValueError(f"VGG11.norm: {norm!r}; it must be 'group', 'batch' or 'none'")
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
        body[f"pool{pool}"] = nn.AdaptiveAvgPool2d(1)  # no effect for 32x32 images
        body["flatten"] = nn.Flatten()
        super().__init__(nn.Sequential(body), nn.Linear(inputs, num_classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
