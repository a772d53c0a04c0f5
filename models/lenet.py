"""LeNet-5."""

from collections import OrderedDict

from torch import nn

from models.classifier import Classifier, pooled_size


class LeNet5(Classifier):
    """LeNet-5 in its usual modern form: ReLU, max pooling, a linear head.

    Y. LeCun et al., "Gradient-Based Learning Applied to Document Recognition", Proc. IEEE 1998.
    Two unpadded 5x5 convolutions (6 and 16 channels), each with 2x2 pooling, then linear layers
    with 120 and 84 units. For images of 32x32, which the paper has, the first of these takes
    16 x 5 x 5 values; for MNIST's 28x28 it takes 16 x 4 x 4.

    Args:
        in_channels: 1 for gray images, 3 for color.
        num_classes: Number of scores.
        image_size: Side of the square images, at least 16.

    Shape:
        Input: [B, in_channels, image_size, image_size]. Output: [B, num_classes].

    Raises:
        ValueError: ``image_size`` is too small.
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
