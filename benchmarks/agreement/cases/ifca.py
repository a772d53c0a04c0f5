"""What the code of IFCA's authors computes."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.agreement.case import Case
from benchmarks.agreement.ours import run
from benchmarks.agreement.problem import ALL, arrays, starts
from pfl.algorithms import IFCA


class Started(IFCA):
    """The first models are given instead of drawn."""

    def begin_round(self, round_index: int) -> None:
        if round_index == 0:
            given = starts(arrays()[2], self.clusters)
            self.models.copy_(torch.from_numpy(given).ravel())


CASES = [
    Case(
        "IFCA, `clusters: 3`, full batches",
        "IFCA",
        "mnist/train_cluster_mnist.py:299-352, 382-402",
        ("server models", "v"),
        partial(run, Started, clusters=3, cohorts=ALL, batch_size=None),
    ),
]
