"""LocalTrain: every client trains alone, the other end of personalization."""

from typing import Any

from torch import Tensor

from pfl.method import Clients, FederatedAlgorithm, Message, Network


class LocalTrain(FederatedAlgorithm):
    """Local SGD from the client's own last model; nothing is ever sent.

    w_i <- w_i - η g_i(w_i), from the common initial model. There is no global model to evaluate,
    and buffers stay local. Client state: w_i.

    Example:
        >>> from pfl.models import MLP
        >>> method = LocalTrain(MLP(64, (8,)))
        >>> method.has_global, method.has_personalized
        (False, True)
    """

    has_global = False
    has_personalized = True
    personalization_penalty = 0.0

    def __init__(self, network: Network, **kwargs: Any) -> None:
        super().__init__(
            network, buffers="local", weighting="uniform", server_optimizer=None, **kwargs
        )
        self.add_client_state("w", self.first_model)

    def download(self) -> Message:
        """Returns a message without bytes: every client has the common initial model already."""
        return Message(self.global_model, 0)

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        clients.state["w"] = self.local_sgd(clients, clients.state["w"])
        return {}

    def server_update(self, mean: dict[str, Tensor]) -> None:
        """Does nothing."""

    def personalized(self, clients: Clients) -> Tensor:
        return clients.state["w"]
