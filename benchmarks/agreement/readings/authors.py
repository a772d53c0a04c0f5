"""What the code of methods' authors, and APPFL, computes instead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.agreement.problem import Iterates, arrays
from benchmarks.agreement.readings.common import CarriedpFedMe, relative_sizes
from pfl.algorithms import APFL, SCAFFOLD, Ditto, FedBuff, FedDyn, FedNova, FedPD
from pfl.method import Clients, FederatedAlgorithm, LocalSchedule, Message, dense


class ScaledFedDyn(FedDyn):
    """α is α / ω_i for a client, with ω_i the relative number of its samples; g_i / α is stored.

    The state "g" is -g_i / α here, the sum of all changes of the client's model, and h their mean.
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
        self.h += (mean["w"] - self.global_model) * (self.participants / self.num_clients)
        self.global_model.copy_(mean["w"] + self.h)


class ScaledSCAFFOLD(SCAFFOLD):
    """Clients receive c / ω_i, with ω_i the relative number of samples, and c moves by ω_i Δc_i.

    With `divided=False` c_i+ is computed with c instead of c / ω_i.
    """

    def __init__(self, *args: Any, divided: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.divided = divided

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Tensor]:
        c_i, lr, size = clients.state["c_i"], self.lr, relative_sizes(self, clients)
        c = clients.received["c"]
        steps = torch.from_numpy(clients.steps_of(self.local_schedule)).to(w)[:, None]
        y = self.local_sgd(clients, w, linear=c / size - c_i)
        received = c / size if self.divided else c
        clients.state["c_i"] = new = c_i - received + (w - y) / (steps * lr)
        return {"y": y - w, "c": (new - c_i) * size}


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
            g[: batch.clients] += self.oracle.gradient(x, batch, clients.buffers)[1][
                : batch.clients
            ]
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


class PresentFedBuff(FedBuff):
    """A message's change is from the server's present model, and its weight 0.9 s(τ_i) / N."""

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        return self.rows(self.local_sgd(clients, w))

    def server_update(self, received: dict[str, Tensor]) -> None:
        scale = 0.9 * len(received["w"]) / self.num_clients
        super().server_update({"w": scale * (received["w"] - self.global_model)})


class LongFedNova(FedNova):
    """τ is the mean of the clients' numbers of steps, also with a proximal term."""

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Tensor]:
        steps = torch.from_numpy(clients.steps_of(self.local_schedule)).to(w)[:, None]
        return super().client_update(clients, w) | {"norm": steps}
