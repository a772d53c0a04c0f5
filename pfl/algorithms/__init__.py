"""Federated methods, one file each."""

from pfl.algorithms.apfl import APFL
from pfl.algorithms.cfl import CFL
from pfl.algorithms.ditto import Ditto
from pfl.algorithms.fedacs import FedACS
from pfl.algorithms.fedagg import FedAgg
from pfl.algorithms.fedala import FedALA
from pfl.algorithms.fedamp import FedAMP, HeurFedAMP
from pfl.algorithms.fedas import FedAS
from pfl.algorithms.fedavg import FedAvg
from pfl.algorithms.fedbabu import FedBABU
from pfl.algorithms.fedbn import FedBN
from pfl.algorithms.fedclup import FedCLUP
from pfl.algorithms.feddbe import FedDBE
from pfl.algorithms.feddpa import FedDPA
from pfl.algorithms.feddyn import FedDyn
from pfl.algorithms.fedex_lora import FedExLoRA
from pfl.algorithms.fedgh import FedGH
from pfl.algorithms.fedlc import FedLC
from pfl.algorithms.fednova import FedNova
from pfl.algorithms.fedntd import FedNTD
from pfl.algorithms.fedopt import FedAdagrad, FedAdam, FedYogi
from pfl.algorithms.fedpac import FedPAC
from pfl.algorithms.fedpd import FedPD
from pfl.algorithms.fedper import FedPer
from pfl.algorithms.fedproto import FedProto
from pfl.algorithms.fedprox import FedProx
from pfl.algorithms.fedrep import FedRep
from pfl.algorithms.fedrod import FedRoD
from pfl.algorithms.fedsa_lora import FedSALoRA
from pfl.algorithms.fedslr import FedSLR
from pfl.algorithms.fedspa import FedSpa
from pfl.algorithms.flex_lora import FlexLoRA
from pfl.algorithms.floco import Floco
from pfl.algorithms.flora import FLoRA
from pfl.algorithms.global_train import GlobalTrain
from pfl.algorithms.gpgd import GPGD
from pfl.algorithms.ifca import IFCA
from pfl.algorithms.l2gd import L2GD
from pfl.algorithms.lg_fedavg import LGFedAvg
from pfl.algorithms.local_train import LocalTrain
from pfl.algorithms.lpgd import LPGD
from pfl.algorithms.moon import MOON
from pfl.algorithms.mr_mtl import MRMTL
from pfl.algorithms.per_fedavg import PerFedAvg
from pfl.algorithms.pfedhn import pFedHN
from pfl.algorithms.pfedme import pFedMe
from pfl.algorithms.rolora import RoLoRA
from pfl.algorithms.scaffold import SCAFFOLD
from pfl.method import FederatedAlgorithm

__all__ = [
    "APFL",
    "CFL",
    "GPGD",
    "IFCA",
    "L2GD",
    "LPGD",
    "MOON",
    "MRMTL",
    "SCAFFOLD",
    "Ditto",
    "FLoRA",
    "FedACS",
    "FedALA",
    "FedAMP",
    "FedAS",
    "FedAdagrad",
    "FedAdam",
    "FedAgg",
    "FedAvg",
    "FedBABU",
    "FedBN",
    "FedCLUP",
    "FedDBE",
    "FedDPA",
    "FedDyn",
    "FedExLoRA",
    "FedGH",
    "FedLC",
    "FedNTD",
    "FedNova",
    "FedPAC",
    "FedPD",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedRep",
    "FedRoD",
    "FedSALoRA",
    "FedSLR",
    "FedSpa",
    "FedYogi",
    "FederatedAlgorithm",
    "FlexLoRA",
    "Floco",
    "GlobalTrain",
    "HeurFedAMP",
    "LGFedAvg",
    "LocalTrain",
    "PerFedAvg",
    "RoLoRA",
    "pFedHN",
    "pFedMe",
]
