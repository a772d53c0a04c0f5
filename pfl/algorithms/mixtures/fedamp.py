"""FedAMP and HeurFedAMP.

Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, "Personalized Cross-Silo Federated Learning on Non-IID
Data", AAAI 2021.
"""

from typing import Any

import torch
from torch import Tensor

from pfl.method import (
    Clients,
    ConfigError,
    Count,
    ModelMixtures,
    Network,
    NonNegative,
    Positive,
    PositiveShare,
    Share,
    inner_products,
)


class FedAMP(ModelMixtures):
    """Clients with similar models pull each other: attentive message passing (Algorithm 1).

    ξ_ij = α_k A'(|w_i - w_j|^2) for j ≠ i, with A(x) = 1 - exp(-x / σ); ξ_ii = 1 - sum_j ξ_ij;
    u_i = sum_j ξ_ij w_j;
    w_i <- argmin f_i(w) + λ / (2 α_k) |w - u_i|^2, by local steps from u_i.

    Evaluated: w_i; there is no global model. Shared: only the mixtures u_i. Personal: w_i. Cost: P
    values down (u_i), P up (w_i). Client state: w_i, of which the server keeps a copy. A newcomer
    trains a first local model from the initial one, and gets its u_i among the last round's cohort.

    Args:
        alpha: α_1, the step of the message passing in the first round.
        alpha_decay: The factor by which α_k falls every `decay_rounds` rounds.
        decay_rounds: The number of rounds with the same α_k.
        sigma: σ. It must be at least α_1 (n - 1) for n clients in a round, or ξ_ii could be
            negative.
        penalty: λ. Local steps with rate η diverge where η λ / α_k exceeds 2, so that α_k must not
            fall too far in long runs.

    Note:
        The paper has all clients in every round. Here the sums go over the round's cohort, with
        each client's last model. The argmin is approached by local SGD steps. The defaults of
        `alpha`, `alpha_decay`, `decay_rounds` and `penalty` are those of a public implementation
        (flgo), and σ is a round number that fits 100 clients. In a well-known other one the
        proximal term has no gradient and clients do not start at u_i, so that it trains every
        client alone.

    Example:
        >>> from pfl.models import MLP
        >>> method = FedAMP(MLP(64, (8,)), alpha=1e4, sigma=1e6, penalty=1.0)
        >>> method.client_state_names
        ['w']
    """

    def __init__(
        self,
        network: Network,
        *,
        alpha: Positive = 1e4,
        alpha_decay: PositiveShare = 0.1,
        decay_rounds: Count = 30,
        sigma: Positive = 1e6,
        penalty: NonNegative = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, weighting="uniform", **kwargs)
        self.alpha = alpha
        self.alpha_decay = alpha_decay
        self.decay_rounds = decay_rounds
        self.sigma = sigma
        self.penalty = penalty

    def check_setup(self) -> None:
        """Refuses negative weights, and proximal terms that make local steps diverge."""
        smallest = max(0, self.cohort_size - 1) * self.alpha
        if self.sigma < smallest:
            raise ConfigError(
                f"model.sigma: {self.sigma:g}; it must be at least {smallest:g}, model.alpha times "
                f"the number of other clients in a round"
            )
        self._check_proximal_term()

    def _check_proximal_term(self) -> None:
        for k in range(self.max_rounds or 1):
            if self.learning_rate(k) * self.penalty > 2 * self.alpha_of(k):
                raise ConfigError(
                    f"model.decay_rounds: {self.decay_rounds}; from round {k + 1} on local steps "
                    f"would diverge, since model.lr * model.penalty is more than twice "
                    f"alpha_k = {self.alpha_of(k):.3g}; give more rounds, or a smaller penalty"
                )

    def alpha_of(self, round_index: int) -> float:
        """Returns α_k of a round (from 0)."""
        return self.alpha * self.alpha_decay ** (round_index // self.decay_rounds)

    def weights(self, models: Tensor, alpha: float) -> Tensor:
        """Returns ξ of models [n, P], float64 [n, n]; its rows sum to one."""
        xi = alpha / self.sigma * torch.exp(-model_distances(models) / self.sigma)
        xi.fill_diagonal_(0.0)
        return xi + torch.diag(1 - xi.sum(1))

    def mixing_weights(self, models: Tensor, round_index: int) -> Tensor:
        return self.weights(models, self.alpha_of(round_index))

    def begin_round(self, round_index: int) -> None:
        self.mix(self.cohort(round_index), round_index)

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        weight = self.penalty and self.penalty / self.alpha_of(clients.round)
        v = self.local_sgd(clients, w, prox_weight=weight, prox_center=w)
        clients.state["w"] = v
        return v

    def begin_evaluation(self) -> None:
        if len(self.unseen_clients):
            last = self.cohort(self.rounds - 1) if self.rounds else self.population[:0]
            self._known = self.kept_models(last)


class HeurFedAMP(FedAMP):
    """FedAMP with weights from cosines, the paper's heuristic for deep networks.

    ξ_ij = (1 - ξ_ii) exp(σ cos(w_i, w_j)) / sum_{h ≠ i} exp(σ cos(w_i, w_h)) for j ≠ i.

    Everything else is as in `FedAMP`; α_k only sets the weight λ / (2 α_k) of the proximal term.

    Args:
        own_weight: ξ_ii; null: 1/n for n clients in a round.
        sigma: σ. A larger value concentrates the weights on the most similar models.
        **kwargs: The other arguments of `FedAMP`.

    Note:
        A client that is alone in a round starts from its own model. A model of norm 0 has cosine 0
        with every model. The defaults are those of a public implementation (flgo).

    Example:
        >>> from pfl.models import MLP
        >>> method = HeurFedAMP(MLP(64, (8,)), own_weight=0.5)
        >>> xi = method.weights(torch.eye(3, 610), alpha=1.0)
        >>> xi[0].tolist()  # all others are equally far away
        [0.5, 0.25, 0.25]
    """

    def __init__(
        self,
        network: Network,
        *,
        own_weight: Share | None = None,
        sigma: Positive = 25.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, sigma=sigma, **kwargs)
        self.own_weight = own_weight

    def check_setup(self) -> None:
        """Refuses proximal terms that make local steps diverge; weights are never negative."""
        self._check_proximal_term()

    def weights(self, models: Tensor, alpha: float) -> Tensor:
        n = len(models)
        if n < 2:
            return torch.eye(n, dtype=torch.float64, device=models.device)
        products = inner_products(models)
        norms = products.diagonal().sqrt().clamp_min(1e-300)
        scores = self.sigma * (products / norms / norms[:, None])
        scores.fill_diagonal_(-torch.inf)
        own = 1 / n if self.own_weight is None else self.own_weight
        xi = (1 - own) * torch.softmax(scores, dim=1)
        return xi.fill_diagonal_(own)


def model_distances(models: Tensor) -> Tensor:
    """Returns |w_i - w_j|^2 of all pairs of models [n, P], float64 [n, n].

    The inner products are taken of differences from the mean model, so that little cancels where
    models are similar. It is one product of matrices; robust rules take each difference itself.
    """
    products = inner_products(models - models.mean(0))
    squares = products.diagonal()
    return (squares[:, None] + squares - 2 * products).clamp_min(0.0)
