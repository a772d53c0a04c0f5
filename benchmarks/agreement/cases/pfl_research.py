"""What pfl-research computes."""

from __future__ import annotations

from functools import partial

from benchmarks.agreement.case import Case
from benchmarks.agreement.ours import run
from benchmarks.agreement.readings import apple_google
from pfl.algorithms import SCAFFOLD, FedAvg, FedProx

CASES = [
    Case(
        "FedAvg, `weighting: uniform`",
        "FedAvg",
        "pfl/algorithm/federated_averaging.py:45",
        ("w",),
        partial(run, FedAvg, weighting="uniform"),
    ),
    Case(
        "FedProx, `weighting: uniform`",
        "FedProx",
        "pfl/internal/bridge/pytorch/proximal.py:27",
        ("w",),
        partial(run, FedProx, proximal_weight=0.3, weighting="uniform"),
    ),
    Case(
        "SCAFFOLD, option I",
        "SCAFFOLD I",
        "pfl/algorithm/scaffold.py:133",
        ("w",),
        partial(run, SCAFFOLD, option="I"),
        "c_i+ is the change of a step of rate 1 from x, -g_i(x), where the paper has g_i(x). All "
        "of them are the same memory, which the model reuses for such changes "
        "(pfl/model/pytorch.py:243), if states are stored in memory: who has taken part before "
        "has its new c_i already in the local steps, and c does not learn of the change.",
        partial(run, apple_google.OtherSignSCAFFOLD, option="I"),
    ),
    Case(
        "SCAFFOLD, option II",
        "SCAFFOLD II",
        "pfl/algorithm/scaffold.py:157",
        ("w",),
        partial(run, SCAFFOLD),
        "(y_i - x) / (K η) is added where the paper adds (x - y_i) / (K η): the change of the "
        "model (pfl/model/pytorch.py:253) is y_i - x.",
        partial(run, apple_google.OtherSignSCAFFOLD),
    ),
]
