"""What the tables say of timed rounds; without PyTorch, for the driver."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any


def times(seconds: Sequence[float], samples: float, work: int | None) -> dict[str, Any]:
    """Returns what the tables say of rounds of `samples` sample gradients."""
    middle = statistics.median(seconds)
    result = {
        "ms": 1000 * middle,
        "min_ms": 1000 * min(seconds),
        "rounds": len(seconds),
        "samples": samples,
        "images_s": samples / middle,
    }
    if work is not None:
        result["operations_s"] = samples * work / middle
    return result
