"""FedProto.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: Federated Prototype Learning across Heterogeneous
Clients", AAAI 2022.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pfl.method import (
    BatchSamples,
    Clients,
    FederatedAlgorithm,
    Message,
    Network,
    NonNegative,
    Objective,
    class_sums,
    distance_to_means,
    linear_head,
    require_classes,
    require_trained_features,
)


class FedProto(FederatedAlgorithm):
    """Personal models whose features are held to common class means, the prototypes (Algorithm 1).

    w_i <- w_i - η g_i(w_i), local steps from the client's own last w_i on
    f_i(w_i) + λ mean_(x, c) 1/K |z(x) - C_c|^2, with the K features z of the sample x of class c;
    C_i,c = mean of z(x) over the client's n_i,c samples of class c, with the new w_i;
    C_c <- sum_S n_i,c C_i,c / sum_S n_i,c.
    A class of which no prototype is known yet adds nothing; one that no client of the round has
    keeps its prototype.

    Evaluated: w_i. Shared: the prototypes. Personal: w_i, with the running statistics of BatchNorm.
    Cost: down K values and the class's number for each known prototype; up the same and the number
    of samples for each class of the client; one forward pass over all n_i more. Client state: w_i.
    Server state: the prototypes. A newcomer has the initial model.

    Args:
        penalty: λ. 0: every client alone.

    Note:
        The head is a linear layer, and z is what it gets.
        Differences from the paper's print: it measures |C_c - C_i,c|, the distance of prototypes.
        The authors' code, followed here, has the mean squared error of each sample's features,
        that is 1/K of the squared distance. The print divides C_c by the number of clients that
        have the class once more, which would shrink it; here it is the mean over samples.
        Differences from the authors' code: there C_c is the plain mean over clients; C_i,c are
        means over the steps of the last epoch, while the model moves; a class that nobody of
        the round has loses its prototype; and a test sample may also get the class of its nearest
        prototype. A sample has one class; regression and several labels are refused.

    Example:
        >>> from pfl.models import MLP
        >>> method = FedProto(MLP(64, (8,)), penalty=1.0)
        >>> method.download()["prototypes"].nbytes  # none are known
        0
    """

    has_global = False
    has_personalized = True
    prototypes: Tensor

    def __init__(self, network: Network, *, penalty: NonNegative = 1.0, **kwargs: Any) -> None:
        # Sums over a class are weighted by themselves.
        super().__init__(
            network, weighting="uniform", server_optimizer=None, buffers="local", **kwargs
        )
        self.penalty = penalty
        head = linear_head(self)
        self.add_client_state("w", self.first_model)
        # For each class whether the prototype is known, and its values.
        self.shape = head.out_features, 1 + head.in_features
        self.add_server_state("prototypes", self.global_model.new_zeros(self.shape))

    @property
    def personalization_penalty(self) -> float | None:
        """0 without a penalty, every client alone; None: λ ties features, and not the models."""
        return None if self.penalty else 0.0

    def check_setup(self) -> None:
        require_classes(self)
        require_trained_features(self, "LocalTrain")

    def download(self) -> dict[str, Message]:
        known = int(self.prototypes[:, 0].sum())
        nbytes = known * self.prototypes[0].nbytes  # the class's number, and K values
        return {"prototypes": Message(self.prototypes.flatten(), nbytes)}

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        received = clients.received["prototypes"].view(self.shape)
        own = {"prototypes": received.expand(len(clients), *self.shape)}
        v = self.local_sgd(clients, clients.state["w"], objective=Objective(self._losses, own))
        clients.state["w"] = v
        sums = self._class_sums(clients, v)
        sent = (sums[..., 0] > 0).sum(1)  # classes that the client has not are not sent
        nbytes = sent * (sums.shape[-1] + 1) * sums.element_size()
        return {"sums": Message(sums.flatten(1), nbytes)}

    def server_update(self, mean: dict[str, Tensor]) -> None:
        sums = mean["sums"].view(self.shape)
        new = sums / sums[:, :1]
        self.prototypes.copy_(torch.where(sums[:, :1] > 0, new, self.prototypes))

    def personalized(self, clients: Clients) -> Tensor:
        return clients.state["w"]

    def _losses(
        self, outputs: Tensor, features: Tensor, samples: BatchSamples, own: Mapping[str, Any]
    ) -> Tensor:
        """Returns f + λ/K |z - C_c|^2 of each sample, [n]."""
        away = distance_to_means(own["prototypes"], features, samples.targets)
        return self.oracle.losses(outputs, samples.targets) + self.penalty * away

    def _class_sums(self, clients: Clients, v: Tensor) -> Tensor:
        """Returns n_i,c and the sum of its features for each class, [C, classes, 1 + K]."""
        return class_sums(self.oracle, clients, v, self.shape[0])[0]
