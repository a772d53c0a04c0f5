"""Distances of label distributions, against SciPy and against loops over all pairs."""

from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from datamodules import Ragged
from pfl.datamodules.partitions.measures import (
    effective_classes,
    label_overlap,
    label_shares,
    shared_samples,
    total_variation,
    trained_on,
    wasserstein,
)


@pytest.fixture(scope="module")
def shares():
    return np.random.default_rng(0).dirichlet(np.full(7, 0.3), size=9)


def test_wasserstein_is_scipys(shares):
    labels = np.arange(7)
    for p, q in combinations(shares, 2):
        expected = stats.wasserstein_distance(labels, labels, p, q)
        assert wasserstein(p, q) == pytest.approx(expected, abs=1e-12)


def test_total_variation_is_the_largest_difference_of_a_set_of_classes(shares):
    sets = [[k for k in range(7) if number >> k & 1] for number in range(128)]
    for p, q in combinations(shares, 2):
        expected = max(p[classes].sum() - q[classes].sum() for classes in sets)
        assert total_variation(p, q) == pytest.approx(expected, abs=1e-12)


def test_effective_classes_counts_equal_shares(shares):
    # k equal shares have the entropy log k.
    for k in range(1, 8):
        assert effective_classes(np.where(np.arange(7) < k, 1 / k, 0)) == pytest.approx(k)
    assert effective_classes(shares) == pytest.approx(np.exp(stats.entropy(shares, axis=1)))


def test_label_overlap_is_the_mean_over_all_pairs(shares):
    pairs = [np.minimum(p, q).sum() for p, q in combinations(shares, 2)]
    assert label_overlap(shares) == pytest.approx(np.mean(pairs))
    empty = np.vstack([shares, np.full(7, np.nan)])
    assert label_overlap(empty) == label_overlap(shares)
    assert np.isnan(label_overlap(shares[:1]))


def test_label_shares_of_a_client_without_samples_are_unknown():
    assert label_shares(np.array([[1, 3], [0, 2]])).tolist() == [[0.25, 0.75], [0, 1]]
    assert np.isnan(label_shares(np.zeros((1, 2)))).all()


@pytest.mark.parametrize("block", [1, 3, 1 << 16])
def test_samples_of_several_clients_are_counted_once(block, monkeypatch):
    monkeypatch.setattr("datamodules.partitions.index_arrays._BLOCK", block)
    # Client 1 holds sample 4 twice; samples 0 and 3 have two clients.
    train = Ragged.from_sizes(np.array([0, 1, 3, 4, 4, 0, 3]), np.array([3, 2, 0, 2]))
    assert shared_samples(train, 6) == 2
    test = Ragged.shared(np.array([3, 5]), 4)
    assert shared_samples(test, 6) == 2
    assert trained_on(train, test, 6) == 1
