"""Random draws that depend on their key only.

Every draw in a run is a function of (seed, purpose, round, client): there is no generator whose
state could differ between two runs, so results do not depend on the number of processes, on how
many clients are trained at once, or on where a run was resumed. What privacy rests on is drawn from
a secret key in place of the seed.
"""

from __future__ import annotations

import hashlib
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from pfl.datamodules.randomness import fold, generator
from pfl.torchscript import scripted

__all__ = [
    *("DrawKey", "Secret", "Seeded", "fold", "generator", "isolated", "key", "permutations"),
    *("global_states", "seed_generators"),
]
KEY_BYTES = 32


class DrawKey(ABC):
    """Where the draws of a purpose come from: a public seed, or a secret key."""

    @abstractmethod
    def generator(self, purpose: str, *keys: int) -> np.random.Generator:
        """Returns the generator of a purpose and further keys, such as a round."""

    def number(self, purpose: str) -> int:
        """Returns a whole number from 0 to 2^63 - 1 for draws that take a seed."""
        return int(self.generator(purpose).integers(2**63))


class Seeded(DrawKey):
    """Draws that are functions of a public seed: whoever knows it can repeat them.

    Args:
        seed: The seed.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def generator(self, purpose: str, *keys: int) -> np.random.Generator:
        return generator(self.seed, purpose, *keys)

    def number(self, purpose: str) -> int:
        """Returns the seed."""
        return self.seed


class Secret(DrawKey):
    """Draws that only the owner of a secret key can repeat: noise for privacy, private cohorts.

    Each purpose has a Philox generator of its own, whose key and counter are a keyed hash (BLAKE2b)
    of the purpose. What one of them draws tells nothing of another one, nor of the key.

    Args:
        key: 32 bytes; None: new ones of the operating system's entropy.

    Example:
        >>> one, other = Secret(), Secret()
        >>> again = Secret(one.key)
        >>> one.generator("noise", 3).normal() == again.generator("noise", 3).normal()
        True
        >>> one.generator("noise", 3).normal() == other.generator("noise", 3).normal()
        False
    """

    def __init__(self, key: bytes | None = None) -> None:
        self.key = key or secrets.token_bytes(KEY_BYTES)

    def generator(self, purpose: str, *keys: int) -> np.random.Generator:
        name = repr((purpose, *map(int, keys))).encode()
        digest = hashlib.blake2b(name, key=self.key, digest_size=48).digest()
        words = [int.from_bytes(digest[begin : begin + 8], "little") for begin in range(0, 48, 8)]
        return np.random.Generator(np.random.Philox(key=words[:2], counter=words[2:]))


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
    """Restores torch's generators, of the processor and a device, after what draws inside."""
    gpus: Sequence[torch.device] = []
    if device.type == "cuda":
        gpus = [device]
    with torch.random.fork_rng(gpus):
        yield


def seed_generators(device: torch.device, seed: int) -> None:
    """Seeds torch's global generators of the processor and of a device, and no other GPU's."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def global_states() -> tuple[bytes, int, bytes]:
    """Returns the states of the global generators of NumPy and of torch on the processor."""
    state = np.random.get_state(legacy=False)["state"]
    return state["key"].tobytes(), state["pos"], torch.get_rng_state().numpy().tobytes()
