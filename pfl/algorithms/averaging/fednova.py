"""FedNova.

Wang, Liu, Liang, Joshi, Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous
Federated Optimization", NeurIPS 2020.
"""

from typing import Any

import torch
from torch import Tensor

from pfl.method import Clients, FederatedAlgorithm, Network, NonNegative, require


class FedNova(FederatedAlgorithm):
    """Averaging of normalized changes, so that clients with more local steps do not count for more.

    v <- v - η (g_i(v) + μ (v - w)), τ_i local steps from w;
    d_i = (v - w) / |a_i|_1;  τ = sum_S p_i |a_i|_1;  w <- w + τ sum_S p_i d_i.

    v - w is -η sum_k a_ik g_i(v_k), where a_ik = (1 - η μ)^(τ_i - 1 - k): without a proximal term
    |a_i|_1 is τ_i, with one it is (1 - (1 - η μ)^τ_i) / (η μ). p_i is the client's share of the
    cohort's samples. Where all clients take the same number of steps this is FedAvg, with μ
    FedProx. With a small rate a fixed point is the minimum of sum n_i f_i for any τ_i, which
    FedAvg's is not.
    Cost: P values down, P + 1 up (d_i and |a_i|_1). No client state.

    Args:
        proximal_weight: μ. η μ must be at most 1, or the weights a_ik would change their signs.

    Note:
        τ_i are the steps that the client took, of stragglers those until they stopped. A client
        without samples has d_i = 0 and τ_i = 0; it weighs nothing unless `weighting` is uniform.
        `weight_decay` is a part of g_i. A `server_optimizer` takes -τ sum p_i d_i as the gradient;
        with a rate of 1 and momentum it is the paper's server momentum. Local momentum, for which
        the paper has an a_i as well, and adaptive optimizers, for which it has none, are refused.
        Difference from the authors' code: with a proximal term it takes τ = sum p_i τ_i, which is
        longer.

    Example:
        >>> from pfl.models import MLP
        >>> method = FedNova(MLP(64, (8,)), lr=0.05, local_epochs=2)
        >>> method.coefficients(torch.tensor([1.0, 3.0]), 0.05)  # |a_i|_1 of one and three steps
        tensor([1., 3.])
    """

    def __init__(
        self, network: Network, *, proximal_weight: NonNegative = 0.0, **kwargs: Any
    ) -> None:
        super().__init__(network, **kwargs)
        holds = self.lr * proximal_weight <= 1
        require("proximal_weight", proximal_weight, holds, f"at most 1 / lr, {1 / self.lr:.4g}")
        self.require_plain_steps()
        self.proximal_weight = proximal_weight

    def coefficients(self, steps: Tensor, lr: float) -> Tensor:
        """Returns |a_i|_1 for numbers of local steps with a rate."""
        shrink = lr * self.proximal_weight
        return (1 - (1 - shrink) ** steps) / shrink if shrink else steps

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Tensor]:
        steps = torch.from_numpy(clients.steps_of(self.local_schedule)).to(w)[:, None]
        v = self.local_sgd(clients, w, prox_weight=self.proximal_weight, prox_center=w)
        norm = self.coefficients(steps, self.rate_of(clients))
        return {"d": (v - w) / norm.clamp_min(1.0), "norm": norm}

    def server_update(self, mean: dict[str, Tensor]) -> None:
        super().server_update({"w": self.global_model + mean["norm"] * mean["d"]})
