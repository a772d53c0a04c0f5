"""What APPFL's asynchronous servers compute."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.agreement.case import Case
from benchmarks.agreement.ours import run
from benchmarks.agreement.problem import SECONDS, SIZES
from benchmarks.agreement.readings.authors import PresentFedBuff
from pfl.algorithms import FedAsync, FedBuff
from pfl.rounds.clock import Clock

PACE = [[2.0 * n / seconds, 0.0] for n, seconds in zip(SIZES, SECONDS, strict=True)]
TIMED: dict[str, Any] = dict(clock=Clock(clients=PACE), batch_size=None)
ASYNC: dict[str, Any] = TIMED | dict(proximal_weight=0.0)

CASES = [
    Case(
        "FedAsync, `mixing: 0.9, staleness: constant` (their defaults), ρ = 0",
        "constant",
        "fedasync_aggregator.py:225-229, 253-258",
        ("w",),
        partial(run, FedAsync, mixing=0.9, staleness="constant", **ASYNC),
    ),
    Case(
        "FedAsync, ρ = 0",
        "polynomial",
        "fedasync_aggregator.py:271",
        ("w",),
        partial(run, FedAsync, **ASYNC),
    ),
    Case(
        "FedAsync, `staleness: hinge, slope: 2, delay: 1`, ρ = 0",
        "hinge",
        "fedasync_aggregator.py:275",
        ("w",),
        partial(run, FedAsync, staleness="hinge", slope=2.0, delay=1, **ASYNC),
    ),
    Case(
        "FedBuff, `buffer_size: 2`",
        "FedBuff",
        "fedbuff_aggregator.py:138-157",
        ("w",),
        partial(run, FedBuff, buffer_size=2, **TIMED),
        "A message is y_i - w with the server's model w when it arrives (157) instead of the model "
        "w_i with which the client began; its weight is α s(τ_i) / N with N clients (138) instead "
        "of s(τ_i) / K.",
        partial(run, PresentFedBuff, buffer_size=2, **TIMED),
    ),
]
