"""FedRep.

Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized
Federated Learning", ICML 2021.
"""

from typing import Any

import numpy as np
from torch import Tensor

from pfl.method import Clients, Count, Message, Network, PartlyPersonal


class FedRep(PartlyPersonal):
    """Shared representation φ and personal heads h_i, trained one after the other (Algorithm 1).

    h_i <- h_i - η g_h(φ, h_i), τ_h epochs from the client's own last h_i, with φ as received;
    φ_i <- φ_i - η g_φ(φ_i, h_i), τ_φ epochs from φ, with the new h_i;
    φ <- sum_S n_i φ_i / sum_S n_i.
    Cost: the body down, the body up. Client state: h_i.

    Args:
        personal: Shell patterns of the names of the head's parameters.
        head_epochs: τ_h. τ_φ is `local_epochs`, or `local_steps` where that is given.

    Note:
        Differences from the paper's print: φ is the mean weighted by the clients' numbers of
        samples; `weighting: uniform` is the print's plain mean. All heads begin at the network's
        initial one. The paper's linear experiments begin with the method of moments, and
        orthonormalize φ after each round, neither of which is in its Algorithm 1. The clients'
        `optimizer` is made anew for the head and for the body. Running statistics of BatchNorm move
        in both, since both run the whole network; `buffers` says what becomes of them.

    Example:
        >>> from pfl.models import MLP
        >>> method = FedRep(MLP(64, (8,)), personal="head", head_epochs=5)
        >>> method.client_state_names
        ['head']
    """

    losses = ("train", "head")

    def __init__(self, network: Network, *, head_epochs: Count = 10, **kwargs: Any) -> None:
        super().__init__(network, **kwargs)
        self.head_epochs = head_epochs

    def cost(self, sizes: np.ndarray) -> np.ndarray:
        """Returns the sample gradients of a round, [C], as if the head's cost as much."""
        return sizes * (self.head_epochs + self.epochs_of(sizes))

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        head = self.personal_part
        v = self.personalized(clients)
        v = self.local_sgd(clients, v, part=head, epochs=self.head_epochs, name="head")
        v = self.local_sgd(clients, v, part=~head)
        return self.keep_and_send(clients, v)
