"""Federated data modules, whose samples are owned by clients, for any Lightning project.

Names are imported when they are first used: a partition rule needs NumPy only, while everything
else needs PyTorch and Lightning.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datamodules.arrays import ArrayDataModule, TensorDataModule
    from datamodules.base import FederatedDataModule, Loaded
    from datamodules.composed import LabelDistribution, Sizes, Within
    from datamodules.conventions import (
        LEAF,
        FedSLRDirichlet,
        FLBenchClasses,
        PFLlibDirichlet,
        PFLlibPathological,
    )
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
    from datamodules.flower import FlowerDirichlet, FlowerPathological, FlowerShards
    from datamodules.flower_bridge import FlowerRule, flower_partitioner
    from datamodules.fluke import FlukeClasses, FlukeDirichlet, FlukeQuantity
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

_NAMES = {  # by module, for `__getattr__`; the imports above are for type checkers only
    "arrays": "ArrayDataModule TensorDataModule",
    "base": "FederatedDataModule Loaded",
    "composed": "LabelDistribution Sizes Within",
    "conventions": "LEAF FedSLRDirichlet FLBenchClasses PFLlibDirichlet PFLlibPathological",
    "digits": "DigitDomainsDataModule DigitsDataModule MNIST5kDataModule",
    "drawn": "Drawn",
    "errors": "ConfigError",
    "feature_shifts": "ClientBlur ClientColour ClientInversion ClientNoise ClientRotation",
    "flower": "FlowerDirichlet FlowerPathological FlowerShards",
    "flower_bridge": "FlowerRule flower_partitioner",
    "fluke": "FlukeClasses FlukeDirichlet FlukeQuantity",
    "given": "Given",
    "hugging_face": "HuggingFaceDataModule",
    "image_folder": "ImageFolderDataModule",
    "label_skew": "ClassesPerClient Dirichlet Shards",
    "leaf": "CelebADataModule FEMNISTDataModule LeafDataModule",
    "leaf_text": "Sent140DataModule ShakespeareDataModule",
    "loaders": "ClientDataModule",
    "mapped": "MappedSamples",
    "partition": "IndexArrays Partition Ragged",
    "partitioners": "IID LogNormal Partitioner Sampled",
    "per_sample": "ByValue Groups Natural",
    "protocols": "MatchLabels OfficialSplit Protocol SharedTest SplitOwn",
    "samples": "DatasetSamples Samples TensorSamples",
    "table": "TableDataModule",
    "theory": "LeastSquares TheoryProblem",
    "theory_logistic": "AgentLogistic HeterogeneousLogistic",
    "tiny_imagenet": "TinyImageNetDataModule",
    "transforms": "Apply Draws HorizontalFlip Normalize Pipeline RandomCrop Transform",
    "vision": "CIFAR10DataModule CIFAR100DataModule EMNISTDataModule FashionMNISTDataModule "
    "MNISTDataModule SVHNDataModule",
}
_NUMPY_ONLY = {
    "composed",
    "conventions",
    "drawn",
    "errors",
    "flower",
    "flower_bridge",
    "fluke",
    "given",
    "label_skew",
    "partition",
    "partitioners",
    "per_sample",
    "protocols",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "IID",
    "LEAF",
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
    "FLBenchClasses",
    "FashionMNISTDataModule",
    "FedSLRDirichlet",
    "FederatedDataModule",
    "FlowerDirichlet",
    "FlowerPathological",
    "FlowerRule",
    "FlowerShards",
    "FlukeClasses",
    "FlukeDirichlet",
    "FlukeQuantity",
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
    "PFLlibDirichlet",
    "PFLlibPathological",
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
    "flower_partitioner",
]


def __getattr__(name: str) -> Any:
    """Imports a public name; with the first one that needs PyTorch, all others.

    Command lines find a class by its short name if it has been imported.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    light = _MODULES[name] in _NUMPY_ONLY
    for public in [name] if light else __all__:
        module = import_module(f"datamodules.{_MODULES[public]}")
        globals()[public] = getattr(module, public)
    return globals()[name]


def __dir__() -> list[str]:
    """Returns the public names, of which some may not have been imported yet."""
    return sorted({*globals(), *__all__})
