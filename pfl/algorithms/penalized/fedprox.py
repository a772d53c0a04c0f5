"""FedProx.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks",
MLSys 2020.
"""

from typing import Any

from torch import Tensor

from pfl.method import Clients, FederatedAlgorithm, Network, NonNegative


class FedProx(FederatedAlgorithm):
    """FedAvg with local objectives f_i(v) + (μ/2) |v - w|^2 (Algorithm 2).

    v <- v - η (g_i(v) + μ (v - w));  w <- mean of v. With μ = 0 this is FedAvg.
    Cost: P values down, P up. No client state.

    Args:
        proximal_weight: μ, the pull towards the received model.

    Note:
        With LoRA |v - w| is the distance of factors, which is not that of the models B A;
        `trainable: delta` holds the updates together.

    Example:
        >>> from pfl.models import MLP
        >>> FedProx(MLP(64, (8,)), proximal_weight=0.1).proximal_weight
        0.1
    """

    def __init__(
        self, network: Network, *, proximal_weight: NonNegative = 0.01, **kwargs: Any
    ) -> None:
        super().__init__(network, **kwargs)
        self.proximal_weight = proximal_weight

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        return self.local_sgd(clients, w, prox_weight=self.proximal_weight, prox_center=w)
