"""What the code of pFedHN's authors computes."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from benchmarks.agreement.case import Case
from benchmarks.agreement.ours import run
from benchmarks.agreement.problem import ONE_EACH, RATE, hypernetwork
from pfl.algorithms import pFedHN


class Started(pFedHN):
    """The first values of the hypernetwork are given instead of drawn."""

    def begin_round(self, round_index: int) -> None:
        if round_index == 0:
            count = sum(values.numel() for values in self.hypernetwork.parameters())
            given = torch.from_numpy(hypernetwork(count))
            nn.utils.vector_to_parameters(given, self.hypernetwork.parameters())


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
