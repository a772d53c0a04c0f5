"""What the code of FLoRA's authors computes."""

from __future__ import annotations

from functools import partial

from benchmarks.agreement.case import Case
from benchmarks.agreement.ours import run_lora
from benchmarks.agreement.readings.lora import FirstClientsFedAvg
from pfl.algorithms import FedAvg, FLoRA

CASES = [
    Case(
        "FLoRA",
        "FLoRA",
        "fed_utils/model_aggregation.py:58-91",
        ("D",),
        partial(run_lora, FLoRA, head=False),
    ),
    Case(
        "FLoRA, `ranks: [2, 1]`",
        "FLoRA, ranks",
        "fed_utils/model_aggregation.py:58-91",
        ("D",),
        partial(run_lora, FLoRA, head=False, ranks=[2, 1]),
    ),
    Case(
        "FedAvg of LoRA (FedIT)",
        "FedIT",
        "fed_utils/model_aggregation.py:122",
        ("A", "B"),
        partial(run_lora, FedAvg, head=False),
        "The sum is given to a name with a typing mistake, `weighted_sindgle_weights`, and lost: "
        "the new factors are those of the first client times its share of the samples.",
        partial(run_lora, FirstClientsFedAvg, head=False),
    ),
]
