"""What the code of FedCLUP's authors computes."""

from __future__ import annotations

from functools import partial

from benchmarks.agreement.case import Case
from benchmarks.agreement.ours import run
from pfl.algorithms import FedAvg, FedCLUP, LocalTrain

CASES = [
    Case(
        "FedCLUP, `weighting: samples`",
        "FedCLUP",
        "src/trainers/fedprox_client.py:101, src/trainers/fedprox_server.py:171",
        ("w", "v"),
        partial(run, FedCLUP, penalty=0.5, server_step=1.2, weighting="samples"),
    ),
    Case("FedAvg", "FedAvg", "src/trainers/fedprox_server.py:165", ("w",), partial(run, FedAvg)),
    Case(
        "LocalTrain",
        "LocalTrain",
        "src/trainers/fedprox_client.py:106",
        ("v",),
        partial(run, LocalTrain),
    ),
]
