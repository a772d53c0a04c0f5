"""FedAvg.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks
from Decentralized Data", AISTATS 2017.
"""

from torch import Tensor

from pfl.method import Clients, FederatedAlgorithm


class FedAvg(FederatedAlgorithm):
    """Local SGD from the global model; the server averages the clients' models (Algorithm 1).

    w_i <- w;  w_i <- w_i - η g_i(w_i) (local steps);  w <- sum_i n_i w_i / sum_i n_i.

    With a `server_optimizer`, whose gradient is w - mean(w_i), this is FedOpt.
    Cost: P values down, P up. No client state.

    Example:
        >>> from pfl.models import MLP
        >>> FedAvg(MLP(64, (8,)), lr=0.05, local_epochs=2).space.size
        610
    """

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        return self.local_sgd(clients, w)
