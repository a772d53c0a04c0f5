"""Networks and losses as plain PyTorch modules, for any PyTorch project.

Every network of classes is a `body` followed by a linear `head` (see
`models.classifier.Classifier`). All arguments are plain values, so that a YAML file can describe
them. The losses complete objectives for which PyTorch has no loss, or none that a file can
describe.
"""

from pfl.models.adapters import Bottleneck as Bottleneck
from pfl.models.adapters import Delta as Delta
from pfl.models.adapters import LoRA as LoRA
from pfl.models.adapters import SoftPrompt as SoftPrompt
from pfl.models.adapters import Trainable as Trainable
from pfl.models.cnn import CIFAR10CNN as CIFAR10CNN
from pfl.models.cnn import CNN as CNN
from pfl.models.cnn import FEMNISTCNN as FEMNISTCNN
from pfl.models.cnn import CelebACNN as CelebACNN
from pfl.models.cnn import FedCLUPCNN as FedCLUPCNN
from pfl.models.cnn import SmallCNN as SmallCNN
from pfl.models.dense import MLP as MLP
from pfl.models.dense import LinearRegression as LinearRegression
from pfl.models.dense import LogisticRegression as LogisticRegression
from pfl.models.family import Family as Family
from pfl.models.lenet import LeNet5 as LeNet5
from pfl.models.losses import HalfSquaredError as HalfSquaredError
from pfl.models.losses import WeightedBinaryCrossEntropy as WeightedBinaryCrossEntropy
from pfl.models.losses import WeightedCrossEntropy as WeightedCrossEntropy
from pfl.models.norm import replace_batch_norm as replace_batch_norm
from pfl.models.penalized import PenalizedCrossEntropy as PenalizedCrossEntropy
from pfl.models.penalized import PenalizedLogisticRegression as PenalizedLogisticRegression
from pfl.models.pretrained import Pretrained as Pretrained
from pfl.models.recurrent import LSTM as LSTM
from pfl.models.recurrent import CharLSTM as CharLSTM
from pfl.models.recurrent import Sent140LSTM as Sent140LSTM
from pfl.models.resnet import ResNet18 as ResNet18
from pfl.models.unet import UNet as UNet
from pfl.models.vgg import VGG11 as VGG11
from pfl.models.vision import AlexNet as AlexNet
from pfl.models.vision import DenseNet121 as DenseNet121
from pfl.models.vision import GoogLeNet as GoogLeNet
from pfl.models.vision import Timm as Timm
from pfl.models.vision import TorchVision as TorchVision

__all__ = sorted(name for name, value in globals().items() if callable(value))

if __name__ == "models":  # the short name, in a checkout
    from pfl._short_names import share

    share(__name__)
