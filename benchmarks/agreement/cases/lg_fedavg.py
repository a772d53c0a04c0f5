"""What the code of LG-FedAvg's authors computes."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.agreement.case import Case
from benchmarks.agreement.ours import run
from pfl.algorithms import LGFedAvg

CASES = [
    Case(
        "LGFedAvg, `weighting: uniform`, SGD with momentum 0.5",
        "LGFedAvg",
        "main_lg.py:91-119, models/Update.py:36",
        ("v",),
        partial(
            run,
            LGFedAvg,
            weighting="uniform",
            optimizer=partial(torch.optim.SGD, momentum=0.5),
        ),
    ),
]
