"""GPGD: global proximal gradient descent, an ablation of FedSLR (TMLR 2023, Section 6.4)."""

from typing import Any

from torch import Tensor

from pfl.method import (
    Clients,
    FederatedAlgorithm,
    Message,
    Network,
    NonNegative,
    low_rank,
    low_rank_size,
    nuclear_norm_prox,
    refuse_factors,
)


class GPGD(FederatedAlgorithm):
    """FedAvg whose server applies the nuclear norm's prox to the average.

    v <- v - η g_i(v), K steps from w;  w <- SVT_{η λ}(mean of v).
    The threshold is that of one local step although a round takes K, so the effective penalty is
    about λ / K. Cost: low-rank factors down, P values up. No client state.

    Args:
        low_rank_penalty: λ.

    Example:
        >>> from pfl.models import MLP
        >>> GPGD(MLP(64, (8,)), low_rank_penalty=0.01).ranks  # of the layers 8 x 64 and 10 x 8
        tensor([8, 8])
    """

    personalization_penalty = None
    ranks: Tensor

    def __init__(
        self, network: Network, *, low_rank_penalty: NonNegative = 1e-4, **kwargs: Any
    ) -> None:
        super().__init__(network, weighting="uniform", server_optimizer=None, **kwargs)
        refuse_factors(self.network, "GPGD")
        self.low_rank_penalty = low_rank_penalty
        self.add_server_state("ranks", self.space.full_ranks)

    def download(self) -> Message:
        return low_rank(self.global_model, self.space, self.ranks)

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        return self.local_sgd(clients, w)

    def server_update(self, mean: dict[str, Tensor]) -> None:
        threshold = self.low_rank_penalty * self.learning_rate(self.rounds)
        w, ranks = nuclear_norm_prox(self.space, mean["w"], threshold)
        self.global_model.copy_(w)
        self.ranks.copy_(ranks)

    def parameters_global(self) -> int:
        return int(low_rank_size(self.space, self.ranks))
