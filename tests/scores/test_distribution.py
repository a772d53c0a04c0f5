"""Quantiles, tails and inequality of one value for each client, by hand."""

import math

import numpy as np
import pytest

from pfl.scores.distribution import distribution, gini, jain
from pfl.scores.names import direction

NAN = float("nan")


def test_numbers_by_hand():
    """Of 20 clients with 1, 2, ..., 20, a tenth are two. Gini of 1, ..., n is (n² - 1)/(3n(n+1)),
    as the sum over all pairs |i - j| is n (n² - 1)/3."""
    values = np.random.default_rng(0).permutation(np.arange(1.0, 21))
    result = distribution(np.append(values, NAN))
    assert result["mean"] == 10.5 and result["std"] == pytest.approx(math.sqrt(399 / 12))
    # Linear between the values at positions 0, ..., 19: q at 0.19 q, counted from 1.
    for q in (10, 25, 50, 75, 90):
        assert result[f"q{q}"] == pytest.approx(1 + 0.19 * q)
    assert (result["worst10"], result["best10"]) == (1.5, 19.5)
    assert result["gini"] == pytest.approx(399 / (3 * 20 * 21))
    assert result["jain"] == pytest.approx(210**2 / (20 * 2870))  # squares: n(n+1)(2n+1)/6


def test_of_losses_the_lowest_are_the_best():
    result = distribution(np.arange(1.0, 21), higher_is_better=False)
    assert (result["worst10"], result["best10"]) == (19.5, 1.5)
    assert {"worst10", "best10"}.isdisjoint(distribution(np.ones(3), higher_is_better=None))


@pytest.mark.parametrize(
    "values, expected_gini, expected_jain",
    [
        ([3, 3, 3], 0, 1),
        ([0, 0, 5], 2 / 3, 1 / 3),
        ([1, 3], 4 / (2 * 4 * 2), 16 / (2 * 10)),  # |1 - 3| twice, over 2 n² mean
        ([-1, 3], 8 / (2 * 4 * 1), 4 / (2 * 10)),  # gains: one lost, one gained
        ([-1, 1], NAN, 0),
        ([-3, 1], NAN, 4 / (2 * 10)),  # no share of a negative sum
        ([0, 0], NAN, NAN),
    ],
)
def test_gini_and_jain(values, expected_gini, expected_jain):
    values = np.array(values, float)
    assert gini(values) == pytest.approx(expected_gini, nan_ok=True)
    assert jain(values) == pytest.approx(expected_jain, nan_ok=True)
    result = distribution(values)
    assert ("gini" in result) == (not math.isnan(expected_gini))
    assert ("jain" in result) == (not math.isnan(expected_jain))


def test_gini_is_the_sum_over_all_pairs():
    values = np.random.default_rng(1).uniform(-0.2, 1, 30)
    pairs = np.abs(values[:, None] - values).sum() / (2 * 30**2 * values.mean())
    assert gini(values) == pytest.approx(pairs)


def test_a_score_that_no_client_has_gives_no_numbers():
    assert distribution(np.full(3, NAN)) == {}
    assert math.isnan(gini(np.empty(0))) and math.isnan(jain(np.empty(0)))


def test_the_direction_of_a_score_is_that_of_its_number():
    metrics = {"accuracy_loss": None, "error": False, "balanced_accuracy": True}
    expected = {"test/global/accuracy_loss": None, "test/local/error": False, "train_samples": None}
    expected |= {"val/global/loss": False, "test/finetuned/5/balanced_accuracy": True}
    assert {name: direction(name, metrics) for name in expected} == expected


def test_scores_of_models_that_diverged_overflow_nothing():
    """Squares of 1e200 have no float64; the index of (1, 3) is 16/20 at any scale."""
    assert jain(np.array([1e200, 3e200])) == pytest.approx(0.8)
    assert math.isnan(jain(np.array([1.0, math.inf])))
    numbers = distribution(np.array([1e300, 1e308, 1.5e308]), higher_is_better=False)
    assert numbers["worst10"] == 1.5e308 and numbers["q50"] == 1e308
