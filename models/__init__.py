"""Network architectures: plain PyTorch modules with nothing federated in them.

All of them are a `body` followed by a linear `head` (see `models.classifier.Classifier`), and take
plain values as arguments, so that a YAML file can describe them. There are two losses beside them,
for objectives that PyTorch's own do not give.
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
