"""Ditto.

Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML
2021.
"""

from typing import Any

import numpy as np
from torch import Tensor

from pfl.method import Clients, Count, FederatedAlgorithm, Network, NonNegative


class Ditto(FederatedAlgorithm):
    """FedAvg, and a personalized model that a penalty holds to the global one (Algorithm 1).

    w_i <- w_i - η g_i(w_i), local steps from w^t;  w^{t+1} <- sum_S n_i w_i / sum_S n_i;
    v_i <- v_i - η (g_i(v_i) + λ (v_i - w^t)), s epochs from the client's own last v_i.

    Evaluated: the global model w, and v_i. Shared: w. Personal: v_i, which never influences w. A
    newcomer receives w. Cost: P values down, P up, as FedAvg; `local_epochs` + s epochs of
    gradients. Client state: v_i. Server state: none beside w.

    Args:
        penalty: λ. 0: every client alone; large: all clients share w.
        personal_epochs: s, epochs of v_i in a round.

    Note:
        v_i is held to the received w^t, not to the client's own w_i. The paper counts s in local
        steps; here they are epochs, and both models have the same rate. A client that never took
        part has the initial model as v_i. With LoRA |v_i - w| is the distance of factors, which is
        not that of the models B A; `trainable: delta` holds the updates together.

    Example:
        >>> from pfl.models import MLP
        >>> method = Ditto(MLP(64, (8,)), penalty=0.1, personal_epochs=1)
        >>> method.client_state_names
        ['v']
    """

    losses = ("train", "personal")
    has_personalized = True
    personal_buffers = "initial"
    personalization_penalty = None  # λ holds v_i to FedAvg's model, not to the minimum over both

    def __init__(
        self,
        network: Network,
        *,
        penalty: NonNegative = 0.1,
        personal_epochs: Count = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, **kwargs)
        self.penalty = penalty
        self.personal_epochs = personal_epochs
        self.add_client_state("v", self.first_model)

    def cost(self, sizes: np.ndarray) -> np.ndarray:
        return sizes * (self.epochs_of(sizes) + self.personal_epochs)

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        sent = self.local_sgd(clients, w)
        clients.state["v"] = self.local_sgd(
            clients.personal,
            clients.state["v"],
            prox_weight=self.penalty,
            prox_center=w,
            epochs=self.personal_epochs,
            name="personal",
        )
        return sent

    def personalized(self, clients: Clients) -> Tensor:
        return clients.state["v"]
