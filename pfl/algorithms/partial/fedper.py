"""FedPer.

Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers",
arXiv 1912.00818, 2019.
"""

from torch import Tensor

from pfl.method import Clients, Message, PartlyPersonal


class FedPer(PartlyPersonal):
    """Shared base layers φ and personal layers h_i, trained together (Algorithms 1 and 2).

    (φ_i, h_i) <- (φ_i, h_i) - η g_i(φ_i, h_i), local steps from the received φ and the client's own
    last h_i;  φ <- sum_S n_i φ_i / sum_S n_i.
    Cost: the body down, the body up. Client state: h_i.

    Args:
        personal: Shell patterns of the names of the personalization layers (the paper's last K_P
            layers).

    Note:
        Differences from the paper's print: all personal layers begin at the network's one initial
        value, while there each client draws its own; n_i are summed over the round's participants,
        while there all clients take part.

    Example:
        >>> from pfl.models import MLP
        >>> method = FedPer(MLP(64, (8,)))
        >>> method.client_state_names
        ['head']
    """

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        v = self.local_sgd(clients, self.personalized(clients))
        return self.keep_and_send(clients, v)
