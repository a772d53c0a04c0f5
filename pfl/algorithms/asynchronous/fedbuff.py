"""FedBuff.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba, "Federated Learning with Buffered Asynchronous
Aggregation", AISTATS 2022.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pfl.method import Buffered, Clients, Count, Message, Network


class FedBuff(Buffered):
    """A buffer of K changes, of which old ones count less, for clients that are fast or slow.

    Client: Δ_i = y_i - w_i, with y_i trained from w_i, the model that it received when it began.
    Server, after K messages: w <- w + sum_i p_i (1 + τ_i)^(-1/2) Δ_i, with p_i = 1/K.

    τ_i is the number of moves of the server since the client began, in the virtual time of
    `loop.clock`; `pfl.method.Buffered` says who trains when. A `server_optimizer` takes the
    negative sum as the gradient: its rate is the paper's η_g, its momentum the paper's.
    Cost: P values down and up. With equal speeds and K clients at a time this is FedAvg with
    uniform weights.

    Args:
        buffer_size: K.

    Note:
        K = 10 and the exponent -1/2 are from memory of the paper, whose text was not at hand.
        FLSim's code has K = 1, weights of 1 and a server's rate of 0.001 by default; its buffer is
        a sum and no mean. Old changes are scaled and not weighted anew, as in FLSim's and APPFL's
        code, so that the weights sum to less than 1.

    Example:
        >>> from pfl.models import MLP
        >>> FedBuff(MLP(64, (8,)), buffer_size=5, lr=0.05).buffer_size
        5
    """

    def __init__(self, network: Network, *, buffer_size: Count = 10, **kwargs: Any) -> None:
        super().__init__(network, buffer_size=buffer_size, **kwargs)

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        """Trains, and sends the change."""
        return self.rows(self.local_sgd(clients, w) - w)

    def server_update(self, received: dict[str, Tensor]) -> None:
        """Adds the changes, the old ones with a smaller weight."""
        weights = self.shares() * (1 + self.staleness()) ** -0.5
        super().server_update({"w": self.global_model + weights @ received["w"]})
