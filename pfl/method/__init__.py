"""Everything that a federated method imports; see docs/add-a-method.md."""

from pfl.clients import Clients, LocalSchedule
from pfl.communication import Message, dense, header, low_rank, low_rank_size, masked, sparse
from pfl.datamodules import FederatedDataModule
from pfl.datamodules.ranges import (
    BelowOne,
    Count,
    CountOrZero,
    NonNegative,
    Positive,
    PositiveShare,
    ProperShare,
    Range,
    Share,
    TwoOrMore,
)
from pfl.distributed.collectives import sum_over_processes
from pfl.engines.batch import Batch
from pfl.engines.local_step import LocalOptimizer, Step
from pfl.engines.objective import BatchSamples, Objective, Outputs
from pfl.errors import ConfigError, require
from pfl.method.algorithm import FederatedAlgorithm
from pfl.method.buffered import Buffered
from pfl.method.checks import refuse_factors
from pfl.method.exact_mean import FactorMethod, MovedWeights
from pfl.method.features import (
    class_sums,
    distance_to_means,
    features,
    linear_head,
    number_of_classes,
    require_classes,
    require_trained_features,
)
from pfl.method.labels import label_counts
from pfl.method.local_training import Network
from pfl.method.messenger import (
    Joined,
    MessengerMethod,
    both_outputs,
    divergence,
    features_before,
    head_width,
)
from pfl.method.mixtures import ModelMixtures, inner_products
from pfl.method.nested import NestedNetworks
from pfl.method.partly_personal import Part, PartlyPersonal, require_part, select_part
from pfl.method.public import PublicSamples, batch_for, public_batches
from pfl.models.adapters import LoRA, Trainable
from pfl.models.classifier import head_name
from pfl.parameters import redrawn, replace_values_in, values_in
from pfl.proximal import nuclear_norm_prox, soft_threshold
from pfl.randomness import generator
from pfl.stages.factors import ClientRanks, factor_mask

__all__ = [
    "Batch",
    "BatchSamples",
    "BelowOne",
    "Buffered",
    "ClientRanks",
    "Clients",
    "ConfigError",
    "Count",
    "CountOrZero",
    "FactorMethod",
    "FederatedAlgorithm",
    "FederatedDataModule",
    "Joined",
    "LoRA",
    "LocalOptimizer",
    "LocalSchedule",
    "Message",
    "MessengerMethod",
    "ModelMixtures",
    "MovedWeights",
    "NestedNetworks",
    "Network",
    "NonNegative",
    "Objective",
    "Outputs",
    "Part",
    "PartlyPersonal",
    "Positive",
    "PositiveShare",
    "ProperShare",
    "PublicSamples",
    "Range",
    "Share",
    "Step",
    "Trainable",
    "TwoOrMore",
    "batch_for",
    "both_outputs",
    "class_sums",
    "dense",
    "distance_to_means",
    "divergence",
    "factor_mask",
    "features",
    "features_before",
    "generator",
    "head_name",
    "head_width",
    "header",
    "inner_products",
    "label_counts",
    "linear_head",
    "low_rank",
    "low_rank_size",
    "masked",
    "nuclear_norm_prox",
    "number_of_classes",
    "public_batches",
    "redrawn",
    "refuse_factors",
    "replace_values_in",
    "require",
    "require_classes",
    "require_trained_features",
    "require_part",
    "select_part",
    "soft_threshold",
    "sparse",
    "sum_over_processes",
    "values_in",
]
