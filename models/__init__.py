"""Networks and losses as plain PyTorch modules, for any PyTorch project.

Every network is a `body` followed by a linear `head` (see `models.classifier.Classifier`). All
arguments are plain values, so that a YAML file can describe them. The two losses complete
objectives for which PyTorch has no loss.
"""

from models.cnn import CNN, SmallCNN
from models.dense import MLP, LinearRegression, LogisticRegression
from models.lenet import LeNet5
from models.losses import HalfSquaredError
from models.penalized import PenalizedCrossEntropy, PenalizedLogisticRegression
from models.resnet import ResNet18
from models.vgg import VGG11

__all__ = [
    "CNN",
    "MLP",
    "VGG11",
    "HalfSquaredError",
    "LeNet5",
    "LinearRegression",
    "LogisticRegression",
    "PenalizedCrossEntropy",
    "PenalizedLogisticRegression",
    "ResNet18",
    "SmallCNN",
]
