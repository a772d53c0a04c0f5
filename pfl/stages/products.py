"""The mean of the products B A of LoRA's factors, beside the means of the factors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from pfl.stages.factors import PRODUCTS, Factors, aggregation_gap, sum_of_products
from pfl.stages.mean import Arrived, WeightedMean, client_weights
from pfl.stages.stage import Messages


class MeanWithProducts(WeightedMean):
    """The weighted mean, with the mean of the clients' products B_i A_i under the name `PRODUCTS`.

    The row of a round has how far the mean of the products is from the product of the means, in
    `train/aggregation_gap`.

    Args:
        weighting: As of `WeightedMean`.
        factors: The layers with two factors.
    """

    def __init__(self, weighting: str, factors: Sequence[Factors]) -> None:
        super().__init__(weighting)
        self.factors = factors

    def sums(self, messages: Messages, sizes: np.ndarray, like: Tensor) -> dict[str, Tensor]:
        sums = super().sums(messages, sizes, like)
        if "w" in messages and messages["w"].values.shape[1] == like.numel():
            weighting = self._weightings[PRODUCTS] = self._weightings["w"]
            weights = client_weights(weighting, sizes).to(like)
            models = messages["w"].values.to(like)
            sums[PRODUCTS] = sum_of_products(self.factors, models, weights)
        return sums

    def means(self, arrived: Arrived, metrics: dict[str, float]) -> dict[str, Tensor] | None:
        means = super().means(arrived, metrics)
        if means is not None and PRODUCTS in means:
            gap = aggregation_gap(self.factors, means["w"], means[PRODUCTS])
            if gap is not None:
                metrics["train/aggregation_gap"] = gap
        return means
