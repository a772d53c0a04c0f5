"""What the code of FedSLR's authors computes."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.agreement.case import Case
from benchmarks.agreement.ours import run
from benchmarks.agreement.problem import BODY
from benchmarks.agreement.readings import authors
from pfl.algorithms import APFL, SCAFFOLD, Ditto, FedAvg, FedPer, FedRep, FedSLR, LGFedAvg

full = partial(run, batch_size=None)
SLR: dict[str, Any] = dict(
    proximal_step=1 / 0.4, low_rank_penalty=0.02, sparse_penalty=0.01, weight_decay=1e-3
)
DITTO: dict[str, Any] = dict(penalty=0.5, personal_epochs=1, weighting="uniform")

CASES = [
    Case(
        "FedSLR, global model",
        "FedSLR",
        "utils_methods.py:484",
        ("w",),
        partial(full, FedSLR, **SLR),
    ),
    Case(
        "FedSLR, w + p_i",
        "FedSLR",
        "mask_component_bi.py:27",
        ("v",),
        partial(full, FedSLR, **SLR),
        "p_i begins as a copy of the initial weights, so that the first personalized models are "
        "twice these. Begun at 0 (next row), both agree.",
    ),
    Case(
        "FedSLR, p_i from 0",
        "FedSLR, p from zero",
        "utils_methods.py:484",
        ("w", "v"),
        partial(full, FedSLR, **SLR),
    ),
    Case(
        "FedAvg, `weighting: uniform`",
        "FedAvg",
        "utils_methods.py:89",
        ("w",),
        partial(full, FedAvg, weighting="uniform"),
    ),
    Case(
        "Ditto, `weighting: uniform`",
        "FedAvg",
        "utils_general.py:332, 377",
        ("w", "v"),
        partial(full, Ditto, **DITTO),
        "v_i takes a step of its loss first and one towards w after it, and decays by 0.001 "
        "whatever the weight decay is (332).",
        partial(full, authors.SteppedDitto, **DITTO),
    ),
    Case(
        "APFL, α fixed",
        "APFL",
        "utils_methods.py:772",
        ("v",),
        partial(full, APFL, alpha=0.6),
    ),
    Case(
        "FedRep",
        "FedRep",
        "utils_methods.py:186, 203",
        ("v",),
        partial(full, FedRep, head_epochs=1),
        "Body and head are trained together, as in FedPer (186). Scored are the new heads on the "
        "body that the round began with (203). The mean is not weighted.",
        lambda: authors.scored_before_the_mean(
            full(FedPer, weighting="uniform"), slice(None, BODY)
        ),
    ),
    Case(
        "LGFedAvg, `weighting: uniform`",
        "LGFedAvg",
        "utils_methods.py:290",
        ("v",),
        partial(full, LGFedAvg, weighting="uniform"),
        "Scored are the new bodies with the head that the round began with. Training agrees.",
        lambda: authors.scored_before_the_mean(
            full(LGFedAvg, weighting="uniform"), slice(BODY, None)
        ),
    ),
    Case(
        "SCAFFOLD",
        "SCAFFOLD",
        "utils_methods.py:375-391",
        ("w",),
        partial(full, SCAFFOLD),
        "Clients receive c divided by their relative numbers of samples, and c moves by the "
        "multiplied changes. With equal sizes both agree.",
        partial(full, authors.ScaledSCAFFOLD),
    ),
]
