"""pFedMe.

T Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020.
"""

from typing import Any

import numpy as np
from torch import Tensor

from pfl.method import Clients, Count, FederatedAlgorithm, Network, Positive, Step, require


class pFedMe(FederatedAlgorithm):
    """Personalized models at the proximal points of a global model (Algorithm 1).

    min_w mean_i F_i(w) with the Moreau envelopes F_i(w) = min_θ f_i(θ) + λ/2 |θ - w|^2.
    Each local step, with one mini-batch: θ_i <- K steps of rate η_p on f_i(θ) + λ/2 |θ - w_i|^2,
    from w_i;  w_i <- w_i - η λ (w_i - θ_i).
    The server sets w <- (1 - β) w + β mean_S w_i.

    Evaluated: the global model w, and the θ_i of the client's last local step, which its last
    mini-batch gave; a client that never took part has the initial model. Shared: w; personal: θ_i,
    which never influences w. A newcomer receives w. Cost: P values down, P up; K gradients in a
    local step. Client state: θ_i, for the evaluation only. Server state: none beside w.

    Args:
        penalty: λ.
        personal_steps: K.
        personal_lr: η_p, without decay; η is `lr`. η λ must be at most 1, or w_i moves beyond θ_i.
        server_mixture: β.

    Note:
        Differences from the paper: there all clients train in every round, and the server asks the
        cohort for its models; here only the cohort trains. The paper leaves the solver of the inner
        problem open; here it takes K gradient steps from w_i, the envelope's centre.
        Differences from the authors' code: there θ_i starts where the last local step left it, the
        inner gradient has another 0.001 θ, and the mean is weighted by samples. `weight_decay` is a
        part of f_i. The statistics of BatchNorm that belong to w_i are those of the first of the K
        passes, which is at w_i; the other passes move θ_i's. With LoRA |θ - w| is the distance of
        factors, which is not that of the models B A; `trainable: delta` takes the updates.

    Example:
        >>> from pfl.models import MLP
        >>> method = pFedMe(MLP(64, (8,)), penalty=15.0, lr=0.005, personal_lr=0.09)
        >>> method.client_state_names
        ['theta']
    """

    has_personalized = True
    personal_buffers = "initial"

    def __init__(
        self,
        network: Network,
        *,
        penalty: Positive = 15.0,
        personal_steps: Count = 5,
        personal_lr: Positive = 0.09,
        server_mixture: Positive = 1.0,
        lr: float = 0.005,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, lr=lr, weighting="uniform", server_optimizer=None, **kwargs)
        require("lr", lr, lr * penalty <= 1, f"at most 1 / penalty, {1 / penalty:.4g}")
        self.require_plain_steps()
        self.penalty = penalty
        self.server_mixture = server_mixture
        self.personal_steps = personal_steps
        self.personal_lr = personal_lr
        self.add_client_state("theta", self.first_model)

    @property
    def personalization_penalty(self) -> float:
        """λ, since the minimum over w and all θ_i is that of the envelopes."""
        return self.penalty

    def cost(self, sizes: np.ndarray) -> np.ndarray:
        return self.personal_steps * super().cost(sizes)

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        v = w.repeat(len(clients), 1)
        theta = clients.state["theta"].clone()
        lr = self.rate_of(clients)
        pull = self.personal_lr * self.penalty
        shrink = 1 - pull - self.personal_lr * self.weight_decay
        personal = clients.personal.buffers
        for batch in clients.batches(self.local_schedule):
            rows = slice(0, batch.clients)
            theta[rows] = v[rows]
            inner = Step(self.personal_lr, shrink, shift=pull * v)
            self.take_steps(theta, batch, inner, clients.buffers, "train")
            self.take_steps(theta, batch, inner, personal, "train", self.personal_steps - 1)
            v[rows].lerp_(theta[rows], lr * self.penalty)
        clients.state["theta"] = theta
        return v

    def server_update(self, mean: dict[str, Tensor]) -> None:
        self.global_model.lerp_(mean["w"], self.server_mixture)

    def personalized(self, clients: Clients) -> Tensor:
        return clients.state["theta"]
