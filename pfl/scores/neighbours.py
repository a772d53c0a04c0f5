"""Local memorization (kNN-Per): a client's training samples vote on the class of a new sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pfl.datamodules.ranges import Checked, Count, Positive


@dataclass(frozen=True)
class Neighbours(Checked):
    """kNN-Per (Marfoq et al., "Personalized Federated Learning through Local Memorization", 2022).

    A client remembers the features z_j (what the network's head gets) and the classes y_j of its
    training samples. With the k of them that are nearest to z, and the model's probabilities p,

        q(y) = sum over j with y_j = y of exp(-|z - z_j|^2 / (K scale)), divided by the sum over all
        h = λ q + (1 - λ) p

    with K the width of the features, as in the authors' code (`omarfoq/knn-per`, `client.py`); the
    paper itself was not at hand. λ is the one of 0, 0.1, ..., 1 with the most right answers on the
    client's validation samples, of several the smallest; the authors leave the choice open.

    Args:
        k: The number of neighbours, or all training samples of a client that has fewer.
        scale: The width of the kernel.

    Example:
        >>> memory, classes = torch.tensor([[0.0], [1.0]]), torch.tensor([1, 0])
        >>> Neighbours(k=1).probabilities(torch.tensor([[0.2]]), memory, classes, 2).tolist()
        [[0.0, 1.0]]
    """

    argument_group: ClassVar[str] = "loop.neighbours"
    k: Count = 10
    scale: Positive = 1.0

    def probabilities(self, z: Tensor, memory: Tensor, labels: Tensor, classes: int) -> Tensor:
        """Returns q, [n, classes], for features z [n, K] by the features of m > 0 labelled samples.

        Args:
            z: The features of the new samples, [n, K].
            memory: The features of the training samples, [m, K].
            labels: Their classes, int64 [m].
            classes: The number of classes.
        """
        # Matrix products would lose the digits of small distances.
        distances = torch.cdist(z, memory, compute_mode="donot_use_mm_for_euclid_dist")
        near, which = distances.topk(min(self.k, len(memory)), largest=False)
        weights = (-near.square() / (z.shape[1] * self.scale)).softmax(1)
        return z.new_zeros(len(z), classes).scatter_add_(1, labels[which], weights)


def best_weight(p: Tensor, q: Tensor, labels: Tensor) -> float:
    """Returns λ for the probabilities p and q [n, classes] of validation samples with n classes."""
    grid = torch.linspace(0, 1, 11, dtype=torch.float64).to(p)[:, None, None]
    right = ((grid * q + (1 - grid) * p).argmax(2) == labels).sum(1)
    return float(grid[int(right.cpu().numpy().argmax()), 0, 0])  # the first of the largest
