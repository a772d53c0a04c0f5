"""Networks that other frameworks publish times of, and that `models` has not."""

from torch import nn

from models.classifier import Classifier


class FedAvgCNN(Classifier):
    """PFLlib's network for MNIST and CIFAR-10: `models.CNN` without padding.

    Two 5x5 convolutions (32 and 64 channels), each with ReLU and 2x2 max pooling, then 512 units
    and the scores; 1,024 features come before the 512 units for images of 28x28, 1,600 for 32x32.
    Layers and parameters are in the order of PFLlib's class of the same name.
    """

    def __init__(self, in_channels: int = 1, num_classes: int = 10, image_size: int = 28) -> None:
        side = ((image_size - 4) // 2 - 4) // 2
        body = nn.Sequential(
            nn.Conv2d(in_channels, 32, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * side * side, 512),
            nn.ReLU(),
        )
        super().__init__(body, nn.Linear(512, num_classes))
