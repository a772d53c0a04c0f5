"""What the code of FedDyn's authors computes."""

from __future__ import annotations

from functools import partial

from benchmarks.agreement.case import Case
from benchmarks.agreement.ours import run
from benchmarks.agreement.readings import authors
from pfl.algorithms import SCAFFOLD, FedAvg, FedDyn, FedProx

full = partial(run, batch_size=None)

CASES = [
    Case(
        "FedDyn",
        "FedDyn",
        "utils_methods.py:387",
        ("w",),
        partial(full, FedDyn, alpha=0.4),
        "α of a client is divided by its relative number of samples. With equal sizes both agree.",
        partial(full, authors.ScaledFedDyn, alpha=0.4),
    ),
    Case("FedAvg", "FedAvg", "utils_methods.py:91", ("w",), partial(full, FedAvg)),
    Case(
        "FedProx",
        "FedProx",
        "utils_general.py:279-280",
        ("w",),
        partial(full, FedProx, proximal_weight=0.3),
    ),
    Case(
        "SCAFFOLD",
        "SCAFFOLD",
        "utils_methods.py:225-231",
        ("w",),
        partial(full, SCAFFOLD),
        "Clients receive c divided by their relative numbers of samples (225), compute c_i with c "
        "itself (229), and c moves by the multiplied changes (231). With equal sizes both agree.",
        partial(full, authors.ScaledSCAFFOLD, divided=False),
    ),
]
