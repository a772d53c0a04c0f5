"""FedCLUP.

Yu, He, Sun, Xue, Li, "Understanding the Statistical Accuracy-Communication Trade-off in
Personalized Federated Learning with Minimax Guarantees", ICML 2025.
"""

import math
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from pfl.method import (
    Clients,
    ConfigError,
    Count,
    FederatedAlgorithm,
    Message,
    Network,
    NonNegative,
    Positive,
    Range,
    header,
    require,
    sum_over_processes,
)

Rule = Literal["inverse_penalty", "corollary2", "inverse_smoothness"]
CONSTANTS = ("smoothness", "strong_convexity", "heterogeneity")


class FedCLUP(FederatedAlgorithm):
    """Personal models w_i held to a global model w by λ: min mean_i [f_i(w_i) + λ/2 |w_i - w|^2].

    Client: w_i <- w_i - η (g_i(w_i) + λ (w_i - w)), warm-started at its own last w_i;
    server: w <- w - γ mean_S λ (w - w_i).

    Algorithm 1 is `batch_size: null` (full gradients) with `local_steps` K, Algorithm 2 has
    mini-batches. Every client starts at the common initial model. λ = 0 is `LocalTrain`; the limit
    λ -> ∞ is GlobalTrain, one model for everyone, which the paper runs as `FedAvg`. Fixed point for
    every K: grad f_i(w_i) + λ (w_i - w) = 0 and w = mean w_i.
    Cost: down P, up P. Client state: w_i.

    Args:
        penalty: λ, the degree of personalization: small is personal. "corollary1": the value of
            Corollary 1, a worst case, from L, μ, R, ρ and the numbers of samples.
        penalty_schedule: "constant"; "plateau": every `patience` rounds in which the mean
            validation loss of the personal models fell by a smaller share than `tolerance`,
            λ <- min(`growth` λ, `max_penalty`); "authors_code": the rule of the authors' code,
            once, after half of the rounds, by R = mean |w_i - w| and the mean number of samples n:
            λ = 5 / (n R^2) where R >= n^-1/2, else 5 / (n^1/2 R).
        server_step: γ, a number or a rule: "inverse_penalty" 1 / λ, the mean of the personal
            models; "corollary2" (λ + L) / (2 λ L); "inverse_smoothness" (λ + L) / (λ L), the rule
            of the paper's synthetic experiments, which is just outside its Theorem 2.
        local_step: η: "lr", the value of `lr`, or "corollary2", 1 / (λ + L).
        smoothness, strong_convexity: L and μ of the clients' objectives; null: the data module's,
            which only data of a theory problem have.
        heterogeneity: R, the radius of the clients' true models; null: the data module's.
        noise: ρ of Corollary 1, which the paper finds by a grid search.
        growth: The factor of the plateau rule, for which the paper has no number.
        patience: The number of rounds between two looks of the plateau rule.
        tolerance: The share by which the loss must fall between two looks.
        max_penalty: The largest λ of the plateau rule; null: no limit.

    Note:
        Algorithm 2 draws one mini-batch a round in print; here every local step has a mini-batch of
        its own, as in Assumption 4 and in the authors' code. In that code for synthetic data
        the server step never runs, since a condition is always true: it takes the mean over all
        clients, including those that did not take part. Its code for images takes the server step
        over the participants, as here, weighted by samples (`weighting: samples`).

    Example:
        >>> from pfl.models import MLP
        >>> method = FedCLUP(MLP(64, (8,)), penalty=0.5)
        >>> method.personalization_penalty
        0.5
    """

    has_personalized = True
    keeps_model = True
    lam: Tensor
    plateau: Tensor

    def __init__(
        self,
        network: Network,
        *,
        penalty: NonNegative | Literal["corollary1"] = 0.5,
        penalty_schedule: Literal["constant", "plateau", "authors_code"] = "constant",
        server_step: Positive | Rule = "inverse_penalty",
        local_step: Literal["lr", "corollary2"] = "lr",
        smoothness: Positive | None = None,
        strong_convexity: Positive | None = None,
        heterogeneity: NonNegative | None = None,
        noise: Positive = 2.0,
        growth: Annotated[float, Range(above=1)] = 2.0,
        patience: Count = 5,
        tolerance: NonNegative = 1e-3,
        max_penalty: NonNegative | None = None,
        weighting: Literal["samples", "uniform"] = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(network, weighting=weighting, server_optimizer=None, **kwargs)
        if local_step == "corollary2" and self.schedules:
            raise ConfigError(
                "model.schedule: local_step: corollary2 gives the rate of every round; leave one "
                "of them out"
            )
        growing = penalty != 0 or penalty_schedule != "plateau"
        require("penalty", penalty, growing, "positive, so that the plateau rule can raise it")
        self.penalty = penalty
        self.penalty_schedule = penalty_schedule
        self.server_step = server_step
        self.local_step = local_step
        self.smoothness = smoothness
        self.strong_convexity = strong_convexity
        self.heterogeneity = heterogeneity
        self.noise = noise
        self.growth = growth
        self.patience = patience
        self.tolerance = tolerance
        self.max_penalty = math.inf if max_penalty is None else max_penalty
        if not isinstance(penalty, str):
            self._check_limit(penalty)
        self.add_client_state("w", self.first_model)
        if penalty_schedule == "authors_code":
            self.keep_messages("last", self.first_model)
        start = math.nan if isinstance(penalty, str) else float(penalty)
        self.add_server_state("lam", torch.tensor(start, dtype=torch.float64))
        # The loss at the plateau rule's last look, and the round of that look; 0: no look yet.
        self.add_server_state("plateau", torch.zeros(2, dtype=torch.float64))

    @property
    def personalization_penalty(self) -> float:
        return float(self.lam)

    def learning_rate(self, round_index: int) -> float:
        return self._rate(round_index, self.personalization_penalty)

    def _rate(self, round_index: int, penalty: float) -> float:
        if self.local_step == "corollary2":
            return 1 / (penalty + self._constant("smoothness"))
        return super().learning_rate(round_index)

    def begin_round(self, round_index: int) -> None:
        if self.penalty_schedule == "constant":  # a checkpoint may have had another one
            self.lam.fill_(self.first_penalty)
        half = max(1, (self.max_rounds or 0) // 2)
        if self.penalty_schedule == "authors_code" and self.rounds == half:
            self.lam.fill_(self._authors_code_penalty())

    def download(self) -> dict[str, Tensor | Message]:
        return {"w": self.global_model, "penalty": header(self.lam)}

    def client_update(self, clients: Clients, w: Tensor) -> dict[str, Tensor | Message]:
        own = clients.state["w"]
        penalty = float(clients.received["penalty"])
        lr = self._rate(clients.round, penalty)
        w_i = self.local_sgd(clients, own, prox_weight=penalty, prox_center=w, lr=lr)
        if penalty > 0:
            w_i[clients.empty] = w  # without samples only the penalty is left
        clients.state["w"] = w_i
        if self.penalty_schedule == "authors_code":  # the server keeps what is sent anyway
            return {"w": w_i, "last": Message(w_i, 0)}
        return {"w": w_i}

    def server_update(self, mean: dict[str, Tensor]) -> None:
        self.global_model.lerp_(mean["w"], self._global_rate())
        self.log_metric("penalty", self.personalization_penalty)

    def personalized(self, clients: Clients) -> Tensor:
        return clients.state["w"]

    # ---- steps and penalty --------------------------------------------------------------------

    def _global_rate(self) -> float:
        """Returns γλ, which has a limit at λ = 0."""
        penalty = self.personalization_penalty
        if isinstance(self.server_step, float | int):
            return self.server_step * penalty
        if self.server_step == "inverse_penalty":
            return 1.0
        rate = 1 + penalty / self._constant("smoothness")
        return rate / 2 if self.server_step == "corollary2" else rate

    def check_setup(self) -> None:
        """Takes missing constants from the data module, and refuses rules that lack a constant."""
        for name in CONSTANTS:
            if getattr(self, name) is None:
                setattr(self, name, self.problem_constant(name))
        if self.server_step in ("corollary2", "inverse_smoothness"):
            self._constant("smoothness", f"server_step: {self.server_step}")
        if self.local_step == "corollary2":
            self._constant("smoothness", "local_step: corollary2")
        if self.penalty_schedule == "plateau":
            self.require_validation("penalty_schedule: plateau")
        if self.penalty_schedule == "authors_code" and not self.max_rounds:
            raise ConfigError(
                "model.penalty_schedule: authors_code acts after half of the rounds; give "
                "trainer.max_epochs their number"
            )
        if self.lam.isnan():
            self.lam.fill_(self._corollary1())
            self._check_limit(self.personalization_penalty)
        self.first_penalty = self.personalization_penalty

    def _check_limit(self, penalty: float) -> None:
        if self.max_penalty != math.inf:  # null
            limit = self.max_penalty
            valid = self.max_penalty >= penalty
            require("max_penalty", limit, valid, f"at least the first penalty, {penalty:g}")

    def _constant(self, name: str, reason: str = "") -> float:
        value = getattr(self, name)
        if value is None:
            raise ConfigError(
                f"model.{name}: null, but {reason} needs a number, and the data module has none"
            )
        if not value > 0 and name != "heterogeneity":  # of the data: what was given has a range
            raise ConfigError(
                f"data: its {name} is {value}, and {reason or 'FedCLUP'} needs a positive number; "
                f"give model.{name}"
            )
        return float(value)

    def _corollary1(self) -> float:
        """Returns λ of Corollary 1: the lower bound for similar clients, else the upper bound."""
        L, mu, R = (self._constant(name, "penalty: corollary1") for name in CONSTANTS)
        sizes = self.client_sizes[self.population]
        n = float(sizes.mean())
        total = float(sizes.sum())
        noise = self.noise**2
        if n * R**2 > 1:
            return noise / (n * mu * R**2)
        kappa = L / mu
        spread = (2 * L**2 * R**2 + noise / n) / (L**2 * R**2 + noise / total)
        return max(64 * kappa**2 * L, max(2 * kappa, 5) * mu * spread) - mu

    def _authors_code_penalty(self) -> float:
        """Returns λ by the mean distance of w_i from w over all clients, seen or not."""
        distance = torch.zeros((), dtype=torch.float64, device=self.device)
        for models in self.iter_kept("last"):
            distance += (models - self.global_model).norm(dim=1).sum()
        R = float(sum_over_processes(distance)) / self.num_clients
        n = self.client_sizes[self.population].mean()
        if R == 0:  # all models are still the same, and the rule has no value
            return self.personalization_penalty
        return 5 / (n * R**2) if n * R**2 >= 1 else 5 / (n**0.5 * R)

    def after_evaluation(self, row: dict[str, float]) -> None:
        last, since = self.plateau.tolist()
        if self.penalty_schedule != "plateau" or self.rounds - since < self.patience:
            return
        loss = row["val/personalized/loss"]
        if since > 0 and last - loss < self.tolerance * abs(last):
            self.lam.fill_(min(self.growth * self.personalization_penalty, self.max_penalty))
        self.plateau.copy_(torch.tensor([loss, self.rounds], dtype=torch.float64))
