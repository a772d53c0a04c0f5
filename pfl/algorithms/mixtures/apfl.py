"""APFL.

Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", arXiv 2003.13461, 2020.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl.method import Clients, FederatedAlgorithm, Network, Share, Step


class APFL(FederatedAlgorithm):
    """Personalized models that are mixtures of a local and the global model (Algorithm 1).

    Each local step, with one mini-batch for both lines:
    w_i <- w_i - η g_i(w_i), from the received w;
    v_i <- v_i - η α_i g_i(v̄_i), with v̄_i = α_i v_i + (1 - α_i) w_i and the new w_i.
    The server replaces w by the unweighted mean of the cohort's w_i.
    Adaptive: in the first step of a round α_i <- clip(α_i - η <v_i - w_i, g_i(v̄_i)>, 0, 1).

    Evaluated: the global model w, and α_i v_i + (1 - α_i) w with the client's last v_i and α_i and
    the newest w; a client that never took part has the initial ones. Shared: w; personal: v_i and
    α_i. A newcomer receives w. Cost: P values down, P up; 2 gradients in a local step. Client
    state: v_i, and α_i if it adapts. Server state: none beside w.

    Args:
        alpha: α_i of all clients at the start. 0: the global model; 1: every client alone.
        adaptive: Learns each client's α_i.

    Note:
        The derivative of f_i(v̄_i) with respect to α_i is <v_i - w_i, g_i(v̄_i)>, that with respect
        to v_i is α_i g_i(v̄_i). `weight_decay` is a part of f_i.
        Differences from the paper: in its Algorithm 1 v̄_i has the w_i from before the local step,
        here and in the authors' code the new one; it evaluates a mean over iterates, here the last
        ones count.
        Differences from the authors' code: there the outputs of v_i and w_i are mixed instead of
        their parameters, which is the same for a linear network only; and α_i moves after v_i, with
        the factor α_i^2 + (1 - α_i)^2 and a penalty of 0.02 α_i in its gradient.
        With LoRA the factors are mixed, which is not the mixture of the updates B A; `trainable:
        delta` mixes the updates.

    Example:
        >>> from pfl.models import MLP
        >>> method = APFL(MLP(64, (8,)), alpha=0.5, adaptive=True)
        >>> method.client_state_names
        ['v', 'alpha']
    """

    losses = ("train", "personal")
    has_personalized = True
    personal_buffers = "initial"
    personalization_penalty = None

    def __init__(
        self, network: Network, *, alpha: Share = 0.5, adaptive: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(network, weighting="uniform", server_optimizer=None, **kwargs)
        self.require_plain_steps()
        self.alpha = alpha
        self.adaptive = adaptive
        self.add_client_state("v", self.first_model)
        if adaptive:
            self.add_client_state("alpha", self._first_alpha)

    def _first_alpha(self) -> Tensor:
        return self.global_model.new_full((1,), self.alpha)

    def cost(self, sizes: np.ndarray) -> np.ndarray:
        return 2 * super().cost(sizes)

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        lr = self.rate_of(clients)
        decay = self.weight_decay
        shared = w.repeat(len(clients), 1)
        own = clients.state["v"].clone()
        alpha = self._alpha(clients).clone()
        buffers = clients.buffers
        personal = clients.personal.buffers
        plain = Step(lr, 1 - lr * decay)
        for step, batch in enumerate(clients.batches(self.local_schedule)):
            rows = slice(0, batch.clients)
            self.take_steps(shared, batch, plain, buffers, "train")
            mixed = torch.lerp(shared, own, alpha)
            share = alpha[rows].clone()
            loss, g = self.oracle.gradient(mixed[rows], batch, personal)
            self.log_loss("personal", loss, batch.counts)
            g.add_(mixed[rows], alpha=decay)
            if self.adaptive and step == 0:
                slope = ((own - shared)[rows] * g).sum(1, keepdim=True)
                alpha[rows] = torch.clamp(share - lr * slope, 0.0, 1.0)
            own[rows].addcmul_(share, g, value=-lr)
        clients.state["v"] = own
        if self.adaptive:
            clients.state["alpha"] = alpha
        return shared

    def personalized(self, clients: Clients) -> Tensor:
        alpha = self._alpha(clients)
        return alpha * clients.state["v"] + (1 - alpha) * clients.received["w"]

    def _alpha(self, clients: Clients) -> Tensor:
        """Returns α_i, [C, 1]."""
        if self.adaptive:
            return clients.state["alpha"]
        return clients.state["v"].new_full((len(clients), 1), self.alpha)
