"""FedRoD.

Chen, Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification",
ICLR 2022.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl.method import (
    BatchSamples,
    Clients,
    ConfigError,
    FederatedAlgorithm,
    Network,
    Objective,
    label_counts,
    linear_head,
    replace_values_in,
    require_classes,
    select_part,
    values_in,
)


class FedRoD(FederatedAlgorithm):
    """A generic model for balanced classes, and a personal head whose outputs are added to its own.

    Let z(x; θ) be the features of the body, h z the outputs of a head h, and n_i,c the number of
    the client's samples of class c. Each local step, with one mini-batch for both lines and all
    values from before the step, takes
    (θ_i, h_i) <- (θ_i, h_i) - η g of mean loss(h_i z + log n_i, c), from the received (θ, h);
    p_i <- p_i - η g_p of mean loss((h_i + p_i) z, c), from the client's own last p_i.
    (θ, h) <- sum_S n_i (θ_i, h_i) / sum_S n_i.
    With the cross entropy the first line has the balanced softmax: class c has the probability
    n_i,c exp(h_i z)_c / sum_k n_i,k exp(h_i z)_k.

    Evaluated: the global model (θ, h), and (θ, h + p_i) with the newest (θ, h). Shared: (θ, h);
    personal: p_i. Cost: P values down, P up; 2 gradients in a local step, and one pass over the
    labels. Client state: p_i. A newcomer receives (θ, h).

    Note:
        The head is a linear layer, so that h and p_i are one head whose values are their sum.
        p_i begins at 0, which makes a client that never trained predict as the generic model does;
        in public implementations it begins at a copy of the network's first head.
        A class that the client has not has the probability 0 (in numbers: the log of the smallest
        positive number is added to its output). A sample has one class; regression and several
        labels are refused.
        The print was not at hand: the method is written from what its abstract and public
        implementations agree on. The personal head that a hypernetwork computes from the class
        shares, and the powers of n_i,c that some implementations offer, are left out. In PFLlib the
        personal step uses outputs of h_i and θ_i from before their step, as here.

    Example:
        >>> from pfl.models import MLP
        >>> method = FedRoD(MLP(64, (8,)))
        >>> method.client_state_names
        ['head']
    """

    losses = ("train", "personal")
    has_personalized = True
    personalization_penalty = None
    personal_part: Tensor

    def __init__(self, network: Network, **kwargs: Any) -> None:
        super().__init__(network, **kwargs)
        self.require_no_aids()
        self.classes = linear_head(self).out_features
        part = select_part(self.network, self.space, "head", "model.network")
        if not part.any():
            raise ConfigError("model.network: the head is frozen; FedRoD trains it")
        self.add_constant("personal_part", part)
        self.add_client_state("head", self._no_head)

    def _no_head(self) -> Tensor:
        return torch.zeros_like(self.global_model[self.personal_part])

    def check_setup(self) -> None:
        require_classes(self)

    def cost(self, sizes: np.ndarray) -> np.ndarray:
        """Returns the sample gradients of a round, [C], as if the head's cost as much."""
        return 2 * super().cost(sizes)

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        head = self.personal_part.nonzero()[:, 0]
        lr = self.rate_of(clients)
        v = w.repeat(len(clients), 1)
        p = clients.state["head"].clone()
        train, train_personal = (self.local_optimizer(x, lr) for x in (v, p))
        balanced = Objective(
            self._balanced_losses, own={"log_counts": self._log_counts(clients, w)}
        )
        for batch in clients.batches(self.local_schedule):
            buffers = None if clients.buffers is None else clients.buffers.clone()
            personal_loss, g_personal = self.oracle.gradient(
                self._added(v, p, head), batch, buffers
            )
            loss, g = self.oracle.gradient(v, batch, clients.buffers, objective=balanced)
            train.step(g, batch.clients)
            train_personal.step(values_in(head, g_personal), batch.clients)
            self.log_loss("train", loss, batch.counts)
            self.log_loss("personal", personal_loss, batch.counts)
        clients.state["head"] = p
        return v

    def personalized(self, clients: Clients) -> Tensor:
        w = clients.received["w"].expand(len(clients), -1)
        return self._added(w, clients.state["head"], self.personal_part)

    def _added(self, v: Tensor, p: Tensor, head: Tensor) -> Tensor:
        """Returns models v [C, P] with p [C, H] added to the values of their heads."""
        v = v.clone()
        replace_values_in(head, v, values_in(head, v) + p)
        return v

    def _balanced_losses(
        self, outputs: Tensor, features: Tensor, samples: BatchSamples, own: Mapping[str, Any]
    ) -> Tensor:
        """Returns the losses of outputs to which log n_i is added, [n]."""
        return self.oracle.losses(outputs + own["log_counts"], samples.targets)

    def _log_counts(self, clients: Clients, w: Tensor) -> Tensor:
        """Returns log n_i,c, [C, classes], in which 0 counts as the smallest positive number."""
        counts = label_counts(clients, self.classes, w)
        return counts.clamp_min(torch.finfo(counts.dtype).tiny).log()
