"""The base of methods that share some layers of the network and leave the others to the clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pfl.clients import Clients
from pfl.communication import Message, masked
from pfl.errors import require
from pfl.method.algorithm import FederatedAlgorithm
from pfl.method.module import Network


class PartlyPersonal(FederatedAlgorithm):
    """Clients share the body φ of the network, and each keeps a personal head h_i.

    The server sends φ and replaces it by the mean of the clients' bodies. A subclass writes how a
    client trains: `client_update` starts at `personalized(clients)` and returns
    `keep_and_send(clients, v)`. The personalized model of a client is (φ, h_i), with the initial
    head if it never took part. A body without a head predicts nothing, so there is no global model;
    `global_model` has φ and the initial head.

    Cost: the body down, the body up. Client state: h_i (`head`).

    Args:
        personal: Shell patterns of the names of the parameters that are personal.

    Attributes:
        personal_part: Which of the P values are personal, bool [P].

    Example:
        >>> from models import MLP
        >>> method = PartlyPersonal(MLP(64, (8,)), personal=["head.*"])  # the head: 8 * 10 + 10
        >>> int(method.personal_part.sum()), method.download().nbytes // 4
        (90, 520)
    """

    has_global = False
    has_personalized = True
    personal_part: Tensor

    def __init__(
        self, network: Network, *, personal: Sequence[str] = ("head.*",), **kwargs: Any
    ) -> None:
        super().__init__(network, server_optimizer=None, **kwargs)
        patterns = [personal] if isinstance(personal, str) else list(personal)
        part = self.space.mask(patterns, "model.personal")
        holds = bool(part.any()) and not bool(part.all())
        require("personal", patterns, holds, "patterns of some of the parameters, and not of all")
        self.add_server_state("personal_part", part)
        self.add_client_state("head", lambda: self.global_model[self.personal_part])

    @property
    def personalization_penalty(self) -> None:
        """None: the clients share a part of the model, and no penalty ties the others."""
        return None

    def download(self) -> Message:
        """Returns a message of φ."""
        return masked(self.global_model, ~self.personal_part)

    def keep_and_send(self, clients: Clients, v: Tensor) -> Message:
        """Keeps the heads of the models v [C, P] with the clients, and sends the bodies."""
        clients.state["head"] = v[:, self.personal_part]
        return masked(v, ~self.personal_part)

    def server_update(self, mean: dict[str, Tensor]) -> None:
        """Replaces φ by the clients' mean."""
        self.global_model.copy_(torch.where(self.personal_part, self.global_model, mean["w"]))

    def personalized(self, clients: Clients) -> Tensor:
        """Returns (φ, h_i)."""
        v = self.global_model.repeat(len(clients), 1)
        v[:, self.personal_part] = clients.state["head"]
        return v
