"""Small convolutional networks."""

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from models.classifier import Classifier, group_norm


class CNN(Classifier):
    """The convolutional network of the FedAvg paper for MNIST, with variants.

    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
    AISTATS 2017: two 5x5 convolutions (32 and 64 channels), each with ReLU and 2x2 max pooling,
    then a linear layer with 512 units and ReLU. The convolutions are padded and keep the size of
    the image, as only then the network has the paper's 1,663,370 parameters for 28x28 images.
    `kernel_size=3, hidden=128` is the network with two convolutions in FedCLUP's released code, and
    `channels=(32, 64, 128), kernel_size=3` has three convolutions.

    Args:
        in_channels: The number of channels of an image: 1 for gray, 3 for color.
        num_classes: The number of scores.
        image_size: The side of the square images, at least 2 to the power of the number of
            convolutions.
        kernel_size: The side of the kernels, an odd number.
        hidden: The number of units of the linear layer.
        channels: The number of channels of each convolution, first to last.

    Shape:
        Input: [B, in_channels, image_size, image_size]. Output: [B, num_classes].

    Raises:
        ValueError: `image_size` is too small, `kernel_size` is even or below 1, or there are no
            `channels`.

    Example:
        >>> CNN()(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        in_channels: int = 1,
        num_classes: int = 10,
        image_size: int = 28,
        kernel_size: int = 5,
        hidden: int = 512,
        channels: Sequence[int] = (32, 64),
    ) -> None:
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"CNN.kernel_size: {kernel_size}; it must be odd and positive")
        if not channels:
            raise ValueError(f"CNN.channels: {channels}; it must have a number per convolution")
        # With padding the size changes by pooling only, whatever the kernel size.
        side, least = image_size >> len(channels), 2 ** len(channels)
        if side < 1:
            raise ValueError(f"CNN.image_size: {image_size}; it must be at least {least}")
        body: OrderedDict[str, nn.Module] = OrderedDict()
        inputs = in_channels
        for i, outputs in enumerate(channels, start=1):
            body[f"conv{i}"] = nn.Conv2d(inputs, outputs, kernel_size, padding=kernel_size // 2)
            body[f"relu{i}"] = nn.ReLU()
            body[f"pool{i}"] = nn.MaxPool2d(2)
            inputs = outputs
        body["flatten"] = nn.Flatten()
        body["linear1"] = nn.Linear(inputs * side * side, hidden)
        body[f"relu{len(channels) + 1}"] = nn.ReLU()
        super().__init__(nn.Sequential(body), nn.Linear(hidden, num_classes))


class SmallCNN(Classifier):
    """A convolutional network for very small images, such as the 8x8 digits of scikit-learn.

    The network has two padded 3x3 convolutions, with `width` and twice as many channels, each with
    GroupNorm, ReLU and 2x2 max pooling. Unlike BatchNorm, GroupNorm has no running statistics,
    which clients with different data cannot share (Hsieh et al., "The Non-IID Data Quagmire of
    Decentralized Machine Learning", ICML 2020).

    Args:
        in_channels: The number of channels of an image: 1 for gray, 3 for color.
        image_size: The side of the square images, at least 4.
        num_classes: The number of scores.
        width: The number of channels of the first convolution, a multiple of `norm_groups`.
        norm_groups: The number of groups of every GroupNorm.

    Shape:
        Input: [B, in_channels, image_size, image_size]. Output: [B, num_classes].

    Raises:
        ValueError: `image_size` is too small, or `width` is no multiple of `norm_groups`.

    Example:
        >>> SmallCNN()(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        in_channels: int = 1,
        image_size: int = 8,
        num_classes: int = 10,
        width: int = 16,
        norm_groups: int = 2,
    ) -> None:
        side = image_size // 4
        if side < 1:
            raise ValueError(f"SmallCNN.image_size: {image_size}; it must be at least 4")
        body = OrderedDict(
            conv1=nn.Conv2d(in_channels, width, kernel_size=3, padding=1, bias=False),
            norm1=group_norm("SmallCNN", norm_groups, width),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(width, 2 * width, kernel_size=3, padding=1, bias=False),
            norm2=group_norm("SmallCNN", norm_groups, 2 * width),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
        )
        super().__init__(nn.Sequential(body), nn.Linear(2 * width * side * side, num_classes))
