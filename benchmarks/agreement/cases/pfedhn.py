"""What the code of pFedHN's authors computes."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.agreement.case import Case
from benchmarks.agreement.ours import run
from benchmarks.agreement.problem import ONE_EACH, RATE, hypernetwork
from pfl.algorithms import pFedHN


class Started(pFedHN):
    """The first values of the hypernetwork are given instead of drawn."""

    def begin_round(self, round_index: int) -> None:
        if round_index == 0:
            given = hypernetwork(len(self.hypernetwork))
            self.hypernetwork.copy_(torch.from_numpy(given))


CASES = [
    Case(
        "pFedHN, SGD with momentum 0.9",
        "pFedHN",
        "experiments/pfedhn/trainer.py:120-181",
        ("v",),
        partial(
            run,
            Started,
            cohorts=ONE_EACH,
            server_lr=RATE,
            server_weight_decay=0.01,
            embedding=3,
            width=6,
            hidden_layers=2,
            local_steps=4,
            weight_decay=0.02,
            optimizer=partial(torch.optim.SGD, momentum=0.9),
        ),
    ),
]
