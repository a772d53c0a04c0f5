"""Federated data modules, whose samples are owned by clients, for any PyTorch or Lightning project.

Names are imported when they are first used: a partition rule needs NumPy only, while everything
else needs PyTorch and Lightning.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pfl.datamodules.base import ClientDataModule as ClientDataModule
    from pfl.datamodules.base import FederatedDataModule as FederatedDataModule
    from pfl.datamodules.errors import ConfigError as ConfigError
    from pfl.datamodules.partitions.index_arrays import IndexArrays as IndexArrays
    from pfl.datamodules.partitions.index_arrays import Ragged as Ragged
    from pfl.datamodules.partitions.lazy import Drawn as Drawn
    from pfl.datamodules.partitions.partition import Partition as Partition
    from pfl.datamodules.protocols.protocol import MatchLabels as MatchLabels
    from pfl.datamodules.protocols.protocol import OfficialSplit as OfficialSplit
    from pfl.datamodules.protocols.protocol import Protocol as Protocol
    from pfl.datamodules.protocols.protocol import SharedTest as SharedTest
    from pfl.datamodules.protocols.protocol import SplitOwn as SplitOwn
    from pfl.datamodules.rules.composition import LabelDistribution as LabelDistribution
    from pfl.datamodules.rules.composition import Sizes as Sizes
    from pfl.datamodules.rules.composition import Within as Within
    from pfl.datamodules.rules.conventions import LEAF as LEAF
    from pfl.datamodules.rules.conventions import FedSLRDirichlet as FedSLRDirichlet
    from pfl.datamodules.rules.conventions import FLBenchClasses as FLBenchClasses
    from pfl.datamodules.rules.conventions import FlukeClasses as FlukeClasses
    from pfl.datamodules.rules.conventions import FlukeDirichlet as FlukeDirichlet
    from pfl.datamodules.rules.conventions import FlukeQuantity as FlukeQuantity
    from pfl.datamodules.rules.conventions import PFLlibDirichlet as PFLlibDirichlet
    from pfl.datamodules.rules.conventions import PFLlibPathological as PFLlibPathological
    from pfl.datamodules.rules.flower_bridge import FlowerRule as FlowerRule
    from pfl.datamodules.rules.flower_bridge import flower_partitioner as flower_partitioner
    from pfl.datamodules.rules.from_file import Given as Given
    from pfl.datamodules.rules.label_skew import ClassesPerClient as ClassesPerClient
    from pfl.datamodules.rules.label_skew import Dirichlet as Dirichlet
    from pfl.datamodules.rules.label_skew import Shards as Shards
    from pfl.datamodules.rules.partitioner import IID as IID
    from pfl.datamodules.rules.partitioner import LogNormal as LogNormal
    from pfl.datamodules.rules.partitioner import Partitioner as Partitioner
    from pfl.datamodules.rules.partitioner import Sampled as Sampled
    from pfl.datamodules.rules.sample_values import ByValue as ByValue
    from pfl.datamodules.rules.sample_values import Groups as Groups
    from pfl.datamodules.rules.sample_values import Natural as Natural
    from pfl.datamodules.samples.loaded import Loaded as Loaded
    from pfl.datamodules.samples.loaded import NewSamples as NewSamples
    from pfl.datamodules.samples.memory_map import MappedSamples as MappedSamples
    from pfl.datamodules.samples.samples import DatasetSamples as DatasetSamples
    from pfl.datamodules.samples.samples import Samples as Samples
    from pfl.datamodules.samples.samples import TensorSamples as TensorSamples
    from pfl.datamodules.sources.arrays import ArrayDataModule as ArrayDataModule
    from pfl.datamodules.sources.arrays import TensorDataModule as TensorDataModule
    from pfl.datamodules.sources.digits import DigitDomainsDataModule as DigitDomainsDataModule
    from pfl.datamodules.sources.digits import DigitsDataModule as DigitsDataModule
    from pfl.datamodules.sources.digits import MNIST5kDataModule as MNIST5kDataModule
    from pfl.datamodules.sources.hugging_face import HuggingFaceDataModule as HuggingFaceDataModule
    from pfl.datamodules.sources.image_folder import ImageFolderDataModule as ImageFolderDataModule
    from pfl.datamodules.sources.leaf import CelebADataModule as CelebADataModule
    from pfl.datamodules.sources.leaf import FEMNISTDataModule as FEMNISTDataModule
    from pfl.datamodules.sources.leaf import LeafDataModule as LeafDataModule
    from pfl.datamodules.sources.leaf_text import Sent140DataModule as Sent140DataModule
    from pfl.datamodules.sources.leaf_text import ShakespeareDataModule as ShakespeareDataModule
    from pfl.datamodules.sources.rdatasets import RDatasetsDataModule as RDatasetsDataModule
    from pfl.datamodules.sources.table import TableDataModule as TableDataModule
    from pfl.datamodules.sources.text import InstructionDataModule as InstructionDataModule
    from pfl.datamodules.sources.text import MovieLensDataModule as MovieLensDataModule
    from pfl.datamodules.sources.vision import CIFAR10DataModule as CIFAR10DataModule
    from pfl.datamodules.sources.vision import CIFAR100DataModule as CIFAR100DataModule
    from pfl.datamodules.sources.vision import EMNISTDataModule as EMNISTDataModule
    from pfl.datamodules.sources.vision import FashionMNISTDataModule as FashionMNISTDataModule
    from pfl.datamodules.sources.vision import MNISTDataModule as MNISTDataModule
    from pfl.datamodules.sources.vision import SVHNDataModule as SVHNDataModule
    from pfl.datamodules.sources.vision import TinyImageNetDataModule as TinyImageNetDataModule
    from pfl.datamodules.synthetic.logistic import AgentLogistic as AgentLogistic
    from pfl.datamodules.synthetic.logistic import HeterogeneousLogistic as HeterogeneousLogistic
    from pfl.datamodules.synthetic.problem import LeastSquares as LeastSquares
    from pfl.datamodules.synthetic.problem import TheoryProblem as TheoryProblem
    from pfl.datamodules.transforms.feature_shifts import ClientBlur as ClientBlur
    from pfl.datamodules.transforms.feature_shifts import ClientColour as ClientColour
    from pfl.datamodules.transforms.feature_shifts import ClientInversion as ClientInversion
    from pfl.datamodules.transforms.feature_shifts import ClientNoise as ClientNoise
    from pfl.datamodules.transforms.feature_shifts import ClientRotation as ClientRotation
    from pfl.datamodules.transforms.transform import Apply as Apply
    from pfl.datamodules.transforms.transform import Draws as Draws
    from pfl.datamodules.transforms.transform import HorizontalFlip as HorizontalFlip
    from pfl.datamodules.transforms.transform import Normalize as Normalize
    from pfl.datamodules.transforms.transform import Pipeline as Pipeline
    from pfl.datamodules.transforms.transform import RandomCrop as RandomCrop
    from pfl.datamodules.transforms.transform import TimeFirst as TimeFirst
    from pfl.datamodules.transforms.transform import Transform as Transform

_NAMES = {  # the public names by the module that defines them
    "base": ("ClientDataModule", "FederatedDataModule"),
    "errors": ("ConfigError",),
    "partitions.index_arrays": ("IndexArrays", "Ragged"),
    "partitions.lazy": ("Drawn",),
    "partitions.partition": ("Partition",),
    "protocols.protocol": ("MatchLabels", "OfficialSplit", "Protocol", "SharedTest", "SplitOwn"),
    "rules.composition": ("LabelDistribution", "Sizes", "Within"),
    "rules.conventions": (
        "LEAF",
        "FedSLRDirichlet",
        "FLBenchClasses",
        "FlukeClasses",
        "FlukeDirichlet",
        "FlukeQuantity",
        "PFLlibDirichlet",
        "PFLlibPathological",
    ),
    "rules.flower_bridge": ("FlowerRule", "flower_partitioner"),
    "rules.from_file": ("Given",),
    "rules.label_skew": ("ClassesPerClient", "Dirichlet", "Shards"),
    "rules.partitioner": ("IID", "LogNormal", "Partitioner", "Sampled"),
    "rules.sample_values": ("ByValue", "Groups", "Natural"),
    "samples.loaded": ("Loaded", "NewSamples"),
    "samples.memory_map": ("MappedSamples",),
    "samples.samples": ("DatasetSamples", "Samples", "TensorSamples"),
    "sources.arrays": ("ArrayDataModule", "TensorDataModule"),
    "sources.digits": ("DigitDomainsDataModule", "DigitsDataModule", "MNIST5kDataModule"),
    "sources.hugging_face": ("HuggingFaceDataModule",),
    "sources.image_folder": ("ImageFolderDataModule",),
    "sources.leaf": ("CelebADataModule", "FEMNISTDataModule", "LeafDataModule"),
    "sources.leaf_text": ("Sent140DataModule", "ShakespeareDataModule"),
    "sources.rdatasets": ("RDatasetsDataModule",),
    "sources.table": ("TableDataModule",),
    "sources.text": ("InstructionDataModule", "MovieLensDataModule"),
    "sources.vision": (
        "CIFAR10DataModule",
        "CIFAR100DataModule",
        "EMNISTDataModule",
        "FashionMNISTDataModule",
        "MNISTDataModule",
        "SVHNDataModule",
        "TinyImageNetDataModule",
    ),
    "synthetic.logistic": ("AgentLogistic", "HeterogeneousLogistic"),
    "synthetic.problem": ("LeastSquares", "TheoryProblem"),
    "transforms.feature_shifts": (
        "ClientBlur",
        "ClientColour",
        "ClientInversion",
        "ClientNoise",
        "ClientRotation",
    ),
    "transforms.transform": (
        "Apply",
        "Draws",
        "HorizontalFlip",
        "Normalize",
        "Pipeline",
        "RandomCrop",
        "TimeFirst",
        "Transform",
    ),
}
_NUMPY_ONLY = ("errors", "partitions", "protocols", "rules")
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Imports a public name; with the first one that needs PyTorch, all others.

    Command lines find a class by its short name if it has been imported.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _MODULES[name].startswith(_NUMPY_ONLY):
        needed = [name]
    else:
        needed = __all__
    for public in needed:
        module = import_module(f"pfl.datamodules.{_MODULES[public]}")
        globals()[public] = getattr(module, public)
    return globals()[name]


def __dir__() -> list[str]:
    """Returns the public names, of which some may not have been imported yet."""
    return sorted({*globals(), *__all__})


if __name__ == "datamodules":  # the short name, in a checkout
    from pfl._short_names import share

    share(__name__)
