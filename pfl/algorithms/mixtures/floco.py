"""Floco.

Grinwald, Wiesner, Nakajima, "Federated Learning over Connected Modes", NeurIPS 2024.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl.method import (
    Clients,
    Count,
    FederatedAlgorithm,
    Message,
    Network,
    NonNegative,
    Part,
    dense,
    generator,
    header,
    masked,
    redrawn,
    replace_values_in,
    select_part,
    values_in,
)


class Floco(FederatedAlgorithm):
    """A simplex of heads, of which each client trains the region that its own changes point to.

    The model has a body u and K heads θ_1 to θ_K; the point α of the simplex, α_k >= 0 with the sum
    1, has the head Σ_k α_k θ_k. Each local step draws a point α of the client's region and takes
    u_i <- u_i - η g_u(u_i, Σ_k α_k θ_i,k);  θ_i,k <- θ_i,k - η α_k g_θ(u_i, Σ_k α_k θ_i,k);
    u <- sum_S n_i u_i / sum_S n_i, and so each θ_k.
    Until the round τ the region is the whole simplex, with the uniform distribution. Before the
    round τ the server takes the last change of (θ_1, ..., θ_K) that each client has sent, and its
    first K principal components κ_i over the clients. The client's centre p_i is κ_i, projected
    onto the simplex of the sum z and divided by z, with the one z of 1000 between 0.0001 and 1 that
    spreads the centres most: the least mean of 1 / |p_i - p_j|² over the pairs. From then on α is
    p_i + r s, with r uniform in [0, ρ] and s random with the l1 norm 1.

    Evaluated: the global model with the centre of the simplex, which is the network's own before
    the first round, and the client's with p_i. Shared:
    u, all θ_k; the server finds p_i. Cost: K heads and the body down, and K numbers once p_i is
    known; K heads and the body up. No client state. Server state: θ_k and p_i; it keeps the
    clients' last changes. A newcomer receives the global model.

    Args:
        endpoints: K.
        projection_round: τ, a round counted from 0.
        radius: ρ.
        simplex: The parameters that have K values: "head", or shell patterns of their names.

    Note:
        θ_1 is the network's own; the others have its values in a random order, parameter by
        parameter, where the authors' code draws them anew. It has one common bias of the head,
        `simplex: [head.weight]` here. There all clients train in the round before τ, so that their
        changes have one start; here no round is added, and a change is that of a client's last
        round. Both agree where all clients take part in each round. A client that has sent nothing
        before τ keeps the whole simplex. As in that code, α may leave the simplex, and its sum be
        away from 1, by up to ρ. A component has the sign with which its largest entry is positive.
        The print was not at hand; the method follows the authors' Flower baseline. The default of
        τ is that of their pull request to FL-bench; the baseline has half of the rounds. Floco+,
        which trains a second model held to this one, is Ditto's step and is left out.

    Example:
        >>> from pfl.models import MLP
        >>> method = Floco(MLP(64, (8,)), endpoints=3)  # 3 heads of 90 values
        >>> method.endpoints.shape
        torch.Size([3, 90])
    """

    has_personalized = True
    personal_part: Tensor
    endpoints: Tensor
    centres: Tensor

    def __init__(
        self,
        network: Network,
        *,
        endpoints: Count = 10,
        projection_round: Count = 10,
        radius: NonNegative = 0.1,
        simplex: Part = "head",
        **kwargs: Any,
    ) -> None:
        super().__init__(network, server_optimizer=None, **kwargs)
        self.require_no_aids()
        self.count = endpoints
        self.projection_round = projection_round
        self.radius = radius
        part = select_part(self.network, self.space, simplex, "model.simplex")
        self.add_constant("personal_part", part)
        self.add_server_state("endpoints", self.global_model[part].repeat(endpoints, 1))
        self.add_server_state("centres", self._no_centres)
        self.keep_messages("change", self._no_change)

    @property
    def personalization_penalty(self) -> None:
        """None: no penalty ties the models."""
        return None

    def _no_centres(self) -> Tensor:
        """Returns p_i of each client of the population, [M, K]; zeros: it has the whole simplex."""
        return self.global_model.new_zeros(self.num_clients, self.count)

    def _no_change(self) -> Tensor:
        return torch.zeros_like(self.endpoints).flatten()

    def begin_round(self, round_index: int) -> None:
        """Draws the heads before the first round."""
        if round_index == 0:
            for number, head in enumerate(self.endpoints[1:], start=1):
                drawn = redrawn(self.space, self.global_model, generator(self.seed, "head", number))
                head.copy_(drawn[self.personal_part])

    def download(self) -> dict[str, Tensor | Message]:
        """Returns u and all θ_k, and whether the p_i are known."""
        return {
            "w": masked(self.global_model, ~self.personal_part),
            "endpoints": self.endpoints.flatten(),
            "known": header(self.centres.any().to(self.centres)[None]),
        }

    def download_for(self, ids: np.ndarray) -> dict[str, Tensor | Message]:
        """Returns p_i, once they are known; zeros for newcomers."""
        by_id = self.centres.new_zeros(len(self.client_sizes), self.count)
        by_id[self.population] = self.centres
        centres = by_id[torch.from_numpy(ids)]
        return {"centre": centres if self.centres.any() else Message(centres, 0)}

    evaluation_for = download_for

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        """Trains u_i and θ_i,k at random points of the client's region."""
        part = self.personal_part.nonzero()[:, 0]
        lr = self.rate_of(clients)
        received = clients.received["endpoints"]
        v = w.repeat(len(clients), 1)
        heads = received.repeat(len(clients), 1)
        train, train_heads = (self.local_optimizer(x, lr) for x in (v, heads))
        for step, batch in enumerate(clients.batches(self.local_schedule)):
            if step == 0:
                points = self._points(clients, w)
            at = points[:, step]
            replace_values_in(part, v, (at[:, None] @ heads.unflatten(1, (self.count, -1)))[:, 0])
            loss, g = self.oracle.gradient(v, batch, clients.buffers)
            train_heads.step(
                (at[..., None] * values_in(part, g)[:, None]).flatten(1), batch.clients
            )
            train.step(g, batch.clients)  # its head is replaced in the next step
            self.log_loss("train", loss, batch.counts)
        sent = {
            "w": masked(v, ~self.personal_part),
            "endpoints": Message(heads, dense(heads).nbytes, reference=received),
        }
        if not clients.received["known"]:  # the server can work it out
            sent["change"] = Message(heads - received, 0)
        return sent

    def server_update(self, mean: dict[str, Tensor]) -> None:
        """Replaces u and θ_k by the clients' means, and finds the centres before the round τ."""
        self.global_model.copy_(mean["w"])
        self.endpoints.copy_(mean["endpoints"].view_as(self.endpoints))
        self.global_model[self.personal_part] = self.endpoints.mean(0)
        if self.centres.any() or self.rounds + 1 < self.projection_round:
            return
        if len(ids := self.kept_ids("change")) > 1:
            changes = self.kept_rows("change", ids).double().cpu().numpy()
            found = torch.from_numpy(spread_on_simplex(principal_components(changes, self.count)))
            places = np.searchsorted(self.population, ids)
            self.centres[places] = found.to(self.centres)

    def personalized(self, clients: Clients) -> Tensor:
        """Returns the body with the head at p_i, or at the centre of the simplex."""
        v = clients.received["w"].repeat(len(clients), 1)
        heads = clients.received["endpoints"].view(self.count, -1)
        centres = clients.received["centre"]
        middle = torch.where(centres.any(1, keepdim=True), centres, 1 / self.count)
        replace_values_in(self.personal_part, v, middle @ heads)
        return v

    def _points(self, clients: Clients, like: Tensor) -> Tensor:
        """Returns the points of the clients' steps, [C, steps, K]."""
        steps = clients.steps_of(self.local_schedule).max()
        centres = clients.received["centre"].cpu().numpy()
        points = np.empty((len(clients), steps, self.count))
        for row, client in enumerate(clients.ids.tolist()):
            draw = generator(self.seed, "simplex", clients.round, client)
            if centres[row].any():
                drawn = draw.uniform(-1, 1, size=(steps, self.count + 1))
                along = drawn[:, :-1] / np.abs(drawn[:, :-1]).sum(1, keepdims=True)
                length = self.radius * (drawn[:, -1:] + 1) / 2
                points[row] = centres[row] + length * along
            else:
                drawn = draw.exponential(size=(steps, self.count))
                points[row] = drawn / drawn.sum(1, keepdims=True)
        return torch.from_numpy(points).to(like)


def principal_components(values: np.ndarray, count: int) -> np.ndarray:
    """Returns the first principal components of n rows, [n, count]; 0 where there are no more.

    Args:
        values: Rows of values, [n, K].
        count: The number of components. Each has the sign with which the entry of its direction
            that is largest in absolute value is positive.
    """
    u, s, directions = np.linalg.svd(values - values.mean(0), full_matrices=False)
    largest = np.abs(directions).argmax(1, keepdims=True)
    found = u * s * np.sign(np.take_along_axis(directions, largest, 1)[:, 0])
    return np.pad(found, ((0, 0), (0, max(0, count - found.shape[1]))))[:, :count]


def spread_on_simplex(points: np.ndarray) -> np.ndarray:
    """Returns points, [n >= 2, K], projected onto simplices of a sum that spreads them most.

    Each is divided by that sum, one of 1000 between 0.0001 and 1.
    """
    first, second = np.triu_indices(len(points), 1)
    ranks = np.arange(1, points.shape[1] + 1)
    above = np.cumsum(np.sort(points, 1)[:, ::-1], 1)
    best = np.full_like(points, 1 / points.shape[1])
    least = np.inf
    for z in np.linspace(1e-4, 1, 1000):
        # Held, Wolfe, Crowder 1974: the threshold is the largest of these means.
        threshold = ((above - z) / ranks).max(1, keepdims=True)
        projected = np.maximum(points - threshold, 0) / z
        distances = np.linalg.norm(projected[first] - projected[second], axis=1)
        energy = np.mean(np.maximum(distances, 1e-4) ** -2.0)
        if energy < least:
            best = projected
            least = energy
    return best
