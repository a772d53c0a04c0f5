"""What the code of FedProto's authors computes."""

from __future__ import annotations

from functools import partial

from benchmarks.agreement.case import Case
from benchmarks.agreement.cases.htfllib import of_family
from benchmarks.agreement.problem import ALL
from benchmarks.agreement.readings import pfllib
from pfl.algorithms import FedProto

CASES = [
    Case(
        "FedProto, all clients in every round, without momentum there",
        "FedProto",
        "lib/update.py:104-160, lib/utils.py:205-240, exps/federated_main.py:88-133",
        ("client w",),
        partial(of_family, FedProto, cohorts=ALL, penalty=1.5),
        "Class means are those of the moving model's features in the last local epoch, and are "
        "averaged over clients.",
        partial(of_family, pfllib.LastEpochFedProto, cohorts=ALL, penalty=1.5),
    ),
]
