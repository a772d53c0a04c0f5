"""What the code of APPLE's authors computes."""

from __future__ import annotations

from benchmarks.agreement.case import Case
from benchmarks.agreement.cases.pfllib import of_vectors
from pfl.algorithms import APPLE

CASES = [
    Case(
        "APPLE, `penalty: 2 μ`, without momentum there",
        "APPLE",
        "train_APPLE.py:40-71, utils/apple.py:17-44, utils/models.py:60-119, utils/losses.py:4-23",
        ("v", "p"),
        lambda: of_vectors(APPLE),
    ),
]
