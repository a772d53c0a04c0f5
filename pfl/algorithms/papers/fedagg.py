"""FedAgg.

Yuan, Wang, "FedAgg: Adaptive Federated Learning with Aggregated Gradients",
arXiv 2303.15799, 2023.
"""

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pfl.method import (
    Clients,
    ConfigError,
    Count,
    FederatedAlgorithm,
    LocalSchedule,
    Message,
    Network,
    Positive,
    ProperShare,
    Step,
    require,
)


class FedAgg(FederatedAlgorithm):
    """Local SGD with a learning rate for each client and epoch, by optimal control.

    Over the epochs l = 0 ... L-1 of a round, with w_0 the received model, the client minimizes
    sum_l α η_l^2 + (1-α) |w_l - φ2_l|^2 under w_{l+1} = w_l - η_l φ1_l, where the mean-field terms
    φ1_l and φ2_l stand for the clients' mean gradient and mean model. Theorem 1 in solved form,
    with c = (1-α)/α:  (I + c M) η = c b,  M_rs = φ1_r'φ1_s (L - max(r, s)),
    b_r = φ1_r' [(L-r) w_l - sum_{k>r} φ2_k],  r, s = l ... L-1; the first entry of η is η_l. The
    system is solved anew at the start of every epoch, from the client's real model, and η_l is
    clipped to [0, η_max]. The global model is the mean of the w_L.

    **The exact mean-field equilibrium of this problem is η = 0.** All clients start at the same
    model; where φ2 is their true mean path, a client on that path deviates from nothing, and the
    cost, which nowhere rewards a smaller loss, is least without any step. Iterating Algorithm 1
    maps η to (I + cM)^-1 cM η, a contraction to 0. The method trains because it stops early, so
    the rule by which the terms are refreshed is a part of the method:

    * `mean_field: damped` (FA-1, the default): φ1 is what the participants of the last round
      measured, φ2_k = w_0 - η_base sum_{r<k} φ1_r is the path that the base rate would take: one
      step of the contraction in every round. `damping_steps: J` (FA-J) takes J of them.
    * `mean_field: fixed_point` (FA-0): Algorithm 1. A round is one iteration. Clients compute their
      rates from φ1 and φ2 as the participants of the last round measured them (the rates of the
      first round are η_base), clipped to [0, η_max] like all rates here, and move by their own
      gradients, or with `dynamics: aggregated` by that φ1 (0 in the first round). All iterations
      start at the same global model, which moves only once both terms have changed by less than
      `tolerance`. The rates go to 0, and nothing is learned.

    Cost: down (1 + L) P (P in the first round), up L P: the gradients, of which the model follows;
    with `fixed_point` down (1 + 2L) P, up 2L P. The L rates are not counted. No client state.
    The mean rates are logged as `rate/<epoch>`, all rates go to `rates.csv`.

    Args:
        rate_penalty: α: larger rates cost more.
        max_rate: η_max. With the paper's 1 two runs of networks with convolutions diverged, when a
            client's rate had risen to three times the base (docs/record/fedagg.md).
        damping_steps: J.
        mean_field: "damped" or "fixed_point".
        tolerance: The bound on the norms of the changes of φ1 and φ2 in FA-0.
        dynamics: "own": clients move by their own gradients, as in Algorithm 2. "aggregated":
            clients move by φ1, as in the derivation (14); then all clients move alike.
        local_epochs: L. The base rate η_base is `lr`.

    Note:
        A mini-batch epoch counts as one step along the sum of its gradients. φ1 and φ2 are uniform
        means over the participants (equation 11), the global model is weighted by samples.
        Models are represented by their differences from the received model, which avoids
        cancellation.

    Example:
        >>> from pfl.models import MLP
        >>> method = FedAgg(MLP(64, (8,)), lr=0.05, local_epochs=3)
        >>> method.gradients.shape  # φ1: L vectors of P values
        torch.Size([3, 610])
    """

    tables = ("rates",)
    takes_client_rates = False
    gradients: Tensor
    path: Tensor
    measured: Tensor

    def __init__(
        self,
        network: Network,
        *,
        rate_penalty: ProperShare = 0.1,
        max_rate: Positive = 1.0,
        damping_steps: Count = 1,
        mean_field: Literal["damped", "fixed_point"] = "damped",
        tolerance: Positive = 1e-6,
        dynamics: Literal["own", "aggregated"] = "own",
        local_epochs: int = 3,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, local_epochs=local_epochs, server_optimizer=None, **kwargs)
        require("max_rate", max_rate, max_rate >= self.lr, f"at least lr, {self.lr}")
        self.require_no_aids()
        for key in ("local_steps", "optimizer"):
            if kwargs.get(key) is not None:
                raise ConfigError(
                    f"model.{key}: {kwargs[key]!r}; FedAgg sets a rate for each epoch, leave it out"
                )
        self.balance = (1 - rate_penalty) / rate_penalty  # c
        self.rate_penalty = rate_penalty
        self.max_rate = max_rate
        self.damping_steps = damping_steps
        self.tolerance = tolerance
        self.mean_field = mean_field
        self.dynamics = dynamics
        zeros = torch.zeros(local_epochs, self.space.size).to(self.global_model)
        self.add_server_state("gradients", zeros)  # φ1
        if mean_field == "fixed_point":
            self.add_server_state("path", zeros.clone())  # φ2_1 ... φ2_L, less the received model
        self.add_server_state("measured", torch.tensor(False))

    def download(self) -> dict[str, Tensor]:
        """Returns the model, and the mean-field terms once clients have measured them."""
        messages = {"w": self.global_model}
        if self.measured:
            messages["gradients"] = self.gradients.flatten()
            if self.mean_field == "fixed_point":
                messages["path"] = self.path.flatten()
        return messages

    def _drift(self, clients: Clients, gram: Tensor) -> Tensor:
        """Returns the sums over k > r of (φ2_k - w_0)'φ1_r for each epoch r, [L]."""
        if self.mean_field == "fixed_point":
            path, phi = (self._term(clients, name).double() for name in ("path", "gradients"))
            drift = path @ phi.T
        else:
            rates = self._reference_rates(gram, clients.round)
            drift = -torch.tril(gram.new_ones(gram.shape)) @ (rates[:, None] * gram)
        return torch.triu(drift.T).sum(1)  # row k-1 of drift belongs to φ2_k

    def _term(self, clients: Clients, name: str) -> Tensor:
        """Returns a mean-field term that the clients have received, [L, P]."""
        return clients.received[name].view(self.local_epochs, -1)

    def _reference_rates(self, gram: Tensor, round_index: int) -> Tensor:
        """Returns the reference path's rates, [L]: η_base after J - 1 steps of the contraction."""
        L = self.local_epochs
        rates = gram.new_full((L,), self.learning_rate(round_index))
        cM = self.balance * self._interaction(gram, 0)
        for _ in range(self.damping_steps - 1):
            rates = torch.linalg.solve(cM.new_ones(L).diag() + cM, cM @ rates)
        return rates

    def _interaction(self, gram: Tensor, epoch: int) -> Tensor:
        """Returns the matrix M of the epochs from `epoch` on, from the products of all φ1."""
        r = torch.arange(epoch, self.local_epochs, device=gram.device)
        return gram[epoch:, epoch:] * (self.local_epochs - torch.maximum(r[:, None], r))

    def _rates(self, phi: Tensor, gram: Tensor, drift: Tensor, moved: Tensor, epoch: int) -> Tensor:
        """Returns η_epoch of clients whose models are w_0 + moved, [C]."""
        M = self._interaction(gram, epoch)
        c = self.balance
        along = (moved @ phi[epoch:].T).double()
        remaining = torch.arange(self.local_epochs - epoch, 0, -1, device=M.device)
        b = along * remaining - drift[epoch:]
        rates = torch.linalg.solve(M.new_ones(len(M)).diag() + c * M, c * b.T)[0]
        return rates.clamp(0, self.max_rate).to(moved)

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Message]:
        C = len(clients)
        L = self.local_epochs
        P = self.space.size
        v = w.repeat(C, 1)
        gradients = v.new_zeros(C, L, P)
        path = []
        rates = v.new_full((C, L), self.learning_rate(clients.round))
        measured = "gradients" in clients.received
        phi = self._term(clients, "gradients") if measured else v.new_zeros(L, P)
        gram = phi.double() @ phi.double().T
        drift = self._drift(clients, gram) if measured else gram[0]
        for epoch in range(L):
            if measured:
                rates[:, epoch] = self._rates(phi, gram, drift, v - w, epoch)
            own = rates[:, epoch, None]
            gradients[:, epoch] = g = self._epoch(clients, v, own, epoch)
            v -= own * (g if self.dynamics == "own" else phi[epoch])
            if self.mean_field == "fixed_point":  # the damped mode has no use for L more [C, P]
                path.append(v - w)
        self.log_table(
            "rates",
            client=np.repeat(clients.ids, L),
            epoch=np.tile(np.arange(L), C),
            rate=rates.flatten(),
        )
        floats = L * P * w.element_size()
        messages = {
            "w": Message(v, 0),  # the server computes the models from the messages below
            "rates": Message(rates, 0, "uniform"),
            "gradients": Message(gradients.flatten(1), floats, "uniform"),
        }
        if self.mean_field == "fixed_point":
            messages["path"] = Message(torch.cat(path, 1), floats, "uniform")
        return messages

    def _epoch(self, clients: Clients, v: Tensor, rate: Tensor, epoch: int) -> Tensor:
        """Returns the sum of the gradients of an epoch that starts at v, [C, P].

        The steps change `moved`, which is minus this sum; the models are v + rate * moved.
        """
        moved = torch.zeros_like(v)
        scale = rate if self.dynamics == "own" else torch.zeros_like(rate)
        step = Step(1.0, offset=v, scale=scale, decay=self.weight_decay)
        schedule = LocalSchedule(self.batch_size, purpose=f"train/{epoch}")
        self.run_local_steps(clients, moved, step, schedule, "train")
        return -moved

    def server_update(self, mean: dict[str, Tensor]) -> None:
        for epoch, rate in enumerate(mean["rates"].tolist()):
            self.log_metric(f"rate/{epoch}", rate)
        literal = self.mean_field == "fixed_point"
        changes = [self._refresh(name, mean) for name in ["gradients", *["path"] * literal]]
        if not literal or (self.measured and max(changes) < self.tolerance):
            self.global_model.copy_(mean["w"])
        self.measured.fill_(True)

    def _refresh(self, name: str, mean: dict[str, Tensor]) -> float:
        """Takes over a mean-field term and returns the norm of its change."""
        term = getattr(self, name)
        new = mean[name].view_as(term)
        change = float((new - term).norm())
        term.copy_(new)
        self.log_metric(f"change/{name}", change)
        return change
