"""pFedHN.

Shamsian, Navon, Fetaya, Chechik, "Personalized Federated Learning using Hypernetworks", ICML 2021.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import relu
from torch.nn.utils import parameters_to_vector, skip_init, vector_to_parameters

from pfl.method import (
    BelowOne,
    Clients,
    Count,
    CountOrZero,
    FederatedAlgorithm,
    Message,
    Network,
    NonNegative,
    Positive,
    dense,
    generator,
)


class Hypernetwork(nn.Module):
    """The vectors v_i of clients, and the layers of h; all values are zero at first.

    They lie in one block of memory, whose places decide how products of matrices are rounded.

    Args:
        clients: The number of vectors.
        widths: The lengths of v_i, of the outputs of all hidden layers, and of a model.
    """

    def __init__(self, clients: int, widths: list[int]) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.zeros(clients, widths[0]))
        layers = [skip_init(nn.Linear, a, b) for a, b in pairwise(widths)]  # which draws nothing
        self.layers = nn.ModuleList(layers)
        for parameter in self.layers.parameters():
            nn.init.zeros_(parameter)
        self.join()

    def forward(self, vectors: Tensor) -> Tensor:
        """Returns the models of vectors [C, E], [C, P]."""
        first, *hidden, last = self.layers
        x = first(vectors)
        for layer in hidden:
            x = layer(relu(x))
        return last(x)

    def with_values(self, flat: Tensor, places: np.ndarray) -> Tensor:
        """Returns the models of some of the vectors, [C, P], by other values, given in one row."""
        names = [name for name, _ in self.named_parameters()]
        own = list(self.parameters())
        pieces = flat.split([values.numel() for values in own])
        views = [piece.view_as(values) for piece, values in zip(pieces, own, strict=True)]
        at = dict(zip(names, views, strict=True))
        models: Tensor = functional_call(self, at, (at["vectors"][torch.from_numpy(places)],))
        return models

    def join(self) -> None:
        """Puts all values into one block of memory again, once PyTorch has moved them."""
        vector_to_parameters(parameters_to_vector(self.parameters()), self.parameters())


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
        >>> from pfl.models import MLP
        >>> method = pFedHN(MLP(64, (8,)), width=20)
        >>> method.has_global, method.has_personalized
        (False, True)
    """

    has_global = False
    has_personalized = True
    hypernetwork: Hypernetwork
    momentum: Tensor

    def __init__(
        self,
        network: Network,
        *,
        server_lr: Positive = 0.01,
        server_momentum: BelowOne = 0.9,
        server_weight_decay: NonNegative = 1e-3,
        embedding: Count | None = None,
        width: Count = 100,
        hidden_layers: CountOrZero = 3,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, server_optimizer=None, buffers="local", **kwargs)
        self.server_lr = server_lr
        self.server_momentum = server_momentum
        self.server_decay = server_weight_decay
        self.embedding = embedding
        self.width = width
        self.hidden_layers = hidden_layers
        self.add_server_state("hypernetwork", self._blank)
        self.add_server_state("momentum", self._no_momentum)

    def _blank(self) -> Hypernetwork:
        first = self.embedding or 1 + self.num_clients // 4
        hidden = [self.width] * (1 + self.hidden_layers)
        made = Hypernetwork(self.num_clients, [first, *hidden, self.space.size])
        made.to(self.space.vector)
        made.join()
        return made

    def after_move(self) -> None:
        super().after_move()
        if hasattr(self, "hypernetwork"):
            self.hypernetwork.join()

    def _no_momentum(self) -> Tensor:
        return torch.zeros_like(parameters_to_vector(self.hypernetwork.parameters()))

    @property
    def personalization_penalty(self) -> None:
        """None: this is no penalized problem."""
        return None

    def begin_round(self, round_index: int) -> None:
        """Draws φ and all v_i before the first round."""
        if round_index > 0:
            return
        draw = generator(self.seed, "hypernetwork")
        vectors = self.hypernetwork.vectors
        vectors.copy_(torch.from_numpy(draw.normal(size=vectors.shape)))
        for layer in cast("list[nn.Linear]", self.hypernetwork.layers):
            bound = layer.in_features**-0.5
            for values in (layer.weight, layer.bias):
                values.copy_(torch.from_numpy(draw.uniform(-bound, bound, values.shape)))
        layer.bias.copy_(self.global_model)  # of the last layer

    def download(self) -> dict[str, Message]:
        return {}

    def download_for(self, ids: np.ndarray) -> Tensor:
        """Returns θ_i; that of the mean vector for newcomers."""
        vectors = self.hypernetwork.vectors
        by_id = vectors.mean(0).repeat(len(self.client_sizes), 1)
        by_id[self.population] = vectors
        models: Tensor = self.hypernetwork(by_id[torch.from_numpy(ids)])
        return models

    evaluation_for = download_for

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        """Trains θ_i, and sends its change."""
        return {"change": dense(self.local_sgd(clients, w) - w, reduce="rows")}

    def server_update(self, received: dict[str, Tensor]) -> None:
        """Moves φ and all v_i, so that the clients' θ_i move along their changes."""
        changes = received["change"]
        places = np.searchsorted(self.population, self.participant_ids)
        with torch.enable_grad():
            values = parameters_to_vector(self.hypernetwork.parameters()).requires_grad_()
            models = self.hypernetwork.with_values(values, places)
            (g,) = torch.autograd.grad(-(models * changes).sum() / len(changes), values)
        values = values.detach()
        g = g.add(values, alpha=self.server_decay)
        self.momentum.mul_(self.server_momentum).add_(g)
        values.sub_(self.momentum, alpha=self.server_lr)
        vector_to_parameters(values, self.hypernetwork.parameters())

    def personalized(self, clients: Clients) -> Tensor:
        """Returns θ_i."""
        return clients.received["w"]
