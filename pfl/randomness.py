"""Random draws that depend on nothing but their key.

Every draw in a run is a function of (seed, purpose, round, client): there is no generator whose
state could differ between two runs, so results do not depend on the number of processes, on how
many clients are trained at once, or on where a run was resumed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from pfl.torchscript import scripted


def key(*parts: int | np.integer | str) -> int:
    """A signed 64-bit key of integers and strings, the same on every machine and in every run."""
    # NumPy writes its whole numbers in another way, and not in all versions the same.
    plain = tuple(part.item() if isinstance(part, np.integer) else part for part in parts)
    digest = hashlib.blake2b(repr(plain).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def generator(*parts: int | np.integer | str) -> np.random.Generator:
    """A NumPy generator that is a pure function of `parts`."""
    return np.random.default_rng(key(*parts) % (1 << 64))


@scripted
def fold(keys: Tensor, data: Tensor) -> Tensor:
    """Mix `data` into `keys` (both int64, broadcast): new keys that look independent.

    The finalizer of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014), elementwise, so that a million
    keys cost a few tensor operations on whatever device they are on.
    """
    # The odd constants are written as signed integers: 0x9E3779B97F4A7C15 and so on. The shifts of
    # int64 tensors are arithmetic; the masks make them logical.
    x = keys + (data + 1) * -0x61C8864680B583EB
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@scripted
def permutations(keys: Tensor, sizes: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """A random permutation of range(sizes[c]) for each key, one after another.

    Args:
        keys, sizes: int64 [C], C < 2^23.
        total: The sum of the sizes (which a GPU would have to be waited for).

    Returns:
        Whose the entries are, and the entries, both int64 [total].
    """
    rows = torch.arange(len(keys), device=keys.device)
    owner = rows.repeat_interleave(sizes, output_size=total)
    begins = sizes.cumsum(0) - sizes
    places = torch.arange(total, device=keys.device) - begins[owner]
    draws = fold(keys[owner], places)
    # Sorted by owner and then by the draws' upper 40 bits, in one go.
    order = ((owner << 40) | ((draws >> 24) & 0xFFFFFFFFFF)).argsort(stable=True)
    return owner, places[order]


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """What networks draw inside leaves no trace in torch's global generators."""
    # `torch.manual_seed` seeds every GPU, not only the one in use.
    gpus = range(torch.cuda.device_count()) if device.type == "cuda" else []
    with torch.random.fork_rng(gpus):
        yield
