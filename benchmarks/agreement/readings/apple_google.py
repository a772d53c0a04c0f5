"""What FedJAX and pfl-research compute instead."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pfl.algorithms import APFL, SCAFFOLD
from pfl.method import Clients, LocalSchedule


class LayeredAPFL(APFL):
    """Each tensor of the network has an α_i of its own, which every step adapts.

    The mixture has the old w_i, v_i takes steps of the whole rate, the mean is weighted by samples,
    and a client's first v_i is the w that it receives.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weighting = "samples"
        self.add_client_state("shares", lambda: torch.full_like(self.global_model, self.alpha))
        self.add_client_state("known", lambda: self.global_model.new_zeros(1))

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        lr, shares = self.learning_rate(clients.round), clients.state["shares"].clone()
        shared = w.repeat(len(clients), 1)
        own = torch.where(clients.state["known"] > 0, clients.state["v"], w)
        for batch in clients.batches(self.local_schedule):
            rows = slice(0, batch.clients)
            mixed = shares * own + (1 - shares) * shared
            _, g_w = self.oracle.gradient(shared, batch, clients.buffers)
            _, g = self.oracle.gradient(mixed, batch, clients.buffers)
            slopes = (own - shared) * g
            for layer in self.space.layers:
                slopes[:, layer.span] = slopes[:, layer.span].sum(1, keepdim=True)
            shared[rows] -= lr * g_w[rows]
            own[rows] -= lr * g[rows]
            shares[rows] = (shares - lr * slopes).clamp(0.0, 1.0)[rows]
        clients.state["v"], clients.state["shares"] = own, shares
        clients.state["known"] = torch.ones_like(clients.state["known"])
        return shared


class OtherSignSCAFFOLD(SCAFFOLD):
    """c_i+ has the sign of the change y_i - x, not that of the gradients: (I) is -g_i(x).

    Option I keeps all c_i in the same memory. Who has taken part before therefore has its new c_i
    already in the local steps, and c does not learn of the change.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_client_state("known", lambda: self.global_model.new_zeros(1))

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Tensor]:
        c_i, c, lr = clients.state["c_i"], clients.received["c"], self.learning_rate(clients.round)
        if self.option == "I":
            batch = next(clients.batches(LocalSchedule(batch_size=None)))
            new = -self.oracle.gradient(w.repeat(len(clients), 1), batch, clients.buffers)[1]
            c_i = torch.where(clients.state["known"] > 0, new, 0.0)
            y = self.local_sgd(clients, w, linear=c - c_i)
        else:
            y = self.local_sgd(clients, w, linear=c - c_i)
            steps = torch.from_numpy(clients.steps_of(self.local_schedule)).to(w)[:, None]
            new = c_i - c + (y - w) / (steps * lr)
        clients.state["c_i"], clients.state["known"] = new, torch.ones(len(clients), 1).to(w)
        return {"y": y - w, "c": new - c_i}
