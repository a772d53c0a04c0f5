"""LeNet-5, a convolutional network for handwritten digits."""

from collections import OrderedDict

from torch import nn

from models.classifier import Classifier, pooled_size


class LeNet5(Classifier):
    """LeNet-5 in its usual modern form: ReLU, max pooling, a linear head.

    Y. LeCun et al., "Gradient-Based Learning Applied to Document Recognition", Proc. IEEE 1998.
    Two unpadded 5x5 convolutions (6 and 16 channels), each with 2x2 pooling, then linear layers
    with 120 and 84 units. The first linear layer has 16 x 5 x 5 inputs for the paper's images of
    32x32, and 16 x 4 x 4 inputs for MNIST's images of 28x28.

    Args:
        in_channels: The number of channels of an image: 1 for gray, 3 for color.
        num_classes: The number of scores.
        image_size: The side of the square images, at least 16.

    Shape:
        Input: [B, in_channels, image_size, image_size]. Output: [B, num_classes].

    Raises:
        ValueError: `image_size` is too small.

    Example:
        >>> LeNet5(in_channels=3, image_size=32)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, in_channels: int = 1, num_classes: int = 10, image_size: int = 28) -> None:
        side = pooled_size("LeNet5", image_size, padding=0)
        body = OrderedDict(
            conv1=nn.Conv2d(in_channels, 6, kernel_size=5),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(6, 16, kernel_size=5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            linear1=nn.Linear(16 * side * side, 120),
            relu3=nn.ReLU(),
            linear2=nn.Linear(120, 84),
            relu4=nn.ReLU(),
        )
        super().__init__(nn.Sequential(body), nn.Linear(84, num_classes))
