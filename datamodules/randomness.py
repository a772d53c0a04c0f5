"""Random generators, and single draws, keyed by what they are for."""

import zlib

import numpy as np


def generator(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """Return the generator of one purpose.

    Draws of different purposes never influence one another, and neither read nor change any
    global random state.

    Args:
        seed: The seed of the run, at least 0.
        purpose: A word for what is drawn, e.g. ``"partition"``.
        *keys: Further whole numbers, at least 0, e.g. an epoch and a client.
    """
    return np.random.default_rng([seed, zlib.crc32(purpose.encode()), *keys])


def fold(keys: int | np.ndarray, data: np.ndarray) -> np.ndarray:
    """Mix ``data`` into ``keys``: new keys that look independent, or draws of 64 random bits.

    The finalizer of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014), elementwise: what an element
    becomes depends on its own key and datum only.

    Args:
        keys: A whole number from 0 to 2^64 - 1, or uint64 that broadcasts with ``data``.
        data: Integers of at least 0, [...].

    Returns:
        uint64 of the common shape.
    """
    x = np.asarray(keys, np.uint64) + (data.astype(np.uint64) + _ONE) * _STEP
    for shift, factor in _ROUNDS:
        x ^= x >> shift
        x *= factor
    x ^= x >> _LAST
    return x


_ONE, _STEP, _LAST = np.array([1, 0x9E3779B97F4A7C15, 31], np.uint64)
_ROUNDS = np.array([[30, 0xBF58476D1CE4E5B9], [27, 0x94D049BB133111EB]], np.uint64)
