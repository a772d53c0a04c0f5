"""Random draws that depend on their key only.

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
    """Returns a signed 64-bit key of integers and strings, the same on every machine."""
    # The text of NumPy's integers differs from Python's, and between versions of NumPy.
    plain = tuple(part.item() if isinstance(part, np.integer) else part for part in parts)
    digest = hashlib.blake2b(repr(plain).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def generator(*parts: int | np.integer | str) -> np.random.Generator:
    """Returns a NumPy generator that is a pure function of `parts`.

    Example:
        >>> generator(0, "noise", 3).random() == generator(0, "noise", 3).random()
        True
    """
    return np.random.default_rng(key(*parts) % (1 << 64))


@scripted
def fold(keys: Tensor, data: Tensor) -> Tensor:
    """Returns new keys, independent in appearance, from `keys` and `data` (int64, broadcast).

    The finalizer of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014) is applied elementwise, so that
    a million keys cost a few tensor operations on any device.
    """
    # The odd constants are written as signed integers: 0x9E3779B97F4A7C15 and so on. The shifts of
    # int64 tensors are arithmetic; the masks make them logical.
    x = keys + (data + 1) * -0x61C8864680B583EB
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@scripted
def permutations(keys: Tensor, sizes: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Returns a random permutation of range(sizes[c]) for each key c, one after another.

    Args:
        keys, sizes: int64 [C], C < 2^23.
        total: The sum of the sizes, an argument because reading it from a GPU takes time.

    Returns:
        The owner c of each entry, and the entries, both int64 [total].
    """
    rows = torch.arange(len(keys), device=keys.device)
    owner = rows.repeat_interleave(sizes, output_size=total)
    begins = sizes.cumsum(0) - sizes
    places = torch.arange(total, device=keys.device) - begins[owner]
    draws = fold(keys[owner], places)
    # One sort by owner and, within an owner, by the upper 40 bits of the draws.
    order = ((owner << 40) | ((draws >> 24) & 0xFFFFFFFFFF)).argsort(stable=True)
    return owner, places[order]


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Restores torch's global generators after what networks draw inside."""
    # `torch.manual_seed` seeds every GPU, not only the GPU in use.
    gpus = range(torch.cuda.device_count()) if device.type == "cuda" else []
    with torch.random.fork_rng(gpus):
        yield
