"""FedFomo.

Zhang, Sapra, Fidler, Yeung, Alvarez, "Personalized Federated Learning with First Order Model
Optimization", ICLR 2021.
"""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pfl.method import (
    Batch,
    Clients,
    ConfigError,
    Count,
    FederatedAlgorithm,
    Message,
    Network,
    NonNegative,
    Share,
    dense,
    generator,
)


class FedFomo(FederatedAlgorithm):
    """Clients mix other clients' models by how much each lowers their loss (Algorithm 1).

    ω_n = (L_i(θ_i) - L_i(w_n)) / |w_n - θ_i| for the models w_n that the client receives, and for
    its own last w_i; θ_i is where the client began its last local steps;
    ω*_n = max(ω_n, 0) / sum_m max(ω_m, 0), or 0 where no model lowers the loss;
    θ_i <- θ_i + sum_n ω*_n (w_n - θ_i);  w_i <- w_i - η g_i(w_i), local steps from θ_i.
    The server adds the ω_n to P_i,n. It sends a client the M models with the largest P_i,n; each of
    them is, with the probability ε, another one at random.

    Evaluated: w_i; there is no global model. Shared: the w_i, which other clients get as they are.
    Personal: θ_i. Cost: up to M models down; up w_i, and ω_n for each received model; M + 2 forward
    passes over the samples of L_i. Client state: w_i, θ_i. Server state: the last w_i of every
    client, and P, the square of the number of clients. A newcomer has the initial model.

    Args:
        models: M.
        judged_on: The samples of L_i, "validation" as in the paper, or "training".
        exploration: ε in the first round.
        exploration_decay: By how much ε falls in each round, down to 0.

    Note:
        L_i is the mean loss, with the network in evaluation mode and the client's own running
        statistics. The validation samples then decide what is trained, so that validation scores
        are better than those of new data; test scores are not concerned. A client without such
        samples keeps its own w_i.
        The print was not at hand: the method is written from the authors' code. Differences from
        it: there the ω_n that are added to P_i,n are divided by the absolute value of their sum,
        P_i,i counts, and only models of the last round are sent, and here the last model of any
        client. Its clusters of clients, which make models of their own, are left out.
        Differences from a public implementation, PFLlib: there a client keeps w_i where no model
        lowers its loss; 0.00001 is added to the distances; the own model is one of the M; and
        nothing is explored. A fifth of each client's training samples is its validation set.

    Example:
        >>> from pfl.models import MLP
        >>> method = FedFomo(MLP(64, (8,)), models=3)
        >>> method.client_state_names
        ['w', 'start']
    """

    has_global = False
    has_personalized = True
    personalization_penalty = None
    affinity: Tensor

    def __init__(
        self,
        network: Network,
        *,
        models: Count = 5,
        judged_on: Literal["validation", "training"] = "validation",
        exploration: Share = 0.3,
        exploration_decay: NonNegative = 0.05,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            network, weighting="uniform", server_optimizer=None, buffers="local", **kwargs
        )
        self.models = models
        self.judged_on = judged_on
        self.exploration = exploration
        self.exploration_decay = exploration_decay
        self.add_client_state("w", self.first_model)
        self.add_client_state("start", self.first_model)
        self.keep_messages("w", self.first_model)
        self.add_server_state("affinity", self._no_affinity)

    def _no_affinity(self) -> Tensor:
        return self.global_model.new_zeros(self.num_clients, self.num_clients)

    @property
    def most(self) -> int:
        """The most models that a client can receive."""
        return min(self.models, self.num_clients - 1)

    def cost(self, sizes: np.ndarray) -> np.ndarray:
        """Returns the sample gradients of a round, with a forward pass as a third of one."""
        passes = (self.models + 2) / 3 if self.judged_on == "training" else 0
        return super().cost(sizes) + sizes * passes

    def begin_round(self, round_index: int) -> None:
        """Chooses which models each client of the cohort gets."""
        judging = self.run.loop.datamodule.partition.val.sizes
        if self.judged_on == "validation" and not judging.any():
            raise ConfigError(
                "model.judged_on: validation; the clients have no validation samples: give "
                "data.protocol a validation share, or take training"
            )
        self._ids = self.cohort(round_index)
        known = self.kept_ids("w")
        self._partners = np.full((len(self._ids), self.most), -1)
        for row, client in enumerate(self._ids.tolist()):
            chosen = self._partners_of(client, known[known != client], round_index)
            self._partners[row, : len(chosen)] = chosen
        self._sent = np.unique(self._partners[self._partners >= 0])
        self._models = self.kept_rows("w", self._sent)

    def _partners_of(self, client: int, others: np.ndarray, round_index: int) -> np.ndarray:
        """Returns the ids of the clients whose models a client gets, ascending."""
        rng = generator(self.seed, "partners", round_index, client)
        row = self.affinity[int(np.searchsorted(self.population, client))].cpu().numpy()
        others = rng.permutation(others)  # in random order where P is equal
        ranked = others[np.argsort(-row[np.searchsorted(self.population, others)], kind="stable")]
        count = min(self.most, len(others))
        chance = max(0.0, self.exploration - round_index * self.exploration_decay)
        best = count - int(rng.binomial(count, chance))
        explored = rng.choice(ranked[best:], count - best, replace=False)
        return np.sort(np.concatenate([ranked[:best], explored]))

    def download(self) -> dict[str, Message]:
        return {}

    def download_for(self, ids: np.ndarray) -> dict[str, Message]:
        """Returns the chosen models of each client; zeros where there are fewer than M."""
        partners = self._partners[np.searchsorted(self._ids, ids)]
        client, place = (partners >= 0).nonzero()
        size = self.global_model.numel()
        models = self.global_model.new_zeros(len(ids), self.most, size)
        found = torch.from_numpy(np.searchsorted(self._sent, partners[client, place]))
        models[torch.from_numpy(client), torch.from_numpy(place)] = self._models[found]
        counts = torch.from_numpy((partners >= 0).sum(1))
        return {"models": Message(models.flatten(1), counts * size * models.element_size())}

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        start = clients.state["start"]
        others = clients.received["models"].view(len(clients), self.most, self.space.size)
        models = torch.cat([clients.state["w"][:, None], others], 1)
        gains = self._losses(clients, start)[:, None] - torch.stack(
            [self._losses(clients, models[:, n]) for n in range(models.shape[1])], 1
        )
        away = models - start[:, None]
        distances = away.norm(dim=2)
        known = models.any(2) & (distances > 0)  # no trained model is 0
        weights = torch.where(known, gains / distances.where(known, 1), 0)
        shares = weights.clamp_min(0)
        total = shares.sum(1, keepdim=True)
        shares = shares / total.where(total > 0, 1)
        begin = start + (shares[..., None] * away).sum(1)
        if self.judged_on == "validation":
            unjudged = torch.from_numpy(clients.data.sizes("val", clients.ids) == 0)
            begin = torch.where(unjudged.to(w.device)[:, None], clients.state["w"], begin)
        v = self.local_sgd(clients, begin)
        clients.state["start"] = begin
        clients.state["w"] = v
        counts = others.any(2).sum(1)
        sent = Message(weights[:, 1:], counts * v.element_size(), reduce="rows")
        return {"w": dense(v), "weights": sent}

    def server_update(self, received: dict[str, Tensor]) -> None:
        """Adds the ω_n to P."""
        for client, weights in zip(self.participant_ids, received["weights"], strict=True):
            partners = self._partners[np.searchsorted(self._ids, client)]
            partners = partners[partners >= 0]
            places = torch.from_numpy(np.searchsorted(self.population, partners))
            row = int(np.searchsorted(self.population, client))
            self.affinity[row, places] += weights[: len(partners)]

    def personalized(self, clients: Clients) -> Tensor:
        return clients.state["w"]

    def _losses(self, clients: Clients, models: Tensor) -> Tensor:
        """Returns the mean loss L_i of each client's model, [C]; 0 without samples."""
        sums = models.new_zeros(len(clients))
        counts = models.new_zeros(len(clients))
        for rows, batch in self._judging(clients):
            buffers = None if clients.buffers is None else clients.buffers[rows]
            sums[rows] += self.oracle.evaluate(models[rows], batch, buffers)[0].sum(1)
            counts[rows] += counts.new_tensor(batch.counts)
        return sums / counts.clamp_min(1)

    def _judging(self, clients: Clients) -> Iterator[tuple[Any, Batch]]:
        if self.judged_on == "validation":
            yield from clients.validation_samples()
        else:
            yield from clients.samples()
