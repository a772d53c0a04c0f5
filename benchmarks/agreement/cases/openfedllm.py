"""What OpenFedLLM's server computes."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.agreement.case import Case
from benchmarks.agreement.ours import run_lora
from benchmarks.agreement.readings.lora import first_deltas
from pfl.algorithms import FedAdagrad, FedAdam, FedAvg, FedYogi

ours = partial(run_lora, head=False)
ADAPTIVE: dict[str, Any] = dict(weighting="uniform", server_lr=0.01, tau=0.001)
MOMENTS: dict[str, Any] = ADAPTIVE | dict(betas=(0.9, 0.99))
FIRST = "m begins at the first Δ instead of 0, and m² takes the place of Δ²."

CASES = [
    Case(
        "FedAvg of LoRA (FedIT)",
        "fedavg",
        "federated_learning/fed_global.py:58-60",
        ("A", "B"),
        partial(ours, FedAvg),
    ),
    Case(
        "FedAdagrad of LoRA, `weighting: uniform`",
        "fedadagrad",
        "federated_learning/fed_global.py:34-40",
        ("A", "B"),
        partial(ours, FedAdagrad, **ADAPTIVE),
    ),
    Case(
        "FedYogi of LoRA, `weighting: uniform`",
        "fedyogi",
        "federated_learning/fed_global.py:45-47",
        ("A", "B"),
        partial(ours, FedYogi, **MOMENTS),
        FIRST,
        partial(ours, first_deltas(FedYogi), **MOMENTS),
    ),
    Case(
        "FedAdam of LoRA, `weighting: uniform`",
        "fedadam",
        "federated_learning/fed_global.py:53-54",
        ("A", "B"),
        partial(ours, FedAdam, **MOMENTS),
        FIRST,
        partial(ours, first_deltas(FedAdam), **MOMENTS),
    ),
]
