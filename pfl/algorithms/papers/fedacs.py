"""FedACS.

Chen, Li, Shen, "Personalized Federated Learning with Attention-based Client Selection",
arXiv 2312.15148, 2023.
"""

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pfl.method import (
    Clients,
    Message,
    ModelMixtures,
    Network,
    Share,
    inner_products,
)


class FedACS(ModelMixtures):
    """Every client starts from a weighted mean of the models that are similar to its own.

    The participants send their last models w_i; s_ij = cos(w_i, w_j) on all trainable parameters;
    a_ij = max(s_ij, 0) where s_ij > δ or j = i, else 0, with δ the p-quantile of all s_ij;
    u_i = sum_j a_ij w_j / sum_j a_ij goes down, and local SGD from u_i gives the new w_i.

    The personalized model is w_i; there is no global model. Cost: up P, down P. Client state: w_i.
    A newcomer trains a first local model from the initial one, and gets the u_i of that model
    and the models of its candidates, those of the last round's cohort or of "all".
    The mean number of partners is logged as `collaborators`, and the weights a_ij / sum_j a_ij go
    to `collaboration.csv` (`CollaborationMap` draws them).

    Args:
        quantile: p. A higher level is less collaboration; from 1 - 1/n on, with n models, there is
            none. null: no threshold (δ = -∞), the paper's link to FedAMP: all models of positive
            similarity are partners. The paper gives no value.
        candidates: The clients among which a client finds partners: the "participants" of this
            round, or "all" clients that have ever sent a model.

    Note:
        Differences from the paper's print: a client is always its own partner (with the strict
        comparison as printed it is not where δ = 1, and 0/0 follows, as at the common start);
        negative similarities count 0; δ = -∞ would be FedAMP, not ∞; the quantile interpolates
        linearly over all n^2 entries, the diagonal included. A model of norm 0 has similarity 0
        with every model. A client that fails after its training (`loop.dropout`) has sent its model
        in that round, and the server keeps it.

    Example:
        >>> from pfl.models import MLP
        >>> method = FedACS(MLP(64, (8,)), quantile=0.7, candidates="all")
        >>> method.client_state_names
        ['w']
    """

    def __init__(
        self,
        network: Network,
        *,
        quantile: Share | None = 0.5,
        candidates: Literal["participants", "all"] = "participants",
        **kwargs: Any,
    ) -> None:
        super().__init__(network, **kwargs)
        self.quantile = quantile
        self.candidates = candidates

    def first_upload(self, clients: Clients) -> Tensor:
        return clients.state["w"]

    def mixing_weights(self, models: Tensor, round_index: int) -> Tensor:
        return attention(cosine(models), self.quantile)

    def begin_round(self, round_index: int) -> None:
        """Computes the weights of the cohort's partners from all models that the server has."""
        ids = cohort = self.cohort(round_index)
        if self.candidates == "all":
            ids = np.union1d(cohort, self.kept_ids("w"))
        weights = self.mix(ids, round_index)
        if len(cohort):
            places = torch.from_numpy(np.searchsorted(ids, cohort))
            partners = weights[places].count_nonzero(1) - 1
            self.log_metric("collaborators", float(partners.double().mean()))

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        clients.state["w"] = self.local_sgd(clients, w)
        return {}

    def begin_evaluation(self) -> None:
        """Collects the models among which clients that never trained find partners."""
        if len(self.unseen_clients):
            seen = self.kept_ids("w")
            if self.candidates != "all" and self.rounds:
                seen = np.intersect1d(seen, self.cohort(self.rounds - 1))
            self._known = self.ask_clients(seen)


def cosine(w: Tensor) -> Tensor:
    """Returns the cosine similarity of all rows of w [n, P] with each other, float64 [n, n].

    Rows of norm 0 have similarity 0. The values are rounded to 12 decimals, so that equal
    similarities are equal numbers.
    """
    gram = inner_products(w)
    norms = gram.diagonal().sqrt()
    similarity = gram / torch.outer(norms, norms)
    return similarity.nan_to_num(0.0).round(decimals=12)


def attention(similarity: Tensor, quantile: float | None) -> Tensor:
    """Returns the weights of partners, [n, n], whose rows sum to one, from similarities [n, n].

    A quantile of None sets no threshold.
    """
    if not len(similarity):
        return similarity
    # NumPy's quantile has no limit on the number of entries.
    delta = -np.inf if quantile is None else np.quantile(similarity.cpu().numpy(), quantile)
    a = torch.where(similarity > delta, similarity, 0).clamp_min(0)
    a.fill_diagonal_(1)
    return a / a.sum(1, keepdim=True)
