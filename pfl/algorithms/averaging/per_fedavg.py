"""Per-FedAvg.

Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A
Model-Agnostic Meta-Learning Approach", NeurIPS 2020.
"""

import copy
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from torch import Tensor

from pfl.method import Batch, Clients, Count, FederatedAlgorithm, Network, Positive


class PerFedAvg(FederatedAlgorithm):
    """A global model that one gradient step adapts to each client (Algorithm 1).

    min_w mean_i F_i(w) with F_i(w) = f_i(w - α ∇f_i(w)). A local step uses three mini-batches D1,
    D2 and D3 of client i, with q = g_i(w - α g_i(w; D1); D2):
    FO: w <- w - β q;
    HF: w <- w - β (q - α [g_i(w + δ q; D3) - g_i(w - δ q; D3)] / (2 δ)).
    The server replaces w by the unweighted mean of the cohort's models.

    The difference in HF approximates the Hessian times q, and is exact on quadratics. HF therefore
    follows the gradient of F_i. FO leaves the Hessian out and has other fixed points.

    Evaluated: the global model w (before adaptation), and w - α g_i(w) on the client's own training
    samples. Shared: w. Personal: the adapted model, which is not stored. Cost: P values down, P up;
    2 (FO) or 4 (HF) gradients in a local step. No states. A newcomer gets w and adapts it.
    Fine-tuning in an evaluation starts at w.

    Args:
        alpha: α, the rate of the adaptation, which does not decay; β is `lr`.
        variant: "FO" (first order) or "HF" (Hessian-free).
        delta: δ of HF's difference.
        adaptation_steps: Gradient steps with rate α before an evaluation. The paper takes 1; Finn
            et al. (2017), on whom it builds, also score after more steps than they train with.

    Note:
        The paper draws D1, D2 and D3 independently. Here they come from three independent orders
        of the client's samples, which are passed through without replacement. The adaptation
        before an evaluation takes mini-batches of `batch_size`, too. `weight_decay` is a part of
        f_i. The running statistics of BatchNorm are those of the passes over D1. The numbers of
        local steps are those of FedAvg, so that an epoch costs 2 or 4 times as many gradients.

    Example:
        >>> from pfl.models import MLP
        >>> method = PerFedAvg(MLP(64, (8,)), alpha=0.01, lr=0.001, variant="HF")
        >>> method.client_state_names
        []
    """

    losses = ("train", "outer", "hessian")
    has_personalized = True
    personalization_penalty = None

    def __init__(
        self,
        network: Network,
        *,
        alpha: Positive = 0.01,
        variant: Literal["FO", "HF"] = "HF",
        delta: Positive = 1e-3,
        adaptation_steps: Count = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, weighting="uniform", server_optimizer=None, **kwargs)
        self.require_plain_steps()
        self.alpha = alpha
        self.variant = variant
        self.delta = delta
        self.adaptation_steps = adaptation_steps

    def cost(self, sizes: np.ndarray) -> np.ndarray:
        return super().cost(sizes) * (2 if self.variant == "FO" else 4)

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        v = w.repeat(len(clients), 1)
        lr = self.rate_of(clients)
        purposes = ("inner", "outer") if self.variant == "FO" else ("inner", "outer", "hessian")
        schedules = [replace(self.local_schedule, purpose=purpose) for purpose in purposes]
        for d1, d2, *d3 in zip(*map(clients.batches, schedules), strict=True):
            inner = self._gradient(v, d1, clients.buffers, "train")
            buffers = None if clients.buffers is None else clients.buffers.clone()
            q = self._gradient(v - self.alpha * inner, d2, buffers, "outer")
            step = q - self.alpha * self._hessian_times(q, v, d3[0], buffers) if d3 else q
            v[: d1.clients] -= lr * step[: d1.clients]
        return v

    def adaptation_start(self, clients: Clients) -> Tensor:
        return clients.received["w"].expand(len(clients), -1)

    def personalized(self, clients: Clients) -> Tensor:
        w = clients.received["w"]
        return self.adapt(clients, w, steps=self.adaptation_steps, lr=self.alpha)

    def _hessian_times(self, q: Tensor, v: Tensor, batch: Batch, buffers: Tensor | None) -> Tensor:
        """Returns the Hessian of f_i at v times q, [C, P], by a central difference."""
        again = copy.copy(batch)
        again.inputs = batch.inputs.clone()  # a network may change its inputs
        ahead = self._gradient(v + self.delta * q, again, buffers, "hessian")
        back = self._gradient(v - self.delta * q, batch, buffers, "hessian")
        return (ahead - back) / (2 * self.delta)

    def _gradient(self, v: Tensor, batch: Batch, buffers: Tensor | None, name: str) -> Tensor:
        """Returns g_i(v), [C, P], with weight decay; 0 for clients that have finished."""
        loss, g = self.oracle.gradient(v, batch, buffers)
        self.log_loss(name, loss, batch.counts)
        if self.weight_decay:
            g[: batch.clients] += self.weight_decay * v[: batch.clients]
        return g
