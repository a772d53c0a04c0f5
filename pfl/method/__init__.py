"""What a federated method is made of, and everything that one needs to import."""

from pfl.clients import Clients
from pfl.communication import Message, dense, low_rank, low_rank_size, masked, sparse
from pfl.distributed.collectives import sum_over_processes
from pfl.engines.batch import Batch
from pfl.engines.local_step import Step
from pfl.errors import ConfigError, require
from pfl.method.algorithm import FederatedAlgorithm
from pfl.method.module import Network
from pfl.proximal import nuclear_norm_prox, soft_threshold
from pfl.randomness import generator

__all__ = [
    "Batch",
    "Clients",
    "ConfigError",
    "FederatedAlgorithm",
    "Message",
    "Network",
    "Step",
    "dense",
    "generator",
    "low_rank",
    "low_rank_size",
    "masked",
    "nuclear_norm_prox",
    "require",
    "soft_threshold",
    "sparse",
    "sum_over_processes",
]
