"""What the code of FedRep's authors computes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.agreement.case import Case
from benchmarks.agreement.ours import run
from benchmarks.agreement.problem import ALL, HEAD_EPOCHS, Iterates
from benchmarks.agreement.readings import authors, common
from pfl.algorithms import APFL, FedPer, FedRep
from pfl.method import FederatedAlgorithm

uniform = partial(run, weighting="uniform")
half = partial(uniform, optimizer=partial(torch.optim.SGD, momentum=0.5))
HEADS = (
    "The weights, and not the biases, decay by 0.0001 (models/Update.py:561). The heads are "
    "averaged, too, and a client that takes part for the first time begins with that mean "
    "(main_fedrep.py:114, 188): its entry is the server's own tensor, not a copy."
)


def changed(kind: Any) -> Any:
    return authors.with_decaying_weights(common.with_averaged_heads(kind))


def first_round(kind: type[FederatedAlgorithm]) -> Iterates:
    iterates = run(kind, cohorts=ALL, batch_size=None, alpha=0.6)
    return {"client v": iterates["client v"][:1]}


CASES = [
    Case(
        "FedRep, `weighting: uniform`, SGD with momentum 0.5",
        "FedRep",
        "models/Update.py:559-615, main_fedrep.py",
        ("v",),
        partial(half, FedRep, head_epochs=HEAD_EPOCHS),
        HEADS,
        partial(uniform, changed(FedRep), head_epochs=HEAD_EPOCHS),
    ),
    Case(
        "FedPer, `weighting: uniform`, SGD with momentum 0.5",
        "FedPer",
        "models/Update.py:559, main_fedrep.py",
        ("v",),
        partial(half, FedPer),
        HEADS,
        partial(uniform, changed(FedPer)),
    ),
    Case(
        "APFL, α fixed, a client's first round",
        "APFL",
        "models/Update.py:397",
        ("client v",),
        partial(first_round, APFL),
        "The mixture is α v_i + α w_i. It has the w_i before the step, and one optimizer with "
        "momentum takes the steps of w_i and those of v_i. The script itself ends with a "
        "NameError (main_apfl.py:86), so that only the client's part was run.",
        partial(first_round, authors.DoubleAlphaAPFL),
    ),
]
