"""Small convolutional networks."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

from torch import nn

from .classifier import Classifier, group_norm, norm_maker


class CNN(Classifier):
    """The convolutional network of the FedAvg paper for MNIST, with variants.

    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
    AISTATS 2017: two 5x5 convolutions (32 and 64 channels), each with ReLU and 2x2 max pooling,
    then a linear layer with 512 units and ReLU. The convolutions are padded and keep the size of
    the image, as only then the network has the paper's 1,663,370 parameters for 28x28 images.
    This is also FedAgg's MNIST-CNN; with `padding: 0` it is PFLlib's CNN, of 582,026 parameters for
    28x28 images. Other papers' variants are `FedCLUPCNN`, `CIFAR10CNN` and `FEMNISTCNN`.

    Args:
        kernel_size: The side of the kernels, an odd number.
        channels: The number of channels of each convolution, first to last.
        pools: How many of the convolutions, from the first on, are followed by pooling; null: all.
        padding: The zeros around the image before each convolution; null: as many as keep its size.

    Shape: input [B, in_channels, image_size, image_size]; output [B, num_classes].

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
        pools: int | None = None,
        padding: int | None = None,
    ) -> None:
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"CNN.kernel_size: {kernel_size}; it must be odd and positive")
        if not channels:
            raise ValueError(f"CNN.channels: {channels}; it must have a number per convolution")
        pools = len(channels) if pools is None else pools
        if not 0 <= pools <= len(channels):
            raise ValueError(f"CNN.pools: {pools}; it must be 0 to {len(channels)}, or null")
        padding = kernel_size // 2 if padding is None else padding
        if padding < 0:
            raise ValueError(f"CNN.padding: {padding}; it must be 0 or more, or null")
        side = _side_after(image_size, kernel_size, padding, pools, len(channels))
        if side < 1:
            least = image_size + 1
            while _side_after(least, kernel_size, padding, pools, len(channels)) < 1:
                least += 1
            raise ValueError(f"CNN.image_size: {image_size}; it must be at least {least}")
        body: OrderedDict[str, nn.Module] = OrderedDict()
        inputs = in_channels
        for i, outputs in enumerate(channels, start=1):
            body[f"conv{i}"] = nn.Conv2d(inputs, outputs, kernel_size, padding=padding)
            body[f"relu{i}"] = nn.ReLU()
            if i <= pools:
                body[f"pool{i}"] = nn.MaxPool2d(2)
            inputs = outputs
        body["flatten"] = nn.Flatten()
        body["linear1"] = nn.Linear(inputs * side * side, hidden)
        body[f"relu{len(channels) + 1}"] = nn.ReLU()
        super().__init__(nn.Sequential(body), nn.Linear(hidden, num_classes))


def _side_after(side: int, kernel_size: int, padding: int, pools: int, convolutions: int) -> int:
    """The side of an image after the convolutions, the first `pools` of them with 2x2 pooling."""
    for i in range(convolutions):
        side += 2 * padding + 1 - kernel_size
        if i < pools:
            side //= 2
    return side


class FedCLUPCNN(CNN):
    """FedCLUP's networks with 2, 3 or 5 convolutions of 3x3.

    Yu, He, Sun, Xue, Li, ICML 2025. Two convolutions (32, 64 channels, each with pooling, then 128
    units) stand in the released code. The paper gives no widths of the others: here 32, 64, 128
    with three poolings, and 32, 64, 64, 128, 128 with two, so that images of 28x28 suffice.

    Example:
        >>> FedCLUPCNN(convolutions=5)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        convolutions: int = 2,
        in_channels: int = 1,
        num_classes: int = 10,
        image_size: int = 28,
    ) -> None:
        widths = {2: (32, 64), 3: (32, 64, 128), 5: (32, 64, 64, 128, 128)}
        if convolutions not in widths:
            raise ValueError(f"FedCLUPCNN.convolutions: {convolutions}; it must be 2, 3 or 5")
        channels = widths[convolutions]
        pools = 3 if convolutions == 3 else 2
        super().__init__(in_channels, num_classes, image_size, 3, 128, channels, pools)


class CIFAR10CNN(CNN):
    """FedAgg's network for CIFAR-10: three 3x3 convolutions with pooling, and dropout.

    Yuan, Wang, "FedAgg: Adaptive Federated Learning with Aggregated Gradients", arXiv 2303.15799.
    Each convolution has 2x2 max pooling; 4 x 4 x 64 features and 512 units come before the scores.
    The paper has two dropout layers, and says neither where nor how much, nor how wide the first
    two convolutions are: here before both linear layers, and 32 and 64 channels.

    Example:
        >>> CIFAR10CNN()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        image_size: int = 32,
        dropout: float = 0.5,
    ) -> None:
        super().__init__(in_channels, num_classes, image_size, 3, 512, (32, 64, 64))
        layers = OrderedDict(self.body.named_children())
        if dropout > 0:
            layers["dropout1"] = nn.Dropout(dropout)
            for name in ("linear1", "relu4"):  # come after it
                layers.move_to_end(name)
            layers["dropout2"] = nn.Dropout(dropout)
        self.body = nn.Sequential(layers)


class FEMNISTCNN(CNN):
    """LEAF's network for FEMNIST: that of the FedAvg paper with 2,048 units.

    Caldas et al., "LEAF: A Benchmark for Federated Settings", 2019; FedPD uses it.

    Example:
        >>> FEMNISTCNN()(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 62])
    """

    def __init__(self, num_classes: int = 62, image_size: int = 28) -> None:
        super().__init__(1, num_classes, image_size, hidden=2048)


class CelebACNN(Classifier):
    """LEAF's network for CelebA: four 3x3 convolutions with BatchNorm, pooling and ReLU.

    Caldas et al., "LEAF: A Benchmark for Federated Settings", 2019. Every convolution has 32
    channels and keeps the size of the image; pooling rounds odd sides up. LEAF's code evaluates
    with the statistics of the test batch, here BatchNorm has running ones. With GroupNorm `width`,
    the channels of every convolution, is a multiple of `norm_groups`.

    Shape: input [B, in_channels, image_size, image_size]; output [B, num_classes].

    Example:
        >>> CelebACNN()(torch.zeros(2, 3, 84, 84)).shape
        torch.Size([2, 2])
    """

    def __init__(
        self,
        num_classes: int = 2,
        image_size: int = 84,
        in_channels: int = 3,
        width: int = 32,
        norm: Literal["group", "batch"] = "batch",
        norm_groups: int = 2,
    ) -> None:
        normalize = norm_maker("CelebACNN", norm, norm_groups)
        body: OrderedDict[str, nn.Module] = OrderedDict()
        inputs = in_channels
        side = image_size
        for i in range(1, 5):
            body[f"conv{i}"] = nn.Conv2d(inputs, width, kernel_size=3, padding=1)
            body[f"norm{i}"] = normalize(width)
            body[f"pool{i}"] = nn.MaxPool2d(2, ceil_mode=True)
            body[f"relu{i}"] = nn.ReLU()
            inputs = width
            side = (side + 1) // 2
        body["flatten"] = nn.Flatten()
        super().__init__(nn.Sequential(body), nn.Linear(width * side * side, num_classes))


class SmallCNN(Classifier):
    """A convolutional network for very small images, such as the 8x8 digits of scikit-learn.

    The network has two padded 3x3 convolutions, with `width` and twice as many channels, each with
    GroupNorm, ReLU and 2x2 max pooling. Unlike BatchNorm, GroupNorm has no running statistics,
    which clients with different data cannot share (Hsieh et al., "The Non-IID Data Quagmire of
    Decentralized Machine Learning", ICML 2020). `width` is a multiple of `norm_groups`.

    Shape: input [B, in_channels, image_size, image_size]; output [B, num_classes].

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
