"""A small problem with given cohorts, on which methods are compared with NumPy round by round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from models import HalfSquaredError
from tests.problems import Problem, least_squares

LOSS = HalfSquaredError()
START = np.linspace(-1.0, 1.0, 8)
SIZES = (7, 2, 5, 3)
ALL = [0, 1, 2, 3]
TRACE = [ALL, [1, 3], [0], [0, 2, 3], [1, 2], ALL]
RATES: dict[str, Any] = dict(lr=0.1, lr_decay=0.8, weight_decay=0.1)
FULL: dict[str, Any] = dict(batch_size=None, loss=LOSS, **RATES)
BATCHES: dict[str, Any] = dict(local_epochs=2, batch_size=2, loss=LOSS, **RATES)
BATCH_COUNTS = [8, 2, 6, 4]  # local steps of the clients with BATCHES

# Of each round and each client of its cohort: the samples of its local steps, None for all.
Batches = Sequence[dict[int, Sequence[np.ndarray | None]]]


def unlike() -> Problem:
    """Four clients of SIZES, each with a Hessian of its own, P = 8."""
    return least_squares(SIZES, bias=True)


def full(steps: int, trace: Sequence[Sequence[int]] = TRACE) -> Batches:
    """Full gradients: `steps` local steps of everyone of each cohort."""
    return [{i: [None] * steps for i in cohort} for cohort in trace]


def in_cohorts(
    seen: Sequence[Sequence[Sequence[np.ndarray]]],
    trace: Sequence[Sequence[int]] = TRACE,
    counts: Sequence[int] = BATCH_COUNTS,
) -> Batches:
    """The recorded mini-batches of the clients of each cohort; `counts` of them in the first."""
    assert [len(own) for own in seen[0]] == list(counts)
    return [{i: own[i] for i in cohort} for cohort, own in zip(trace, seen, strict=True)]


def furthest(one: Sequence[dict], other: Sequence[dict], name: str = "w") -> float:
    """The largest difference of an entry over all rounds."""
    pairs = zip(one, other, strict=True)
    return max(float(np.abs(a[name] - b[name]).max()) for a, b in pairs)
