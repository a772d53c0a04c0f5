"""Paired statistics of two methods' scores, with SciPy's tests."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

ROUNDING = 2.0**-22  # of the larger score of a pair: a smaller difference is float32's rounding


@dataclass(frozen=True)
class Paired:
    """The comparison of a method with a baseline on the same clients.

    Attributes:
        pairs: Number of pairs.
        difference: The mean of method - baseline.
        low, high: The 95% bootstrap confidence interval of `difference`.
        p: The p-value of Wilcoxon's signed-rank test, two-sided, without correction: 1 if all pairs
            are equal, and NaN if there are none.
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
    rounding of scores to float32 count as equal in ranks, wins and losses; the mean and its
    interval are of the differences as they are. A client whose loss is infinite under one method is
    the largest difference, and under both methods none.

    Example:
        >>> result = compare_pairs(np.array([0.9, 0.8, 0.7]), np.array([0.5, 0.8, 0.6]))
        >>> result.wins, result.ties, result.losses
        (2, 1, 0)
    """
    have = ~(np.isnan(method) | np.isnan(baseline))
    a = method[have].astype(np.float64)
    b = baseline[have].astype(np.float64)
    difference = np.subtract(a, b, out=np.zeros(len(a)), where=a != b)
    largest = np.maximum(np.abs(a), np.abs(b))
    ranked = _level_ties(difference, ROUNDING * np.where(np.isinf(largest), 0.0, largest))
    if larger_is_better:
        better = ranked
    else:
        better = -ranked
    counts = [int((better > 0).sum()), int((better == 0).sum()), int((better < 0).sum())]
    if not len(difference):
        return Paired(0, math.nan, math.nan, math.nan, math.nan, *counts)
    if ranked.any():
        p = float(stats.wilcoxon(ranked).pvalue)
    else:
        p = 1.0
    low, high = mean_interval(difference)
    with np.errstate(invalid="ignore"):  # infinite ones of both signs have no mean
        mean = float(difference.mean())
    return Paired(len(difference), mean, low, high, p, *counts)


@np.errstate(invalid="ignore")  # infinite differences are equal to each other only
def _level_ties(values: np.ndarray, tolerances: np.ndarray) -> np.ndarray:
    """Returns differences [n] for their ranks: those that differ by rounding only become equal.

    A difference within its own pair's tolerance is 0. In the order of their sizes, a difference has
    the size of the first one of its group if both pairs' tolerances allow it: a pair of large
    scores, whose rounding is large, makes no others equal.
    """
    sizes = np.abs(values)
    sizes[sizes <= tolerances] = 0.0
    order = np.argsort(sizes, kind="stable")
    first = -1
    for place in order.tolist():
        allowed = min(tolerances[place], tolerances[first])
        if first >= 0 and sizes[place] - sizes[first] <= allowed:
            sizes[place] = sizes[first]
        else:
            first = place
    return np.copysign(sizes, values)


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """Returns the 95% percentile bootstrap interval of a mean (9,999 resamples, a fixed seed)."""
    if len(values) < 2 or (values == values[0]).all():
        return float(values[0]), float(values[0])
    rng = np.random.default_rng(0)
    batch = max(1, 5_000_000 // len(values))
    with warnings.catch_warnings(), np.errstate(invalid="ignore"):  # some values may be infinite
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
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


@dataclass(frozen=True)
class SeedsTest:
    """A paired t-test of differences, one for each seed, which are independent.

    Attributes:
        difference: The mean difference.
        low, high: Its confidence interval, 1 - level.
        p: The two-sided p-value.
        sign: 1 or -1 if p is below the level, the sign of the difference; otherwise 0.
    """

    difference: float
    low: float
    high: float
    p: float
    sign: int


def seeds_test(differences: np.ndarray, level: float) -> SeedsTest:
    """Tests whether the mean of differences [n] is 0, n >= 2; NaN among them decides nothing."""
    n = len(differences)
    mean = float(differences.mean())
    error = float(differences.std(ddof=1)) / math.sqrt(n)
    if math.isnan(mean):
        return SeedsTest(math.nan, math.nan, math.nan, math.nan, 0)
    half = error * float(stats.t.ppf(1 - level / 2, n - 1))
    if error > 0:
        p = 2 * float(stats.t.sf(abs(mean) / error, n - 1))
    else:  # all differences are equal
        p = float(mean == 0)
    sign = 0
    if p < level:
        sign = round(math.copysign(1, mean))
    return SeedsTest(mean, mean - half, mean + half, p, sign)


def pooled_deviation(groups: Sequence[np.ndarray]) -> float | None:
    """Returns the standard deviation within groups of differences; None without any two."""
    freedom = sum(len(group) - 1 for group in groups)
    if not freedom:
        return None
    return math.sqrt(sum(float(((group - group.mean()) ** 2).sum()) for group in groups) / freedom)


def seeds_to_find(
    difference: float, deviation: float, level: float, power: float, least: int, most: int
) -> int:
    """Returns with how many seeds `seeds_test` finds a true difference with a probability `power`.

    With n normal differences, t has n - 1 degrees of freedom and the shift
    sqrt(n) difference / deviation. The number is at least `least`, and at most `most`.
    """
    if deviation == 0:
        return least
    quantiles = float(stats.norm.ppf(1 - level / 2) + stats.norm.ppf(power))
    fewest = math.ceil((quantiles * deviation / difference) ** 2)  # if the deviation were known
    for n in range(max(least, fewest), most):
        shift = math.sqrt(n) * difference / deviation
        edge = float(stats.t.ppf(1 - level / 2, n - 1))
        if float(stats.nct.sf(edge, n - 1, shift)) >= power:
            return n
    return most


def seeds_to_choose(
    difference: float, deviation: float, versions: int, power: float, most: int
) -> int:
    """Returns with how many seeds the only better one of some versions has the largest mean.

    The means of n seeds are normal, each with the deviation `deviation` / sqrt(n), and that of the
    better version is larger by `difference`. It wins with the probability
    E[Phi(x + difference sqrt(n) / deviation)^(versions - 1)] for a standard normal x.
    """
    x = np.linspace(-8.0, 8.0, 1601)
    density = stats.norm.pdf(x) * (x[1] - x[0])
    for n in range(1, most):
        shift = math.sqrt(n) * difference / max(deviation, math.ulp(0.0))
        if float((density * stats.norm.cdf(x + shift) ** (versions - 1)).sum()) >= power:
            return n
    return most


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
