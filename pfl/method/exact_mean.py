"""The base of methods whose server adds exact means of LoRA's products to the frozen weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pfl.communication import Message, low_rank_size
from pfl.method.algorithm import FederatedAlgorithm
from pfl.method.local_training import Network
from pfl.models.adapters import Trainable
from pfl.stages.factors import (
    PRODUCTS,
    Factors,
    factor_mask,
    require_factors,
    split_products,
    with_residual,
)


class FactorMethod(FederatedAlgorithm):
    """A method of LoRA's factors A_i and B_i, whose server may read the mean of B_i A_i.

    Args:
        trainable: What is trained; "lora", or a `LoRA`.

    Attributes:
        factors: The layers, a list of `Factors`.
    """

    def __init__(
        self, network: Network, *, trainable: Trainable | str | None = "lora", **kwargs: Any
    ) -> None:
        super().__init__(network, trainable=trainable, **kwargs)

    def check_setup(self) -> None:
        require_factors(self.factors, type(self).__name__)

    def products(self, mean: dict[str, Tensor]) -> list[Tensor]:
        """Returns sum_S p_i s B_i A_i of each layer, [out, in], from what `server_update` gets."""
        if not self.factors:
            return []
        return split_products(self.factors, mean[PRODUCTS])


class MovedWeights(FactorMethod):
    """A `FactorMethod` with a dense update D of each frozen weight, which only the server moves.

    Attributes:
        residual: Which of the P values are D, bool [P].
        residual_rank: A bound on the rank of D, by the rounds so far.
    """

    reads_products = True
    residual: Tensor
    residual_rank: Tensor

    def __init__(
        self, network: Network, *, trainable: Trainable | str | None = "lora", **kwargs: Any
    ) -> None:
        trainable = with_residual(trainable)
        super().__init__(network, trainable=trainable, server_optimizer=None, **kwargs)
        self.add_constant("residual", factor_mask(self.space, "residual"))
        self.trained_part = ~self.residual
        self.add_server_state("residual_rank", torch.tensor(0))

    def download(self) -> Message:
        """Returns the model, with D as two factors where that is shorter."""
        ranks = self.space.full_ranks
        for place, layer in enumerate(self.space.matrices):
            if self.residual[layer.span].any():
                ranks[place] = min(int(ranks[place]), int(self.residual_rank))
        size = low_rank_size(self.space, ranks) - self.known_values
        return Message(self.global_model, int(size) * self.global_model.element_size())

    @property
    def known_values(self) -> int:
        """How many values of the model clients know without being sent them; here none."""
        return 0

    def add_residual(self, new: Tensor, pair: Factors, change: Tensor) -> None:
        """Adds a change [out, in] to the D of a layer in a model [P], in place."""
        assert pair.residual is not None
        new[pair.residual.span] += change.flatten()
