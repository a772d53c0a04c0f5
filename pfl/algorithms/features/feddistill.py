"""FedDistill, which its authors call federated distillation (FD).

Jeong, Oh, Kim, Park, Bennis, Kim, "Communication-Efficient On-Device Machine Learning: Federated
Distillation and Augmentation under Non-IID Private Data", NeurIPS Workshop on Machine Learning on
the Phone and other Consumer Devices, 2018.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import log_softmax, one_hot

from pfl.method import (
    BatchSamples,
    Clients,
    FederatedAlgorithm,
    Message,
    Network,
    NonNegative,
    Objective,
    linear_head,
    require_classes,
)


class FedDistill(FederatedAlgorithm):
    """Personal models that learn from the others' mean class probabilities (Algorithm 1).

    w_i <- w_i - η g_i(w_i), local steps from the client's own last w_i on
    f_i(w_i) + γ mean_(x, l) φ(F(x), F̂_i,l), with the softmax F of the scores of the sample x of
    class l, and the cross entropy φ(F, F̂) = -sum_c F̂_c log F_c;
    F̄_i,l = mean of F(x) over the client's samples of class l, with the new w_i;
    F̂_i,l = mean of F̄_j,l over the other clients j that have the class l.
    A class of which no other client has sent anything adds nothing.

    Evaluated: w_i. Shared: the F̄_i,l, which are sent. Personal: w_i, with the running statistics of
    BatchNorm. Cost: down the probabilities of F̂_i,l and the class's number for each class that
    another client has sent; up the same for each class of the client; one forward pass over all n_i
    more. Client state: w_i. Server state: the last F̄_i,l of every client. A newcomer has the
    initial model.

    Args:
        penalty: γ. 0: every client alone.

    Note:
        Networks may differ in all but the number of scores (`pfl.models.Family`). The last layer is
        linear, and its outputs are the scores.
        Neither the print nor code of the authors was at hand when this was written. Differences
        from their Algorithm 1: there F̄_i,l is the mean over the local steps, while the model moves;
        and all clients take part in every round. Here clients that are not in the round teach by
        what they sent last. The augmentation of data (FAug) is left out.
        Differences from a public implementation, HtFLlib's FD: there the scores themselves are
        averaged and then taken for probabilities in the cross entropy, though they may be negative
        and do not sum to one; a client is among its own teachers; and only clients of the last
        round teach. A sample has one class; regression and several labels are refused.

    Example:
        >>> from pfl.models import MLP
        >>> method = FedDistill(MLP(64, (8,)), penalty=1.0)
        >>> method.shape  # of each class: whether it is known, and 10 probabilities
        (10, 11)
    """

    has_global = False
    has_personalized = True

    def __init__(self, network: Network, *, penalty: NonNegative = 1.0, **kwargs: Any) -> None:
        super().__init__(
            network, weighting="uniform", server_optimizer=None, buffers="local", **kwargs
        )
        self.penalty = penalty
        self.add_client_state("w", self.first_model)
        classes = linear_head(self).out_features
        # For each class whether the client has it, and its mean probabilities.
        self.shape = classes, 1 + classes
        self.keep_messages("means", self._nothing)

    def _nothing(self) -> Tensor:
        return self.global_model.new_zeros(self.shape).flatten()

    @property
    def personalization_penalty(self) -> float | None:
        """0 without a penalty, every client alone; None: γ ties outputs, and not the models."""
        return None if self.penalty else 0.0

    def check_setup(self) -> None:
        require_classes(self)

    def begin_round(self, round_index: int) -> None:
        """Computes what each client of the cohort is taught."""
        self._ids = self.cohort(round_index)
        total = self.kept_mean("means") * self.num_clients
        others = (total - self.kept_rows("means", self._ids)).unflatten(1, self.shape)
        count = others[..., :1].round()
        known = (count > 0).to(others)
        means = others[..., 1:] / count.clamp_min(1)
        self._teachers = known * torch.cat([known, means], 2)

    def download(self) -> dict[str, Message]:
        return {}

    def download_for(self, ids: np.ndarray) -> dict[str, Message]:
        """Returns F̂_i, and for each class whether it is known."""
        teachers = self._teachers[torch.from_numpy(np.searchsorted(self._ids, ids))]
        return {"teachers": self._of_classes(teachers)}

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        teachers = clients.received["teachers"].unflatten(1, self.shape)
        objective = Objective(self._losses, own={"teachers": teachers})
        v = self.local_sgd(clients, clients.state["w"], objective=objective)
        clients.state["w"] = v
        return {"means": self._of_classes(self._class_means(clients, v))}

    def server_update(self, mean: dict[str, Tensor]) -> None:
        """Does nothing: there is no global model."""

    def personalized(self, clients: Clients) -> Tensor:
        return clients.state["w"]

    def _losses(
        self, outputs: Tensor, features: Tensor, samples: BatchSamples, own: Mapping[str, Any]
    ) -> Tensor:
        """Returns f + γ φ(F, F̂) of each sample, [n]; F̂ is 0 where it is not known."""
        teachers = own["teachers"][samples.targets][:, 1:]
        distilled = -(teachers * log_softmax(outputs, 1)).sum(1)
        return self.oracle.losses(outputs, samples.targets) + self.penalty * distilled

    def _class_means(self, clients: Clients, v: Tensor) -> Tensor:
        """Returns for each class whether the client has it, and F̄_i, [C, classes, 1 + classes]."""
        classes = self.shape[0]
        counts = v.new_zeros(len(clients), classes, 1)
        sums = v.new_zeros(len(clients), classes, classes)
        for rows, batch in clients.samples():
            buffers = None if clients.buffers is None else clients.buffers[rows]
            outputs = self.oracle.evaluate(v[rows], batch, buffers)[2].to(v.dtype)
            real = (batch.sample_weights(v.dtype) > 0).to(v)[..., None]  # 0 for padding
            member = real * one_hot(batch.targets, classes)
            counts[rows] += member.sum(1)[..., None]
            sums[rows] += member.mT @ outputs.softmax(2)
        return torch.cat([(counts > 0).to(v), sums / counts.clamp_min(1)], 2)

    def _of_classes(self, values: Tensor) -> Message:
        """Returns a message of the probabilities of known classes, and the classes' numbers."""
        known = values[..., 0].sum(1).long()
        return Message(values.flatten(1), known * self.shape[1] * values.element_size())
