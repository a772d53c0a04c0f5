"""Random generators keyed by what they are for."""

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
