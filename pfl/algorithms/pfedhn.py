"""pFedHN.

Shamsian, Navon, Fetaya, Chechik, "Personalized Federated Learning using Hypernetworks", ICML 2021.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, relu

from pfl.method import Clients, FederatedAlgorithm, Message, Network, dense, generator, require


class pFedHN(FederatedAlgorithm):
    """A network at the server computes each client's model from a vector of the client (Alg. 1).

    θ_i = h(v_i; φ), with the client's vector v_i and the hypernetwork's values φ;
    θ̃_i <- θ_i, then θ̃_i <- θ̃_i - η g_i(θ̃_i), local steps; the client sends Δ_i = θ̃_i - θ_i;
    (φ, v) <- (φ, v) - α m, where m <- μ m + g + decay (φ, v) with g = -1/|S| Σ_S (∇θ_i)ᵀ Δ_i.
    h has hidden layers of one width with ReLU between them, and a linear layer that returns all P
    values.

    Evaluated: θ_i with the newest φ; there is no global model. Personal: nothing, the server has
    all of it. Cost: P values down, P up. No client state. Server state: φ and all v_i, and their
    momentum. A newcomer gets h of the mean vector of the clients that train.

    Args:
        server_lr: α.
        server_momentum: μ.
        server_weight_decay: Of φ and all v_i.
        embedding: The length of v_i; null: 1 + M / 4, rounded down, of the M clients that train.
        width: Of the hidden layers.
        hidden_layers: How many there are after the first one.

    Note:
        One client in a round is the paper's algorithm; with more, this is the mean of their
        gradients. The default values and layers are those of the authors' code for CIFAR-10, which
        also cuts gradients at the norm 50. There all layers begin as PyTorch's do; here the last
        one's biases are the network's own first values, so that θ_i begins as these plus W x, with
        the last layer's weights W and its inputs x.
        Running statistics of BatchNorm stay with the client. pFedHN-PC, which keeps heads with the
        clients, and the training of a newcomer's vector alone are left out.

    Example:
        >>> from models import MLP
        >>> method = pFedHN(MLP(64, (8,)), width=20)
        >>> method.has_global, method.has_personalized
        (False, True)
    """

    has_global = False
    has_personalized = True
    hypernetwork: Tensor
    momentum: Tensor

    def __init__(
        self,
        network: Network,
        *,
        server_lr: float = 0.01,
        server_momentum: float = 0.9,
        server_weight_decay: float = 1e-3,
        embedding: int | None = None,
        width: int = 100,
        hidden_layers: int = 3,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, server_optimizer=None, buffers="local", **kwargs)
        require("server_lr", server_lr, server_lr > 0, "positive")
        require("server_momentum", server_momentum, 0 <= server_momentum < 1, "in [0, 1)")
        decay = server_weight_decay
        require("server_weight_decay", decay, decay >= 0, "at least 0")
        require("embedding", embedding, embedding is None or embedding >= 1, "at least 1, or null")
        require("width", width, width >= 1, "at least 1")
        require("hidden_layers", hidden_layers, hidden_layers >= 0, "at least 0")
        self.server_lr, self.server_momentum, self.server_decay = server_lr, server_momentum, decay
        self.embedding, self.width, self.hidden_layers = embedding, width, hidden_layers
        self.add_server_state("hypernetwork", self._blank)
        self.add_server_state("momentum", self._blank)

    @property
    def personalization_penalty(self) -> None:
        """None: this is no penalized problem."""
        return None

    def begin_round(self, round_index: int) -> None:
        """Draws φ and all v_i before the first round."""
        if round_index > 0:
            return
        draw = generator(self.seed, "hypernetwork")
        vectors, layers = self._parts(self.hypernetwork)
        vectors.copy_(torch.from_numpy(draw.normal(size=vectors.shape)))
        for weight, bias in layers:
            bound = weight.shape[1] ** -0.5
            for values in (weight, bias):
                values.copy_(torch.from_numpy(draw.uniform(-bound, bound, values.shape)))
        bias.copy_(self.global_model)  # the last layer's bias

    def download(self) -> dict[str, Message]:
        return {}

    def download_for(self, ids: np.ndarray) -> Tensor:
        """Returns θ_i; that of the mean vector for newcomers."""
        vectors, _ = self._parts(self.hypernetwork)
        by_id = vectors.mean(0).repeat(len(self.client_sizes), 1)
        by_id[self.population] = vectors
        return self._models(self.hypernetwork, by_id[torch.from_numpy(ids)])

    evaluation_for = download_for

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        """Trains θ_i, and sends its change."""
        return {"change": dense(self.local_sgd(clients, w) - w, reduce="rows")}

    def server_update(self, received: dict[str, Tensor]) -> None:
        """Moves φ and all v_i, so that the clients' θ_i move along their changes."""
        changes = received["change"]
        with torch.enable_grad():
            at = self.hypernetwork.clone().requires_grad_()
            places = np.searchsorted(self.population, self.participant_ids)
            models = self._models(at, self._parts(at)[0][torch.from_numpy(places)])
            (g,) = torch.autograd.grad(-(models * changes).sum() / len(changes), at)
        g = g.add(self.hypernetwork, alpha=self.server_decay)
        self.momentum.mul_(self.server_momentum).add_(g)
        self.hypernetwork.sub_(self.momentum, alpha=self.server_lr)

    def personalized(self, clients: Clients) -> Tensor:
        """Returns θ_i."""
        return clients.received["w"]

    def _widths(self) -> list[int]:
        """Returns the widths of v_i, of all hidden layers and of the last one."""
        first = self.embedding or 1 + self.num_clients // 4
        return [first, *[self.width] * (1 + self.hidden_layers), self.space.size]

    def _blank(self) -> Tensor:
        """Returns zeros for all v_i and φ."""
        widths = self._widths()
        layers = sum(b * (a + 1) for a, b in pairwise(widths))
        return self.global_model.new_zeros(self.num_clients * widths[0] + layers)

    def _parts(self, phi: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Returns views of the vectors [clients, E], and of each layer's weight and bias."""
        layers, end = list[tuple[Tensor, Tensor]](), len(phi)
        for a, b in reversed([*pairwise(self._widths())]):
            weight, bias = phi[end - b * (a + 1) : end].split([b * a, b])
            layers.insert(0, (weight.view(b, a), bias))
            end -= b * (a + 1)
        return phi[:end].view(-1, self._widths()[0]), layers

    def _models(self, phi: Tensor, vectors: Tensor) -> Tensor:
        """Returns the models of vectors [C, E], [C, P]."""
        _, (first, *hidden, last) = self._parts(phi)
        x = linear(vectors, *first)
        for layer in hidden:
            x = linear(relu(x), *layer)
        return linear(x, *last)
