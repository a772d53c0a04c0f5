"""What FedJAX computes."""

from __future__ import annotations

from functools import partial

from benchmarks.agreement.case import Case
from benchmarks.agreement.ours import run
from benchmarks.agreement.readings import apple_google
from pfl.algorithms import APFL, FedAvg, FedProx

CASES = [
    Case("FedAvg", "FedAvg", "fedjax/algorithms/fed_avg.py:138", ("w",), partial(run, FedAvg)),
    Case(
        "FedProx",
        "FedProx",
        "fedjax/algorithms/fed_prox.py:103",
        ("w",),
        partial(run, FedProx, proximal_weight=0.3),
    ),
    Case(
        "APFL",
        "APFL",
        "fedjax/algorithms/apfl.py:71, 112-130, 191, 213",
        ("w", "client v"),
        partial(run, APFL, alpha=0.6, adaptive=True),
        "Each tensor of the network has an α_i of its own, which every step adapts; it cannot be "
        "held fixed. v_i moves by the whole gradient at the mixture, not by α_i times it, and the "
        "mixture has the old w_i. A client's first v_i is the w of that round, not the first one. "
        "The mean is weighted by samples.",
        partial(run, apple_google.LayeredAPFL, alpha=0.6),
    ),
]
