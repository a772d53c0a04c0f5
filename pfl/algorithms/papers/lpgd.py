"""LPGD: local proximal gradient descent, an ablation of FedSLR (TMLR 2023, Section 6.4)."""

from typing import Any

from torch import Tensor

from pfl.method import (
    Clients,
    FederatedAlgorithm,
    Message,
    Network,
    NonNegative,
    low_rank,
    nuclear_norm_prox,
    refuse_factors,
)


class LPGD(FederatedAlgorithm):
    """Every local step is followed by the nuclear norm's prox; the server averages.

    v <- SVT_{η λ}(v - η g_i(v)), K steps from w;  w <- mean of v.
    Cost: P values down (a mean of low-rank models has a higher rank), low-rank factors up.
    No client state.

    Args:
        low_rank_penalty: λ.

    Example:
        >>> from pfl.models import MLP
        >>> LPGD(MLP(64, (8,)), low_rank_penalty=0.01).low_rank_penalty
        0.01
    """

    personalization_penalty = None

    def __init__(
        self, network: Network, *, low_rank_penalty: NonNegative = 1e-4, **kwargs: Any
    ) -> None:
        super().__init__(network, weighting="uniform", **kwargs)
        refuse_factors(self.network, "LPGD")
        self.low_rank_penalty = low_rank_penalty

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        ranks = self.space.full_ranks.to(w.device).repeat(len(clients), 1)

        def prox(v: Tensor, lr: float) -> Tensor:
            v, rank = nuclear_norm_prox(self.space, v, self.low_rank_penalty * lr)
            ranks[: len(v)] = rank
            return v

        v = self.local_sgd(clients, w, prox=prox)
        return low_rank(v, self.space, ranks)
