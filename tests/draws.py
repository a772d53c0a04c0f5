"""Inputs for transforms, and a second implementation of their random draws."""

import numpy as np
import torch

from datamodules import Pipeline, TensorSamples

N, CLIENTS = 37, 6
IMAGES = torch.from_numpy(np.random.default_rng(0).random((N, 3, 7, 9), np.float32))
OWNERS, INDEX = torch.arange(N) % CLIENTS, torch.arange(N) * 3
VISITS = torch.arange(N) // 4 + 100


def bound(*transforms, images=IMAGES, clients=CLIENTS, seed=0):
    samples = TensorSamples(images, torch.zeros(len(images)))
    return Pipeline(transforms, seed).bound(samples, clients)


# ---- keys, with Python's integers ----------------------------------------------------------------

MASK = (1 << 64) - 1


def mixed(key, datum):
    """SplitMix64: output number `datum` from the state `key`."""
    x = (key + (datum + 1) * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def uniform_of(key, number=0):
    """The upper 24 of 64 bits as a fraction."""
    return (mixed(key, number) >> 40) / 2**24


def choice_of(key, options, number=0):
    """31 bits, from bit 16 on, modulo the number of options."""
    return (mixed(key, number) >> 16) % 2**31 % options


def visit_key(i, place):
    """The key of image i for the transform number `place` in a list."""
    return mixed(mixed(int(VISITS[i]), int(INDEX[i])), place)


def client_key(client, place, seed=0):
    """The key of a client for the transform number `place` in a list."""
    return mixed(mixed(seed, place), client)
