"""FedCLUP.

Yu, He, Sun, Xue, Li, "Understanding the Statistical Accuracy-Communication Trade-off in
Personalized Federated Learning with Minimax Guarantees", ICML 2025.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from pfl.method import (
    Clients,
    ConfigError,
    FederatedAlgorithm,
    Network,
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
    mini-batches. Every client starts at the common initial model. λ -> 0 is `LocalTrain`, exactly
    so at 0; λ -> ∞ is GlobalTrain, one model for everyone, which the paper runs as `FedAvg`. Fixed
    point, for every K: grad f_i(w_i) + λ (w_i - w) = 0 and w = mean w_i.
    Cost: down P, up P. Client state: w_i.

    Args:
        penalty: λ, the degree of personalization: small is personal. "corollary1": the value of
            Corollary 1, a worst case, from L, μ, R, ρ and the numbers of samples.
        penalty_schedule: "constant"; "plateau": every `patience` rounds in which the mean
            validation loss of the personal models fell by a smaller share than `tolerance`,
            λ <- min(`growth` λ, `max_penalty`); "authors_code": the rule of the authors' code, once,
            after half of the rounds, from R = mean |w_i - w| and the mean number of samples n:
            λ = 5 / (n R^2) where R >= n^-1/2, else 5 / (n^1/2 R).
        server_step: γ, a number or a rule: "inverse_penalty" 1 / λ, the mean of the personal
            models; "corollary2" (λ + L) / (2 λ L); "inverse_smoothness" (λ + L) / (λ L), that of
            the paper's synthetic experiments, which is just outside its Theorem 2.
        local_step: η: "lr", the value of `lr`, or "corollary2", 1 / (λ + L).
        smoothness, strong_convexity: L and μ of the clients' objectives.
        heterogeneity: R, the radius of the clients' true models.
        noise: ρ of Corollary 1, which the paper finds by a grid search.
        growth, patience, tolerance, max_penalty: Of the plateau rule; null: no limit.

    `smoothness`, `strong_convexity` and `heterogeneity` are taken from the data module where it
    knows them and they are left out.

    Note:
        Algorithm 2 draws one mini-batch a round in print; here every local step has its own, as
        Assumption 4 and the code have it. The released code never runs its server step (it takes
        the mean over all clients, those that did not take part included); here it is that of the
        paper, over the participants.
    """

    has_personalized = True
    lam: Tensor
    plateau: Tensor

    def __init__(
        self,
        network: Network,
        *,
        penalty: float | Literal["corollary1"] = 0.5,
        penalty_schedule: Literal["constant", "plateau", "authors_code"] = "constant",
        server_step: float | Rule = "inverse_penalty",
        local_step: Literal["lr", "corollary2"] = "lr",
        smoothness: float | None = None,
        strong_convexity: float | None = None,
        heterogeneity: float | None = None,
        noise: float = 2.0,
        growth: float = 2.0,
        patience: int = 5,
        tolerance: float = 1e-3,
        max_penalty: float | None = None,
        weighting: Literal["samples", "uniform"] = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(network, weighting=weighting, server_optimizer=None, **kwargs)
        if isinstance(penalty, str):
            require("penalty", penalty, penalty == "corollary1", "a number or corollary1")
        else:
            require("penalty", penalty, 0 <= penalty < math.inf, "a number of at least 0")
            growing = penalty > 0 or penalty_schedule != "plateau"
            require("penalty", penalty, growing, "positive, so that the plateau rule can raise it")
        if isinstance(server_step, str):
            rules = ("inverse_penalty", "corollary2", "inverse_smoothness")
            require(
                "server_step", server_step, server_step in rules, f"a number or {', '.join(rules)}"
            )
        else:
            require("server_step", server_step, server_step > 0, "positive")
        schedules, steps = ("constant", "plateau", "authors_code"), ("lr", "corollary2")
        require(
            "penalty_schedule",
            penalty_schedule,
            penalty_schedule in schedules,
            f"one of {', '.join(schedules)}",
        )
        require("local_step", local_step, local_step in steps, f"one of {', '.join(steps)}")
        given = (smoothness, strong_convexity, heterogeneity, noise)
        for name, value in zip((*CONSTANTS, "noise"), given, strict=True):
            if value is not None:
                _checked(name, value)
        require("growth", growth, growth > 1, "above 1")
        require("patience", patience, patience >= 1, "at least 1")
        require("tolerance", tolerance, tolerance >= 0, "at least 0")
        self.penalty, self.penalty_schedule = penalty, penalty_schedule
        self.server_step, self.local_step = server_step, local_step
        self.smoothness, self.strong_convexity = smoothness, strong_convexity
        self.heterogeneity, self.noise = heterogeneity, noise
        self.growth, self.patience, self.tolerance = growth, patience, tolerance
        self.max_penalty = math.inf if max_penalty is None else max_penalty
        if not isinstance(penalty, str):
            self._check_limit(penalty)
        self._rounds_apart = 1  # from one evaluation to the next
        self.add_client_state("w", lambda: self.global_model)
        start = math.nan if isinstance(penalty, str) else float(penalty)
        self.add_server_state("lam", torch.tensor(start, dtype=torch.float64))
        # Of the plateau rule: the last loss it looked at, and in which round.
        self.add_server_state("plateau", torch.tensor([math.nan, 0.0], dtype=torch.float64))

    @property
    def personalization_penalty(self) -> float:
        """λ."""
        return float(self.lam)

    def learning_rate(self, round_index: int) -> float:
        """η."""
        if self.local_step == "corollary2":
            return 1 / (self.personalization_penalty + self._constant("smoothness"))
        return super().learning_rate(round_index)

    def begin_round(self, round_index: int) -> None:
        """The released rule, once half of the rounds are over."""
        half = max(1, (self.trainer.max_epochs or 0) // 2)
        if self.penalty_schedule == "authors_code" and self.rounds == half:
            self.lam.fill_(self._authors_code_penalty())

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        """Local steps from the client's own model; sends it."""
        penalty = self.personalization_penalty
        w_i = self.local_sgd(clients, clients.state["w"], prox_weight=penalty, prox_center=w)
        if penalty > 0:
            w_i[clients.empty] = w  # without samples only the penalty holds them
        clients.state["w"] = w_i
        return w_i

    def server_update(self, mean: dict[str, Tensor]) -> None:
        """w <- (1 - γλ) w + γλ mean w_i."""
        self.global_model.lerp_(mean["w"], self._global_rate())
        self.log_metric("penalty", self.personalization_penalty)

    def personalized(self, clients: Clients) -> Tensor:
        """w_i."""
        return clients.state["w"]

    # ---- steps and penalty --------------------------------------------------------------------

    def _global_rate(self) -> float:
        """γλ, which has a limit at λ = 0."""
        penalty = self.personalization_penalty
        if isinstance(self.server_step, float | int):
            return self.server_step * penalty
        if self.server_step == "inverse_penalty":
            return 1.0
        rate = 1 + penalty / self._constant("smoothness")
        return rate / 2 if self.server_step == "corollary2" else rate

    def setup(self, stage: str) -> None:
        """Look up the problem's constants, and check that what the rules need is there."""
        super().setup(stage)
        loop = self._loop
        for name in CONSTANTS:
            if getattr(self, name) is None:
                setattr(self, name, getattr(loop.datamodule, name, None))
        if self.server_step in ("corollary2", "inverse_smoothness"):
            self._constant("smoothness", f"server_step: {self.server_step}")
        if self.local_step == "corollary2":
            self._constant("smoothness", "local_step: corollary2")
        if self.penalty_schedule == "plateau":
            validated = loop.datamodule.partition.val.sizes.any() and "val" in loop.evaluate
            if not validated:
                raise ConfigError(
                    "model.penalty_schedule: plateau needs a validation loss; give data.protocol "
                    "a validation share, and loop.evaluate val"
                )
            if stage == "fit" and self.trainer.limit_val_batches == 0:
                raise ConfigError(
                    "trainer.limit_val_batches: 0; penalty_schedule: plateau needs a validation "
                    "loss, give 1.0"
                )
        if stage == "fit":
            self._rounds_apart = self.trainer.check_val_every_n_epoch or 1
        if self.penalty_schedule == "authors_code" and (self.trainer.max_epochs or -1) < 0:
            raise ConfigError(
                "model.penalty_schedule: authors_code acts after half of the rounds; give "
                "trainer.max_epochs their number"
            )
        if self.lam.isnan():
            self.lam.fill_(self._corollary1())
            self._check_limit(self.personalization_penalty)

    def _check_limit(self, penalty: float) -> None:
        limit, valid = self.max_penalty, self.max_penalty >= penalty
        require("max_penalty", limit, valid, f"at least the first penalty, {penalty:g}")

    def _constant(self, name: str, reason: str = "") -> float:
        value = getattr(self, name)
        if value is None:
            raise ConfigError(
                f"model.{name}: null, but {reason} needs it; give the number, which "
                f"{type(self._loop.datamodule).__name__} does not know"
            )
        return _checked(name, value)

    def _corollary1(self) -> float:
        """Corollary 1: the least λ where the clients are alike, the largest where they are not."""
        L, mu, R = (self._constant(name, "penalty: corollary1") for name in CONSTANTS)
        sizes = self._loop.datamodule.client_sizes
        n, total, noise = float(sizes.mean()), float(sizes.sum()), self.noise**2
        if n * R**2 > 1:
            return noise / (n * mu * R**2)
        kappa = L / mu
        spread = (2 * L**2 * R**2 + noise / n) / (L**2 * R**2 + noise / total)
        return max(64 * kappa**2 * L, max(2 * kappa, 5) * mu * spread) - mu

    def _authors_code_penalty(self) -> float:
        """From the mean distance between w_i and w over all clients, those never seen included."""
        distance = torch.zeros((), dtype=torch.float64, device=self.device)
        for clients in self.iter_clients("train"):
            distance += (clients.state["w"] - self.global_model).norm(dim=1).sum()
        loop = self._loop
        R, n = (
            float(sum_over_processes(distance)) / loop.num_clients,
            loop.datamodule.client_sizes.mean(),
        )
        if R == 0:
            return (
                self.personalization_penalty
            )  # all models are still the same: there is nothing to go by
        return 5 / (n * R**2) if n * R**2 >= 1 else 5 / (n**0.5 * R)

    def on_validation_epoch_end(self) -> None:
        """Log the scores; the plateau rule looks at them."""
        super().on_validation_epoch_end()
        last, since = self.plateau.tolist()
        if self.penalty_schedule != "plateau" or self.rounds - since < self.patience:
            return
        if self.trainer.state.fn != "fit":
            return
        if (self.trainer.current_epoch + 1) % self._rounds_apart:
            return  # evaluated since the run ends here: it may go on, and be as if it had not
        loss = self.row["val/personalized/loss"]
        if last - loss < self.tolerance * abs(last):  # never at the first look, when last is NaN
            self.lam.fill_(min(self.growth * self.personalization_penalty, self.max_penalty))
        self.plateau.copy_(torch.tensor([loss, float(self.rounds)]))


def _checked(name: str, value: float) -> float:
    alike = name == "heterogeneity" and value == 0
    require(name, value, value > 0 or alike, "positive")
    return float(value)
