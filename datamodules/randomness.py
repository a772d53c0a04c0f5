"""Random numbers that are functions of a key: results depend on no global random state."""

import zlib

import numpy as np
from torch import Tensor


def generator(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """Returns the random generator of one purpose.

    The draws of one purpose never influence those of another. Global random states are neither
    read nor changed.

    Args:
        seed: The seed of the run, at least 0.
        purpose: A word for what is drawn, e.g. `"partition"`.
        *keys: Further whole numbers, at least 0, e.g. an epoch and a client.
    """
    return np.random.default_rng([seed, zlib.crc32(purpose.encode()), *keys])


def fold(keys: Tensor, data: Tensor) -> Tensor:
    """Mixes integers into keys, which gives new keys that look independent, or 64 random bits.

    An element of the result depends on its own key and datum only. The function is the generator
    SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014):
    from a state `keys` the result is output number `data`, counted from 0.

    Args:
        keys: int64, of a shape that broadcasts with `data`.
        data: int64, of a shape that broadcasts with `keys`.

    Returns:
        int64 of the common shape. Its bits are those of SplitMix64's unsigned integers.
    """
    # 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB as signed integers. A right
    # shift of int64 copies the sign bit; the masks clear the copies.
    x = keys + (data + 1) * -0x61C8864680B583EB
    x ^= (x >> 30).bitwise_and_(0x3FFFFFFFF)
    x *= -0x40A7B892E31B1A47
    x ^= (x >> 27).bitwise_and_(0x1FFFFFFFFF)
    x *= -0x6B2FB644ECCEEE15
    x ^= (x >> 31).bitwise_and_(0x1FFFFFFFF)
    return x
