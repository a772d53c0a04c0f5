"""A network for the classes of pixels."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from .classifier import group_norm


class UNet(nn.Module):
    """U-Net for the classes of pixels (Ronneberger et al., MICCAI 2015), padded and with GroupNorm.

    Each of `depth` levels halves the image and doubles the channels, and on the way back takes the
    features of the same level, too. Images may have any size of at least 2^depth. The head is a
    convolution of 1x1, which is called last. `width` is a multiple of `norm_groups`.

    Shape: input [B, in_channels, H, W]; output [B, num_classes, H, W].

    Example:
        >>> UNet()(torch.zeros(2, 1, 17, 24)).shape
        torch.Size([2, 2, 17, 24])
    """

    def __init__(
        self,
        in_channels: int = 1,
        num_classes: int = 2,
        width: int = 8,
        depth: int = 2,
        norm_groups: int = 2,
    ) -> None:
        super().__init__()
        if depth < 1:
            raise ValueError(f"UNet.depth: {depth}; it must be at least 1")
        self.down = nn.ModuleList()
        channels = in_channels
        for level in range(depth + 1):
            self.down.append(_block(channels, width * 2**level, norm_groups))
            channels = width * 2**level
        self.up = nn.ModuleList()
        for level in reversed(range(depth)):
            wide = width * 2**level
            self.up.append(_block(3 * wide, wide, norm_groups))
        self.head = nn.Conv2d(width, num_classes, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        levels: list[Tensor] = []
        for block in self.down:
            if levels:
                x = functional.max_pool2d(x, 2)
            x = block(x)
            levels.append(x)
        levels.pop()
        for block in self.up:
            skipped = levels.pop()
            x = functional.interpolate(x, size=skipped.shape[-2:])
            x = block(torch.cat([skipped, x], 1))
        return self.head(x)


def _block(inputs: int, outputs: int, norm_groups: int) -> nn.Sequential:
    """Returns two convolutions of 3x3, each with GroupNorm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
        group_norm("UNet", norm_groups, outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, kernel_size=3, padding=1, bias=False),
        group_norm("UNet", norm_groups, outputs),
        nn.ReLU(),
    )
