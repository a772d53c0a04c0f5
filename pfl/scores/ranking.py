"""The score of a ranking of items by user."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from pfl.datamodules.errors import check_optional


class NDCG(Metric):
    """The normalized discounted cumulative gain of a client's ranking, for items of one user.

    A user is a client, and an item a sample. The items are ranked by the model's score. With the
    relevance r_j of the item in place j, DCG = sum over the first k places of r_j / log2(1 + j),
    and NDCG = DCG / (the DCG of the best ranking). Items of equal scores share the mean of what
    they would give in all their orders. NaN for a client without a relevant item, which then does
    not count.

    Args:
        k: How many places count; None: all.

    Shape: scores float [n], or [n, 2] for two classes, whose second one is "relevant"; relevances
    of at least 0, [n], as labels or values.

    Example:
        >>> metric = NDCG()
        >>> metric.update(torch.tensor([0.9, 0.5, 0.1]), torch.tensor([0, 1, 0]))
        >>> round(float(metric.compute()), 4)  # 1 / log2(3)
        0.6309
    """

    higher_is_better = True
    is_differentiable = False
    full_state_update = False
    scores: list[Tensor]
    relevances: list[Tensor]

    def __init__(self, k: int | None = None) -> None:
        super().__init__()
        self.k = check_optional("NDCG.k", k)
        self.add_state("scores", [], dist_reduce_fx="cat")
        self.add_state("relevances", [], dist_reduce_fx="cat")

    def update(self, predicted: Tensor, targets: Tensor) -> None:
        """Adds items [n] with their scores; a ValueError if an item has several of them."""
        if predicted.ndim == 2 and predicted.shape[1] == 2 and targets.ndim == 1:
            predicted = predicted[:, 1]
        if predicted.ndim != 1 or targets.ndim != 1:
            raise ValueError("an item has one score and one relevance, at least 0")
        if (targets < 0).any():
            raise ValueError("a relevance is negative; it must be at least 0")
        self.scores.append(predicted)
        self.relevances.append(targets)

    def compute(self) -> Tensor:
        """Returns the gain of the ranking; NaN without a relevant item."""
        scores = torch.cat(self.scores).double()
        relevances = torch.cat(self.relevances).double()
        places = torch.arange(len(scores), dtype=torch.float64, device=scores.device)
        discounts = 1 / torch.log2(places + 2)
        if self.k is not None:
            discounts[self.k :] = 0
        _, number, sizes = scores.neg().unique(return_inverse=True, return_counts=True)
        sums = torch.zeros_like(sizes, dtype=torch.float64)
        means = sums.index_add(0, number, relevances) / sizes  # of items with equal scores
        in_order = means.repeat_interleave(sizes)
        best = relevances.sort(descending=True).values
        return (in_order * discounts).sum() / (best * discounts).sum()
