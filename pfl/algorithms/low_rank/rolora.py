"""RoLoRA.

Chen, Guo, Ju, Dalal, Zhu, Khisti, "Robust Federated Finetuning of LLMs via Alternating Optimization
of LoRA", NeurIPS 2025.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pfl.method import Clients, FactorMethod, Message, Network, factor_mask, masked


class RoLoRA(FactorMethod):
    """LoRA's B in the rounds 0, 2, ... and A in the rounds 1, 3, ..., with the other factor still.

    B_i <- local steps from B with A still;  B <- sum_S p_i B_i;  in the next round the same for A.
    As the other factor is common, the mean of one is the exact mean of the updates. Heads are
    trained in all rounds.

    Shared: all. Cost: P values down; one factor and the head up. No client state.

    Args:
        trainable: `LoRA`.

    Note:
        B comes first, since it begins at 0, where A has no gradient. The clients' `optimizer` is
        made anew in each round. A client receives both factors, since it may have missed the last
        round.

    Example:
        >>> from pfl.models import MLP, LoRA
        >>> method = RoLoRA(MLP(64, (8,)), trainable=LoRA(rank=2))
        >>> int(method.moving(0).sum()), int(method.moving(1).sum())  # B or A, and the head's 90
        (106, 218)
    """

    lora_a: Tensor
    lora_b: Tensor

    def __init__(self, network: Network, **kwargs: Any) -> None:
        super().__init__(network, server_optimizer=None, **kwargs)
        for name, factor in (("lora_a", "lora_A"), ("lora_b", "lora_B")):
            self.add_constant(name, factor_mask(self.space, factor))

    def moving(self, round_index: int) -> Tensor:
        """Returns what moves in a round, bool [P]."""
        return ~(self.lora_b if round_index % 2 else self.lora_a)

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        part = self.moving(clients.round)
        return masked(self.local_sgd(clients, w, part=part), part)

    def server_update(self, mean: dict[str, Tensor]) -> None:
        part = self.moving(self.rounds)
        self.global_model.copy_(torch.where(part, mean["w"], self.global_model))
