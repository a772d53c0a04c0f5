"""What the code of FedDF's authors computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.agreement.case import Case
from benchmarks.agreement.ours import public, run
from benchmarks.agreement.problem import DISTILLED, PUBLIC_PICKS, Iterates
from pfl.algorithms import FedDF


class LossesFedDF(FedDF):
    """The mean of the divergences from each client's probabilities, in place of one divergence.

    Its slope is that of the divergence from the mean of the probabilities, whose logarithms are
    scores.
    """

    def _mean_scores(self, received: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        models = received["models"]
        shares = [self.oracle.predict(w, inputs).softmax(1) for w in models]
        return torch.stack(shares).mean(0).log()


def distilled(kind: type[FedDF]) -> Iterates:
    """The iterates of FedDF with plain means, the scheme of the authors' code."""
    settings: dict[str, Any] = {
        "weighting": "uniform",
        "server_batch_size": PUBLIC_PICKS,
        **DISTILLED,
    }
    return run(kind, public=public(), public_samples=PUBLIC_PICKS, **settings)


CASES = [
    Case(
        "FedDF, `weighting: uniform`, with `avg_logits` of their scripts",
        "FedDF",
        "pcode/aggregation/noise_knowledge_transfer.py:211-345, 472-500, fedavg.py:10-39",
        ("w",),
        lambda: distilled(FedDF),
    ),
    Case(
        "FedDF, `weighting: uniform`, their default",
        "FedDF, losses",
        "pcode/aggregation/noise_knowledge_transfer.py:141-143, 454-471",
        ("w",),
        lambda: distilled(FedDF),
        "`avg_losses`: the mean of the divergences from each client, which draws to the mean of "
        "the probabilities, in place of the divergence from the mean scores.",
        lambda: distilled(LossesFedDF),
    ),
]
