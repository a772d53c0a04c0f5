"""What the code of pFedMe's authors computes."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.agreement.case import Case
from benchmarks.agreement.ours import run
from benchmarks.agreement.problem import RATE
from benchmarks.agreement.readings import authors, common
from pfl.algorithms import FedAvg, PerFedAvg, pFedMe

MOREAU: dict[str, Any] = dict(
    penalty=2.0,
    personal_steps=3,
    personal_lr=0.1,
    lr=RATE,
    server_mixture=0.8,
    local_steps=4,
)
META: dict[str, Any] = dict(alpha=RATE, lr=0.3, variant="FO", batch_size=None)

CASES = [
    Case(
        "pFedMe",
        "pFedMe",
        "users/userpFedMe.py:44-54, optimizers/fedoptimizer.py:64-65",
        ("w", "v"),
        partial(run, pFedMe, **MOREAU),
        "θ_i starts where the last local step of the round left it instead of at w_i, its "
        "gradient has 0.001 θ_i more (64), and the mean is weighted by samples. The stored θ_i "
        "are the parameters of the client's network themselves (65), which the line after the "
        "local steps (userpFedMe.py:58) overwrites by w_i, so that w_i is what is scored as "
        "personalized.",
        partial(run, authors.LocalpFedMe, **MOREAU),
    ),
    Case("FedAvg", "FedAvg", "users/useravg.py:32", ("w",), partial(run, FedAvg, local_steps=4)),
    Case(
        "PerFedAvg, first order",
        "PerFedAvg",
        "servers/serverbase.py:66",
        ("w",),
        partial(run, PerFedAvg, **META),
        "The mean is weighted by samples. With equal sizes both agree.",
        partial(run, common.by_samples(PerFedAvg), **META),
    ),
]
