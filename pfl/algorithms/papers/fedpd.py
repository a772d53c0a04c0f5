"""FedPD.

Zhang, Hong, Dhople, Yin, Liu, "FedPD: A Federated Learning Framework with Adaptivity to Non-IID
Data", IEEE Transactions on Signal Processing, 2021.
"""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl.method import (
    Batch,
    BelowOne,
    Clients,
    ConfigError,
    Count,
    FederatedAlgorithm,
    LocalSchedule,
    Message,
    Network,
    Positive,
    generator,
    header,
    require,
)


class FedPD(FederatedAlgorithm):
    """Primal-dual: each client solves its local augmented Lagrangian, and may skip communication.

    L_i(x, x_0, λ) = f_i(x) + <λ, x - x_0> + |x - x_0|^2 / (2η)       (Algorithm 2)
    x_i <- Oracle(L_i(., x_{0,i}, λ_i)), started at the last x_i;
    λ_i <- λ_i + (x_i - x_{0,i}) / η;  x_{0,i} <- x_i + η λ_i;
    in a round that communicates, all clients send x_{0,i} and continue from x_0 = mean x_{0,i};
    in a round that does not, each client continues from its own x_{0,i}.

    Oracle I: x <- x - η_1 (g_i(x) + λ_i + (x - x_{0,i}) / η), η_1 = `lr`; this is FedPD-GD with
    `batch_size: null`, else FedPD-SGD. Oracle II (`variance_reduction`), FedPD-VR: g_i is the full
    gradient, taken anew every I-th round, and corrected on the way by mini-batches:
    x+ = argmin <g_i + λ_i, x> + |x - x_{0,i}|^2 / (2η) + |x - x_i|^2 / (2γ),
    g_i <- g_i + h(x+) - h(x_i) with h the gradients of the same mini-batch.

    The evaluated model is x_0, between communications the mean of the x_{0,i}. The paper has no
    personal models. Every client takes part in every round; the clients' mean is unweighted.
    Cost of a round that communicates: up P, down P; of a skipped one: nothing. The common initial
    model is not counted. Client state: x_i, λ_i, with skipping x_{0,i}, with Oracle II g_i.

    Args:
        proximal_step: η. Theory: 0 < η < (5^1/2 - 1) / (4L).
        skip_probability: p, the probability of skipping a round's communication, by one coin for
            all clients.
        communication_period: k; clients communicate in every k-th round only.
        residual_tolerance: ε_1; a client's local steps end where |grad_x L_i|^2 is at most ε_1,
            and after `local_steps` at the latest. With full gradients only; null: no tolerance.
        variance_reduction: True: Oracle II, which client states in 16 bits would let drift and
            which refuses them. False: Oracle I.
        refresh_period: I, the number of rounds between full gradients of Oracle II.
        inner_step: γ of Oracle II; null: infinite, that is x+ = x_{0,i} - η (g_i + λ_i).

    Note:
        As in the paper x_{0,i} takes the new λ_i; the authors' Matlab code takes the old λ_i, which
        is less stable. λ_i starts at 0 and x_i at x_0; the paper does not say where they start.

    Example:
        >>> from pfl.models import MLP
        >>> method = FedPD(MLP(64, (8,)), proximal_step=0.5, communication_period=2)
        >>> [method.communicates(round_index) for round_index in range(4)]
        [False, True, False, True]
    """

    needs_all_clients = True
    keeps_model = True
    common: Tensor
    refreshed: Tensor

    def __init__(
        self,
        network: Network,
        *,
        proximal_step: Positive = 1.0,
        skip_probability: BelowOne = 0.0,
        communication_period: Count = 1,
        residual_tolerance: Positive | None = None,
        variance_reduction: bool = False,
        refresh_period: Count = 20,
        inner_step: Positive | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, weighting="uniform", server_optimizer=None, **kwargs)
        p = skip_probability
        k = communication_period
        tolerance = residual_tolerance
        both = p > 0 and k > 1
        require("communication_period", k, not both, "1 where skip_probability is not 0")
        exact = self.batch_size is None and not variance_reduction
        usable = tolerance is None or exact
        require(
            "residual_tolerance", tolerance, usable, "positive, with full gradients and Oracle I"
        )
        self.require_plain_steps()
        self.proximal_step = proximal_step
        self.inner_step = inner_step
        self.skip_probability = p
        self.communication_period = k
        self.residual_tolerance = tolerance
        self.variance_reduction = variance_reduction
        self.refresh_period = refresh_period
        self.skips = p > 0 or k > 1
        self.add_client_state("x", self.first_model)
        self.add_client_state("lam")
        if self.skips:
            self.add_client_state("x0", self.first_model)
            # True if all clients continue from the same x_0: the last round communicated.
            self.add_server_state("common", torch.tensor(True))
        if variance_reduction:
            self.add_client_state("g")
            self.add_server_state("refreshed", torch.tensor(0))  # rounds since then; 0: refresh now

    def cost(self, sizes: np.ndarray) -> np.ndarray:
        """Returns the sample gradients of a round, [C]; of Oracle II the mean over rounds."""
        if not self.variance_reduction:
            return super().cost(sizes)
        return 2 * super().cost(sizes) + sizes / self.refresh_period

    def check_setup(self) -> None:
        """Refuses rounded g_i, and statistics that travel in skipped rounds."""
        if self.variance_reduction:  # g_i is the gradient at x_i only while neither is rounded
            self.require_exact_states("variance_reduction: true")
        if self.skips and self.oracle.buffers.size and self.buffer_policy == "average":
            raise ConfigError(
                f"model.buffers: average; where FedPD skips communication, the statistics of "
                f"{type(self.network).__name__} cannot be averaged either, use local"
            )

    def communicates(self, round_index: int) -> bool:
        """Returns True if a round (from 0) ends with communication, by a coin for all clients."""
        if self.skip_probability > 0:
            coin = generator(self.seed, "communication", round_index).random()
            return bool(coin >= self.skip_probability)
        return (round_index + 1) % self.communication_period == 0

    def download(self) -> dict[str, Message]:
        """Returns x_0, whose bytes count in a round that ends with communication."""
        messages = {"w": Message(self.global_model, self._nbytes(self.rounds))}
        if self.skips:
            messages["common"] = header(self.common)
        if self.variance_reduction:
            messages["refreshed"] = header(self.refreshed)
        return messages

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        common = not self.skips or bool(clients.received["common"])
        x0 = w.expand(len(clients), -1) if common else clients.state["x0"]
        lam = clients.state["lam"]
        oracle = self._oracle_two if self.variance_reduction else self._oracle_one
        x = oracle(clients, clients.state["x"].clone(), x0, lam)
        # Without samples f_i is 0, and this is the minimum of L_i.
        x[clients.empty] = (x0 - self.proximal_step * lam)[clients.empty]
        lam = lam + (x - x0) / self.proximal_step
        clients.state["x"] = x
        clients.state["lam"] = lam
        x0 = x + self.proximal_step * lam
        if self.skips:
            clients.state["x0"] = x0
        return Message(x0, self._nbytes(clients.round))

    def server_update(self, mean: dict[str, Tensor]) -> None:
        self.global_model.copy_(mean["w"])
        if self.skips:
            self.common.fill_(self.communicates(self.rounds))
        if self.variance_reduction:
            self.refreshed.copy_((self.refreshed + 1) % self.refresh_period)

    def _nbytes(self, round_index: int) -> int:
        sent = self.communicates(round_index)
        return self.space.size * self.space.vector.element_size() if sent else 0

    def _oracle_one(self, clients: Clients, x: Tensor, x0: Tensor, lam: Tensor) -> Tensor:
        """Takes (stochastic) gradient steps on L_i = f_i(x) + <λ, x> + |x - x_0|^2 / (2 η)."""
        tolerance = self.residual_tolerance
        pull = 1 / self.proximal_step
        if tolerance is None:
            return self.local_sgd(clients, x, linear=lam, prox_weight=pull, prox_center=x0)
        lr = self.rate_of(clients)
        moving = np.ones(len(clients), bool)
        for batch in clients.batches(self.local_schedule):
            # A client that has stopped would not evaluate this gradient, so it is not counted.
            counted = (np.array(batch.counts) * moving[: batch.clients]).tolist()
            rows = slice(0, batch.clients)
            stopped = torch.from_numpy(~moving)
            before = _copy_of(clients.buffers)
            g = self._gradient(clients, x, batch, counted)
            if clients.buffers is not None and before is not None:
                clients.buffers[stopped] = before[stopped]  # they stop with their client
            residual = (g + lam + pull * (x - x0))[rows]
            moving[rows] &= (residual.square().sum(1) > tolerance).cpu().numpy()
            if not moving[rows].any():
                break
            x[rows] -= lr * residual * torch.from_numpy(moving[rows]).to(x)[:, None]
        return x

    def _oracle_two(self, clients: Clients, x: Tensor, x0: Tensor, lam: Tensor) -> Tensor:
        """Takes steps along a full gradient that mini-batches keep up to date."""
        g = clients.state["g"].clone()
        # Statistics move once a local step, with x+. The other gradients move a copy.
        scratch = replace(clients, buffers=_copy_of(clients.buffers))
        if clients.received["refreshed"] == 0:
            for batch in clients.batches(LocalSchedule(batch_size=None, complete=True)):
                g = self._gradient(scratch, x, batch)
        eta = self.proximal_step
        gamma = self.inner_step
        share = 1.0 if gamma is None else gamma / (eta + gamma)  # of x_0; the rest is of x
        for batch in clients.batches(self.local_schedule):
            rows = slice(0, batch.clients)
            old = x.clone()
            goal = torch.add(g, lam).mul_(-eta).add_(x0)
            x[rows].lerp_(goal[rows], share)
            again = copy.copy(batch)
            again.inputs = batch.inputs.clone()  # a network may change its inputs
            change = self._gradient(clients, x, batch).sub_(self._gradient(scratch, old, again))
            g[rows].add_(change[rows])
        clients.state["g"] = g
        return x

    def _gradient(
        self, clients: Clients, x: Tensor, batch: Batch, counted: list[int] | None = None
    ) -> Tensor:
        loss, g = self.oracle.gradient(x, batch, clients.buffers, counted=counted)
        if counted is None:
            counted = batch.counts
        self.log_loss("train", loss, counted)
        if self.weight_decay:
            g.add_(x, alpha=self.weight_decay)
        return g


def _copy_of(buffers: Tensor | None) -> Tensor | None:
    return None if buffers is None else buffers.clone()
