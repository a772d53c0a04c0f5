"""FedAsync.

Xie, Koyejo, Gupta, "Asynchronous Federated Optimization", OPT workshop at NeurIPS 2019.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from pfl.method import (
    Buffered,
    Clients,
    CountOrZero,
    Message,
    Network,
    NonNegative,
    PositiveShare,
)


class FedAsync(Buffered):
    """Every message moves the model at once, towards the client's model and less if that is old.

    Client: w_i minimizes f_i(v) + ρ/2 |v - w_τ|^2 from w_τ, the model that it received.
    Server, after each message: w <- (1 - α s(τ_i)) w + α s(τ_i) w_i.

    τ_i is the number of moves of the server since the client began, in the virtual time of
    `loop.clock`; `pfl.method.Buffered` says who trains when. s(τ) is 1 ("constant"), (1 + τ)^-a
    ("polynomial"), or 1 up to τ = b and 1 / (a (τ - b) + 1) from there ("hinge").
    Cost: P values down and up. Where all clients of a round begin with the current model, w moves
    by α towards the mean of their models.

    Args:
        mixing: α.
        staleness: The function s.
        exponent: a of "polynomial".
        slope, delay: a and b of "hinge".
        proximal_weight: ρ.

    Note:
        APPFL's code has the same s, and this step with α over the number of clients; FLSim's has
        the step too, without "hinge". Their defaults are s = 1, with α = 0.9 and 0.001. Those here
        are from memory of the paper, whose text was not at hand: α = 0.6, a = 0.5 of "polynomial",
        a = 10 and b = 4 of "hinge", ρ = 0.005.

    Example:
        >>> from pfl.models import MLP
        >>> method = FedAsync(MLP(64, (8,)), staleness="hinge", slope=1.0, delay=2)
        >>> method.trust(torch.tensor([0.0, 2.0, 3.0]))  # s(τ)
        tensor([1.0000, 1.0000, 0.5000])
    """

    def __init__(
        self,
        network: Network,
        *,
        mixing: PositiveShare = 0.6,
        staleness: Literal["constant", "polynomial", "hinge"] = "polynomial",
        exponent: NonNegative = 0.5,
        slope: NonNegative = 10.0,
        delay: CountOrZero = 4,
        proximal_weight: NonNegative = 0.005,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, buffer_size=1, **kwargs)
        self.mixing = mixing
        self.kind = staleness
        self.proximal_weight = proximal_weight
        self.exponent = exponent
        self.slope = slope
        self.delay = delay

    def trust(self, staleness: Tensor) -> Tensor:
        """Returns s(τ) of the staleness τ of some messages, [n]."""
        if self.kind == "constant":
            return torch.ones_like(staleness)
        if self.kind == "polynomial":
            return (1 + staleness) ** -self.exponent
        return 1 / (self.slope * (staleness - self.delay).clamp_min(0) + 1)

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        """Trains near the received model, and sends the result."""
        rho = self.proximal_weight
        return self.rows(self.local_sgd(clients, w, prox_weight=rho, prox_center=w))

    def server_update(self, received: dict[str, Tensor]) -> None:
        """Moves the model towards the clients'."""
        weights = self.mixing * self.shares() * self.trust(self.staleness())
        change = weights @ (received["w"] - self.global_model)
        super().server_update({"w": self.global_model + change})
