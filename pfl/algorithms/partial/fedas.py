"""FedAS.

Yang, Huang, Ye, "FedAS: Bridging Inconsistency in Personalized Federated Learning", CVPR 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl.method import (
    BatchSamples,
    Clients,
    Count,
    LocalSchedule,
    Message,
    Network,
    Objective,
    Part,
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


class FedAS(PartlyPersonal):
    """Shared body, personal head; the body is aligned first, and weighted by information.

    Let z(x; u) be the K features of the body u, and n_i,c the number of the client's samples of
    class c. With the client's own last model (u_i, h_i), which is the initial one at first:
    C_i,c = mean of z(x; u_i) over the client's samples x of class c;
    u_i <- u, the received body, then u_i <- u_i - η_a g_a(u_i) on
    sum_c 1/n_i,c sum_{x of c} 1/K |z(x; u_i) - C_i,c|²;
    (u_i, h_i) <- (u_i, h_i) - η g_i(u_i, h_i), local steps;
    t_i = sum over the client's mini-batches of |g_i(u_i, h_i)|², an estimate of the trace of the
    Fisher information;
    u <- u + sum_S t_i (u_i - u) / sum_S t_i, the mean of the u_i with the weights t_i.

    Evaluated: (u_i, h_i) after the client's last round. Shared: u; personal: h_i and the last u_i.
    Cost: the body down, the body and t_i up; `alignment_epochs` epochs of gradients of the body,
    one more pass of gradients, and a forward pass over all n_i. Client state: (u_i, h_i). A
    newcomer has the newest body with the initial head.

    Args:
        personal: The parameters that are personal, as in `PartlyPersonal`.
        alignment_lr: η_a, without decay. 0.01 in the authors' code.
        alignment_epochs: Epochs of the alignment, which has the user's optimizer and weight decay.

    Note:
        The head is a linear layer, and z is what it gets. Running statistics stay with the client.
        The print was not at hand: the method is written from the authors' public code. There the
        classes of a mini-batch weigh the same; here the classes of all the client's samples do, so
        that both agree where a mini-batch has all samples. There alignment has mini-batches of 16,
        plain steps and no weight decay, and t_i is taken in evaluation mode. A sample has
        one class; regression and several labels are refused.

    Example:
        >>> from pfl.models import MLP
        >>> method = FedAS(MLP(64, (8,)))
        >>> method.download().nbytes // 4  # the body: 64 * 8 + 8
        520
    """

    losses = ("train", "alignment", "trace")

    def __init__(
        self,
        network: Network,
        *,
        personal: Part = "head",
        alignment_lr: Positive = 0.01,
        alignment_epochs: Count = 1,
        **kwargs: Any,
    ) -> None:
        # Models are weighted by t_i.
        super().__init__(network, personal=personal, weighting="uniform", buffers="local", **kwargs)
        self.alignment_lr = alignment_lr
        self.alignment_epochs = alignment_epochs
        self.classes = linear_head(self).out_features
        self.add_client_state("body", self._first_body)

    def _first_body(self) -> Tensor:
        return self.global_model[~self.personal_part]

    def check_setup(self) -> None:
        require_classes(self)

    def cost(self, sizes: np.ndarray) -> np.ndarray:
        """Returns the sample gradients of a round, [C], with alignment and t_i."""
        return super().cost(sizes) + (self.alignment_epochs + 1) * sizes

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        """Aligns u, trains (u_i, h_i), keeps it, and sends t_i (u_i - u) with t_i."""
        start = super().personalized(clients)
        v = self.local_sgd(clients, self._aligned(clients, start, self.personalized(clients)))
        clients.state["body"] = values_in(~self.personal_part, v)
        clients.state["head"] = values_in(self.personal_part, v)
        trace = self._trace(clients, v)
        moved = masked(trace * (v - w), ~self.personal_part)
        return {"moved": moved, "trace": Message(trace, trace.element_size())}

    def server_update(self, mean: dict[str, Tensor]) -> None:
        """Moves u to the weighted mean; it stays where no client has a gradient."""
        if mean["trace"] > 0:
            self.global_model.add_(mean["moved"] / mean["trace"])

    def personalized(self, clients: Clients) -> Tensor:
        """Returns (u_i, h_i)."""
        v = super().personalized(clients)
        replace_values_in(~self.personal_part, v, clients.state["body"])
        return v

    def newcomer(self, clients: Clients) -> Tensor:
        """Returns the newest body with the initial head."""
        return self.global_model.repeat(len(clients), 1)

    def _aligned(self, clients: Clients, v: Tensor, own: Tensor) -> Tensor:
        """Returns models v [C, P] whose bodies are moved to the features of the clients' own."""
        sums, _ = class_sums(self.oracle, clients, own, self.classes)
        counts = sums[..., :1]
        means = torch.cat([counts.sign(), sums[..., 1:] / counts.clamp_min(1)], 2)
        weights = counts.sum(1, keepdim=True) / counts.clamp_min(1)
        objective = Objective(self._distance, own={"means": means, "weights": weights[..., 0]})
        return self.local_sgd(
            clients,
            v,
            epochs=self.alignment_epochs,
            lr=self.alignment_lr,
            part=~self.personal_part,
            objective=objective,
            name="alignment",
        )

    def _distance(
        self, outputs: Tensor, features: Tensor, samples: BatchSamples, own: Mapping[str, Any]
    ) -> Tensor:
        """Returns n_i / n_i,c 1/K |z - C_i,c|² of each sample, [n]."""
        classes = samples.targets
        return own["weights"][classes] * distance_to_means(own["means"], features, classes)

    def _trace(self, clients: Clients, v: Tensor) -> Tensor:
        """Returns t_i, [C, 1]."""
        trace = v.new_zeros(len(clients), 1)
        for batch in clients.batches(
            LocalSchedule(self.batch_size, purpose="trace", complete=True)
        ):
            buffers = None if clients.buffers is None else clients.buffers.clone()
            loss, g = self.oracle.gradient(v, batch, buffers)
            trace += g.square().sum(1, keepdim=True)
            self.log_loss("trace", loss, batch.counts)
        return trace
