"""Our methods, each changed by what another implementation computes instead of the paper's line.

They show that a difference has the stated reason and no other: changed so, both sides agree.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl.algorithms import APFL, SCAFFOLD, FedBABU, FedDyn, FedGH, pFedMe
from pfl.method import Clients, FederatedAlgorithm, Message, PartlyPersonal, dense


def by_samples(kind: type[FederatedAlgorithm]) -> type[FederatedAlgorithm]:
    """The method with the mean over the cohort weighted by the numbers of samples."""

    class BySamples(kind):  # type: ignore[valid-type,misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.weighting = "samples"

    return BySamples


class NormFedDyn(FedDyn):
    """The proximal term is α/2 |θ - θ^t| without the square; its gradient at θ^t is 0."""

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        g, lr = clients.state["g"], self.learning_rate(clients.round)
        v = w.repeat(len(clients), 1)
        for batch in clients.batches(self.local_schedule):
            _, gradient = self.oracle.gradient(v, batch, clients.buffers)
            away = v - w
            pull = self.alpha / 2 * away / away.norm(dim=1, keepdim=True).clamp_min(1e-300)
            v[: batch.clients] -= lr * (gradient - g + pull)[: batch.clients]
        clients.state["g"] = g - self.alpha * (v - w)
        return v


class StoredMixtureAPFL(by_samples(APFL)):  # type: ignore[misc]
    """v_i takes steps of rate η at v_i itself; α_i changes in every step, with mixed gradients.

    After the local steps the mixture replaces v_i.
    """

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        lr, alpha = self.learning_rate(clients.round), clients.state["alpha"].clone()
        shared, own = w.repeat(len(clients), 1), clients.state["v"].clone()
        for batch in clients.batches(self.local_schedule):
            rows = slice(0, batch.clients)
            _, g_w = self.oracle.gradient(shared, batch, clients.buffers)
            shared[rows] -= lr * g_w[rows]
            _, g_v = self.oracle.gradient(own, batch, clients.buffers)
            own[rows] -= lr * g_v[rows]
            mixed = alpha * g_v + (1 - alpha) * g_w
            slope = ((own - shared) * mixed).sum(1, keepdim=True) + 0.02 * alpha
            alpha[rows] = (alpha - lr * slope).clamp(0.0, 1.0)[rows]
        clients.state["alpha"] = alpha
        clients.state["v"] = alpha * own + (1 - alpha) * shared
        return shared

    def personalized(self, clients: Clients) -> Tensor:
        return clients.state["v"]


class CarriedpFedMe(by_samples(pFedMe)):  # type: ignore[misc]
    """θ_i starts where the last local step of the round left it, and f_i has μ/2 |θ|^2 more.

    Evaluated is the received model, or the first one before the client has trained.
    """

    decay = 0.001  # μ

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        v, theta = w.repeat(len(clients), 1), w.repeat(len(clients), 1)
        for batch in clients.batches(self.local_schedule):
            rows = slice(0, batch.clients)
            for _ in range(self.personal_steps):
                _, g = self.oracle.gradient(theta, batch, clients.buffers)
                g = g + self.penalty * (theta - v) + self.decay * theta
                theta[rows] -= self.personal_lr * g[rows]
            v[rows] -= self.learning_rate(clients.round) * self.penalty * (v - theta)[rows]
        clients.state["theta"] = theta
        return v

    def personalized(self, clients: Clients) -> Tensor:
        trained = torch.from_numpy(np.isin(clients.ids, self.seen_clients("theta")))
        return torch.where(trained[:, None], self.global_model, clients.state["theta"])


class AliasedFedGH(FedGH):
    """The server's head is the head of client 0, which that client's local steps move."""

    trained: Tensor | None = None

    def local_sgd(self, clients: Clients, start: Tensor, **kwargs: Any) -> Tensor:
        v = super().local_sgd(clients, start, **kwargs)
        for row in (clients.ids == 0).nonzero()[0]:
            self.trained = v[row]
        return v

    def server_update(self, mean: dict[str, Tensor]) -> None:
        if self.trained is not None:
            head = ~self.personal_part
            self.global_model[head] = self.trained[head]
            self.trained = None
        super().server_update(mean)


class OwnBodyFedBABU(FedBABU):
    """Fine-tuning begins at the model that the client had last, not at the newest global one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_client_state("last", lambda: self.global_model)

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        self.received = self.global_model.clone()
        sent = super().client_update(clients, w)
        clients.state["last"] = torch.where(self.head, self.global_model, sent.values)
        return sent

    def personalized(self, clients: Clients) -> Tensor:
        last = torch.from_numpy(clients.ids[:, None] == self.cohort(self.rounds - 1)).any(1)
        return torch.where(last[:, None], clients.state["last"], self.received)


class GlobalStart(FedBABU):
    """FedBABU whose personalized models are those before fine-tuning."""

    def personalized(self, clients: Clients) -> Tensor:
        return self.global_model.repeat(len(clients), 1)


# ---- FL-bench -----------------------------------------------------------------------------------


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

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        g, alpha = clients.state["g"], self.alpha
        if self.pulled:
            v = self.local_sgd(clients, w, linear=-g, prox_weight=alpha, prox_center=w)
        else:
            v = self.local_sgd(clients, w, linear=-g - alpha * w)
        clients.state["g"] = g - alpha * (v - w)
        return v

    def server_update(self, mean: dict[str, Tensor]) -> None:
        self.h.copy_(self.mean_state("g"))
        self.global_model.copy_(mean["w"] - self.h / self.alpha)


def with_averaged_heads(kind: type[PartlyPersonal]) -> type[PartlyPersonal]:
    """The personal parts are averaged, too, and a client begins with their mean."""

    class AveragedHeads(kind):  # type: ignore[valid-type,misc]
        def keep_and_send(self, clients: Clients, v: Tensor) -> Message:
            clients.state["head"] = v[:, self.personal_part]
            return dense(v)

        def server_update(self, mean: dict[str, Tensor]) -> None:
            self.global_model.copy_(mean["w"])

        def personalized(self, clients: Clients) -> Tensor:
            own = torch.from_numpy(np.isin(clients.ids, self.seen_clients("head")))
            return torch.where(own[:, None], super().personalized(clients), self.global_model)

    return AveragedHeads


class DecayingHeadFedBABU(FedBABU):
    """Weight decay moves the head, which is sent and averaged as well."""

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        lr, v = self.learning_rate(clients.round), self.global_model.repeat(len(clients), 1)
        for batch in clients.batches(self.local_schedule):
            _, g = self.oracle.gradient(v, batch, clients.buffers)
            step = torch.where(self.head, 0.0, g) + self.weight_decay * v
            v[: batch.clients] -= lr * step[: batch.clients]
        return v

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


def from_zero(kind: type[FederatedAlgorithm]) -> type[FederatedAlgorithm]:
    """The adaptive server with v = 0 at the beginning."""

    class FromZero(kind):  # type: ignore[valid-type,misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.v.zero_()

    return FromZero
