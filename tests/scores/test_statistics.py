"""Paired statistics against numbers worked out by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from pfl.scores.statistics import (
    compare_pairs,
    critical_difference,
    holm,
    mean_interval,
    mean_ranks,
)


def test_wilcoxon_counts_signs_of_ranks():
    """Five differences of one sign: of the 2^5 equally likely signs of the ranks, two are as
    extreme (all positive, all negative), so that p = 2/32."""
    baseline = np.array([0.1, 0.2, 0.3, 0.4, 0.5])
    result = compare_pairs(baseline + np.array([0.01, 0.02, 0.03, 0.04, 0.05]), baseline)
    assert result.p == pytest.approx(2 / 32)
    assert (result.pairs, result.wins, result.ties, result.losses) == (5, 5, 0, 0)
    assert result.difference == pytest.approx(0.03)


def test_a_smaller_loss_is_a_win():
    result = compare_pairs(
        np.array([0.1, 0.5, 0.3]), np.array([0.2, 0.5, 0.1]), larger_is_better=False
    )
    assert (result.wins, result.ties, result.losses) == (1, 1, 1)
    assert result.difference == pytest.approx(0.1 / 3)  # method - baseline, whatever is better


def test_clients_without_a_score_are_not_paired():
    result = compare_pairs(np.array([1.0, np.nan, 0.5]), np.array([0.5, 0.5, np.nan]))
    assert (result.pairs, result.wins) == (1, 1)


def test_rounding_to_float32_breaks_no_ties():
    """Of 20 clients with 10 samples each: the sizes of the differences are whole tenths."""
    rng = np.random.default_rng(0)
    right, also = rng.integers(3, 11, (2, 20))
    expected = stats.wilcoxon(right - also).pvalue
    single = [(hits / 10).astype(np.float32) for hits in (right, also)]
    assert stats.wilcoxon(np.subtract(*single)).pvalue != pytest.approx(expected, rel=1e-3)
    result = compare_pairs(*single)
    assert result.p == pytest.approx(expected, rel=1e-9)
    assert result.difference == pytest.approx((right - also).mean() / 10, abs=1e-7)


def test_one_client_with_a_large_loss_changes_nothing_for_the_others():
    """All 200 clients lose less than the baseline, by .005 to .015; the last has equal scores.

    Its pair is a tie, so that Wilcoxon's test has the other 199 differences; the mean difference is
    their sum divided by 200.
    """
    rng = np.random.default_rng(0)
    baseline = rng.normal(0.5, 0.02, 200)
    method = baseline - rng.uniform(0.005, 0.015, 200)
    for large in (0.5, 2_000.0, 100_000.0):
        method[-1] = baseline[-1] = large
        result = compare_pairs(method, baseline, larger_is_better=False)
        assert (result.wins, result.ties, result.losses) == (199, 1, 0)
        differences = (method - baseline)[:-1]
        assert result.p == pytest.approx(stats.wilcoxon(differences).pvalue, rel=1e-3)
        assert result.difference == pytest.approx(differences.sum() / 200, rel=1e-12)


def test_an_infinite_loss_is_the_largest_difference_and_no_tie():
    """The method loses by 0.1 to 1.2 at twelve clients: p = 2 / 2^12, also if one loss is infinite.

    With the same infinite loss under the baseline, eleven clients have a difference.
    """
    baseline = np.linspace(1.0, 2.0, 12)
    method = baseline + np.linspace(0.1, 1.2, 12)
    method[3] = np.inf
    result = compare_pairs(method, baseline, larger_is_better=False)
    assert (result.wins, result.ties, result.losses) == (0, 0, 12)
    assert result.p == pytest.approx(2 / 2**12) and result.difference == np.inf
    baseline[3] = np.inf
    result = compare_pairs(method, baseline, larger_is_better=False)
    assert (result.wins, result.ties, result.losses) == (0, 1, 11)
    assert result.p == pytest.approx(2 / 2**11)
    others = np.linspace(0.1, 1.2, 12).sum() - np.linspace(0.1, 1.2, 12)[3]
    assert result.difference == pytest.approx(others / 12)
    baseline[4] = np.inf  # infinite differences of both signs have no mean
    method[5] = np.inf
    result = compare_pairs(method, baseline, larger_is_better=False)
    assert (result.wins, result.ties, result.losses) == (1, 1, 10)
    assert math.isnan(result.difference)


def test_many_close_differences_are_no_chain_of_ties():
    """2,000 differences from 0.1 to 0.1001 have steps of 5e-8, a fifth of the rounding.

    The lower half is won, the upper half lost. The ranks of the lower half sum to 1,000 * 1,001 / 2
    = 500,500; with random signs it is 2,000 * 2,001 / 4 = 1,000,500 on average, with the standard
    deviation sqrt(2,000 * 2,001 * 4,001 / 24) = 25,829: 19 deviations away, so that p is about
    1e-83. A chain of ties would give all sizes one rank, and p = 1.
    """
    sizes = np.linspace(0.1, 0.1001, 2_000)
    signs = np.where(np.arange(2_000) < 1_000, 1, -1)
    result = compare_pairs(1 + signs * sizes, np.ones(2_000))
    assert (result.wins, result.losses) == (1_000, 1_000)
    assert result.p < 1e-70


def test_a_tie_with_the_first_of_all_pairs_shares_its_rank():
    """0.1 and -0.1 by rounding have the ranks 1.5 and 1.5, and not 1 and 2."""
    differences = np.array([0.1, -0.1, 0.2, 0.3, -0.4, 0.5, 0.6])
    method = 1 + differences
    method[1] -= 5e-9
    equal = stats.wilcoxon(differences).pvalue
    assert compare_pairs(method, np.ones(7)).p == equal
    differences[1] = -0.11
    assert stats.wilcoxon(differences).pvalue != equal


def test_a_pair_of_large_scores_does_not_share_the_rank_of_a_pair_of_small_ones():
    """The rounding of 1,000.2 is 2.4e-4 and hides 1e-5; that of 0.3 is 7e-8 and does not."""
    baseline = np.array([0.1, 1000.0, 0.1, 0.1, 0.1, 0.1])
    differences = np.array([0.2, -0.20001, 0.3, 0.4, 0.5, -0.6])
    result = compare_pairs(baseline + differences, baseline)
    assert result.p == stats.wilcoxon(differences).pvalue
    differences[1] = -0.2
    assert result.p != stats.wilcoxon(differences).pvalue


def test_the_rounding_of_a_pair_is_a_tie_up_to_its_very_end():
    """The larger score of both pairs is 1, whose rounding is 2^-22: sizes of 0.25 and 0.25 + 2^-22
    are one, and one bit more are two."""
    rest = np.array([0.3, 0.4, -0.5, 0.6, 0.7])
    ranks = np.concatenate([[0.25, -0.25], rest])
    for more, tied in ((0.0, True), (2.0**-50, False)):
        method = np.concatenate([[1.0, 0.75 - 2.0**-22 - more], 1 + rest])
        baseline = np.concatenate([[0.75, 1.0], np.ones(5)])
        result = compare_pairs(method, baseline)
        assert bool(result.p == stats.wilcoxon(ranks).pvalue) is tied


def test_differences_below_the_rounding_are_ties_and_count_in_the_mean():
    """1e-9 is less than 2^-22 of 1; mean and interval are those of the differences as they are."""
    result = compare_pairs(1 + np.array([1e-9, 3e-9]), np.ones(2))
    assert result.ties == result.pairs == 2
    assert result.difference == pytest.approx(2e-9)
    assert (result.low, result.high) == pytest.approx((1e-9, 3e-9))


def test_no_pairs_have_no_numbers():
    result = compare_pairs(np.array([1.0, np.nan]), np.array([np.nan, 1.0]))
    assert (result.pairs, result.wins, result.ties, result.losses) == (0, 0, 0, 0)
    assert all(map(math.isnan, (result.difference, result.low, result.high, result.p)))


def test_the_interval_of_two_pairs_is_between_both():
    """A resample of 0 and 1 is twice the same with a chance of 1/4 each: more than 2.5%."""
    assert mean_interval(np.array([0.0, 1.0])) == (0.0, 1.0)
    assert mean_interval(np.array([3.0])) == (3.0, 3.0)


def test_equal_scores_have_the_p_value_1_and_are_a_comparison_of_holms():
    """Without a difference the statistic is 0, and every other sample has one of at least 0. Beside
    0.02 it is one of two comparisons: 2 * 0.02."""
    result = compare_pairs(np.ones(4), np.ones(4))
    assert (result.p, result.ties) == (1.0, 4)
    assert (result.low, result.high) == (0, 0)
    assert holm([0.02, result.p]) == pytest.approx([0.04, 1.0])


def test_the_interval_of_many_pairs_is_the_normal_one():
    """The mean of n = 4,000 values is normal with s / sqrt(n): the 95% interval is 1.96 of these
    to both sides. The percentile bootstrap's own noise is about 2% of the half width."""
    values = np.random.default_rng(3).exponential(size=4000)
    half = 1.96 * values.std() / math.sqrt(4000)
    low, high = mean_interval(values)
    assert low == pytest.approx(values.mean() - half, abs=0.06 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.06 * half)


def test_holm_by_hand():
    """Sorted p: 0.01, 0.03, 0.04 times 3, 2, 1 is 0.03, 0.06, 0.04; the last must not be below the
    one before. NaN is no comparison: with it the factors would be 4, 3, 2."""
    assert holm([0.01, 0.04, math.nan, 0.03])[:2] == pytest.approx([0.03, 0.06])
    assert holm([0.01, 0.04, math.nan, 0.03])[3] == pytest.approx(0.06)
    assert math.isnan(holm([0.01, 0.04, math.nan, 0.03])[2])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_ties_share_their_mean_rank():
    scores = np.array([[0.9, 0.8, 0.8], [0.7, 0.9, 0.8]])  # ranks 1, 2.5, 2.5 and 3, 1, 2
    np.testing.assert_allclose(mean_ranks(scores), [2, 1.75, 2.25])


@pytest.mark.parametrize("methods, q", [(2, 1.960), (3, 2.343), (5, 2.728), (10, 3.164)])
def test_the_critical_difference_has_the_published_quantiles(methods, q):
    """q for α = 0.05 as in Table 5a of Demšar (JMLR 2006); CD = q sqrt(k (k + 1) / (6 N))."""
    expected = q * math.sqrt(methods * (methods + 1) / (6 * 12))
    assert critical_difference(methods, 12) == pytest.approx(expected, abs=1e-3)
