"""Federated data modules, whose samples are owned by clients, for any Lightning project."""

from datamodules.arrays import ArrayDataModule, TensorDataModule
from datamodules.base import FederatedDataModule, Loaded
from datamodules.composed import LabelDistribution, Sizes, Within
from datamodules.digits import DigitDomainsDataModule, DigitsDataModule, MNIST5kDataModule
from datamodules.drawn import Drawn
from datamodules.errors import ConfigError
from datamodules.feature_shifts import (
    ClientBlur,
    ClientColour,
    ClientInversion,
    ClientNoise,
    ClientRotation,
)
from datamodules.given import Given
from datamodules.hugging_face import HuggingFaceDataModule
from datamodules.image_folder import ImageFolderDataModule
from datamodules.label_skew import ClassesPerClient, Dirichlet, Shards
from datamodules.leaf import CelebADataModule, FEMNISTDataModule, LeafDataModule
from datamodules.leaf_text import Sent140DataModule, ShakespeareDataModule
from datamodules.loaders import ClientDataModule
from datamodules.mapped import MappedSamples
from datamodules.partition import IndexArrays, Partition, Ragged
from datamodules.partitioners import IID, LogNormal, Partitioner, Sampled
from datamodules.per_sample import ByValue, Groups, Natural
from datamodules.protocols import MatchLabels, OfficialSplit, Protocol, SharedTest, SplitOwn
from datamodules.samples import DatasetSamples, Samples, TensorSamples
from datamodules.table import TableDataModule
from datamodules.theory import LeastSquares, TheoryProblem
from datamodules.theory_logistic import AgentLogistic, HeterogeneousLogistic
from datamodules.tiny_imagenet import TinyImageNetDataModule
from datamodules.transforms import (
    Apply,
    Draws,
    HorizontalFlip,
    Normalize,
    Pipeline,
    RandomCrop,
    Transform,
)
from datamodules.vision import (
    CIFAR10DataModule,
    CIFAR100DataModule,
    EMNISTDataModule,
    FashionMNISTDataModule,
    MNISTDataModule,
    SVHNDataModule,
)

__all__ = [
    "IID",
    "AgentLogistic",
    "Apply",
    "ArrayDataModule",
    "ByValue",
    "CIFAR10DataModule",
    "CIFAR100DataModule",
    "CelebADataModule",
    "ClassesPerClient",
    "ClientBlur",
    "ClientColour",
    "ClientDataModule",
    "ClientInversion",
    "ClientNoise",
    "ClientRotation",
    "ConfigError",
    "DatasetSamples",
    "DigitDomainsDataModule",
    "DigitsDataModule",
    "Dirichlet",
    "Drawn",
    "Draws",
    "EMNISTDataModule",
    "FEMNISTDataModule",
    "FashionMNISTDataModule",
    "FederatedDataModule",
    "Given",
    "Groups",
    "HeterogeneousLogistic",
    "HorizontalFlip",
    "HuggingFaceDataModule",
    "ImageFolderDataModule",
    "IndexArrays",
    "LabelDistribution",
    "LeafDataModule",
    "LeastSquares",
    "Loaded",
    "LogNormal",
    "MNIST5kDataModule",
    "MNISTDataModule",
    "MappedSamples",
    "MatchLabels",
    "Natural",
    "Normalize",
    "OfficialSplit",
    "Partition",
    "Partitioner",
    "Pipeline",
    "Protocol",
    "Ragged",
    "RandomCrop",
    "SVHNDataModule",
    "Sampled",
    "Samples",
    "Sent140DataModule",
    "ShakespeareDataModule",
    "Shards",
    "SharedTest",
    "Sizes",
    "SplitOwn",
    "TableDataModule",
    "TensorDataModule",
    "TensorSamples",
    "TheoryProblem",
    "TinyImageNetDataModule",
    "Transform",
    "Within",
]
