"""Random draws that depend on their key only.

Every draw in a run is a function of (seed, purpose, round, client): there is no generator whose
state could differ between two runs, so results do not depend on the number of processes, on how
many clients are trained at once, or on where a run was resumed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from pfl.datamodules.randomness import fold, generator
from pfl.torchscript import scripted

__all__ = ["fold", "generator", "isolated", "key", "permutations"]


def key(*parts: int | np.integer | str) -> int:
    """Returns a signed 64-bit key of integers and strings, the same on every machine."""
    # The text of NumPy's integers differs from Python's, and between versions of NumPy.
    plain = tuple(part.item() if isinstance(part, np.integer) else part for part in parts)
    digest = hashlib.blake2b(repr(plain).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


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
    gpus: Sequence[int] = []
    if device.type == "cuda":
        gpus = range(torch.cuda.device_count())
    with torch.random.fork_rng(gpus):
        yield
