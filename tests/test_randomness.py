"""Keyed draws: the same everywhere, different for every key, uniform."""

import hashlib
from itertools import permutations as all_permutations
from math import factorial, sqrt

import numpy as np
import pytest
import torch

from pfl.randomness import fold, generator, key, permutations

MASK = (1 << 64) - 1


def signed(x):
    return (x & MASK) - ((x & MASK) >> 63 << 64)


def splitmix64(state, steps):
    """The generator of Steele, Lea & Flood (2014), its output after `steps` steps; big integers."""
    z = (state + steps * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def chi_square_bound(cells):
    """Mean + 6 standard deviations of chi-square with `cells` - 1 degrees of freedom."""
    return cells - 1 + 6 * sqrt(2 * (cells - 1))


# ---- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [(0,), (3, "cohort", 7), ("a",), (-1, "x", 2**70)])
def test_a_key_is_blake2b_of_the_parts(parts):
    """The definition, by hand: results of a paper must not change with a version of pfl."""
    digest = hashlib.blake2b(repr(parts).encode("utf-8"), digest_size=8).digest()
    value = sum(byte << (8 * place) for place, byte in enumerate(digest))
    assert key(*parts) == value - (1 << 64 if value >= 1 << 63 else 0)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_a_number_of_numpy_is_the_number(kind):
    """A seed out of `np.arange` is that seed: other cohorts and orders would be another run."""
    assert key(kind(3), "cohort", kind(7)) == key(3, "cohort", 7)
    assert generator(kind(3), "cohort", 7).random() == generator(3, "cohort", 7).random()


def test_keys_tell_parts_apart():
    parts = [(), (0,), (1,), ("0",), (0, 1), (1, 0), (0, "1"), ("0, 1",), (0, 0), ("",), (10,)]
    parts += [("a", "b"), ("ab",), ("a', 'b",)]
    assert len({key(*p) for p in parts}) == len(parts)
    assert all(-(2**63) <= key(*p) < 2**63 for p in parts)


def test_a_generator_is_a_function_of_its_key():
    first = generator(1, "cohort", 5).random(4)
    np.random.seed(0)
    assert (generator(1, "cohort", 5).random(4) == first).all()
    for other in [(2, "cohort", 5), (1, "other", 5), (1, "cohort", 6)]:
        assert not (generator(*other).random(4) == first).any()


def test_fold_is_splitmix64():
    keys = [0, 1, -1, 2**62, -(2**63), 2**63 - 1, key(5, "x")]
    for data in (0, 1, 12345):
        expected = [signed(splitmix64(k & MASK, data + 1)) for k in keys]
        assert fold(torch.tensor(keys), torch.tensor(data)).tolist() == expected
    # The published test vector of splitmix64 with seed 1234567.
    assert fold(torch.tensor(1234567), torch.tensor(0)).item() == 6457827717110365317


def test_fold_broadcasts_and_is_elementwise():
    keys = torch.tensor([3, -4, 5])
    table = fold(keys[:, None], torch.arange(4))
    assert table.shape == (3, 4)
    for i in range(3):
        for j in range(4):
            assert table[i, j] == fold(keys[i], torch.tensor(j))
    assert len(table.unique()) == 12


def test_folding_a_million_keys_gives_no_two_equal_ones():
    """Two among n = 10^6 random 64-bit numbers agree with probability n^2 / 2^65 = 3e-8."""
    folded = fold(torch.tensor(key(0)), torch.arange(1_000_000))
    assert len(folded.unique()) == 1_000_000
    # And the bits look like coin flips: 10^6 flips, 6 standard deviations of sqrt(n) / 2.
    for bit in range(0, 64, 7):
        ones = ((folded >> bit) & 1).sum().item()
        assert abs(ones - 500_000) < 6 * 500


# ---- permutations --------------------------------------------------------------------------------


def orders(keys, sizes):
    """What `permutations` says, as a list for each key."""
    owner, entries = permutations(keys, torch.tensor(sizes), sum(sizes))
    assert owner.tolist() == [c for c, size in enumerate(sizes) for _ in range(size)]
    return [part.tolist() for part in entries.split(sizes)]


def test_permutations_sort_by_the_draws_of_splitmix64():
    """Place p of key k draws the upper 40 bits of splitmix64(k, p + 1)."""
    sizes, start = [7, 7, 5, 1, 0, 40], torch.tensor(key(0))
    keys = fold(start, torch.arange(6))
    for k, size, order in zip(keys.tolist(), sizes, orders(keys, sizes), strict=True):
        draws = [splitmix64(k & MASK, p + 1) >> 24 for p in range(size)]
        assert order == sorted(range(size), key=draws.__getitem__)


def test_a_permutation_depends_on_its_key_and_size_alone():
    keys = fold(torch.tensor(key(1)), torch.arange(6))
    sizes = [50, 40, 30, 30, 20, 10]
    table = orders(keys, sizes)
    for rows in ([3], [5, 0], [1, 2, 3, 4]):
        again = orders(keys[rows], [sizes[row] for row in rows])
        assert again == [table[row] for row in rows]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_permutations_are_uniform(size):
    """Chi-square over all n! orders with 40,000 keys (6 standard deviations above its mean)."""
    number = 40_000
    keys = fold(torch.tensor(key(2, size)), torch.arange(number))
    drawn = torch.tensor(orders(keys, [size] * number))
    codes = (drawn * size ** torch.arange(size)).sum(1)
    cells = [sum(p * size**i for i, p in enumerate(q)) for q in all_permutations(range(size))]
    counts = torch.tensor([(codes == cell).sum() for cell in cells], dtype=torch.float64)
    assert counts.sum() == number
    expected = number / factorial(size)
    assert (counts - expected).square().sum() / expected < chi_square_bound(factorial(size))


def test_every_sample_is_equally_likely_at_every_place():
    """Size 20: 400 cells (place, sample), each with probability 1/20; keys as clients have them."""
    number, size = 20_000, 20
    keys = fold(torch.tensor(key(0, "train", 3)), torch.arange(number))
    drawn = torch.tensor(orders(fold(keys, torch.tensor(0)), [size] * number))
    for place in range(size):
        counts = torch.bincount(drawn[:, place], minlength=size).double()
        expected = number / size
        assert (counts - expected).square().sum() / expected < chi_square_bound(size)


def test_neighbouring_keys_give_unrelated_orders():
    """Two orders of 1,000 samples agree at 1 place on average (Poisson: 20 has p = 1e-19)."""
    base, zero = torch.tensor(key(0, "train", 0)), torch.tensor(0)
    client = fold(base, torch.arange(2))
    epochs = fold(client[:, None], torch.arange(3)).flatten()
    rounds = fold(fold(torch.tensor([key(0, "train", 1), key(0, "other", 0)]), zero), zero)
    drawn = torch.tensor(orders(torch.cat([epochs, rounds]), [1000] * 8))
    for i in range(8):
        for j in range(i):
            assert (drawn[i] == drawn[j]).sum() < 20
