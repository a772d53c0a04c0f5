"""LeNet-5, a convolutional network for handwritten digits."""

from collections import OrderedDict

from torch import nn

from .classifier import Classifier


class LeNet5(Classifier):
    """LeNet-5 in its usual modern form: ReLU, max pooling, a linear head.

    Y. LeCun et al., "Gradient-Based Learning Applied to Document Recognition", Proc. IEEE 1998.
    Two unpadded 5x5 convolutions (6 and 16 channels), each with 2x2 pooling, then linear layers
    with 120 and 84 units. The first linear layer has 16 x 5 x 5 inputs for the paper's images of
    32x32, and 16 x 4 x 4 inputs for MNIST's images of 28x28. `channels=(16, 32), padding=2` is
    FedAgg's wider LeNet-5 for EMNIST, 5 x 5 x 32 - 120 - 84 - 26, whose first width the paper does
    not give.

    Args:
        padding: The padding of the first convolution; 2 makes of 28x28 what 32x32 is without.

    Shape: input [B, in_channels, image_size, image_size]; output [B, num_classes].

    Example:
        >>> LeNet5(in_channels=3, image_size=32)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        in_channels: int = 1,
        num_classes: int = 10,
        image_size: int = 28,
        channels: tuple[int, int] = (6, 16),
        padding: int = 0,
    ) -> None:
        side = ((image_size + 2 * padding - 4) // 2 - 4) // 2
        if side < 1:
            least = 16 - 2 * padding
            raise ValueError(f"LeNet5.image_size: {image_size}; it must be at least {least}")
        first, second = channels
        body = OrderedDict(
            conv1=nn.Conv2d(in_channels, first, kernel_size=5, padding=padding),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(first, second, kernel_size=5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            linear1=nn.Linear(second * side * side, 120),
            relu3=nn.ReLU(),
            linear2=nn.Linear(120, 84),
            relu4=nn.ReLU(),
        )
        super().__init__(nn.Sequential(body), nn.Linear(84, num_classes))
