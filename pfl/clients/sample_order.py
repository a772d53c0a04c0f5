"""The order of samples: which of a client's own samples a local step takes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from pfl.randomness import fold, permutations
from pfl.torchscript import scripted

VISITS = 1 << 20  # indices of samples that are laid out at a time, 8 MiB


def ragged_arange(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the owner of each entry and its rank within that owner, for client sizes `counts`."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def step_ranges(
    steps: np.ndarray, per_epoch: np.ndarray, size: int
) -> Iterator[tuple[int, int, int]]:
    """Yields all local steps, in ranges of consecutive steps that the same clients take.

    The indices of a range are laid out at once, so a range is no longer than `VISITS` allows, or
    than the longest epoch if that is more. The numbers of steps of each client fall; `size` is the
    number of samples of a step.

    Yields:
        The first step, the step after the last, and how many clients (the first ones) take them.
    """
    first = 0
    for end in np.unique(steps[steps > 0]).tolist():
        active = int((steps >= end).sum())
        longest = max(int(per_epoch[0]), VISITS // (active * size))
        for begin in range(first, end, longest):
            yield begin, min(begin + longest, end), active
        first = end


def full_batch_indices(indices: Tensor, owned: np.ndarray, steps: int) -> Tensor:
    """Returns all samples of A clients for each step, [steps, A, largest size].

    A smaller client's row repeats the client's last sample.

    Args:
        indices: The indices of all clients' samples, one client after another.
        owned: The clients' ids, the positions where their indices begin, and their numbers of
            samples, int64 [3, A].
        steps: As many rows are equal.
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
    """Returns the batches of K local steps, [K, A, size]; a short one repeats its last sample.

    Every epoch of a client is a fresh shuffle of its samples, keyed by (base, id, epoch).

    Args:
        indices, owned: As in `full_batch_indices`.
        base: The key of the round and the purpose.
        epoch, place: The epoch of each step, and the position within the epoch of the step's first
            sample, [K, A].
        counts: Number of samples of each step, [K, A].
        size: The largest number of samples of a step.
    """
    first = epoch[0]
    passes = epoch[-1] - epoch[0] + 1
    owner = np.repeat(np.arange(len(passes)), passes)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(passes) - passes, passes)
    shuffles = np.vstack([owned[:, owner], first[owner] + nth])
    lengths = passes * owned[2]
    at = np.cumsum(lengths) - lengths + (epoch - first) * owned[2] + place
    cuts = torch.from_numpy(np.stack([at, counts - 1])).to(indices.device, non_blocking=True)
    drawn = torch.from_numpy(shuffles).to(indices.device, non_blocking=True)
    return _shuffle(indices, drawn, cuts, base, int(lengths.sum()), size)


@scripted
def _shuffle(
    indices: Tensor, shuffles: Tensor, cuts: Tensor, base: int, total: int, size: int
) -> Tensor:
    ids, begins, sizes, epochs = shuffles.unbind()
    keys = fold(fold(torch.full_like(ids, base), ids), epochs)
    owner, places = permutations(keys, sizes, total)
    order = indices[begins[owner] + places]
    at, last = cuts.unsqueeze(-1).unbind()
    return order[at + torch.minimum(torch.arange(size, device=order.device), last)]
