"""The five papers' methods."""

from __future__ import annotations

from typing import Any

from tests.algorithms import closed_forms as forms
from tests.algorithms.entry import Method

_COMPONENTS = {"proximal_step": 1.0, "low_rank_penalty": 3.0, "sparse_penalty": 0.02}
_PERSONAL: dict[str, Any] = {
    "private": ("p",),
    "settle": {"lr": 0.4, "local_steps": 6, "personal_epochs": 4},
    "rounds": 30,
    "accuracy": 1e-6,
}
ENTRIES = [
    Method("FedSLR", forms.low_rank_and_sparse, forms.factors_down, _COMPONENTS, **_PERSONAL),
    Method(
        "FedSLR, all multipliers",
        forms.low_rank_and_sparse,
        forms.factors_down,
        _COMPONENTS | {"memory_efficient": False},
        **_PERSONAL,
    ),
    Method(
        "FedSLR, S+LR",
        forms.low_rank_and_sparse,
        forms.sparse_down,
        {
            "proximal_step": 1.0,
            "low_rank_penalty": 0.3,
            "sparse_penalty": 0.3,
            "global_component": "sparse",
            "personal_component": "low_rank",
        },
        **_PERSONAL,
    ),
    Method(
        "LPGD",
        forms.mean_of_low_rank,
        forms.factors_up,
        {"low_rank_penalty": 3.0},
        settle={"lr": 0.6, "local_steps": 40},
        rounds=2,
    ),
    Method("GPGD", forms.low_rank_of_mean, forms.factors_down, {"low_rank_penalty": 5.0}),
    Method("FedCLUP", forms.held_together, forms.dense, {"penalty": 0.4}, rounds=22),
    Method("FedPD", forms.minimum, forms.dense, rounds=32, accuracy=1e-6, everyone=True),
    Method(
        "FedPD, VR",
        forms.minimum,
        forms.dense,
        {"variance_reduction": True, "refresh_period": 2, "inner_step": 0.5},
        rounds=32,
        accuracy=1e-6,
        everyone=True,
    ),
    Method(
        "FedPD, skipping",
        forms.minimum,
        forms.dense_or_skipped,
        {"skip_probability": 0.5},
        rounds=22,
        problem=forms.alike,
        everyone=True,
        timed=True,
    ),
    Method(
        "FedACS",
        forms.collaboration,
        forms.dense,
        settle={"lr": 0.3, "local_steps": 4},
        problem=forms.pairs,
    ),
    Method("FedACS, quantile 1", forms.alone, forms.dense, {"quantile": 1.0, "candidates": "all"}),
    Method(
        "FedAgg",
        forms.averaging,
        forms.gradients,
        settle={"lr": 0.5, "local_epochs": 1, "rate_penalty": 1e-13},
        rounds=35,
        accuracy=1e-6,
    ),
    Method(
        "FedAgg, aggregated",
        forms.minimum,
        forms.gradients,
        {"dynamics": "aggregated"},
        settle={"lr": 0.3, "local_epochs": 1, "rate_penalty": 1e-13},
        rounds=40,
        accuracy=1e-6,
    ),
]
