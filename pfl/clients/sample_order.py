"""Which of their own samples clients take in which local step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from pfl.randomness import fold, permutations
from pfl.torchscript import scripted

VISITS = 1 << 20  # of samples that are laid out at a time, 8 MiB


def ragged_arange(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whose every entry is, and which of its owner's, where client i has counts[i] of them."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def step_ranges(
    wanted: np.ndarray, per_epoch: np.ndarray, size: int
) -> Iterator[tuple[int, int, int]]:
    """All local steps, in runs of steps that the same clients take.

    A run is no longer than `VISITS` allows, or than the longest epoch if that is more.

    Args:
        wanted: Steps of each client, falling.
        per_epoch: Of which this many are an epoch.
        size: Samples of a step.

    Yields:
        The first step, the one behind the last, and how many clients (the first ones) take them.
    """
    first = 0
    for end in np.unique(wanted[wanted > 0]).tolist():
        active = int((wanted >= end).sum())
        most = max(int(per_epoch[0]), VISITS // (active * size))
        for begin in range(first, end, most):
            yield begin, min(begin + most, end), active
        first = end


def full_batch_indices(indices: Tensor, owned: np.ndarray, steps: int) -> Tensor:
    """All samples of A clients in each step, [steps, A, largest size]; the last one is repeated.

    Args:
        indices: Of all clients' samples, one client after another.
        owned: The clients' ids, where their indices begin, and how many they have, int64 [3, A].
    """
    _, begin, size = torch.from_numpy(owned).to(indices.device)[:, :, None]
    places = torch.arange(int(owned[2].max()), device=indices.device)
    return indices[begin + torch.minimum(places, size - 1)].expand(steps, -1, -1)


def shuffled_indices(
    indices: Tensor,
    owned: np.ndarray,
    base: int,
    epoch: np.ndarray,
    place: np.ndarray,
    counts: np.ndarray,
    size: int,
) -> Tensor:
    """The batches of K local steps, [K, A, size]; the last sample of a short one is repeated.

    Every epoch of a client is a fresh shuffle of its samples, keyed by (base, id, epoch).

    Args:
        indices, owned: As for `in_order`.
        base: Key of the round and the purpose.
        epoch, place: In which epoch the steps are, and the place in it of their first sample,
            [K, A].
        counts: How many samples they have, [K, A].
        size: The most that one may have.
    """
    first, passes = epoch[0], epoch[-1] - epoch[0] + 1
    owner, nth = ragged_arange(passes)
    shuffles = np.vstack([owned[:, owner], first[owner] + nth])
    lengths = passes * owned[2]
    at = np.cumsum(lengths) - lengths + (epoch - first) * owned[2] + place
    cuts = torch.from_numpy(np.stack([at, counts - 1])).to(indices.device, non_blocking=True)
    drawn = torch.from_numpy(shuffles).to(indices.device, non_blocking=True)
    return _shuffled(indices, drawn, cuts, base, int(lengths.sum()), size)


@scripted
def _shuffled(
    indices: Tensor, shuffles: Tensor, cuts: Tensor, base: int, total: int, size: int
) -> Tensor:
    ids, begins, sizes, epochs = shuffles.unbind()
    keys = fold(fold(torch.full_like(ids, base), ids), epochs)
    owner, places = permutations(keys, sizes, total)
    order = indices[begins[owner] + places]
    at, last = cuts.unsqueeze(-1).unbind()
    return order[at + torch.minimum(torch.arange(size, device=order.device), last)]
