"""Federated data modules, whose samples are owned by clients, for any Lightning project."""

from datamodules.arrays import ArrayDataModule, TensorDataModule
from datamodules.base import FederatedDataModule, Loaded
from datamodules.digits import DigitsDataModule
from datamodules.drawn import Drawn
from datamodules.errors import ConfigError
from datamodules.label_skew import ClassesPerClient, Dirichlet, Shards
from datamodules.loaders import ClientDataModule
from datamodules.partition import IndexArrays, Partition, Ragged
from datamodules.partitioners import IID, LogNormal, Natural, Partitioner, Sampled
from datamodules.protocols import MatchLabels, Protocol, SharedTest, SplitOwn
from datamodules.samples import DatasetSamples, Samples, TensorSamples
from datamodules.theory import LeastSquares, TheoryProblem
from datamodules.theory_logistic import AgentLogistic, HeterogeneousLogistic
from datamodules.tiny_imagenet import TinyImageNetDataModule
from datamodules.vision import (
    CIFAR10DataModule,
    CIFAR100DataModule,
    EMNISTDataModule,
    FashionMNISTDataModule,
    MNISTDataModule,
)

__all__ = [
    "IID",
    "AgentLogistic",
    "ArrayDataModule",
    "CIFAR10DataModule",
    "CIFAR100DataModule",
    "ClassesPerClient",
    "ClientDataModule",
    "ConfigError",
    "DatasetSamples",
    "DigitsDataModule",
    "Dirichlet",
    "Drawn",
    "EMNISTDataModule",
    "FashionMNISTDataModule",
    "FederatedDataModule",
    "HeterogeneousLogistic",
    "IndexArrays",
    "LeastSquares",
    "Loaded",
    "LogNormal",
    "MNISTDataModule",
    "MatchLabels",
    "Natural",
    "Partition",
    "Partitioner",
    "Protocol",
    "Ragged",
    "Sampled",
    "Samples",
    "Shards",
    "SharedTest",
    "SplitOwn",
    "TensorDataModule",
    "TensorSamples",
    "TheoryProblem",
    "TinyImageNetDataModule",
]
