"""What fluke computes instead."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.agreement.problem import SIZES
from benchmarks.agreement.readings.common import from_zero, relative_sizes
from pfl.algorithms import APFL, FedAMP, FedDyn, PerFedAvg, pFedMe
from pfl.method import Clients, FederatedAlgorithm, Message


class OtherSignFedDyn(FedDyn):
    """The state g_i is the paper's with α / ω_i for α, and is added where it should be subtracted.

    ω_i is the relative number of samples. Clients begin at the mean + the mean of the cohort's
    g_i, in their first round at the mean, which is also what is scored.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weighting = "samples"
        self.add_client_state("known", lambda: self.global_model.new_zeros(1))
        self.add_server_state("cloud", self.global_model.clone())

    cloud: Tensor

    def download(self) -> dict[str, Tensor]:
        return {"w": self.global_model, "cloud": self.cloud}

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Tensor | Message]:
        alpha, g = self.alpha / relative_sizes(self, clients), clients.state["g"]
        start = torch.where(clients.state["known"] > 0, clients.received["cloud"], w)
        v, lr = start.clone(), self.learning_rate(clients.round)
        for batch in clients.batches(self.local_schedule):
            _, gradient = self.oracle.gradient(v, batch, clients.buffers)
            v[: batch.clients] -= lr * (gradient + alpha * (v - start + g))[: batch.clients]
        clients.state["g"] = g = g - alpha * (v - start)
        clients.state["known"] = torch.ones_like(clients.state["known"])
        return {"w": v, "g": Message(g, 0, weighting="uniform")}

    def server_update(self, mean: dict[str, Tensor]) -> None:
        self.global_model.copy_(mean["w"])
        self.cloud.copy_(mean["w"] + mean["g"])


class MixingAPFL(APFL):
    """v_i is never trained, and the mixture with the new w_i replaces it after each round."""

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        shared = self.local_sgd(clients, w)
        clients.state["v"] = self.alpha * clients.state["v"] + (1 - self.alpha) * shared
        return shared

    def personalized(self, clients: Clients) -> Tensor:
        return clients.state["v"]


class AdaptedPerFedAvg(PerFedAvg):
    """The second gradient's step begins where the first one ended, not at w."""

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        v, lr = w.repeat(len(clients), 1), self.learning_rate(clients.round)
        for batch in clients.batches(self.local_schedule):
            for rate in (self.alpha, lr):
                _, g = self.oracle.gradient(v, batch, clients.buffers)
                v[: batch.clients] -= rate * g[: batch.clients]
        return v


class PlainpFedMe(pFedMe):
    """No proximal term: K plain steps on every mini-batch, with 0.001 θ_i, and θ_i is sent."""

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        theta = w.repeat(len(clients), 1)
        for batch in clients.batches(self.local_schedule):
            for _ in range(self.personal_steps):
                _, g = self.oracle.gradient(theta, batch, clients.buffers)
                step = self.personal_lr * (g + 0.001 * theta)
                theta[: batch.clients] -= step[: batch.clients]
        clients.state["theta"] = theta
        return theta.clone()


class LateFedAMP(FedAMP):
    """u_i is made after a round and used in the client's next one; local steps begin at w_i.

    The proximal term has λ / η, and what is scored is the last u_i that was used.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_server_state("coming", self.global_model.repeat(len(SIZES), 1))
        self.add_client_state("u", lambda: self.global_model)

    coming: Tensor

    def begin_round(self, round_index: int) -> None: ...

    def download_for(self, ids: np.ndarray) -> Tensor:
        return self.coming[ids]

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        start, weight = clients.state["w"], self.penalty / self.lr
        clients.state["w"] = v = self.local_sgd(clients, start, prox_weight=weight, prox_center=w)
        clients.state["u"] = w.clone()
        return v

    def server_update(self, mean: dict[str, Tensor]) -> None:
        models = self.kept_rows("w", self.participant_ids)
        self.coming[self.participant_ids] = self.weights(models, self.alpha) @ models

    def personalized(self, clients: Clients) -> Tensor:
        return clients.state["u"]


def twice_the_rate(kind: type[FederatedAlgorithm]) -> type[FederatedAlgorithm]:
    """The adaptive server with v = 0 at the beginning, and Δ multiplied by its rate."""

    class TwiceTheRate(from_zero(kind)):  # type: ignore[misc]
        def server_update(self, mean: dict[str, Tensor]) -> None:
            w = torch.lerp(self.global_model, mean["w"], self.server_lr)
            super().server_update({"w": w})

    return TwiceTheRate
