"""L2GD.

Hanzely, Richtárik, "Federated Learning of a Mixture of Global and Local Models", 2020,
arXiv 2002.05516.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl.method import (
    Clients,
    FederatedAlgorithm,
    Message,
    Network,
    NonNegative,
    ProperShare,
    generator,
    header,
    require,
)


class L2GD(FederatedAlgorithm):
    """Loopless local gradient descent: coins decide between local and averaging steps.

    min mean_i [f_i(x_i) + λ/2 |x_i - x̄|^2] over x_1, ..., x_n, where x̄ = mean_i x_i.

    In every iteration of Algorithm 1 all clients take the same kind of step, by one coin:
    with probability 1 - p:  x_i <- x_i - α / (n (1 - p)) g_i(x_i);
    with probability p:      x_i <- (1 - θ) x_i + θ x̄,  θ = α λ / (n p).

    Averaging steps do not change x̄, so that a run of them needs one communication. A round here is
    a run of local steps and the run of averaging steps after it: clients take K local steps and
    send x_i, receive x̄, and take A averaging steps: x_i <- (1 - θ)^A x_i + (1 - (1 - θ)^A) x̄. K and
    A are drawn for each round; they are at least 1, with the means 1 / p and 1 / (1 - p).

    `lr` is the local step η = α / (n (1 - p)), so that θ = η λ (1 - p) / p. The paper's f and
    penalty are both means over the n clients, so that λ does not depend on n, and is the λ of
    `FedCLUP`, which solves the same problem. With a constant η the x_i do not settle: they end in a
    neighbourhood of the solution, which shrinks with η (`lr_decay`). With λ = 0 this is
    `LocalTrain`, and with θ = 1 `FedAvg` with uniform weights, each with K local steps.
    Evaluated: x_i after the averaging steps, and the global model x̄. Shared: x_i. A newcomer
    receives x̄. All clients take part in every round.
    Cost: P values down, P up; K gradients. Client state: x_i after the local steps. Server state:
    one number beside x̄.

    Args:
        penalty: λ. 0: every client alone; large: all clients share x̄.
        averaging_probability: p. The paper's best choice is λ / (L + λ), where L is the smoothness
            of the f_i.

    Note:
        `batch_size: null` is Algorithm 1, with full gradients; with mini-batches of a client's own
        samples it is the paper's L2SGD without variance reduction. `local_epochs` and `local_steps`
        must keep their defaults. Averaging steps before the first local step are left out, since
        all x_i are still the same. The paper has no default values. The code of Ditto's authors has
        a method named L2SGD that is another one: it draws no coins, and takes local steps on
        f_i(x_i) + λ/2 |x_i - w|^2, as `FedCLUP` does.

    Example:
        >>> from pfl.models import MLP
        >>> method = L2GD(MLP(64, (8,)), lr=0.1, penalty=0.5, averaging_probability=0.2)
        >>> round(method.averaging_step(0), 6)  # θ = 0.1 * 0.5 * 0.8 / 0.2
        0.2
    """

    needs_all_clients = True  # a coin decides for all clients
    has_personalized = True
    keeps_model = True
    takes_client_rates = False  # the rate of the averaging steps is that of all clients
    pull: Tensor

    def __init__(
        self,
        network: Network,
        *,
        penalty: NonNegative = 0.1,
        averaging_probability: ProperShare = 0.2,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, weighting="uniform", server_optimizer=None, **kwargs)
        p = averaging_probability
        drawn = "the default, as L2GD draws the number of local steps"
        require("local_epochs", self.local_epochs, self.local_epochs == 1, f"1, {drawn}")
        require("local_steps", self.local_steps, self.local_steps is None, f"null, {drawn}")
        self.require_plain_steps()
        largest = p / (self.lr * (1 - p))
        reason = f"at most p / (lr (1 - p)) = {largest:g}, or averaging steps go beyond the mean"
        require("penalty", penalty, penalty <= largest * (1 + 1e-9), reason)
        self.penalty = penalty
        self.averaging_probability = p
        self.add_client_state("x", self.first_model)
        # 1 - (1 - θ)^A of the last round: how far its averaging steps take x_i towards the mean.
        self.add_server_state("pull", torch.tensor(0.0))

    @property
    def personalization_penalty(self) -> float:
        return self.penalty

    def cost(self, sizes: np.ndarray) -> np.ndarray:
        """Returns the mean over rounds of the sample gradients, [C], as K has the mean 1 / p."""
        of_step = sizes if self.batch_size is None else np.minimum(sizes, self.batch_size)
        return of_step / self.averaging_probability

    def runs(self, round_index: int) -> tuple[int, int]:
        """Returns the numbers K of local steps and A of averaging steps in a round (from 0).

        They are the lengths of two runs of coins, which are geometrically distributed.
        """
        draws = generator(self.seed, "coins", round_index)
        p = self.averaging_probability
        return int(draws.geometric(p)), int(draws.geometric(1 - p))

    def averaging_step(self, round_index: int) -> float:
        """Returns θ of a round (from 0)."""
        p = self.averaging_probability
        return self.learning_rate(round_index) * self.penalty * (1 - p) / p

    def local_sgd(self, clients: Clients, start: Tensor, **kwargs: Any) -> Tensor:
        """Takes K local steps where no number is given, as in a run's local baseline."""
        kwargs.setdefault("steps", self.runs(clients.round)[0])
        return super().local_sgd(clients, start, **kwargs)

    def download(self) -> dict[str, Tensor | Message]:
        return {"w": self.global_model, "pull": header(self.pull)}

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        clients.state["x"] = x = self.local_sgd(clients, self.personalized(clients))
        return x

    def server_update(self, mean: dict[str, Tensor]) -> None:
        steps, averaging_steps = self.runs(self.rounds)
        self.global_model.copy_(mean["w"])
        self.pull.fill_(1 - (1 - self.averaging_step(self.rounds)) ** averaging_steps)
        self.log_metric("local_steps", steps)
        self.log_metric("averaging_steps", averaging_steps)

    def personalized(self, clients: Clients) -> Tensor:
        x = clients.state["x"]
        pull = clients.received["pull"].to(clients.state["x"])
        if "buffers" in clients.received:  # what is true of the models is true of their statistics
            own = clients.state["buffers"]
            clients.buffers = own + pull * (clients.received["buffers"] - own)
        return x + pull * (clients.received["w"] - x)
