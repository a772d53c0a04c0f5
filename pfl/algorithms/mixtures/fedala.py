"""FedALA.

Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedALA: Adaptive Local Aggregation for Personalized
Federated Learning", AAAI 2023.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl.method import (
    Clients,
    FederatedAlgorithm,
    LocalSchedule,
    Network,
    Part,
    Positive,
    PositiveShare,
    TwoOrMore,
    replace_values_in,
    select_part,
    values_in,
)


class FedALA(FederatedAlgorithm):
    """Each client starts from its own mixture, value by value, of its last and the received model.

    Let u be the last layers of w, with the client's own u_i and a weight W_i in [0, 1] for each
    value, and ŵ_i = w with u replaced by u_i + W_i (u - u_i), all products value by value.
    W_i <- clip(W_i - η_W g_u(ŵ_i) (u - u_i), 0, 1) for each mini-batch of a share s of the client's
    samples: one pass; the first time pass after pass until the loss has settled, at most 100;
    w_i <- w_i - η g_i(w_i), local steps from ŵ_i; the client keeps the last layers of w_i as u_i;
    w <- sum_S n_i w_i / sum_S n_i.
    At the start u_i is that of the initial model and W_i = 1. Where u = u_i, as in a first round,
    there is nothing to learn, and the first time is still to come.

    Evaluated: the global model w, and ŵ_i with the client's last u_i and W_i and the newest w.
    Shared: w; personal: u_i, W_i. Cost: P values down, P up; s n_i sample gradients in a pass more.
    Client state: u_i, W_i, whether W_i has settled. A newcomer receives w.

    Args:
        adaptive: The last layers u: "head", or shell patterns of the names of their parameters.
        share: s, rounded up to whole mini-batches of the user's `batch_size`; they are
            drawn anew in each round, and all passes of a round take the same ones.
        weight_lr: η_W, without decay.
        threshold: The loss has settled when the standard deviation of the mean losses of the last
            `window` passes is below this number.
        window: A number of passes; one more is the least that is taken the first time.

    Note:
        The print was not at hand: the method is written from the authors' public code and its
        README. `share`, `weight_lr`, `threshold` and `window` have its defaults; its number
        of last layers counts weights and biases by themselves.
        Differences from the authors' code: there the share is a range of successive samples, of
        which the last incomplete batch is left out; the loss of a pass is that of its last
        mini-batch; passes end only when the loss has settled, which may never be; and an evaluation
        learns W_i for the newest w first.
        `weight_decay` does not enter the gradient of W_i.

    Example:
        >>> from pfl.models import MLP
        >>> method = FedALA(MLP(64, (8,)), adaptive="head", share=0.8)
        >>> method.client_state_names
        ['own', 'weights', 'learned']
    """

    losses = ("train", "weights")
    has_personalized = True
    personalization_penalty = None
    most_passes = 100  # of the first time
    personal_part: Tensor

    def __init__(
        self,
        network: Network,
        *,
        adaptive: Part = "head",
        share: PositiveShare = 0.8,
        weight_lr: Positive = 1.0,
        threshold: Positive = 0.1,
        window: TwoOrMore = 10,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, **kwargs)
        part = select_part(self.network, self.space, adaptive, "model.adaptive")
        self.share = share
        self.weight_lr = weight_lr
        self.threshold = threshold
        self.window = window
        self.add_constant("personal_part", part)
        self.add_client_state("own", self._first_layers)
        self.add_client_state("weights", self._first_weights)
        self.add_client_state("learned", self._not_learned)

    def _first_layers(self) -> Tensor:
        return self.global_model[self.personal_part]

    def _first_weights(self) -> Tensor:
        return torch.ones_like(self._first_layers())

    def _not_learned(self) -> Tensor:
        return self.global_model.new_zeros(1)

    def cost(self, sizes: np.ndarray) -> np.ndarray:
        return super().cost(sizes) + self.share * sizes

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        weights = self._learned_weights(clients, w)
        v = self.local_sgd(clients, self._mixed(clients, w, weights))
        clients.state["own"] = values_in(self.personal_part, v)
        return v

    def personalized(self, clients: Clients) -> Tensor:
        return self._mixed(clients, clients.received["w"], clients.state["weights"])

    def _mixed(
        self, clients: Clients, w: Tensor, weights: Tensor, layers: Tensor | None = None
    ) -> Tensor:
        """Returns ŵ_i, [C, P], of the received w [P]; `layers` are the places of the last ones."""
        v = w.repeat(len(clients), 1)
        layers = self.personal_part if layers is None else layers
        mixture = torch.lerp(clients.state["own"], values_in(layers, v), weights)
        replace_values_in(layers, v, mixture)
        return v

    def _learned_weights(self, clients: Clients, w: Tensor) -> Tensor:
        """Learns W_i [C, K], and keeps it and whether it has settled."""
        schedule = LocalSchedule(self.batch_size, purpose="weights", complete=True)
        counts = np.ceil(np.round(self.share * clients.steps_of(schedule), 9))
        batches = torch.from_numpy(counts).to(w)  # of the share, [C]
        buffers = None if clients.buffers is None else clients.buffers.clone()
        weights = clients.state["weights"]
        before = clients.state["learned"][:, 0] > 0
        layers = self.personal_part.nonzero()[:, 0]
        away = w[layers] - clients.state["own"]
        learns = away.any(1) & (batches > 0)
        active = learns
        losses = list[Tensor]()
        for _ in range(self.most_passes):
            if not active.any():
                break
            losses.append(torch.zeros_like(batches))
            for step, batch in enumerate(clients.batches(schedule)):
                moves = active & (batches > step)
                if not moves.any():
                    break
                rows = slice(0, batch.clients)
                at = self._mixed(clients, w, weights, layers)
                used = np.where(moves[rows].cpu(), batch.counts, 0).tolist()
                loss, g = self.oracle.gradient(at, batch, buffers, counted=used)
                new = weights - self.weight_lr * values_in(layers, g) * away
                weights = torch.where(moves[:, None], new.clamp(0, 1), weights)
                losses[-1][rows] += torch.where(moves[rows], loss / batches[rows], 0)
                self.log_loss("weights", loss, used)
            active = active & ~before
            if len(losses) > self.window:
                last = torch.stack(losses[-self.window :])
                active = active & (last.std(0, correction=0) >= self.threshold)
        clients.state["weights"] = weights
        clients.state["learned"] = (before | learns)[:, None].to(w)
        return weights
