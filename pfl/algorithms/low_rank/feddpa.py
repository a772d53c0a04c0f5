"""FedDPA.

Yang, Long, Shen, Jiang, Blumenstein, "Dual-Personalizing Adapter for Federated Foundation Models",
NeurIPS 2024.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pfl.method import (
    Clients,
    ConfigError,
    Count,
    LoRA,
    Message,
    Network,
    Part,
    PartlyPersonal,
    Trainable,
    factor_mask,
    masked,
    values_in,
)


class FedDPA(PartlyPersonal):
    """A global and a personal adapter, whose outputs add (FedDPA-T).

    y = W x + s (a B A x + (1 - a) B'_i A'_i x);
    (A'_i, B'_i) <- epochs from the client's own last ones, with the received A and B still;
    (A_i, B_i) <- local steps from (A, B) without the personal adapter;  A, B <- plain means.
    Evaluated: the sum. Shared: A, B and the head. Cost: these down and up. Client state: A'_i and
    B'_i.

    Args:
        trainable: `LoRA` with a `pair`, a.
        personal: What stays with the client: the second adapter, and heads if "head" is named.
        personal_epochs: Epochs of the personal adapter in a round.

    Note:
        Differences from the paper: there a is found for each instance, by its similarity to the
        client's training samples, and here it is one number. Differences from the authors' code:
        there a client's first round trains no personal adapter, and the global one is trained with
        the factor 1 in place of a.

    Example:
        >>> from pfl.models import MLP, LoRA
        >>> method = FedDPA(MLP(64, (8,)), trainable=LoRA(rank=2, pair=0.5))
        >>> method.download().nbytes // 4  # A and B, 2 * (64 + 8), and the head's 8 * 10 + 10
        234
    """

    losses = ("train", "personal")
    own_b: Tensor

    def __init__(
        self,
        network: Network,
        *,
        trainable: Trainable | str | None = "lora",
        personal: Part = ("*own_A", "*own_B"),
        personal_epochs: Count = 1,
        weighting: Literal["samples", "uniform"] = "uniform",
        **kwargs: Any,
    ) -> None:
        trainable = LoRA(pair=0.5) if trainable == "lora" else trainable
        if trainable is not None and getattr(trainable, "pair", None) is None:
            raise ConfigError(
                "model.trainable: FedDPA adds the outputs of two adapters; it must be LoRA with a "
                "pair, such as 0.5"
            )
        super().__init__(
            network, trainable=trainable, personal=personal, weighting=weighting, **kwargs
        )
        self.personal_epochs = personal_epochs
        self.add_constant("own_b", factor_mask(self.space, "own_B"))

    def cost(self, sizes: np.ndarray) -> np.ndarray:
        return sizes * (self.epochs_of(sizes) + self.personal_epochs)

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        """Trains the personal adapter beside the received one, and that one alone."""
        part = self.personal_part
        v = self.local_sgd(
            clients,
            self.personalized(clients),
            part=part,
            epochs=self.personal_epochs,
            name="personal",
        )
        clients.state["head"] = values_in(part, v)
        alone = torch.where(self.own_b, 0, v)
        return masked(self.local_sgd(clients, alone, part=~part), ~part)
