"""IFCA.

Ghosh, Chung, Yin, Ramchandran, "An Efficient Framework for Clustered Federated Learning",
NeurIPS 2020.
"""

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pfl.method import (
    Clients,
    Count,
    FederatedAlgorithm,
    Message,
    Network,
    Positive,
    generator,
    redrawn,
    require,
)


class IFCA(FederatedAlgorithm):
    """k models, of which each client trains the one that suits it best (Algorithm 1, averaging).

    j_i = argmin_j f_i(θ_j), over all of the client's training samples;
    θ_i <- θ_{j_i};  θ_i <- θ_i - η g_i(θ_i), local steps;
    θ_j <- mean of the θ_i of the cohort's clients with j_i = j, or θ_j where there are none.

    Evaluated: θ_{j_i}, chosen anew by the client's training samples; there is no global model. A
    newcomer chooses in the same way. Cost: k P values down, P + 1 up (θ_i and j_i), and a forward
    pass of k models over the client's samples. No client state. Server state: the k models.

    Args:
        clusters: k.
        perturbation: How the k models begin. The first one is the network's own. The others are,
            null: the network's values, each parameter's in a random order, which is a new random
            initialisation; a number σ: the network's values + σ N(0, 1), which networks
            need whose values are all alike, such as a logistic regression that begins at 0.
        weighting: The clients' weights in the mean of their cluster. "uniform": as in the paper.

    Attributes:
        models: θ_1 to θ_k, [k, P].
        statistics: Their running statistics, [k, B]; [k, 0] with `buffers: local`.

    Note:
        With one cluster this is FedAvg with the same weighting. A client without samples belongs to
        no cluster; it is scored with the first model. The losses that decide are taken
        with the network in evaluation mode. Each cluster's model has the mean of its clients'
        running statistics; with `buffers: local` each client keeps its own.
        Differences from the paper: option I, gradient averaging, is left out; it takes one step of
        all samples and moves θ_j by the cluster's share of the cohort. The paper prints any k
        first models, and draws them independently in its experiments with neural networks; the
        layers that the two share there (Section 6.3) are not shared here.

    Example:
        >>> from pfl.models import MLP
        >>> method = IFCA(MLP(64, (8,)), clusters=3)
        >>> method.models.shape  # 3 models of 610 values
        torch.Size([3, 610])
    """

    has_global = False
    has_personalized = True
    tables = ("clusters",)
    personalization_penalty = None
    models: Tensor
    statistics: Tensor

    def __init__(
        self,
        network: Network,
        *,
        clusters: Count = 2,
        perturbation: Positive | None = None,
        weighting: Literal["samples", "uniform"] = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(network, weighting=weighting, server_optimizer=None, **kwargs)
        if perturbation is None:
            layers = [self.global_model[layer.span] for layer in self.space.layers]
            differ = clusters == 1 or any(values.min() < values.max() for values in layers)
            require("perturbation", None, differ, "a number, as the network's values are all alike")
        self.clusters = clusters
        self.perturbation = perturbation
        self.add_server_state("models", self.global_model.repeat(clusters, 1))
        self.add_server_state("statistics", self._first_statistics)

    def cost(self, sizes: np.ndarray) -> np.ndarray:
        """Returns the sample gradients of a round, with a forward pass as a third of one."""
        return super().cost(sizes) + sizes * (self.clusters / 3)

    def _first_statistics(self) -> Tensor:
        buffers = self.global_buffers
        sent = buffers if self.buffer_policy == "average" else buffers[:0]
        return sent.repeat(self.clusters, 1)

    def begin_round(self, round_index: int) -> None:
        if round_index == 0:
            for number, model in enumerate(self.models[1:], start=1):
                rng = generator(self.seed, "clusters", number)
                if self.perturbation is None:
                    model.copy_(redrawn(self.space, model, rng))
                else:
                    normal = torch.from_numpy(rng.normal(size=len(model)))
                    model += self.perturbation * normal.to(model)

    def download(self) -> dict[str, Tensor]:
        return {"models": self.models.flatten(), "statistics": self.statistics.flatten()}

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        choice, start = self._choose(clients)
        v = self.local_sgd(clients, start)
        member = one_hot(choice, self.clusters).to(v)
        member[clients.empty] = 0
        self.log_table("clusters", client=clients.ids, cluster=choice)
        own = v[:, :0]  # no statistics are sent with `buffers: local`
        if clients.buffers is not None and self.buffer_policy == "average":
            own = clients.buffers
        size = v.element_size()
        sent = {"member": Message(member, size)}
        for name, rows in (("w", v), ("statistics", own)):
            placed = (member[:, :, None] * rows[:, None]).flatten(1)  # the rest is 0, and not sent
            sent[name] = Message(placed, rows.shape[1] * size)
        return sent

    def server_update(self, mean: dict[str, Tensor]) -> None:
        share = mean["member"][:, None]  # of the cohort's weight, [k, 1]
        for old, total in ((self.models, mean["w"]), (self.statistics, mean["statistics"])):
            sums = total.view_as(old)
            old.copy_(torch.where(share > 0, sums / share, old))

    def personalized(self, clients: Clients) -> Tensor:
        return self._choose(clients)[1]

    def _choose(self, clients: Clients) -> tuple[Tensor, Tensor]:
        """Returns j_i, int64 [C], and θ_{j_i}, whose running statistics the clients get.

        It is the model with the least loss over the training samples, the first of equals.
        """
        models = self._by_cluster(clients.received["models"])
        statistics = self._by_cluster(clients.received["statistics"])
        losses = models.new_zeros(len(clients), len(models))
        for rows, batch in clients.training_samples():
            buffers = None if clients.buffers is None else clients.buffers[rows]
            for j, model in enumerate(models):
                if statistics.numel():
                    buffers = statistics[j].expand(len(rows), -1)
                each = model.expand(len(rows), -1)
                losses[rows, j] += self.oracle.evaluate(each, batch, buffers)[0].sum(1)
        choice = losses.argmin(1)
        if statistics.numel():
            clients.buffers = statistics[choice]
        return choice, models[choice]

    def _by_cluster(self, values: Tensor) -> Tensor:
        """Returns the rows of the k clusters."""
        return values.view(self.clusters, len(values) // self.clusters)
