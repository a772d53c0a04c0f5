"""Network architectures: plain PyTorch modules with nothing federated in them.

All of them are a `body` followed by a linear `head` (see `models.classifier.Classifier`), and take
plain values as arguments, so that a YAML file can describe them.
"""

from models.cnn import CNN, SmallCNN
from models.dense import MLP, LogisticRegression
from models.lenet import LeNet5
from models.resnet import ResNet18

__all__ = ["CNN", "MLP", "LeNet5", "LogisticRegression", "ResNet18", "SmallCNN"]
