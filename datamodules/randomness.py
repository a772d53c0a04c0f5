"""Random numbers that are functions of a key: results depend on no global random state."""

import zlib
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


def generator(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """Returns the random generator of a seed, a purpose and further keys, such as an epoch.

    The draws of one purpose, such as "partition", never influence those of another. Global random
    states are neither read nor changed.
    """
    return np.random.default_rng([seed, zlib.crc32(purpose.encode()), *keys])


def fold(keys: Tensor, data: Tensor) -> Tensor:
    """Mixes integers into keys, which gives new keys that look independent, or 64 random bits.

    An element of the result depends on its own key and datum only. The function is the generator
    SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014):
    from a state `keys` the result is output number `data`, counted from 0. All are int64, of shapes
    that broadcast; the result has the bits of SplitMix64's unsigned integers.
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


def uniform(keys: Tensor, number: int = 0) -> Tensor:
    """Returns a uniform number in [0, 1) for each key, float32 with 24 random bits.

    `number`, from 0, counts the numbers that are drawn from the same keys.
    """
    bits = fold(keys, torch.full_like(keys, number)) >> 40
    return bits.bitwise_and_(0xFFFFFF).float().mul_(2.0**-24)


def choice(keys: Tensor, options: int, number: int = 0) -> Tensor:
    """Returns a uniform integer from 0 to `options` - 1 for each key; see `uniform`."""
    bits = fold(keys, torch.full_like(keys, number)) >> 16
    return bits.bitwise_and_(0x7FFFFFFF).remainder_(options)


def normal(keys: Tensor, count: int) -> Tensor:
    """Returns `count` standard normal numbers for each key, float32 [n, count].

    They are the quantiles of 16 random bits: the same on every device, in every batch, and at most
    4.3 in absolute value.
    """
    words = torch.arange(-(-count // 4), device=keys.device)
    bits = fold(keys[:, None], words).view(torch.int16)[:, :count]
    return _quantiles().to(keys.device, non_blocking=True)[bits.int() + 32768]


@lru_cache
def _quantiles() -> Tensor:
    """Returns the quantiles of the normal distribution at (i + 1/2) / 65536, float32 [65536]."""
    shares = (torch.arange(65536, dtype=torch.float64) + 0.5) / 65536
    return torch.special.ndtri(shares).float()
