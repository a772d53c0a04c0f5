"""The base of methods whose clients begin a round from mixtures of the clients' own models."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl.clients import Clients
from pfl.communication import Message
from pfl.method.algorithm import FederatedAlgorithm
from pfl.method.local_training import Network


class ModelMixtures(FederatedAlgorithm):
    """Each client trains from u_i = sum_j ξ_ij w_j, a mixture of the models that clients sent last.

    The personalized model is w_i, and there is no global model. A subclass writes `mixing_weights`,
    calls `mix` in `begin_round` with the clients j, and sets `self._known` in `begin_evaluation` to
    the models that a newcomer's mixture has beside the newcomer's own; it writes `client_update`,
    which keeps w_i in `clients.state["w"]`, and sends w_i there or in `first_upload`.

    Client state: w_i, of which the server keeps a copy. The weights that are not zero go to
    `collaboration.csv`. A newcomer trains a first local model from the initial one, and gets its
    mixture.
    """

    has_global = False
    has_personalized = True
    keeps_model = True
    personalization_penalty = None
    _known: dict[str, Tensor]
    tables = ("collaboration",)

    def __init__(self, network: Network, **kwargs: Any) -> None:
        super().__init__(network, server_optimizer=None, **kwargs)
        self.add_client_state("w", self.first_model)
        self.keep_messages("w", self.first_model)

    def mixing_weights(self, models: Tensor, round_index: int) -> Tensor:
        """Returns ξ of models [n, P], float64 [n, n], whose rows sum to one."""
        raise NotImplementedError

    def mix(self, ids: np.ndarray, round_index: int) -> Tensor:
        """Returns the weights ξ of a round among clients `ids`, ascending int64, and keeps them."""
        self._ids = ids
        self._models = self.kept_models(ids)
        self._weights = self.mixing_weights(self._models["w"], round_index)
        return self._weights

    def download(self) -> dict[str, Message]:
        return {}

    def download_for(self, ids: np.ndarray) -> Tensor | dict[str, Tensor]:
        """Returns u_i and its running statistics."""
        weights = self._weights[torch.from_numpy(np.searchsorted(self._ids, ids))]
        client, partner = weights.nonzero(as_tuple=True)
        self.log_table(
            "collaboration",
            client=ids[client.cpu().numpy()],
            partner=self._ids[partner.cpu().numpy()],
            weight=weights[client, partner],
        )
        return {name: weights.to(rows) @ rows for name, rows in self._models.items()}

    def server_update(self, mean: dict[str, Tensor]) -> None:
        """Does nothing: there is no global model."""

    def personalized(self, clients: Clients) -> Tensor:
        return clients.state["w"]

    def newcomer(self, clients: Clients) -> Tensor:
        """Returns u_i of a first local model."""
        own = {"w": self.adapt(clients, self.global_model)}
        if clients.buffers is not None:
            own["buffers"] = clients.buffers
        mixed: dict[str, list[Tensor]] = {name: [] for name in self._known}
        for c in range(len(clients)):
            models = {n: torch.cat([rows, own[n][c : c + 1]]) for n, rows in self._known.items()}
            weights = self.mixing_weights(models["w"], max(0, self.rounds - 1))[-1]
            for name, rows in models.items():
                mixed[name].append(weights.to(rows) @ rows)
        if "buffers" in mixed:
            clients.buffers = torch.stack(mixed["buffers"])
        return torch.stack(mixed["w"])


def inner_products(models: Tensor) -> Tensor:
    """Returns <w_i, w_j> of all pairs of models [n, P], float64 [n, n]."""
    products = torch.zeros(len(models), len(models), dtype=torch.float64, device=models.device)
    for part in models.split(1 << 20, dim=1):  # a float64 copy of all models could be too large
        products += part.double() @ part.double().T
    return products
