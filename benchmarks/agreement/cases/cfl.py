"""What the code of CFL's authors computes."""

from __future__ import annotations

from functools import partial

from benchmarks.agreement.case import Case
from benchmarks.agreement.ours import run
from benchmarks.agreement.problem import ALL
from benchmarks.agreement.readings import common
from pfl.algorithms import CFL

CASES = [
    Case(
        "CFL, `lr_decay: 0.99`",
        "CFL",
        "fl_devices.py:133, clustered_federated_learning.ipynb",
        ("v",),
        partial(run, CFL, cohorts=ALL, mean_norm=10.0, largest_norm=0.1, lr_decay=0.99),
        "Clusters of two are not split, in the notebook; the two parts come from complete linkage, "
        "which is not always the split with the least similarity across.",
        partial(
            run,
            common.complete_linkage(0),
            cohorts=ALL,
            mean_norm=10.0,
            largest_norm=0.1,
            lr_decay=0.99,
        ),
    ),
]
