"""What FL-bench computes instead."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.agreement.ours import run
from benchmarks.agreement.problem import (
    BODY,
    CLASSES,
    COHORTS,
    EVERYONE,
    ROUNDS,
    Iterates,
    arrays,
    starts,
)
from benchmarks.agreement.readings.common import CarriedpFedMe, complete_linkage
from pfl.algorithms import MOON, SCAFFOLD, FedBABU, FedDyn, FedMD, Floco
from pfl.method import BatchSamples, Clients, Message, dense


class ForgettingSCAFFOLD(SCAFFOLD):
    """What a client computes as its c_i is kept by nobody: every round begins with c_i = 0."""

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Tensor]:
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

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Tensor | Message]:
        g, alpha = clients.state["g"], self.alpha
        if self.pulled:
            v = self.local_sgd(clients, w, linear=-g, prox_weight=alpha, prox_center=w)
        else:
            v = self.local_sgd(clients, w, linear=-g - alpha * w)
        clients.state["g"] = new = g - alpha * (v - w)
        return {"w": v, "g": Message(new - g, 0, weighting="uniform")}


class FirstInputsFedMD(FedMD):
    """The inputs of all rounds are those of the first; distances are squared.

    A round begins with the scores of its clients, to which these are then drawn.
    """

    def begin_round(self, round_index: int) -> None:
        inputs = self.public.inputs(self.seed, 0, self.global_model)
        models = self.states.rows("w", self.cohort(round_index))
        scores = torch.stack([self.oracle.predict(w, inputs) for w in models])
        self.consensus[0] = 1
        self.consensus[1:] = scores.mean(0).flatten()

    def server_update(self, mean: dict[str, Tensor]) -> None: ...

    def _distances(
        self, outputs: Tensor, features: Tensor, samples: BatchSamples, own: Any
    ) -> Tensor:
        return (outputs.flatten(1) - samples.targets).square().mean(1)


class ForgettingFedMD(FedMD):
    """Every round begins with the first model, of which all scores are, so that none is wrong."""

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        clients.state["w"] = torch.from_numpy(arrays()[2]).repeat(len(clients), 1)
        clients.received["consensus"] = torch.zeros_like(clients.received["consensus"])
        return super().client_update(clients, w)


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


class FirstReceivedMOON(MOON):
    """The last model of a client that takes part for the first time is the received one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_client_state("known", lambda: self.global_model.new_zeros(1))

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        known = clients.state["known"] > 0
        clients.state["previous"] = torch.where(known, clients.state["previous"], w)
        clients.state["known"] = torch.ones_like(clients.state["known"])
        return super().client_update(clients, w)


class PlacesCFL(complete_linkage(2)):  # type: ignore[misc]
    """The parts of a cluster are places in it; a client moves with each cluster that it is in."""

    def server_update(self, received: dict[str, Tensor]) -> None:
        updates = received["update"]
        if self.rounds == 0:
            self.parts = [np.arange(len(updates))]
            self.cluster.copy_(torch.arange(len(updates)))  # every client has a model
        new: list[np.ndarray] = []
        for members in self.parts:
            second = self._split(updates[members], torch.ones(len(members)).to(updates))
            halves = [np.flatnonzero(~second), np.flatnonzero(second)]
            new += halves if second.any() else [members]
        self.parts = new
        for members in new:
            self.models[members] += updates[members].mean(0)


class GivenFloco(Floco):
    """The first heads and the draws of points are given; with `found`, the centres from a round."""

    found: tuple[int, np.ndarray] | None = None

    def begin_round(self, round_index: int) -> None:
        if round_index == 0:
            heads = starts(arrays()[2], self.count)[:, BODY:-CLASSES]
            self.endpoints.copy_(torch.from_numpy(heads))
        if self.found is not None and round_index == self.found[0]:
            self.centres.copy_(torch.from_numpy(self.found[1]).view_as(self.centres))

    def _points(self, clients: Clients, like: Tensor) -> Tensor:
        with patch(
            "pfl.algorithms.mixtures.floco.generator",
            lambda *given: np.random.default_rng(given[2:]),
        ):
            return super()._points(clients, like)


def projected_after_a_turn(at: int, **settings: Any) -> Iterates:
    """Floco whose centres are those of a turn of all clients with the models of the round `at`."""
    cohorts = [*COHORTS[:at], EVERYONE, *COHORTS[at + 1 :]]
    turn = run(GivenFloco, cohorts=cohorts, projection_round=at + 1, **settings)

    class Found(GivenFloco):
        found = at, turn["server centres"][at]

    return run(Found, projection_round=ROUNDS + 1, **settings)
