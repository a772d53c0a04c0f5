"""What the code of FedPD's authors computes."""

from __future__ import annotations

from functools import partial

from benchmarks.agreement.case import Case
from benchmarks.agreement.ours import run
from benchmarks.agreement.problem import ALL, RATE
from benchmarks.agreement.readings import authors
from pfl.algorithms import FedPD

MU = 0.5  # their `mu` is 1 / η
fedpd = partial(run, cohorts=ALL, proximal_step=1 / MU, local_steps=4)
# Their step is γη / (γ + η).
corrected = partial(
    fedpd, variance_reduction=True, refresh_period=1, inner_step=RATE / (1 - RATE * MU)
)

CASES = [
    Case(
        "FedPD, Oracle I",
        "FedPD-SGD",
        "Python/src/optimizer.py:228-247",
        ("w",),
        partial(fedpd, FedPD),
    ),
    Case(
        "FedPD, Oracle I, `communication_period: 2`",
        "FedPD-SGD, period 2",
        "Python/src/agent.py:67",
        ("w",),
        partial(fedpd, FedPD, communication_period=2),
    ),
    Case(
        "FedPD, Oracle II",
        "FedPD-VR",
        "Python/src/agent.py:67, 127",
        ("w",),
        partial(corrected, FedPD),
        "The old gradient is subtracted out of place (`add` for `add_`), that is never (127), so "
        "that g_i adds up all gradients. The full gradient is taken at x_0 instead of at x_i (67).",
        partial(corrected, authors.SummedFedPD),
    ),
    Case(
        "FedPD, Oracle I, Matlab",
        "",
        "Matlab/FedPD_v2/Fed_PD.m:32",
        ("w",),
        partial(fedpd, FedPD),
        "x_{0,i} + η λ_i instead of x_i + η λ_i: the sum begins at the old centre.",
        partial(fedpd, authors.OldCentreFedPD),
    ),
]
