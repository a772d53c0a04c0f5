"""What the tests of the papers' pages share: the pages and their published data."""

from typing import Any

import numpy as np

from benchmarks import published
from tests.commands import ROOT

RECORD = ROOT / "docs" / "record"
SHORT = ROOT / "docs" / "papers"


def curves(name, value, *keys):
    """The values of a column of published data by round, for each place that `keys` tell apart."""
    lines: dict[Any, list[float]] = {}
    for row in published.rows(name):
        lines.setdefault(tuple(row[key] for key in keys), []).append(float(row[value] or "nan"))
    return lines


def until(line, target):
    """The first round, from 1, whose value is at most the target; infinity if there is none."""
    return next((k for k, value in enumerate(line, 1) if value <= target), np.inf)


def with_deviation(values):
    """The mean and the standard deviation of seeds, as the pages print them."""
    return f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}"
