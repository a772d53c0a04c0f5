"""FedAdagrad, FedAdam and FedYogi.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive Federated Optimization",
ICLR 2021, Algorithm 2.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from pfl.method import (
    BelowOne,
    Clients,
    FederatedAlgorithm,
    Network,
    Positive,
    require,
)


class AdaptiveServer(FederatedAlgorithm):
    """FedAvg's local training with an adaptive step of the server (Algorithm 2).

    Δ <- mean_S (x_i - x);  m <- β_1 m + (1 - β_1) Δ;  v by the subclass;
    x <- x + η m / (sqrt(v) + τ).

    m starts at 0, v at τ^2, and there is no bias correction.
    Evaluated and shared: the global model x, which is also a newcomer's model. Personal: nothing.
    Cost: P values down, P up. Client state: none. Server state: m and v.

    Args:
        server_lr: η; `lr` is the paper's η_l.
        betas: β_1 and β_2.
        tau: τ, the degree of adaptivity; smaller adapts more.

    Note:
        The mean over S is weighted by the clients' numbers of samples, as in the paper's
        experiments; Algorithm 2 prints the unweighted mean, which is `weighting: uniform`. The
        paper tunes η for each task, so that the default is no more than a beginning. Some public
        implementations start v at 0 or correct the bias, and so take other first steps.
    """

    m: Tensor
    v: Tensor

    def __init__(
        self,
        network: Network,
        *,
        server_lr: Positive = 0.01,
        betas: tuple[float, float] = (0.9, 0.99),
        tau: Positive = 1e-3,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, server_optimizer=None, **kwargs)
        usable = len(betas) == 2 and all(0 <= beta < 1 for beta in betas)
        require("betas", betas, usable, "two numbers of at least 0 and below 1")
        self.server_lr = server_lr
        self.betas = tuple(betas)
        self.tau = tau
        self.add_server_state("m", torch.zeros_like(self.global_model))
        self.add_server_state("v", torch.full_like(self.global_model, tau**2))

    @abstractmethod
    def second_moment(self, square: Tensor) -> Tensor:
        """Returns the new v from Δ^2, [P]."""

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        return self.local_sgd(clients, w)

    def server_update(self, mean: dict[str, Tensor]) -> None:
        delta = mean["w"] - self.global_model
        self.m.mul_(self.betas[0]).add_(delta, alpha=1 - self.betas[0])
        self.v.copy_(self.second_moment(delta.square()))
        self.global_model.add_(self.m / (self.v.sqrt() + self.tau), alpha=self.server_lr)


class FedAdagrad(AdaptiveServer):
    """Adagrad on the server: v <- v + Δ^2.

    With β_1 = 0, the default and the choice of the paper's experiments, this is `FedAvg` with
    `torch.optim.Adagrad(lr=η, initial_accumulator_value=τ^2, eps=τ)` as its `server_optimizer`.
    See `AdaptiveServer` for all lines, states and the cost.

    Args:
        server_lr: η; `lr` is the paper's η_l.
        beta: β_1.
        tau: τ, the degree of adaptivity.

    Example:
        >>> from pfl.models import MLP
        >>> method = FedAdagrad(MLP(64, (8,)), server_lr=0.1, tau=0.5)
        >>> float(method.v[0])  # τ^2
        0.25
    """

    def __init__(
        self,
        network: Network,
        *,
        server_lr: Positive = 0.01,
        beta: BelowOne = 0.0,
        tau: Positive = 1e-3,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, server_lr=server_lr, betas=(beta, 0.0), tau=tau, **kwargs)

    def second_moment(self, square: Tensor) -> Tensor:
        return self.v + square


class FedAdam(AdaptiveServer):
    """Adam on the server: v <- β_2 v + (1 - β_2) Δ^2.

    `FedAvg` with `torch.optim.Adam` as its `server_optimizer` is not the same: there v starts at 0,
    and the step is taken with m / (1 - β_1^t) and v / (1 - β_2^t). See `AdaptiveServer` for all
    lines, arguments, states and the cost.

    Example:
        >>> from pfl.models import MLP
        >>> method = FedAdam(MLP(64, (8,)), server_lr=0.01, betas=(0.9, 0.99), tau=1e-3)
        >>> method.download().nbytes // 4  # P
        610
    """

    def second_moment(self, square: Tensor) -> Tensor:
        return self.betas[1] * self.v + (1 - self.betas[1]) * square


class FedYogi(AdaptiveServer):
    """Yogi on the server: v <- v - (1 - β_2) Δ^2 sign(v - Δ^2).

    See `AdaptiveServer` for all lines, arguments, states and the cost.

    Example:
        >>> from pfl.models import MLP
        >>> method = FedYogi(MLP(64, (8,)), server_lr=0.01)
        >>> method.betas
        (0.9, 0.99)
    """

    def second_moment(self, square: Tensor) -> Tensor:
        return self.v - (1 - self.betas[1]) * square * torch.sign(self.v - square)
