"""What the code of FedBABU's authors computes."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.agreement.case import Case
from benchmarks.agreement.ours import run
from pfl.algorithms import FedBABU

CASES = [
    Case(
        "FedBABU, training, `weighting: uniform`, SGD with momentum 0.9, weight decay",
        "FedBABU",
        "main_fed.py:77-124",
        ("w",),
        partial(
            run,
            FedBABU,
            weighting="uniform",
            optimizer=partial(torch.optim.SGD, momentum=0.9),
            weight_decay=0.001,
        ),
    ),
]
