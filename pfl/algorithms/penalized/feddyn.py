"""FedDyn.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, "Federated Learning Based on Dynamic
Regularization", ICLR 2021.
"""

from typing import Any

import torch
from torch import Tensor

from pfl.method import Clients, FederatedAlgorithm, Message, Network, Positive


class FedDyn(FederatedAlgorithm):
    """Local objectives with a dynamic regularizer, whose stationary points agree (Algorithm 1).

    θ_i <- argmin f_i(θ) - <g_i, θ> + α/2 |θ - θ^t|^2, local steps from θ^t;
    g_i <- g_i - α (θ_i - θ^t);  h <- h - α/m sum_S (θ_i - θ^t);
    θ^{t+1} <- mean_S θ_i - h / α.

    m is the number of all clients, and S is the cohort, whose mean is unweighted. g_i and h start
    at 0, so that h is always the mean of all m g_i. With full gradients a fixed point is a
    stationary point of mean f_i, however many local steps the clients take. FedSLR's first phase
    with η_g = 1/α and without penalty has the same iterates; so has FedPD with η = 1/α, if all
    clients take part and solve their problems exactly.
    Evaluated and shared: the global model θ, which is also a newcomer's model. Personal: nothing.
    Cost: P values down, P up. Client state: g_i. Server state: h.

    Args:
        alpha: α, the weight of the proximal term.

    Note:
        A client without samples sends θ^t. The authors' code scales α by the clients' relative
        numbers of samples, clips gradients and starts clients at the mean of their models; the
        paper does none of these. Some public implementations leave out the proximal term or its
        square; both change where the method ends.

    Example:
        >>> from pfl.models import MLP
        >>> method = FedDyn(MLP(64, (8,)), alpha=0.1, local_epochs=2)
        >>> method.client_state_names
        ['g']
    """

    h: Tensor

    def __init__(self, network: Network, *, alpha: Positive = 0.1, **kwargs: Any) -> None:
        super().__init__(network, weighting="uniform", server_optimizer=None, **kwargs)
        self.alpha = alpha
        self.add_client_state("g")
        self.add_server_state("h", torch.zeros_like(self.global_model))

    def client_update(self, clients: Clients, w: Tensor) -> Tensor | dict[str, Tensor | Message]:
        g = clients.state["g"]
        v = self.local_sgd(clients, w, linear=-g, prox_weight=self.alpha, prox_center=w)
        exact = g - self.alpha * (v - w)
        clients.state["g"] = stored = self.as_stored("g", exact)
        if stored is exact:
            return v
        # With states in 16 bits h must follow what is kept, which the server cannot compute from
        # θ_i. It costs no bytes: how states are stored does not belong to the method.
        return {"w": v, "g": Message(stored - g, 0)}

    def server_update(self, mean: dict[str, Tensor]) -> None:
        change = mean.get("g", self.alpha * (self.global_model - mean["w"]))  # of g_i, mean over S
        self.h += change * (self.participants / self.num_clients)
        self.global_model.copy_(mean["w"] - self.h / self.alpha)
