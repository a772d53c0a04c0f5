"""GPGD: global proximal gradient descent, an ablation of FedSLR (TMLR 2023, Section 6.4)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pfl.algorithms.base import FederatedAlgorithm
from pfl.algorithms.module import Network
from pfl.clients import Clients
from pfl.communication import Message, low_rank_size
from pfl.communication import low_rank as low_rank_message
from pfl.errors import require
from pfl.proximal import low_rank


class GPGD(FederatedAlgorithm):
    """FedAvg whose server takes the nuclear norm's prox of the average.

    v <- v - η g_i(v), K steps from w;  w <- SVT_{η λ}(mean of v).
    The threshold is that of one local step although a round takes K, so the effective penalty is
    about λ / K. Cost: low-rank factors down, P values up. No client state.

    Args:
        low_rank_penalty: λ.
    """

    ranks: Tensor

    def __init__(self, network: Network, *, low_rank_penalty: float = 1e-4, **kwargs: Any) -> None:
        super().__init__(network, weighting="uniform", server_optimizer=None, **kwargs)
        require("low_rank_penalty", low_rank_penalty, low_rank_penalty >= 0, "at least 0")
        self.low_rank_penalty = low_rank_penalty
        self.add_server_state("ranks", self.space.full_ranks)

    @property
    def coupling(self) -> None:
        """It solves a problem of its own."""
        return None

    def download(self) -> Message:
        """The global model's low-rank factors."""
        return low_rank_message(self.global_model, self.space, self.ranks)

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        """Local SGD; sends v."""
        return self.local_sgd(clients, w)

    def server_update(self, mean: dict[str, Tensor]) -> None:
        """w <- SVT(mean of v)."""
        threshold = self.low_rank_penalty * self.learning_rate(self.rounds)
        w, ranks = low_rank(self.space, mean["w"], threshold)
        self.global_model.copy_(w)
        self.ranks.copy_(ranks)

    def parameters_global(self) -> int:
        """Values of the factors."""
        return int(low_rank_size(self.space, self.ranks))
