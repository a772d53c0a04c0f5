"""FedSA-LoRA.

Guo, Zeng, Wang, Fan, Wang, Qu, "Selective Aggregation for Low-Rank Adaptation in Federated
Learning", ICLR 2025.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pfl.method import Clients, Message, Network, Part, PartlyPersonal, Trainable


class FedSALoRA(PartlyPersonal):
    """LoRA's A is shared, and B_i and the head stay with the client.

    (A_i, B_i, h_i) <- local steps from the received A and the client's own last B_i and h_i;
    A <- sum_S p_i A_i. This is FedPer with B and the head as personal parameters.
    Cost: A down, A up. Client state: B_i and h_i.

    Args:
        trainable: `LoRA`.
        personal: What stays with the client; without "head" the head is shared.

    Note:
        As the authors' configuration for GLUE, `local_param: [lora_B, classifier]`. All B_i begin
        at 0, and all heads at the network's.

    Example:
        >>> from pfl.models import MLP, LoRA
        >>> method = FedSALoRA(MLP(64, (8,)), trainable=LoRA(rank=2))
        >>> method.download().nbytes // 4  # A, 2 * 64
        128
    """

    def __init__(
        self,
        network: Network,
        *,
        trainable: Trainable | str | None = "lora",
        personal: Part = ("*lora_B", "head"),
        **kwargs: Any,
    ) -> None:
        super().__init__(network, trainable=trainable, personal=personal, **kwargs)

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        return self.keep_and_send(clients, self.local_sgd(clients, self.personalized(clients)))
