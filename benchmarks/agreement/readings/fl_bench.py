"""What FL-bench computes instead."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.agreement.readings.common import CarriedpFedMe
from pfl.algorithms import SCAFFOLD, FedBABU, FedDyn
from pfl.method import Clients, Message, dense


class ForgettingSCAFFOLD(SCAFFOLD):
    """What a client computes as its c_i is kept by nobody: every round begins with c_i = 0."""

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        sent = super().client_update(clients, w)
        clients.state["c_i"] = torch.zeros_like(clients.state["c_i"])
        return sent


class SampledFedDyn(FedDyn):
    """The mean of the models is weighted by samples, and that of the g_i is not.

    With `pulled=False` the local objective has no α/2 |θ|^2: the local direction is
    g - g_i - α θ^t instead of g - g_i + α (θ - θ^t).
    """

    def __init__(self, *args: Any, pulled: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weighting, self.pulled = "samples", pulled

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        g, alpha = clients.state["g"], self.alpha
        if self.pulled:
            v = self.local_sgd(clients, w, linear=-g, prox_weight=alpha, prox_center=w)
        else:
            v = self.local_sgd(clients, w, linear=-g - alpha * w)
        clients.state["g"] = new = g - alpha * (v - w)
        return {"w": dense(v), "g": Message(new - g, 0, weighting="uniform")}


class DecayingHeadFedBABU(FedBABU):
    """Weight decay moves the head, which is sent and averaged as well."""

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        lr, v = self.learning_rate(clients.round), w.repeat(len(clients), 1)
        for batch in clients.batches(self.local_schedule):
            _, g = self.oracle.gradient(v, batch, clients.buffers)
            step = torch.where(self.head, 0.0, g) + self.weight_decay * v
            v[: batch.clients] -= lr * step[: batch.clients]
        return dense(v)

    def server_update(self, mean: dict[str, Tensor]) -> None:
        self.global_model.copy_(mean["w"])


class UntrainedpFedMe(CarriedpFedMe):
    """Scored is the first model, since nobody keeps the θ_i."""

    def personalized(self, clients: Clients) -> Tensor:
        return clients.state["theta"]

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        first = clients.state["theta"]
        v = super().client_update(clients, w)
        clients.state["theta"] = first
        return v
