"""Federated methods, one file each."""

from pfl.algorithms.fedacs import FedACS
from pfl.algorithms.fedagg import FedAgg
from pfl.algorithms.fedavg import FedAvg
from pfl.algorithms.fedclup import FedCLUP
from pfl.algorithms.fedpd import FedPD
from pfl.algorithms.fedper import FedPer
from pfl.algorithms.fedprox import FedProx
from pfl.algorithms.fedrep import FedRep
from pfl.algorithms.fedslr import FedSLR
from pfl.algorithms.gpgd import GPGD
from pfl.algorithms.local_train import LocalTrain
from pfl.algorithms.lpgd import LPGD
from pfl.algorithms.scaffold import SCAFFOLD
from pfl.method import FederatedAlgorithm

__all__ = [
    "GPGD",
    "LPGD",
    "SCAFFOLD",
    "FedACS",
    "FedAgg",
    "FedAvg",
    "FedCLUP",
    "FedPD",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedSLR",
    "FederatedAlgorithm",
    "LocalTrain",
]
