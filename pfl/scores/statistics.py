"""Paired statistics of two methods' scores, with SciPy's tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

ROUNDING = 2.0**-22  # differences closer than this, relative to the scores, are equal: float32


@dataclass(frozen=True)
class Paired:
    """The comparison of a method with a baseline on the same clients.

    Attributes:
        pairs: Number of pairs, one for each client and seed.
        difference: The mean of method - baseline.
        low, high: The 95% bootstrap confidence interval of `difference`.
        p: The p-value of Wilcoxon's signed-rank test, two-sided, without correction. NaN if all
            pairs are equal.
        wins, ties, losses: Numbers of pairs in which the method is better, equal, worse.
    """

    pairs: int
    difference: float
    low: float
    high: float
    p: float
    wins: int
    ties: int
    losses: int


def compare_pairs(
    method: np.ndarray, baseline: np.ndarray, larger_is_better: bool = True
) -> Paired:
    """Compares the scores [n] of the same clients under two methods; pairs with NaN do not count.

    Wilcoxon's signed-rank test leaves pairs without a difference out. The interval is the
    percentile bootstrap over the pairs, with a fixed seed. Differences that are unequal only by the
    rounding of scores to float32 count as equal.

    Example:
        >>> result = compare_pairs(np.array([0.9, 0.8, 0.7]), np.array([0.5, 0.8, 0.6]))
        >>> result.wins, result.ties, result.losses
        (2, 1, 0)
    """
    have = ~(np.isnan(method) | np.isnan(baseline))
    a, b = method[have].astype(np.float64), baseline[have].astype(np.float64)
    largest = max(np.abs(a).max(initial=0), np.abs(b).max(initial=0))
    difference = _level_ties(a - b, ROUNDING * largest)
    better = difference if larger_is_better else -difference
    counts = [int((better > 0).sum()), int((better == 0).sum()), int((better < 0).sum())]
    if not len(difference):
        return Paired(0, math.nan, math.nan, math.nan, math.nan, *counts)
    p = float(stats.wilcoxon(difference).pvalue) if difference.any() else math.nan
    low, high = mean_interval(difference)
    return Paired(len(difference), float(difference.mean()), low, high, p, *counts)


def _level_ties(values: np.ndarray, tolerance: float) -> np.ndarray:
    """Returns values whose sizes are equal where neighbours in their order are within a tolerance.

    Sizes within the tolerance of 0 become 0.
    """
    sizes, places = np.abs(values), np.argsort(np.abs(values), kind="stable")
    steps = np.diff(sizes[places], prepend=0.0) > tolerance
    first = np.maximum.accumulate(np.where(steps, np.arange(len(values)), -1))
    tied = np.where(first >= 0, sizes[places][first], 0.0)
    result = np.empty_like(sizes)
    result[places] = tied
    return np.copysign(result, values)


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """Returns the 95% percentile bootstrap interval of a mean (9,999 resamples, a fixed seed)."""
    if len(values) < 2 or (values == values[0]).all():
        return float(values[0]), float(values[0])
    rng, batch = np.random.default_rng(0), max(1, 5_000_000 // len(values))
    result = stats.bootstrap((values,), np.mean, batch=batch, method="percentile", rng=rng)
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def holm(p: Sequence[float]) -> list[float]:
    """Returns p-values corrected for several comparisons by Holm's step-down method (1979).

    The smallest of m p-values is multiplied by m, the next by m - 1, and so on; a corrected value
    is never below that of a smaller p-value. NaN stays NaN and does not count as a comparison.
    """
    values = np.asarray(p, np.float64)
    known = np.flatnonzero(~np.isnan(values))
    order = known[np.argsort(values[known], kind="stable")]
    factors = len(order) - np.arange(len(order))
    result = np.full(len(values), np.nan)
    result[order] = np.minimum(np.maximum.accumulate(values[order] * factors), 1.0)
    return result.tolist()


def mean_ranks(scores: np.ndarray) -> np.ndarray:
    """Returns each method's mean rank, 1 for the best, of scores [blocks, k], larger for better.

    Ties share their mean rank. A block is, for example, a seed and a data set.
    """
    return stats.rankdata(-scores, axis=1).mean(axis=0)


def critical_difference(methods: int, blocks: int, alpha: float = 0.05) -> float:
    """Returns Nemenyi's critical difference of mean ranks (Demšar, JMLR 2006).

    It is q sqrt(k (k + 1) / (6 N)) for k methods on N blocks, with q the upper quantile of the
    studentized range for infinitely many degrees of freedom, divided by sqrt(2).
    """
    q = float(stats.studentized_range.ppf(1 - alpha, methods, np.inf)) / math.sqrt(2)
    return q * math.sqrt(methods * (methods + 1) / (6 * blocks))
