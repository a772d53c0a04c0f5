"""ResNet-18 with a choice of normalization."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from .classifier import Classifier, draw_convolutions, norm_maker


class ResNet18(Classifier):
    """ResNet-18, by default in the variant of federated learning papers for CIFAR.

    He et al., "Deep Residual Learning for Image Recognition", CVPR 2016. FedSLR (Appendix B.2) has
    GroupNorm with 2 groups instead of BatchNorm: 11,173,962 parameters for 10 classes. The weights
    of convolutions are initialized by He's normal distribution (fan out), as in torchvision.

    Args:
        small_images: Whether the first layer is a 3x3 convolution at full resolution, for images of
            32x32 or 64x64. False is for ImageNet: a 7x7 convolution and 3x3 pooling, each of
            stride 2.
        width: The number of channels of the first stage, a multiple of `norm_groups`; each further
            stage has twice as many.
        blocks: The number of blocks of each of the four stages; 1 makes a ResNet-10.

    Shape: input [B, in_channels, H, W], any H and W; output [B, num_classes].

    Example:
        >>> ResNet18(num_classes=100)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 100])
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        norm: Literal["group", "batch"] = "group",
        norm_groups: int = 2,
        small_images: bool = True,
        width: int = 64,
        blocks: int = 2,
    ) -> None:
        normalize = norm_maker("ResNet18", norm, norm_groups)
        body: OrderedDict[str, nn.Module] = OrderedDict()
        kernel, stride = (3, 1) if small_images else (7, 2)
        body["conv1"] = nn.Conv2d(in_channels, width, kernel, stride, kernel // 2, bias=False)
        body["norm1"] = normalize(width)
        body["relu1"] = nn.ReLU()
        if not small_images:
            body["pool1"] = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        inputs = width
        for i, outputs in enumerate((width, 2 * width, 4 * width, 8 * width), start=1):
            body[f"stage{i}"] = nn.Sequential(
                _Block(inputs, outputs, normalize, stride=1 if i == 1 else 2),
                *(_Block(outputs, outputs, normalize, stride=1) for _ in range(blocks - 1)),
            )
            inputs = outputs
        body["pool2"] = nn.AdaptiveAvgPool2d(1)
        body["flatten"] = nn.Flatten()
        super().__init__(nn.Sequential(body), nn.Linear(inputs, num_classes))
        draw_convolutions(self)


class _Block(nn.Module):
    """A residual block: two 3x3 convolutions, to whose output the input is added."""

    def __init__(
        self, inputs: int, outputs: int, normalize: Callable[[int], nn.Module], stride: int
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
        self.norm1 = normalize(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, kernel_size=3, padding=1, bias=False)
        self.norm2 = normalize(outputs)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(OrderedDict(conv=conv, norm=normalize(outputs)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(y)) + self.shortcut(x))
