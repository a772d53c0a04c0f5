"""What FLSim's asynchronous servers compute."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.agreement.case import Case
from benchmarks.agreement.cases.appfl import ASYNC, TIMED
from benchmarks.agreement.ours import run
from pfl.algorithms import FedAsync, FedBuff

CASES = [
    Case(
        "FedBuff, `buffer_size: 2`, against `lr: 0.5, avg_staleness: 0`",
        "FedBuff",
        "async_aggregators.py:378-436",
        ("w",),
        partial(run, FedBuff, buffer_size=2, **TIMED),
    ),
    Case(
        "FedBuff, `buffer_size: 2`, against `lr: 1`",
        "FedBuff, sum",
        "async_aggregators.py:421-436, async_staleness_weights.py:42",
        ("w",),
        partial(run, FedBuff, buffer_size=2, **TIMED),
        "The buffer is a sum and no mean, and s(τ) is divided by s(1), so that the server's step "
        "is longer by K s(0) / s(1): here by 2 √2.",
        partial(
            run,
            FedBuff,
            buffer_size=2,
            server_optimizer=partial(torch.optim.SGD, lr=2 * 2**0.5),
            **TIMED,
        ),
    ),
    Case(
        "FedAsync, ρ = 0, against `lr: 0.6, avg_staleness: 0`",
        "FedAsync",
        "async_aggregators.py:162-201, 212-233",
        ("w",),
        partial(run, FedAsync, **ASYNC),
    ),
]
