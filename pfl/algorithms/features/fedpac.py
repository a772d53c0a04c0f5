"""FedPAC.

Xu, Tong, Huang, "Personalized Federated Learning with Feature Alignment and Classifier
Collaboration", ICLR 2023.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl.method import (
    BatchSamples,
    Clients,
    Count,
    Message,
    Network,
    NonNegative,
    Objective,
    PartlyPersonal,
    Positive,
    class_sums,
    distance_to_means,
    linear_head,
    masked,
    replace_values_in,
    require_classes,
    values_in,
)


class FedPAC(PartlyPersonal):
    """Shared body θ, aligned features, and a head for each client mixed from all (Algorithm 1).

    With the received θ a client computes its features z, and with them the sums over its samples
    H_i,c = 1/n_i sum_(x of class c) z(x) and V_i = 1/n_i (mean_x |z(x)|^2 - sum_c |H_i,c|^2);
    h_i <- h_i - η_h g_h(θ, h_i), τ_h epochs from the received head, with θ as received;
    θ_i <- θ_i - η g_θ(θ_i, h_i), local steps from θ on f_i + λ mean_(x, c) 1/K |z(x) - C_c|^2.
    θ <- sum_S n_i θ_i / sum_S n_i;  C_c <- sum_S n_i,c C_i,c / sum_S n_i,c, with the class means
    C_i,c of the features by θ_i; and each client of the next cohort S receives the head
    sum_j α_ij h_j, with α_i = argmin sum_j α_j^2 V_j + sum_c |H_i,c - sum_j α_j H_j,c|^2 over the
    α >= 0 that sum to 1, and j over the clients of S that have sent a head.

    Evaluated: (θ, h_i) with the newest body and the head that the client trained last. Shared: θ,
    the C_c, and the heads, which are sent. Cost: down the body, a head, and for each known C_c its
    K values and the number of the class; up the body, the head, V_i, K values of H_i for every
    class, and for each class of the client its number, n_i,c and K values of C_i; two forward
    passes over all n_i more. Client state: h_i. Server state: the C_c, and of each client the last
    h_i, H_i and V_i. A newcomer has the newest body and the initial head.

    Args:
        personal: The head, as for FedRep.
        penalty: λ.
        head_epochs: τ_h. The body's are `local_epochs`, or `local_steps` where that is given.
        head_lr: η_h, without decay.

    Note:
        z is what the network's head gets, which is a linear layer.
        Differences from the paper's print: there all clients take part, so that the heads of one
        round are mixed; here those that the cohort has sent last, in whatever round. A client
        without samples lends no head, and one that has sent none receives the initial one. A class
        of which nothing is known yet adds nothing to the alignment, and one that no client of the
        round has keeps its C_c.
        Differences from the authors' code: there α_ij below 0.001 become 0; eigenvalues of the
        program below 0.01 become 0 where rounding makes one negative; a class without C_c is
        aligned to the client's own mean; and clients are scored after their local steps, with a
        body of their own. Here H_i, V_i and C_i are taken in evaluation mode. A sample has one
        class; regression and several labels are refused.

    Example:
        >>> from pfl.models import MLP
        >>> method = FedPAC(MLP(64, (8,)), penalty=1.0, head_epochs=1, head_lr=0.1)
        >>> {name: message.nbytes // 4 for name, message in method.download().items()}
        {'w': 520, 'centroids': 0}
    """

    losses = ("train", "head")
    centroids: Tensor

    def __init__(
        self,
        network: Network,
        *,
        penalty: NonNegative = 1.0,
        head_epochs: Count = 1,
        head_lr: Positive = 0.1,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, **kwargs)
        self.penalty = penalty
        self.head_epochs = head_epochs
        self.head_lr = head_lr
        layer = linear_head(self)
        # For each class whether C_c is known, and its values.
        self.shape = layer.out_features, 1 + layer.in_features
        self.add_server_state("centroids", self.global_model.new_zeros(self.shape))
        self.keep_messages("head", self.first_head)
        self.keep_messages("statistics", self._no_statistics)  # V_i and H_i

    def _no_statistics(self) -> Tensor:
        return self.global_model.new_zeros(1 + self.shape[0] * (self.shape[1] - 1))

    def check_setup(self) -> None:
        require_classes(self)

    def cost(self, sizes: np.ndarray) -> np.ndarray:
        """Returns the sample gradients of a round, [C], as if the head's cost as much."""
        return sizes * (self.head_epochs + self.epochs_of(sizes))

    def begin_round(self, round_index: int) -> None:
        self._ids = self.cohort(round_index)
        self._heads = self.kept_rows("head", self._ids)
        lends = np.isin(self._ids, self.kept_ids("head")) & (self.client_sizes[self._ids] > 0)
        if lends.any():
            rows = torch.from_numpy(lends.nonzero()[0])
            statistics = self.kept_rows("statistics", self._ids[lends]).double().cpu().numpy()
            weights = torch.from_numpy(mixing_weights(statistics[:, 0], statistics[:, 1:]))
            self._heads[rows] = weights.to(self._heads) @ self._heads[rows]

    def download(self) -> dict[str, Message]:
        known = int(self.centroids[:, 0].sum())
        nbytes = known * self.centroids[0].nbytes  # the class's number, and K values
        centroids = Message(self.centroids.flatten(), nbytes)
        return {"w": masked(self.global_model, ~self.personal_part), "centroids": centroids}

    def download_for(self, ids: np.ndarray) -> dict[str, Tensor]:
        return {"head": self._heads[torch.from_numpy(np.searchsorted(self._ids, ids))]}

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Tensor | Message]:
        part = self.personal_part
        v = w.repeat(len(clients), 1)
        replace_values_in(part, v, clients.received["head"])
        sums, squares = self._class_sums(clients, v)
        sizes = sums[..., 0].sum(1).clamp_min(1)
        mean = (sums[..., 1:] / sizes[:, None, None]).flatten(1)  # H_i
        variance = (squares / sizes - mean.square().sum(1)) / sizes  # V_i
        received = clients.received["centroids"].view(self.shape)
        own = {"centroids": received.expand(len(clients), *self.shape)}
        v = self.local_sgd(
            clients, v, part=part, epochs=self.head_epochs, lr=self.head_lr, name="head"
        )
        v = self.local_sgd(clients, v, part=~part, objective=Objective(self._losses, own))
        sums, _ = self._class_sums(clients, v)
        sent = (sums[..., 0] > 0).sum(1)  # classes that the client has not are not sent
        nbytes = sent * (sums.shape[-1] + 1) * sums.element_size()
        return {
            "w": self.keep_and_send(clients, v),
            "head": values_in(part, v),
            "statistics": torch.cat([variance[:, None], mean], 1),
            "sums": Message(sums.flatten(1), nbytes, weighting="uniform"),
        }

    def server_update(self, mean: dict[str, Tensor]) -> None:
        super().server_update(mean)
        sums = mean["sums"].view(self.shape)
        new = sums / sums[:, :1]
        self.centroids.copy_(torch.where(sums[:, :1] > 0, new, self.centroids))

    def _losses(
        self, outputs: Tensor, features: Tensor, samples: BatchSamples, own: Mapping[str, Any]
    ) -> Tensor:
        """Returns f + λ/K |z - C_c|^2 of each sample, [n]."""
        away = distance_to_means(own["centroids"], features, samples.targets)
        return self.oracle.losses(outputs, samples.targets) + self.penalty * away

    def _class_sums(self, clients: Clients, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns n_i,c and the sum of features by class, [C, classes, 1 + K]; sum |z|^2, [C]."""
        return class_sums(self.oracle, clients, v, self.shape[0])


def mixing_weights(variances: np.ndarray, means: np.ndarray) -> np.ndarray:
    """Returns the weights α_ij of n clients' heads, float64 [n, n], whose rows sum to one.

    Args:
        variances: V_i, [n]. Rounding makes some of them negative, which count as 0.
        means: H_i, [n, classes * K].
    """
    variances = np.maximum(variances, 0.0)
    away = (means - row for row in means)
    return np.stack([simplex_minimum(np.diag(variances) + d @ d.T) for d in away])


def simplex_minimum(matrix: np.ndarray) -> np.ndarray:
    """Returns argmin x'Ax over the x >= 0 that sum to one, for a symmetric A >= 0 [n, n].

    Wolfe's method ("Finding the nearest point in a polytope", 1976): the minimum over the x that
    are 0 outside of a set; the set gains the index of the steepest descent, and loses those whose
    value would become negative. The objective falls each time, so that no set comes twice, and the
    points of a set are affinely independent, so that its minimum is one solution.

    Example:
        >>> simplex_minimum(np.diag([1.0, 3.0])).round(12).tolist()  # in proportion to 1 / A_ii
        [0.75, 0.25]
    """
    n = len(matrix)
    scale = max(float(matrix.diagonal().max()), np.finfo(float).tiny)
    a = matrix / scale
    x = np.zeros(n)
    x[a.diagonal().argmin()] = 1.0
    chosen = x > 0
    while True:
        slope = a @ x  # of half the objective; on the chosen indices it is the value x'Ax
        best = int(slope.argmin())
        if chosen[best] or slope[best] >= x @ slope - 1e-13:
            return x
        chosen[best] = True
        while True:
            y = np.zeros(n)
            # The minimum on the set, whose values may be negative: A y = m, sum y = 1.
            size = int(chosen.sum())
            system = np.ones((size + 1, size + 1))
            system[:size, :size] = a[np.ix_(chosen, chosen)]
            system[size, size] = 0.0
            y[chosen] = np.linalg.solve(system, np.eye(size + 1)[size])[:size]
            negative = chosen & (y <= 0)
            if not negative.any():
                x = y
                break
            steps = x[negative] / (x[negative] - y[negative])
            x = np.maximum(x + steps.min() * (y - x), 0.0)
            leaves = negative.nonzero()[0][steps.argmin()]
            x[leaves] = 0.0
            chosen[leaves] = False
