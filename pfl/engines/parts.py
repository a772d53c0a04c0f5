"""Gradients of mini-batches in parts, one after another, which takes less memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pfl.engines.batch import Batch, Buffers, Origin
from pfl.engines.runner import ModelRunner
from pfl.randomness import key

Gradient = Callable[[Tensor, Batch, Buffers, Tensor], tuple[Tensor, Tensor]]
"""Returns losses [R] and gradients [R, P] of models [R, P], of rows [R] of a mini-batch."""


@dataclass(frozen=True)
class PartOrigin(Origin):
    """The origin of a part of some rows of a mini-batch.

    Attributes:
        batch: The origin of the mini-batch.
        rows: Its rows.
        part: The number of the part.
    """

    batch: Origin
    rows: list[int]
    part: int

    def seed(self, row: int) -> int:
        return key(self.batch.seed(self.rows[row]), self.part)

    def describe(self, row: int) -> str:
        return self.batch.describe(self.rows[row])


def gradient_in_parts(
    gradient: Gradient, runner: ModelRunner, w: Tensor, batch: Batch, buffers: Buffers, parts: int
) -> tuple[Tensor, Tensor]:
    """Returns the mean loss [A] of each row of a batch, and its gradient [C, P].

    They are those of the whole mini-batch, as far as samples do not change each other's outputs:
    BatchNorm sees one part at a time, and its statistics move once a part.

    Args:
        gradient: Computes those of a part.
        runner: Says how many targets samples have.
        w: The models, [C, P].
        batch: A mini-batch of each of A clients.
        buffers: Running statistics [C, ...], changed in place.
        parts: In how many parts of about equal size each row is cut, whatever other rows have.
    """
    counts = np.array(batch.counts)
    sizes = -(-counts // parts)
    weights = runner.weights(batch, w.dtype)
    g = torch.zeros_like(w)
    loss = w.new_zeros(batch.clients)
    for part in range(parts):
        firsts = part * sizes
        chosen = np.flatnonzero(counts > firsts)
        if not len(chosen):
            break
        rows = torch.from_numpy(chosen).to(w.device)
        own = np.minimum(counts - firsts, sizes)[chosen]
        places = np.arange(own.max())
        columns = firsts[chosen, None] + np.minimum(places, own[:, None] - 1)  # the rest is padding
        at = rows[:, None], torch.from_numpy(columns).to(w.device)
        origin = PartOrigin(batch.origin, chosen.tolist(), part)
        piece = Batch(batch.inputs[at], batch.targets[at], own.tolist(), origin)
        theirs = None if buffers is None else buffers[rows]
        losses, found = gradient(w[rows], piece, theirs, rows)
        if buffers is not None and theirs is not None:
            buffers[rows] = theirs
        real = torch.from_numpy(places < own[:, None]).to(w.device)
        share = torch.where(real, weights[at], 0.0).sum(1)  # of the part in the mean of its row
        loss[rows] += share * losses.to(loss)
        g[rows] += share[:, None] * found
    return loss, g
