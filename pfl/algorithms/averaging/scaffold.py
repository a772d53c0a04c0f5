"""SCAFFOLD.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning", ICML 2020.
"""

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pfl.method import Clients, FederatedAlgorithm, LocalSchedule, Network, Positive


class SCAFFOLD(FederatedAlgorithm):
    """Local SGD with control variates, which take the clients' drift out of it (Algorithm 1).

    y_i <- x;  y_i <- y_i - η_l (g_i(y_i) - c_i + c), K local steps;       (lines 7 to 11)
    c_i+ <- (I) g_i(x), or (II) c_i - c + (x - y_i) / (K η_l);             (line 12)
    x <- x + η_g mean_S (y_i - x);  c <- c + 1/N sum_S (c_i+ - c_i).       (lines 16 and 17)

    N is the number of all clients, S the cohort, whose mean is unweighted; all control variates
    start at 0, so that c is always the mean of all N c_i. The first round is that of FedAvg; so is
    every round with one local step, full gradients and all clients. With full gradients a fixed
    point on quadratics is the minimum of mean f_i for any K, which FedAvg's is not.
    Cost: 2P values down (x and c), 2P up (y_i - x and c_i+ - c_i). Client state: c_i.

    Args:
        server_lr: η_g.
        option: Line 12. "I": the gradient at the received model over all of the client's samples,
            for one more pass over them. "II": the mean of the local steps' gradients, for nothing.

    Note:
        K and η_l are the client's own number of local steps and the round's decayed rate.
        `weight_decay` is a part of g_i, in line 12 as well. The pass of option I takes the
        gradient in mini-batches of `batch_size`, which stragglers finish as well, and changes no
        running statistics. A client without samples keeps its c_i; it counts in the mean over S,
        with y_i = x. In the first round c = 0 is counted as sent, too.

    Example:
        >>> from pfl.models import MLP
        >>> method = SCAFFOLD(MLP(64, (8,)), lr=0.05, local_epochs=2)
        >>> {name: message.nbytes for name, message in method.download().items()}
        {'w': 2440, 'c': 2440}
    """

    losses = ("train", "control")
    c: Tensor

    def __init__(
        self,
        network: Network,
        *,
        server_lr: Positive = 1.0,
        option: Literal["I", "II"] = "II",
        **kwargs: Any,
    ) -> None:
        super().__init__(network, weighting="uniform", server_optimizer=None, **kwargs)
        self.require_plain_steps()
        self.server_lr = server_lr
        self.option = option
        self.add_client_state("c_i")
        self.add_server_state("c", torch.zeros_like(self.global_model))

    def cost(self, sizes: np.ndarray) -> np.ndarray:
        return super().cost(sizes) + (sizes if self.option == "I" else 0)

    def download(self) -> dict[str, Tensor]:
        return {"w": self.global_model, "c": self.c}

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Tensor]:
        c_i = clients.state["c_i"]
        c = clients.received["c"]
        lr = self.rate_of(clients)
        steps = torch.from_numpy(clients.steps_of(self.local_schedule)).to(w)[:, None]  # K
        received = None if clients.buffers is None else clients.buffers.clone()
        y = self.local_sgd(clients, w, linear=c - c_i)
        if self.option == "I":
            new = self._full_gradient(clients, w, received)
        else:
            new = c_i - c + (w - y) / (steps * lr)
        new = torch.where(steps > 0, new, c_i)  # nothing is known of f_i without samples
        # With states in 16 bits c must follow what is kept, or it drifts away from the mean of c_i.
        clients.state["c_i"] = new = self.as_stored("c_i", new)
        return {"y": y - w, "c": new - c_i}

    def server_update(self, mean: dict[str, Tensor]) -> None:
        self.global_model.add_(mean["y"], alpha=self.server_lr)
        self.c += mean["c"] * (self.participants / self.num_clients)

    def _full_gradient(self, clients: Clients, x: Tensor, buffers: Tensor | None) -> Tensor:
        """Returns g_i(x) over all of each client's samples, [C, P]; 0 without samples."""
        models = x.repeat(len(clients), 1)
        total = self.weight_decay * models
        sizes = torch.from_numpy(clients.sizes).to(x)[:, None]
        schedule = LocalSchedule(self.batch_size, purpose="control", complete=True)
        for batch in clients.batches(schedule):
            loss, g = self.oracle.gradient(models, batch, buffers)
            rows = slice(0, batch.clients)
            total[rows] += g[rows] * (batch.sizes[:, None] / sizes[rows])
            self.log_loss("control", loss, batch.counts)
        return total
