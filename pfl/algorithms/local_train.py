"""LocalTrain: every client alone, the other end of personalization."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pfl.method import Clients, FederatedAlgorithm, Message, Network


class LocalTrain(FederatedAlgorithm):
    """Local SGD from the client's own last model; nothing is ever sent.

    w_i <- w_i - η g_i(w_i), from the common initial model. There is no global model to evaluate,
    and buffers stay local. Client state: w_i.
    """

    has_global = False
    has_personalized = True

    def __init__(self, network: Network, **kwargs: Any) -> None:
        super().__init__(
            network, buffers="local", weighting="uniform", server_optimizer=None, **kwargs
        )
        self.add_client_state("w", lambda: self.global_model)

    @property
    def personalization_penalty(self) -> float:
        """Every client alone."""
        return 0.0

    def download(self) -> Message:
        """Nothing: every client knows the common initial model."""
        return Message(self.global_model, 0)

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        """Local SGD; sends nothing."""
        clients.state["w"] = self.local_sgd(clients, clients.state["w"])
        return {}

    def server_update(self, mean: dict[str, Tensor]) -> None:
        """Nothing to do."""

    def personalized(self, clients: Clients) -> Tensor:
        """w_i."""
        return clients.state["w"]
