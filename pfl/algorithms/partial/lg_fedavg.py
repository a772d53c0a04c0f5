"""LG-FedAvg.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think Locally, Act Globally:
Federated Learning with Local and Global Representations", NeurIPS 2019 workshop, arXiv 2001.01523.
"""

from typing import Any

from torch import Tensor

from pfl.method import Clients, Message, Network, Part, PartlyPersonal


class LGFedAvg(PartlyPersonal):
    """Local representations and a shared head, trained together (Algorithm 1).

    (u_i, h) <- (u_i, h) - η g_i(u_i, h), local steps;  h <- sum_S n_i h_i / sum_S n_i.

    FedPer with the parts exchanged: `personal` is the body u_i here.
    Evaluated: (u_i, h) with the client's last u_i and the newest h. Shared: h; personal: u_i, with
    the running statistics of BatchNorm. Cost: the head down, the head up. Client state: u_i (the
    state `head`, a name that `PartlyPersonal` gives). No server state but h. A newcomer has the
    initial body and the newest head.

    Args:
        personal: The local part, as in `PartlyPersonal`.

    Note:
        All bodies begin at the network's initial one. The authors' runs begin with a model that
        FedAvg has trained, which is not in the algorithm; here a network with trained values does
        the same. For a client without a body of its own the paper averages the outputs of all
        clients' models, which is left out here. In the authors' code all participants weigh the
        same (`weighting: uniform`), and a client is scored with the model that was best on its test
        samples in any round; here it is scored with its newest one.

    Example:
        >>> from pfl.models import MLP
        >>> method = LGFedAvg(MLP(64, (8,)))
        >>> method.download().nbytes // 4  # the head, 8 * 10 + 10
        90
    """

    def __init__(self, network: Network, *, personal: Part = "body", **kwargs: Any) -> None:
        super().__init__(network, personal=personal, buffers="local", **kwargs)

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        return self.keep_and_send(clients, self.local_sgd(clients, self.personalized(clients)))
