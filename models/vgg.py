"""VGG-11 for small images."""

from collections import OrderedDict
from typing import Literal

from torch import nn

from .classifier import Classifier, draw_convolutions, norm_maker

# Configuration A of the paper: the channels of each 3x3 convolution; 0 means 2x2 max pooling.
_LAYERS = (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0)


class VGG11(Classifier):
    """VGG-11 with one linear layer after its eight convolutions, as is usual for 32x32 images.

    Simonyan, Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition",
    ICLR 2015, configuration A. The two linear layers of 4,096 units for ImageNet are omitted: the
    head has 512 inputs, the width that FedAgg states for its VGG-11. The weights of convolutions
    are initialized by He's normal distribution (fan out), biases by 0, as in torchvision.

    With `norm="none"` there is no norm, as in the paper. Only then the convolutions have biases.

    Shape: input [B, in_channels, H, W], H and W at least 32; output [B, num_classes].

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
        known = "'group', 'batch' or 'none'"
        normalize = None
        if norm != "none":
            normalize = norm_maker("VGG11", norm, norm_groups, known)
        body: OrderedDict[str, nn.Module] = OrderedDict()
        inputs = in_channels
        conv = 1
        pool = 1
        for outputs in _LAYERS:
            if outputs == 0:
                body[f"pool{pool}"] = nn.MaxPool2d(2)
                pool += 1
                continue
            body[f"conv{conv}"] = nn.Conv2d(inputs, outputs, 3, padding=1, bias=norm == "none")
            if normalize is not None:
                body[f"norm{conv}"] = normalize(outputs)
            body[f"relu{conv}"] = nn.ReLU()
            inputs = outputs
            conv += 1
        body[f"pool{pool}"] = nn.AdaptiveAvgPool2d(1)  # no effect for 32x32 images
        body["flatten"] = nn.Flatten()
        super().__init__(nn.Sequential(body), nn.Linear(inputs, num_classes))
        draw_convolutions(self)
