"""FedBABU.

Oh, Kim, Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR
2022.
"""

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from pfl.method import (
    Clients,
    Count,
    FederatedAlgorithm,
    Message,
    Network,
    Part,
    masked,
    require_part,
    select_part,
)


class FedBABU(FederatedAlgorithm):
    """Federated training of the body alone, under a random head that never moves (Algorithm 1).

    φ_i <- φ_i - η g_φ(φ_i, h_0), local steps;  φ <- sum_S n_i φ_i / sum_S n_i;
    h_0 is the network's initial head, the same for all clients and rounds.
    For an evaluation every client fine-tunes (φ, h_0) on its own training samples.

    Evaluated: the global model (φ, h_0), and the fine-tuned models. Shared: φ; personal: what
    fine-tuning makes of (φ, h_0). Cost: the body down, the body up. No client state; no server
    state but the model. A newcomer is fine-tuned from (φ, h_0) like everyone.

    Args:
        head: The part that does not move; see `PartlyPersonal` for its values.
        finetune_epochs: Epochs of fine-tuning before each evaluation, with the local rate of the
            coming round, the same batch size and the same optimizer as in training.
        finetune_part: What fine-tuning moves: the "body", the "head" or all ("full"), which the
            paper compares.

    Note:
        The paper fine-tunes once, after the last round. Here every evaluation fine-tunes, and
        nothing of it is kept: with many clients, evaluate every few rounds
        (`trainer.check_val_every_n_epoch`).

    Example:
        >>> from pfl.models import MLP
        >>> method = FedBABU(MLP(64, (8,)), finetune_epochs=5)
        >>> method.download().nbytes // 4  # the body, 64 * 8 + 8
        520
    """

    has_personalized = True
    personalization_penalty = None
    head: Tensor

    def __init__(
        self,
        network: Network,
        *,
        head: Part = "head",
        finetune_epochs: Count = 5,
        finetune_part: Literal["body", "head", "full"] = "full",
        **kwargs: Any,
    ) -> None:
        super().__init__(network, server_optimizer=None, **kwargs)
        part = select_part(self.network, self.space, head, "model.head")
        require_part("head", head, part)
        self.finetune_epochs = finetune_epochs
        self.finetune_part = finetune_part
        self.add_constant("head", part)

    def download(self) -> Message:
        """Returns a message of φ; h_0 costs no bytes, since every client has it from the start."""
        return Message(self.global_model, masked(self.global_model, ~self.head).nbytes)

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        sent = masked(self.local_sgd(clients, w, part=~self.head), ~self.head)
        return replace(sent, reference=masked(w, ~self.head).values)

    def server_update(self, mean: dict[str, Tensor]) -> None:
        self.global_model.copy_(torch.where(self.head, self.global_model, mean["w"]))

    def adaptation_start(self, clients: Clients) -> Tensor:
        return clients.received["w"].expand(len(clients), -1)

    def personalized(self, clients: Clients) -> Tensor:
        parts = {"body": ~self.head, "head": self.head, "full": None}
        part = parts[self.finetune_part]
        epochs = self.finetune_epochs
        return self.adapt(clients, clients.received["w"], epochs=epochs, part=part)
