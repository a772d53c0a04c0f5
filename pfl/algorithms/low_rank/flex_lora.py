"""FlexLoRA.

Bai, Chen, Qian, Yao, Li, "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks
and Client Resources", NeurIPS 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl.method import ClientRanks, Clients, FactorMethod, Message, Network


class FlexLoRA(FactorMethod):
    """Factors of any ranks from the singular value decomposition of the mean update.

    (A_i, B_i) <- local steps from the received factors of rank r_i;
    U S V' = sum_S p_i B_i A_i;  client i receives B = U_r S_r and A = V_r' with r = r_i.
    This is the best product of rank r_i, and the mean update itself where that has no higher rank.
    p_i is the client's share of the cohort's samples. Heads are averaged.

    Shared: all. Cost: factors of rank r_i and the head down, and the same up. No client state.
    Evaluated: the product of the rank of `trainable`.

    Args:
        trainable: `LoRA`; its rank is the largest.
        ranks: r_i: client i has ranks[i mod the number of ranks]; null: all have the largest.

    Note:
        The factor alpha / r has the rank r of `trainable`, for all clients. U S and V', rather than
        two roots of S, leave A with a direction where S is 0, which could not be trained if B were
        0 there, too. Before the first round all clients have the first rows of the network's A.

    Example:
        >>> from pfl.models import MLP, LoRA
        >>> method = FlexLoRA(MLP(64, (8,)), trainable=LoRA(rank=4), ranks=[2, 4])
        >>> message = method.download_for(np.array([0, 1]))
        >>> (message.nbytes // 4).tolist()  # r_i (64 + 8), and the head's 90
        [234, 378]
    """

    reads_products = True

    def __init__(
        self, network: Network, *, ranks: Sequence[int] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(network, server_optimizer=None, **kwargs)
        self.client_ranks = ClientRanks(ranks, self.factors)

    def download_for(self, ids: np.ndarray) -> Message:
        """Returns the model with factors of each client's rank, [C, P]."""
        w = self.global_model.repeat(len(ids), 1)
        return Message(self.client_ranks.truncate(w, ids), self._nbytes(ids))

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        return Message(self.local_sgd(clients, w), self._nbytes(clients.ids))

    def server_update(self, mean: dict[str, Tensor]) -> None:
        new = mean["w"].clone()
        for pair, product in zip(self.factors, self.products(mean), strict=True):
            a, b = pair.of(new)
            u, s, v = torch.linalg.svd(product / pair.scale, full_matrices=False)
            a.copy_(v[: len(a)])
            b.copy_((u * s)[:, : len(a)])
        self.global_model.copy_(new)

    def _nbytes(self, ids: np.ndarray) -> Tensor:
        """Returns the bytes of the clients' models, int64 [C]."""
        factors = sum(pair.a.size + pair.b.size for pair in self.factors)
        size = self.client_ranks.sizes(ids) + self.space.size - factors
        return size * self.space.vector.element_size()
