"""APPLE.

Luo, Wu, "Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning",
IJCAI 2022.
"""

import math
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pfl.method import (
    Clients,
    CountOrZero,
    FederatedAlgorithm,
    Message,
    Network,
    NonNegative,
    dense,
)


class APPLE(FederatedAlgorithm):
    """Each client learns how to add up the core models of all clients, and its own (Algorithm 1).

    w_i = sum_j p_ij c_j, with the core models c_j of all N clients and the client's vector p_i;
    F_i = f_i(w_i) + λ(r) μ/2 |p_i - p_0|^2, with p_0,j = n_j / sum_k n_k, where p_i begins;
    c_i <- c_i - η p_ii g_i(w_i);  p_ij <- p_ij - η_p (<g_i(w_i), c_j> + λ(r) μ (p_ij - p_0,j)), in
    each local step both from the same w_i, with the c_j, j ≠ i, as received.
    λ(r) falls from 1 in the first round towards 0, and is 0 from the round L on.

    Evaluated: w_i with the c_j that the client received last; there is no global model. Shared: the
    core models, which all clients get. Personal: p_i. Cost: down the N core models and p_0, up c_i.
    Client state: c_i, p_i - p_0, w_i. Server state: the last c_i of every client. A newcomer has
    the initial model.

    Args:
        relationship_lr: η_p, without decay.
        penalty: μ.
        scheduler: How λ(r) falls: "cosine", (1 + cos(π r / L)) / 2; or "exponential",
            0.001^(r / L).
        penalized_rounds: L.

    Note:
        It is meant for few clients: each gets the core models of all in every round. All c_i begin
        as the network's initial model. p_i need not sum to one.
        `weight_decay` is a part of f_i. The choice of M core models where a client cannot load
        all is left out.
        The print was not at hand: the method is written from the authors' code. Differences from
        it: there every c_i is drawn by itself, the steps on c_i and p_i have momentum, the
        penalty is μ without the half, and L is a tenth of the 160 rounds.
        Differences from a public implementation, PFLlib: there p_i begins as 1/N; η is multiplied
        by N; <g, c_j> is a mean over the values of a layer and then over layers, and that of c_i
        is taken after its step; clients see the c_j that those before them have changed in the
        round; and a client's w_i takes the place of its c_i after it.

    Example:
        >>> from pfl.models import MLP
        >>> method = APPLE(MLP(64, (8,)), penalty=0.1)
        >>> method.client_state_names
        ['core', 'change', 'w']
    """

    has_global = False
    has_personalized = True
    personalization_penalty = None

    def __init__(
        self,
        network: Network,
        *,
        relationship_lr: NonNegative = 0.001,
        penalty: NonNegative = 0.1,
        scheduler: Literal["cosine", "exponential"] = "exponential",
        penalized_rounds: CountOrZero = 16,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            network, weighting="uniform", server_optimizer=None, buffers="local", **kwargs
        )
        self.require_plain_steps()
        self.relationship_lr = relationship_lr
        self.penalty = penalty
        self.scheduler = scheduler
        self.penalized_rounds = penalized_rounds
        self.add_client_state("core", self.first_model)
        self.add_client_state("change", self._no_change)  # p_i - p_0
        self.add_client_state("w", self.first_model)
        self.keep_messages("core", self.first_model)
        self._sent: dict[str, Tensor] = {}  # to all clients of the round

    def _no_change(self) -> Tensor:
        return self.global_model.new_zeros(self.num_clients)

    def penalty_of(self, round_index: int) -> float:
        """Returns λ(r) μ of a round (from 0)."""
        if round_index >= self.penalized_rounds:
            return 0.0
        passed = round_index / self.penalized_rounds
        if self.scheduler == "cosine":
            return self.penalty * (1 + math.cos(math.pi * passed)) / 2
        return self.penalty * 0.001**passed

    def begin_round(self, round_index: int) -> None:
        sizes = self.global_model.new_tensor(self.client_sizes[self.population])
        cores = self.kept_rows("core", self.population)
        self._sent = {"cores": cores.flatten(), "shares": sizes / sizes.sum().clamp_min(1)}

    def begin_evaluation(self) -> None:
        self._sent = {}  # clients have their w_i

    def download(self) -> dict[str, Tensor]:
        """Returns all c_j, and p_0."""
        return self._sent

    def download_for(self, ids: np.ndarray) -> dict[str, Message]:
        """Returns the client's own place among the N, a number."""
        places = torch.from_numpy(np.searchsorted(self.population, ids))
        return {"place": Message(places.to(self.global_model)[:, None], 0)}

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        lr = self.rate_of(clients)
        pull = self.penalty_of(clients.round)
        cores = clients.received["cores"].view(self.num_clients, self.space.size)
        own = one_hot(clients.received["place"][:, 0].long(), self.num_clients).bool()
        core = clients.state["core"].clone()
        change = clients.state["change"].clone()

        def own_weight(p: Tensor, rows: slice) -> Tensor:
            """Returns p_ii, [A, 1]; a selection would wait for a GPU in every step."""
            return p.where(own[rows], 0).sum(1, keepdim=True)

        def mixed(rows: slice) -> Tensor:
            p = clients.received["shares"] + change[rows]
            others = p.masked_fill(own[rows], 0) @ cores
            return others + own_weight(p, rows) * core[rows]

        for batch in clients.batches(self.local_schedule):
            rows = slice(0, batch.clients)
            at = mixed(rows)
            loss, g = self.oracle.gradient(at, batch, clients.buffers)
            self.log_loss("train", loss, batch.counts)
            g.add_(at, alpha=self.weight_decay)
            slopes = torch.where(own[rows], (g * core[rows]).sum(1, keepdim=True), g @ cores.T)
            p = clients.received["shares"] + change[rows]
            core[rows] -= lr * own_weight(p, rows) * g
            change[rows] -= self.relationship_lr * (slopes + pull * change[rows])
        clients.state["core"] = core
        clients.state["change"] = change
        clients.state["w"] = mixed(slice(None))
        return {"core": dense(core)}

    def server_update(self, mean: dict[str, Tensor]) -> None:
        """Does nothing: there is no global model."""

    def personalized(self, clients: Clients) -> Tensor:
        return clients.state["w"]
