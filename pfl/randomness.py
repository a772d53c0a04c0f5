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

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # the odd constants of SplitMix64, as signed integers
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_LAST = torch.iinfo(torch.int64).max


def key(*parts: int | str) -> int:
    """A signed 64-bit key of integers and strings, the same on every machine and in every run."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def generator(*parts: int | str) -> np.random.Generator:
    """A NumPy generator that is a pure function of `parts`."""
    return np.random.default_rng(key(*parts) % (1 << 64))


def fold(keys: Tensor, data: Tensor | int) -> Tensor:
    """Mix `data` into `keys` (both int64, broadcast): new keys that look independent.

    The finalizer of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014), elementwise, so that a million
    keys cost a few tensor operations on whatever device they are on.
    """
    # The shifts of int64 tensors are arithmetic; the masks make them logical.
    x = keys + (torch.as_tensor(data, device=keys.device) + 1) * _GOLDEN
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def permutations(keys: Tensor, sizes: Tensor, width: int) -> Tensor:
    """A random permutation of range(sizes[c]) for each key, padded to `width`.

    Args:
        keys, sizes: int64 [C].
        width: At least the largest size.

    Returns:
        int64 [C, width]; behind the first sizes[c] entries of a row stand the unused positions.
    """
    positions = torch.arange(width, device=keys.device)
    draws = fold(keys[:, None], positions)
    draws = torch.where(positions < sizes[:, None], draws >> 1, _LAST)
    return draws.argsort(dim=1, stable=True)


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """What networks draw inside leaves no trace in torch's global generators."""
    # `torch.manual_seed` seeds every GPU, not only the one in use.
    gpus = range(torch.cuda.device_count()) if device.type == "cuda" else []
    with torch.random.fork_rng(gpus):
        yield
