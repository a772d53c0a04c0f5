"""How scores are distributed over clients: quantiles, tails and inequality."""

from __future__ import annotations

import math

import numpy as np

QUANTILES = (10, 25, 50, 75, 90)
"""In percent."""


@np.errstate(over="ignore", invalid="ignore")  # a model may have diverged
def distribution(values: np.ndarray, higher_is_better: bool | None = True) -> dict[str, float]:
    """Returns the numbers that describe one value for each client, [M]; empty if no client counts.

    NaN stands for a client that does not count. The numbers are `mean`; `std` with the divisor M;
    quantiles `q10` to `q90`, interpolated linearly; `worst10` and `best10`, the means of the worst
    and the best tenth of the clients, rounded up to whole clients, unless `higher_is_better` is
    None; `gini` and `jain`, left out where they are not defined.

    Example:
        >>> numbers = distribution(np.array([0.25, 0.5, 0.75, np.nan]))
        >>> numbers["q50"], numbers["best10"], round(numbers["gini"], 4)
        (0.5, 0.75, 0.2222)
    """
    values = values[~np.isnan(values)].astype(np.float64)
    if not len(values):
        return {}
    result = {"mean": float(values.mean()), "std": float(values.std())}
    for q, value in zip(QUANTILES, np.percentile(values, QUANTILES), strict=True):
        result[f"q{q}"] = float(value)
    if higher_is_better is not None:
        if higher_is_better:
            sign = 1
        else:
            sign = -1
        result["worst10"] = sign * worst_tenth(sign * values)
        result["best10"] = -sign * worst_tenth(-sign * values)
    inequality = {"gini": gini(values), "jain": jain(values)}
    return result | {name: value for name, value in inequality.items() if not math.isnan(value)}


def gini(values: np.ndarray) -> float:
    """Returns Gini's coefficient of values [n]: sum_ij |x_i - x_j| / (2 n² mean(x)).

    It is 0 if all are equal, and 1 - 1/n if one has everything. Where some values are negative, as
    gains can be, it may exceed 1. NaN unless the mean is positive.

    Example:
        >>> gini(np.array([0.0, 0.0, 0.0, 1.0]))
        0.75
    """
    ordered = np.sort(values)
    n = len(values)
    if not n or not values.mean() > 0:
        return math.nan
    # In order, x_(i) is the larger one of i - 1 pairs and the smaller one of n - i pairs.
    weights = 2 * np.arange(1, n + 1) - n - 1
    return float(weights @ ordered / (n**2 * values.mean()))


def jain(values: np.ndarray) -> float:
    """Returns Jain's fairness index of values [n], (sum x)² / (n sum x²).

    It is 1 if all are equal, and 1/n if one has everything (Jain, Chiu & Hawe 1984). Where some
    values are negative it may fall below 1/n. NaN if all values are 0, or one is infinite.

    Example:
        >>> jain(np.array([0.0, 0.0, 0.0, 1.0]))
        0.25
    """
    largest = float(np.abs(values).max(initial=0.0))
    if not 0 < largest < math.inf:
        return math.nan
    scaled = values / largest  # squares of large values would overflow
    return float(scaled.sum() ** 2 / (len(scaled) * (scaled @ scaled)))


def worst_tenth(values: np.ndarray) -> float:
    """Returns the mean of the lowest tenth of the values, rounded up to a whole number of values.

    NaN, the loss of a model that diverged, is the worst of all.
    """
    if np.isnan(values).any():
        return math.nan
    return float(np.sort(values)[: math.ceil(len(values) / 10)].mean())
