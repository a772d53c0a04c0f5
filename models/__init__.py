"""Networks and losses as plain PyTorch modules, for any PyTorch project.

Every network is a `body` followed by a linear `head` (see `models.classifier.Classifier`). All
arguments are plain values, so that a YAML file can describe them. The two losses complete
objectives for which PyTorch has no loss.
"""

from pfl._path import open_door
from pfl.models.adapters import Bottleneck, Delta, LoRA, SoftPrompt, Trainable
from pfl.models.cnn import CIFAR10CNN, CNN, FEMNISTCNN, CelebACNN, FedCLUPCNN, SmallCNN
from pfl.models.dense import MLP, LinearRegression, LogisticRegression
from pfl.models.lenet import LeNet5
from pfl.models.losses import HalfSquaredError
from pfl.models.norm import replace_batch_norm
from pfl.models.penalized import PenalizedCrossEntropy, PenalizedLogisticRegression
from pfl.models.pretrained import Pretrained
from pfl.models.recurrent import LSTM, CharLSTM, Sent140LSTM
from pfl.models.resnet import ResNet18
from pfl.models.vgg import VGG11
from pfl.models.vision import AlexNet, DenseNet121, GoogLeNet, Timm, TorchVision

open_door(__name__)

__all__ = [
    "CIFAR10CNN",
    "CNN",
    "FEMNISTCNN",
    "LSTM",
    "MLP",
    "VGG11",
    "AlexNet",
    "Bottleneck",
    "CelebACNN",
    "CharLSTM",
    "Delta",
    "DenseNet121",
    "FedCLUPCNN",
    "GoogLeNet",
    "HalfSquaredError",
    "LeNet5",
    "LinearRegression",
    "LoRA",
    "LogisticRegression",
    "PenalizedCrossEntropy",
    "PenalizedLogisticRegression",
    "Pretrained",
    "ResNet18",
    "Sent140LSTM",
    "SmallCNN",
    "SoftPrompt",
    "Timm",
    "TorchVision",
    "Trainable",
    "replace_batch_norm",
]
