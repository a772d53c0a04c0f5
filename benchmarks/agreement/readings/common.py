"""What several other implementations compute instead of the paper's lines.

Every reading is a method of ours, changed by what another implementation computes. It shows that a
difference has the stated reason and no other: changed so, both sides agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform
from torch import Tensor
from torch.func import functional_call

from pfl.algorithms import CFL, pFedMe
from pfl.method import Clients, FederatedAlgorithm, Message, PartlyPersonal, dense


def by_samples(kind: type[FederatedAlgorithm]) -> type[FederatedAlgorithm]:
    """The method with the mean over the cohort weighted by the numbers of samples."""

    class BySamples(kind):  # type: ignore[valid-type,misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.weighting = "samples"

    return BySamples


class CarriedpFedMe(by_samples(pFedMe)):  # type: ignore[misc]
    """θ_i starts where the last local step of the round left it, and f_i has μ/2 |θ|^2 more.

    Evaluated is the received model, or the first one before the client has trained.
    """

    decay = 0.001  # μ

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_client_state("known", lambda: self.global_model.new_zeros(1))

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
        clients.state["known"] = torch.ones_like(clients.state["known"])
        return v

    def personalized(self, clients: Clients) -> Tensor:
        known = clients.state["known"] > 0
        return torch.where(known, clients.received["w"], clients.state["theta"])


def with_averaged_heads(kind: type[PartlyPersonal]) -> type[PartlyPersonal]:
    """The personal parts are averaged, too, and a client begins with their mean."""

    class AveragedHeads(kind):  # type: ignore[valid-type,misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.add_client_state("known", lambda: self.global_model.new_zeros(1))

        def download(self) -> Message:
            return dense(self.global_model)

        def keep_and_send(self, clients: Clients, v: Tensor) -> Message:
            super().keep_and_send(clients, v)
            clients.state["known"] = torch.ones_like(clients.state["known"])
            return dense(v)

        def server_update(self, mean: dict[str, Tensor]) -> None:
            self.global_model.copy_(mean["w"])

        def personalized(self, clients: Clients) -> Tensor:
            known = clients.state["known"] > 0
            return torch.where(known, super().personalized(clients), clients.received["w"])

    return AveragedHeads


def call(method: FederatedAlgorithm, at: Tensor, module: str, *args: Tensor) -> Tensor:
    """What a module of the method's network gives with the values of a model, [P]."""
    prefix = f"{module}." if module else ""
    values = {
        name.removeprefix(prefix): value
        for name, value in method.space.split(at).items()
        if name.startswith(prefix)
    }
    found: Tensor = functional_call(method.network.get_submodule(module), values, args)
    return found


def stepped(
    method: FederatedAlgorithm,
    clients: Clients,
    start: Tensor,
    loss: Callable[[Tensor, Tensor, Tensor, int], Tensor],
) -> Tensor:
    """Models [C, P] after SGD steps on a loss of whole mini-batches.

    Args:
        method: Has the rate and the schedule.
        clients: The clients.
        start: The models before.
        loss: Of a model [P], inputs, targets, and the number of the client's row.
    """
    v = start.clone()
    rate = method.learning_rate(clients.round)
    for batch in clients.batches(method.local_schedule):
        for row in range(batch.clients):
            one = batch.select(row)
            with torch.enable_grad():
                at = v[row].clone().requires_grad_()
                value = loss(at, one.inputs[0], one.targets[0], row)
                (slope,) = torch.autograd.grad(value, at)
            v[row] -= rate * slope
    return v


def from_zero(kind: type[FederatedAlgorithm]) -> type[FederatedAlgorithm]:
    """The adaptive server with v = 0 at the beginning."""

    class FromZero(kind):  # type: ignore[valid-type,misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.v.zero_()

    return FromZero


def relative_sizes(method: FederatedAlgorithm, clients: Clients) -> Tensor:
    """The clients' numbers of samples, divided by the mean over all clients, [C, 1]."""
    sizes = torch.from_numpy(clients.sizes / method.client_sizes.mean())
    return sizes[:, None]


def complete_linkage(first_round: int) -> type[CFL]:
    """CFL that splits clusters of three or more by complete linkage, from a round on."""

    class Complete(CFL):
        def _split(self, updates: Tensor, weights: Tensor) -> np.ndarray:
            if (
                self.rounds < first_round
                or len(updates) < 3
                or not super()._split(updates, weights).any()
            ):
                return np.zeros(len(updates), dtype=bool)
            unit = updates / updates.norm(dim=1, keepdim=True)
            away = 1 - (unit @ unit.T).numpy()
            np.fill_diagonal(away, 0)
            part = fcluster(linkage(squareform(away, checks=False), "complete"), 2, "maxclust")
            return np.asarray(part != part[0])

    return Complete
