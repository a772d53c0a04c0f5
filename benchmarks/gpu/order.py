"""Who trains on which samples in which step, exported from our own loop for the other sides."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.shapes import Shape
from pfl import FederatedLoop
from pfl.clients import ClientData, Clients, LocalSchedule


@dataclass(frozen=True)
class Order:
    """A round of C clients, of at most K local steps of at most B samples.

    Attributes:
        ids: The clients by falling number of samples, [C].
        shares: Their weights in the mean, [C].
        picks: The samples of each step, int64 [K, C, B]; a short batch repeats its last sample.
        weights: 1 / count for real samples and 0 for others, [K, C, B]. Of a client whose steps are
            used up all weights are 0.
        counts: Number of samples of each step, 0 where a client's steps are used up, [K, C].
    """

    ids: np.ndarray
    shares: list[float]
    picks: Tensor
    weights: Tensor
    counts: np.ndarray

    @property
    def samples(self) -> int:
        """Number of sample gradients of the round."""
        return int(self.counts.sum())

    def to(self, device: torch.device) -> Order:
        """Returns the same with its tensors on a device."""
        picks = self.picks.to(device)
        weights = self.weights.to(device)
        return Order(self.ids, self.shares, picks, weights, self.counts)


def order_of(loop: FederatedLoop, data: ClientData, shape: Shape, round_index: int) -> Order:
    """Returns what our loop does in a round, from 0."""
    cohort = loop.cohort(round_index)
    sizes = data.sizes("train", cohort)
    ids = cohort[np.argsort(-sizes, kind="stable")]
    clients = Clients(ids, round_index, data)
    blocks = list(clients.step_blocks(LocalSchedule(shape.batch, shape.epochs)))
    steps = sum(len(block.counts) for block in blocks)
    width = max(block.picks.shape[2] for block in blocks)
    picks = torch.zeros(steps, len(ids), width, dtype=torch.int64, device=blocks[0].picks.device)
    counts = np.zeros((steps, len(ids)), np.int64)
    first = 0
    for block in blocks:
        last = first + len(block.counts)
        chosen = block.picks.long()
        picks[first:last, : block.clients, : chosen.shape[2]] = chosen
        counts[first:last, : block.clients] = block.counts
        first = last
    of_step = torch.from_numpy(counts)[..., None]
    weights = (torch.arange(width) < of_step).float() / of_step.clamp_min(1)
    own = data.sizes("train", ids)
    return Order(ids, (own / own.sum()).tolist(), picks, weights, counts)
