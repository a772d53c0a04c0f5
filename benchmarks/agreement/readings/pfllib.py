"""What PFLlib computes instead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.agreement.problem import COHORTS
from benchmarks.agreement.readings.common import by_samples
from pfl.algorithms import APFL, FedALA, FedBABU, FedDBE, FedDyn, FedGH, FedLC, FedProto, FedRoD
from pfl.method import (
    Clients,
    FederatedAlgorithm,
    Message,
    Objective,
    dense,
    features,
    label_counts,
    values_in,
)


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
        self.add_client_state("rounds", lambda: self.global_model.new_zeros(1))
        self.add_server_state("old", self.global_model.clone())

    old: Tensor

    def download(self) -> dict[str, Tensor | Message]:  # type: ignore[override]
        return {"w": super().download(), "old": self.old}

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        sent = super().client_update(clients, w)
        clients.state["last"] = torch.where(self.head, w, sent.values)
        clients.state["rounds"] = torch.full_like(clients.state["rounds"], clients.round + 1)
        return sent

    def server_update(self, mean: dict[str, Tensor]) -> None:
        self.old.copy_(self.global_model)
        super().server_update(mean)

    def personalized(self, clients: Clients) -> Tensor:
        in_last_round = clients.state["rounds"] == clients.round
        return torch.where(in_last_round, clients.state["last"], clients.received["old"])


class GlobalStart(FedBABU):
    """FedBABU whose personalized models are those before fine-tuning."""

    def personalized(self, clients: Clients) -> Tensor:
        return clients.received["w"].repeat(len(clients), 1)


class CopiedHeadFedRoD(FedRoD):
    """The personal head begins as a copy of the first head."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.states.declare("head", lambda: self.global_model[self.personal_part])


class EveryoneMixes(FedALA):
    """All clients mix their models with the new one and learn weights; a cohort trains."""

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:  # type: ignore[override]
        v = self._mixed(clients, w, self._learned_weights(clients, w))
        trains = torch.from_numpy(np.isin(clients.ids, COHORTS[clients.round]))
        v = torch.where(trains[:, None], self.local_sgd(clients, v), v)
        clients.state["own"] = values_in(self.personal_part, v)
        return {"w": replace(dense(v), reduce="rows")}

    def server_update(self, received: dict[str, Tensor]) -> None:
        ids = list(COHORTS[self.rounds])
        weights = torch.from_numpy(self.client_sizes[ids]).to(self.global_model)
        self.global_model.copy_(weights @ received["w"][ids] / weights.sum())


class PooledFedLC(FedLC):
    """n_i,c counts the samples of all clients, and its root is in single precision."""

    pooled_counts: Tensor

    def check_setup(self) -> None:
        super().check_setup()
        everyone = Clients(self.population[self.client_sizes.argsort()[::-1]], 0, self._data())
        assert self.classes is not None
        counts = label_counts(everyone, self.classes, self.global_model)
        self.pooled_counts = counts.sum(0, keepdim=True)

    def _data(self) -> Any:
        return self.run.loop.client_data(self.device)

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        margins = self.calibration * self.pooled_counts.float() ** -0.25
        own = {"margins": margins.to(w).expand(len(clients), -1)}
        return self.local_sgd(clients, w, objective=Objective(self._losses, own))


def starting_mean(mean: np.ndarray) -> type[FederatedAlgorithm]:
    """FedDBE with a mean of features that is known before the first round."""

    class StartingMean(FedDBE):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.mean.copy_(torch.from_numpy(mean))

    return StartingMean


class RunningFedProto(FedProto):
    """Class means are those of the features that the moving model had in training.

    They are averaged over clients, not samples, and only the last cohort's are known.
    """

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        received = clients.received["prototypes"].view(self.shape)
        objective = Objective(
            self._losses, {"prototypes": received.expand(len(clients), *self.shape)}
        )
        v, lr = clients.state["w"].clone(), self.learning_rate(clients.round)
        sums = v.new_zeros(len(clients), *self.shape)
        for batch in clients.batches(self.local_schedule):
            rows = slice(0, batch.clients)
            z = features(self.oracle, v[rows], batch, clients.buffers)
            real = batch.sample_weights(z.dtype) > 0
            member = real[..., None] * torch.nn.functional.one_hot(batch.targets, self.shape[0])
            sums[rows, :, 0] += member.sum(1)
            sums[rows, :, 1:] += member.to(z).mT @ z
            _, g = self.oracle.gradient(v, batch, clients.buffers, objective=objective)
            v[rows] -= lr * g[rows]
        clients.state["w"] = v
        means = sums / sums[..., :1].clamp_min(1)  # each client counts once for its classes
        return {"sums": dense(means.flatten(1))}

    def server_update(self, mean: dict[str, Tensor]) -> None:
        self.prototypes.zero_()
        super().server_update(mean)
