"""CFL.

Sattler, Müller, Samek, "Clustered Federated Learning: Model-Agnostic Distributed Multitask
Optimization Under Privacy Constraints", IEEE Transactions on Neural Networks and Learning Systems,
2021.
"""

from typing import Any, Literal

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
    dense,
    inner_products,
)


class CFL(FederatedAlgorithm):
    """FedAvg in clusters, which are split where it has converged and clients still disagree.

    Δ_i = w_i - θ_c, with w_i after local steps w_i <- w_i - η g_i(w_i) from the model θ_c of the
    client's cluster c. At first all clients are one cluster. If |mean_c Δ_i| < ε_1 and
    max_c |Δ_i| > ε_2, then the cluster c is split into c_1 and c_2, which minimize
    max {cos(Δ_i, Δ_j): i in c_1, j in c_2}, and each begins with a copy of θ_c;
    θ_c <- θ_c + mean_c Δ_i, for the clusters after the split.

    Evaluated: θ_c of the client's cluster; there is no global model. A newcomer gets the model of
    all clients from before the first split, the root of the paper's tree of models. Cost: P values
    down, P up; all clients take part in every round. No client state.
    Server state: the models and each client's cluster.

    Args:
        mean_norm: ε_1. 0.4 in the authors' code. The right values depend on the learning rate, on
            the number of local steps and on the network.
        largest_norm: ε_2. 1.6 in the authors' code.
        most_clusters: No cluster is split when there are so many. The server holds this many
            models, so that who expects more groups of clients raises it, and pays memory.
        weighting: The clients' weights in the means. "uniform": as in the authors' code.

    Attributes:
        models: θ_c, [most_clusters, P].
        cluster: The cluster of each client of `population`, [M].

    Note:
        The two clusters are exact: joining the most similar pairs until two groups are left (single
        linkage) minimizes the largest similarity across them. A cluster of which a client's message
        is missing is not split in this round. Clients without samples have no weight in the means.
        Running statistics of BatchNorm stay with the client.
        The print was not at hand. Written from what is known of it and from the authors' code
        (felisat/clustered-federated-learning, `fl_devices.py`), which has complete linkage, and so
        not always the two clusters of least similarity. Its notebook, as FL-bench's `cfl.py`, also
        waits 20 rounds, and leaves clusters of two alone. The paper's further condition for a
        split, a bound on the similarity by the noise of the clients' gradients, is left out, as in
        both; so is its rule that sends a newcomer down the tree by its first update. Whether the
        print's ε_1 means the mean weighted by samples, and whether the new clusters move in the
        round of the split, was not checked.

    Example:
        >>> from pfl.models import MLP
        >>> method = CFL(MLP(64, (8,)), most_clusters=4)
        >>> method.models.shape  # 4 models of 610 values
        torch.Size([4, 610])
    """

    needs_all_clients = True  # else no cluster would be complete
    has_global = False
    has_personalized = True
    tables = ("clusters",)
    personalization_penalty = None
    models: Tensor
    cluster: Tensor

    def __init__(
        self,
        network: Network,
        *,
        mean_norm: NonNegative = 0.4,
        largest_norm: NonNegative = 1.6,
        most_clusters: Count = 8,
        weighting: Literal["samples", "uniform"] = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            network, weighting=weighting, server_optimizer=None, buffers="local", **kwargs
        )
        self.mean_norm = mean_norm
        self.largest_norm = largest_norm
        self.most_clusters = most_clusters
        self.add_server_state("models", self.global_model.repeat(most_clusters, 1))
        self.add_server_state("cluster", self._one_cluster)

    def _one_cluster(self) -> Tensor:
        return torch.zeros(self.num_clients)

    def download(self) -> dict[str, Message]:
        return {}

    def download_for(self, ids: np.ndarray) -> Tensor:
        """Returns the models of the clients' clusters; the first one for newcomers."""
        by_id = np.zeros(len(self.client_sizes), np.int64)
        by_id[self.population] = self.cluster.cpu().numpy()
        self.log_table("clusters", client=ids, cluster=by_id[ids])
        return self.models[torch.from_numpy(by_id[ids])]

    evaluation_for = download_for

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        return {"update": dense(self.local_sgd(clients, w) - w, reduce="rows")}

    def server_update(self, received: dict[str, Tensor]) -> None:
        updates = received["update"]
        ids = self.participant_ids
        weights = torch.from_numpy(self.client_sizes[ids]).to(updates)
        if self.weighting == "uniform":
            weights = weights.sign()
        models = self.models
        clusters = int(self.cluster.max()) + 1
        places = np.searchsorted(self.population, ids)
        known = self.cluster.cpu().numpy()
        for number in range(clusters):
            rows = np.flatnonzero(known[places] == number)
            complete = len(rows) == (known == number).sum()
            second = np.zeros(len(rows), dtype=bool)
            if complete and clusters < self.most_clusters:
                second = self._split(updates[rows], weights[rows])
            if second.any():
                models[clusters] = models[number]
                self.cluster[places[rows[second]]] = clusters
                self._move(models[clusters], updates, weights, rows[second])
                clusters += 1
            self._move(models[number], updates, weights, rows[~second])
        if clusters == 1:
            self.global_model.copy_(models[0])
        self.log_metric("clusters", clusters)

    def personalized(self, clients: Clients) -> Tensor:
        return clients.received["w"]

    def newcomer(self, clients: Clients) -> Tensor:
        return self.global_model.repeat(len(clients), 1)

    def _split(self, updates: Tensor, weights: Tensor) -> np.ndarray:
        """Returns which clients of a cluster become a new one, bool [n]: none if it stays whole."""
        inner = inner_products(updates)
        norms = inner.diagonal().sqrt()
        mean = weights @ updates / weights.sum().clamp_min(1)
        if len(updates) < 2 or mean.norm() >= self.mean_norm or norms.max() <= self.largest_norm:
            return np.zeros(len(updates), dtype=bool)
        similarity = (inner / torch.outer(norms, norms)).nan_to_num(0.0)
        return second_half(similarity.cpu().numpy())

    def _move(self, model: Tensor, updates: Tensor, weights: Tensor, rows: np.ndarray) -> None:
        """Adds the mean of some rows of the changes to a model [P]."""
        total = weights[rows].sum()
        if total > 0:
            model += weights[rows] @ updates[rows] / total


def second_half(similarity: np.ndarray) -> np.ndarray:
    """Returns two groups with the least largest similarity across them: those without the first.

    Args:
        similarity: Of n >= 2 members, symmetric [n, n].

    Returns:
        Whether a member is in the group that the first member is not in, bool [n].
    """
    group = np.arange(len(similarity))
    groups = len(similarity)
    first, other = np.triu_indices(groups, 1)
    for pair in np.argsort(-similarity[first, other], kind="stable"):
        if groups == 2:
            break
        i = group[first[pair]]
        j = group[other[pair]]
        if i != j:
            group[group == j] = i
            groups -= 1
    return group != group[0]
