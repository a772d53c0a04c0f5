"""FedEx-LoRA.

Singhal, Ponkshe, Vepakomma, "FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning
of Large Language Models", ACL 2025.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pfl.method import Clients, Message, MovedWeights, masked


class FedExLoRA(MovedWeights):
    """Means of LoRA's factors, and what they miss of the mean update added to the frozen weight.

    (A_i, B_i) <- local steps from (A, B), with W + D + s B_i A_i as weight and D still;
    A <- sum_S p_i A_i;  B <- sum_S p_i B_i;  D <- D + s (sum_S p_i B_i A_i - B A), the new A and B.
    So W + D + s B A is exactly the mean of the clients' W + D + s B_i A_i. p_i is the client's
    share of the cohort's samples, and s is alpha / r. Heads are averaged.

    Shared: all. Cost: A, B, the head and D down, D as two factors of rank r sum_t |S_t| over the
    rounds t so far, or all its values where these are fewer; A, B and the head up. No client state.

    Args:
        trainable: `LoRA`, whose layers get D in addition.

    Note:
        A client receives the whole D, so that it need not have been there in earlier rounds; in the
        paper, where all clients take part, it is the round's change. Differences from the authors'
        code: it adds the transpose of the change, and its mean is unweighted, as with uniform
        `weighting`.

    Example:
        >>> from pfl.models import MLP, LoRA
        >>> method = FedExLoRA(MLP(64, (8,)), trainable=LoRA(rank=2))
        >>> method.download().nbytes // 4  # 2 * (64 + 8), the head's 8 * 10 + 10, and no D yet
        234
    """

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        return masked(self.local_sgd(clients, w), ~self.residual)

    def server_update(self, mean: dict[str, Tensor]) -> None:
        new = torch.where(self.residual, self.global_model, mean["w"])
        for pair, product in zip(self.factors, self.products(mean), strict=True):
            self.add_residual(new, pair, product - pair.product(mean["w"]))
        self.global_model.copy_(new)
        ranks = [pair.a.shape[0] for pair in self.factors]
        self.residual_rank += self.participants * max(ranks, default=0)
