"""Our methods, each changed by what another implementation computes instead of the paper's line.

They show that a difference has the stated reason and no other: changed so, both sides agree.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.agreement.problem import Iterates, arrays
from pfl.algorithms import APFL, SCAFFOLD, Ditto, FedBABU, FedDyn, FedGH, FedPD, pFedMe
from pfl.method import (
    Clients,
    FederatedAlgorithm,
    LocalSchedule,
    Message,
    PartlyPersonal,
    dense,
)


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


# ---- the authors' code --------------------------------------------------------------------------


class ScaledFedDyn(FedDyn):
    """α is α / ω_i for a client, with ω_i the relative number of its samples; g_i / α is stored.

    The state "g" is -g_i / α here, the sum of all changes of the client's model.
    """

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        moved, alpha = clients.state["g"], self.alpha / relative_sizes(self, clients)
        pull, lr = moved - w, self.learning_rate(clients.round)
        v = w.repeat(len(clients), 1)
        for batch in clients.batches(self.local_schedule):
            _, g = self.oracle.gradient(v, batch, clients.buffers)
            v[: batch.clients] -= lr * (g + alpha * (v + pull))[: batch.clients]
        clients.state["g"] = moved + v - w
        return v

    def server_update(self, mean: dict[str, Tensor]) -> None:
        self.global_model.copy_(mean["w"] + self.mean_state("g"))


def relative_sizes(method: FederatedAlgorithm, clients: Clients) -> Tensor:
    """The clients' numbers of samples, divided by the mean over all clients, [C, 1]."""
    sizes = torch.from_numpy(clients.sizes / method.client_sizes.mean())
    return sizes[:, None]


class ScaledSCAFFOLD(SCAFFOLD):
    """Clients receive c / ω_i, with ω_i the relative number of samples, and c moves by ω_i Δc_i.

    With `divided=False` c_i+ is computed with c instead of c / ω_i.
    """

    def __init__(self, *args: Any, divided: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.divided = divided

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        c_i, lr, size = clients.state["c_i"], self.lr, relative_sizes(self, clients)
        steps = torch.from_numpy(clients.steps_of(self.local_schedule)).to(w)[:, None]
        y = self.local_sgd(clients, w, linear=self.c / size - c_i)
        received = self.c / size if self.divided else self.c
        clients.state["c_i"] = new = c_i - received + (w - y) / (steps * lr)
        return {"y": dense(y - w), "c": dense((new - c_i) * size)}


class SteppedDitto(Ditto):
    """v_i takes a step of its loss and of 0.001 v_i, and then one towards w; `weighting: uniform`.

    The mean over the cohort is that of the models after the local steps, as in Ditto.
    """

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        lr, schedule = self.learning_rate(clients.round), self.local_schedule
        v = clients.state["v"].clone()
        for batch in clients.batches(replace(schedule, epochs=self.personal_epochs)):
            _, g = self.oracle.gradient(v, batch, clients.buffers)
            rows = slice(0, batch.clients)
            v[rows] -= lr * (g + 0.001 * v)[rows]
            v[rows] -= lr * self.penalty * (v - w)[rows]
        clients.state["v"] = v
        return self.local_sgd(clients, w)


def scored_before_the_mean(iterates: Iterates, shared: slice) -> Iterates:
    """The personalized models v with the shared part that the round began with."""
    v = iterates["v"].copy()
    v[1:, :, shared] = iterates["v"][:-1, :, shared]
    v[0, :, shared] = arrays()[2][shared]
    return {"v": v}



class LocalpFedMe(CarriedpFedMe):
    """Scored is w_i after the local steps, since θ_i are the parameters that w_i overwrites."""

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        v = super().client_update(clients, w)
        clients.state["theta"] = v.clone()
        return v

    def personalized(self, clients: Clients) -> Tensor:
        return clients.state["theta"]


class SummedFedPD(FedPD):
    """Oracle II without the subtraction: g_i is the full gradient at x_0 plus all later ones."""

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        x, lam, lr = clients.state["x"].clone(), clients.state["lam"], self.lr
        g = torch.zeros_like(x)
        for batch in clients.batches(LocalSchedule(batch_size=None)):
            g += self.oracle.gradient(w.expand_as(x).clone(), batch, clients.buffers)[1]
        for batch in clients.batches(self.local_schedule):
            g[: batch.clients] += self.oracle.gradient(x, batch, clients.buffers)[1][: batch.clients]
            step = g + lam + (x - w) / self.proximal_step
            x[: batch.clients] -= lr * step[: batch.clients]
        clients.state["x"] = x
        clients.state["lam"] = lam = lam + (x - w) / self.proximal_step
        return dense(x + self.proximal_step * lam)


class OldCentreFedPD(FedPD):
    """x_{0,i} <- x_{0,i} + η λ_i instead of x_i + η λ_i, with the new λ_i in both."""

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        super().client_update(clients, w)
        return dense(w + self.proximal_step * clients.state["lam"])


def with_decaying_weights(kind: type[FederatedAlgorithm]) -> type[FederatedAlgorithm]:
    """Local steps with momentum 0.5, and weight decay 0.0001 of all but the biases."""

    class DecayingWeights(kind):  # type: ignore[valid-type,misc]
        def local_sgd(
            self,
            clients: Clients,
            start: Tensor,
            *,
            epochs: int | None = None,
            part: Tensor | None = None,
            name: str = "train",
        ) -> Tensor:
            schedule = replace(self.local_schedule, purpose=name)
            if epochs is not None:
                schedule = replace(schedule, epochs=epochs)
            weights = self.space.mask(["*weight"], "weights")
            v = start.expand(len(clients), -1).clone()
            momentum = torch.zeros_like(v)
            for batch in clients.batches(schedule):
                rows = slice(0, batch.clients)
                _, g = self.oracle.gradient(v, batch, clients.buffers)
                momentum[rows] = (0.5 * momentum + g + 0.0001 * weights * v)[rows]
                moved = momentum if part is None else torch.where(part, momentum, 0.0)
                v[rows] -= self.lr * moved[rows]
            return v

    return DecayingWeights


class DoubleAlphaAPFL(APFL):
    """The mixture is α_i v_i + α_i w_i; one optimizer with momentum 0.5 takes both kinds of steps.

    It takes the gradient at the mixture with the old w_i, and decays all but the biases by 0.0001.
    """

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        decay = 0.0001 * self.space.mask(["*weight"], "weights")
        shared, own = w.repeat(len(clients), 1), clients.state["v"].clone()
        momentum = torch.zeros_like(own)
        for batch in clients.batches(self.local_schedule):
            mixed = self.alpha * own + self.alpha * shared
            _, g = self.oracle.gradient(shared, batch, clients.buffers)
            momentum = 0.5 * momentum + g + decay * shared
            shared -= self.lr * momentum
            _, g = self.oracle.gradient(mixed, batch, clients.buffers)
            momentum = 0.5 * momentum + self.alpha * g + decay * mixed
            own -= self.lr * momentum
        clients.state["v"] = own
        return shared
