"""Dropout whose draws are functions of a key: of the client and step, the layer, and the sample.

No generator is read or changed, so that clients train in any order, in threads and all at once,
and every engine draws the same. `pfl.engines.probe` decides which networks have it: chains of
layers, where each layer runs once and in a known order. All others keep PyTorch's dropout.
"""

# No annotations from __future__: chains compile `dropout_factors` with TorchScript.
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pfl.datamodules.randomness import fold

_drawing = threading.local()


def dropout_factors(
    seeds: Tensor, number: int, kept: int, samples: int, size: int, dtype: torch.dtype
) -> Tensor:
    """Returns independent factors 65536 / kept, each with probability kept / 65536, and 0 else.

    A value's factor does not depend on how many samples or clients there are.

    Args:
        seeds: The seed of each client's step, int64 [C].
        number: How many layers have drawn before in this step.
        kept: How many of 65,536 values are kept.
        samples: B, the number of samples of each client.
        size: How many values a sample has.
        dtype: Of the factors.

    Returns:
        [C, B, size].
    """
    # 64 random bits are four draws of 16 bits. A shift to the left brings each of them to the top,
    # where what lies below it does not matter.
    words = (size + 3) // 4
    places = torch.arange(samples * words, device=seeds.device).view(samples, words)
    keys = fold(seeds, torch.full_like(seeds, number)).view(-1, 1, 1)
    shifts = 16 * torch.arange(4, device=seeds.device).view(4, 1)
    draws = torch.bitwise_left_shift(fold(keys, places).unsqueeze(-2), shifts)
    keeps = draws < ((kept - 32768) << 48)
    factors = keeps.flatten(-2)[..., :size].to(dtype)
    return factors.mul_(65536.0 / max(1, kept))


def kept_of(layer: nn.Dropout) -> int:
    """Returns how many of 65,536 values a layer keeps: all of them where it changes nothing."""
    return round((1 - layer.p) * 65536)


@contextmanager
def drawing(seed: Tensor) -> Iterator[None]:
    """Has the dropout inside draw for one client's step, whose seed is int64 [1]."""
    _drawing.seed = seed
    _drawing.number = 0
    try:
        yield
    finally:
        _drawing.seed = None


class KeyedDropout(nn.Dropout):
    """Dropout that takes its draws from the seed of `drawing`; from 0 outside of it."""

    def forward(self, x: Tensor) -> Tensor:
        kept = kept_of(self)
        if not self.training or kept == 65536:
            return x
        seed = getattr(_drawing, "seed", None)
        number = 0
        if seed is None:
            seed = torch.zeros(1, dtype=torch.int64, device=x.device)
        else:
            number = _drawing.number
            _drawing.number += 1
        factors = dropout_factors(seed, number, kept, len(x), x[0].numel(), x.dtype)
        return x * factors.view(x.shape)


def has_dropout(network: nn.Module) -> bool:
    """Whether a network has PyTorch's dropout layers, which draw."""
    return any(type(m) is nn.Dropout and kept_of(m) < 65536 for m in network.modules())


def key_dropout(network: nn.Module) -> None:
    """Replaces the dropout layers of a network, in place."""
    for module in network.modules():
        if type(module) is nn.Dropout:
            module.__class__ = KeyedDropout
