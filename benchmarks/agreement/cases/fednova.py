"""What the code of FedNova's authors computes."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.agreement.case import Case
from benchmarks.agreement.ours import run
from benchmarks.agreement.problem import ALL
from benchmarks.agreement.readings.authors import LongFedNova
from pfl.algorithms import FedNova

fednova = partial(run, cohorts=ALL)
MOMENTUM = partial(torch.optim.SGD, lr=1.0, momentum=0.6)

CASES = [
    Case(
        "FedNova",
        "FedNova",
        "distoptim/FedNova.py:141-162, 168-203",
        ("w",),
        partial(fednova, FedNova),
    ),
    Case(
        "FedNova, `server_optimizer` with momentum 0.6",
        "server momentum",
        "distoptim/FedNova.py:194-202",
        ("w",),
        partial(fednova, FedNova, server_optimizer=MOMENTUM),
    ),
    Case(
        "FedNova, `proximal_weight: 0.5`",
        "proximal",
        "distoptim/FedNova.py:172-173",
        ("w",),
        partial(fednova, FedNova, proximal_weight=0.5),
        "The length of the server's step is Σ p_i τ_i instead of Σ p_i ‖a_i‖.",
        partial(fednova, LongFedNova, proximal_weight=0.5),
    ),
]
