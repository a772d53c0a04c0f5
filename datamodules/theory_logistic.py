"""Synthetic logistic regression: FedCLUP's (Section 6.1) and FedPD's (Section IV)."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from datamodules.errors import check_whole
from datamodules.randomness import generator
from datamodules.theory import TheoryProblem, check_choice, check_number
from datamodules.theory_newton import coupled_softmax


class HeterogeneousLogistic(TheoryProblem):
    """Softmax regression in which every client has a true model and a feature mean of its own.

    Client k: true model W_k [c, d] with entries from N(0, R^2); feature mean v_k ~ N(0, I);
    x ~ N(v_k, diag(j^-1.2)), j = 1..d; no bias. The label is the class with the largest score in
    W_k x, as in the paper's code, or drawn from softmax(W_k x). Synthetic experiment of FedCLUP
    (Yu, He, Sun, Xue, Li, "Understanding the Statistical Accuracy-Communication Trade-off in
    Personalized Federated Learning with Minimax Guarantees", ICML 2025, Section 6.1).

    ``labels="argmax"`` has no maximum-likelihood solution for a client alone: its true model
    separates its samples, and so does any multiple of it, with less loss the larger it is. R then
    has no influence on the data at all, and errors against the true models say little.
    ``labels="sampled"`` is the statistical model that the paper's theory is about; a client whose
    feature mean lies far on one side can have separable samples there too, the rarer the smaller R.

    Inputs are float64 [N, d]. The paper's code divides every client's features by their standard
    deviations for training, and by these again its models before it measures errors. Here features
    are as drawn, and errors are measured in the same coordinates.

    Train ``LogisticRegression(d, c, bias=False)``, whose parameters have the order of
    ``true_models``. One vector added to all rows of W_k changes no probability: ``identified``
    takes the mean over the rows out of a model, and ``solve`` gives the solution without it.

    Args:
        num_clients: M.
        samples_per_client: n, training samples of each client.
        features: d.
        classes: c.
        heterogeneity: R, the standard deviation of the entries of W_k.
        validation_samples: Further samples of each client, for validation.
        test_samples: Further samples of each client, for its test.
        labels: "argmax" or "sampled".
        batch_size: Samples per batch of the loaders; None loads everything as one batch.
        seed: Of all that is drawn; None is 0.
        num_workers: Worker processes of the loaders.

    Attributes:
        heterogeneity: Not the argument: the largest distance of an identified true model from
            their mean.

    Raises:
        ConfigError: An argument is out of range.
    """

    def __init__(
        self,
        num_clients: int = 10,
        samples_per_client: int = 200,
        features: int = 10,
        classes: int = 2,
        heterogeneity: float = 1.0,
        validation_samples: int = 0,
        test_samples: int = 0,
        labels: Literal["argmax", "sampled"] = "argmax",
        batch_size: int | None = 32,
        seed: int | None = None,
        num_workers: int = 0,
    ) -> None:
        name = type(self).__name__
        check_whole("samples_per_client", samples_per_client, owner=name)
        check_whole("features", features, owner=name)
        check_whole("classes", classes, 2, name)
        check_whole("validation_samples", validation_samples, 0, name)
        check_whole("test_samples", test_samples, 0, name)
        check_number(name, 0, heterogeneity=heterogeneity)
        check_choice(name, ("argmax", "sampled"), labels=labels)
        sizes = (samples_per_client, validation_samples, test_samples)
        super().__init__(num_clients, sizes, batch_size, seed, num_workers)
        self.features, self.classes, self.labels = features, classes, labels
        self.deviation = float(heterogeneity)

    def draw(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the client's inputs and classes."""
        n, d = sum(self._sizes), self.features
        rng = generator(self.seed, "logistic features", client)
        mean = rng.normal(size=d)
        inputs = mean + rng.normal(size=(n, d)) * np.arange(1, d + 1) ** -0.6
        scores = inputs @ self.true_models[client].view(self.classes, d).numpy().T
        if self.labels == "sampled":
            # The largest score plus Gumbel noise is at class c with probability softmax(scores)_c.
            scores += generator(self.seed, "logistic labels", client).gumbel(size=scores.shape)
        return inputs, scores.argmax(1)

    @cached_property
    def true_models(self) -> Tensor:
        """W_k, row after row, [M, c d]."""
        size = self.classes * self.features
        rngs = [generator(self.seed, "logistic model", k) for k in range(self.num_clients)]
        return torch.from_numpy(np.stack([rng.normal(0, self.deviation, size) for rng in rngs]))

    @cached_property
    def smoothness(self) -> float:
        """L = max_i 1/2 λ_max(X_i'X_i/n)."""
        # The Hessian is the mean of S ⊗ xx', S = diag(p) - pp' that of the loss in the scores. By
        # Gershgorin no eigenvalue of S exceeds max_c p_c (1 - p_c) + p_c (1 - p_c) <= 1/2.
        return 0.5 * _largest_second_moment(self.train_arrays()[0])

    @property
    def heterogeneity(self) -> float:
        """See the class."""
        models = self.identified(self.true_models)
        return float((models - models.mean(0)).norm(dim=1).max())

    def solve(self, penalty: float) -> tuple[Tensor, Tensor] | None:
        """Solve by Newton's method; see the base class.

        None where the samples of all clients together, for penalty 0 of one of them, can be
        separated, and for penalties so close to 0 (1e-9) that float64 cannot tell.
        """
        check_number("solve", 0, penalty=penalty)
        solution = coupled_softmax(*self.train_arrays(), self.classes, penalty)
        if solution is None:
            return None
        return torch.from_numpy(solution[0]), torch.from_numpy(solution[1])

    def identified(self, models: Tensor) -> Tensor:
        """Return models [..., P] less the mean over their rows, which no probability depends on."""
        rows = models.unflatten(-1, (self.classes, self.features))
        return (rows - rows.mean(-2, keepdim=True)).flatten(-2)

    def rule(self) -> str:
        """Say in words how the samples are made."""
        label = {"argmax": "the most likely class", "sampled": "drawn from the model"}[self.labels]
        return (
            f"logistic regression with {self.features} features and {self.classes} classes, "
            f"true models with entries from N(0, {self.deviation:g}^2), labels {label}"
        )


class AgentLogistic(TheoryProblem):
    """Logistic regression with a penalty that is not convex, for one-model methods such as FedPD.

    f_i(x) = 1/n Σ_j log(1 + exp(-b_j a_j'x)) + Σ_d β α x_d^2 / (1 + α x_d^2), equation (125) of
    Zhang, Hong, Dhople, Yin, Liu, "FedPD: A Federated Learning Framework with Adaptivity to Non-IID
    Data", IEEE TSP 2021 (Figures 2, 4 and 5). Features a_j are N(0, 1), the last one is 1.

    "weak": labels b_j are ±1 with equal probabilities, whatever the features. "strong": every
    client has a model x_i, uniform in [-10, 10]^d, and b_j = sign(a_j'x_i + N(0, 1)).

    Inputs are float64 [N, d]; b = -1 is class 0, b = 1 is class 1. The penalty is a part of the
    network's output: train ``PenalizedLogisticRegression(d)`` with the loss
    ``PenalizedCrossEntropy``.

    Args:
        num_clients: M.
        samples_per_client: n.
        features: d, the constant one included; the number of weights P too.
        non_iid: "weak" or "strong".
        alpha: α of the network; only ``smoothness`` depends on it.
        beta: β of the network; only ``smoothness`` depends on it.
        batch_size: Samples per batch of the loaders; None loads everything as one batch.
        seed: Of all that is drawn; None is 0.
        num_workers: Worker processes of the loaders.

    Raises:
        ConfigError: An argument is out of range.
    """

    def __init__(
        self,
        num_clients: int = 100,
        samples_per_client: int = 400,
        features: int = 20,
        non_iid: Literal["weak", "strong"] = "weak",
        alpha: float = 1.0,
        beta: float = 0.1,
        batch_size: int | None = 32,
        seed: int | None = None,
        num_workers: int = 0,
    ) -> None:
        name = type(self).__name__
        check_whole("samples_per_client", samples_per_client, owner=name)
        check_whole("features", features, owner=name)
        check_choice(name, ("weak", "strong"), non_iid=non_iid)
        check_number(name, 0, alpha=alpha, beta=beta)
        super().__init__(num_clients, (samples_per_client, 0, 0), batch_size, seed, num_workers)
        self.features, self.non_iid = features, non_iid
        self.alpha, self.beta = float(alpha), float(beta)

    def draw(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the client's inputs and classes."""
        rng = generator(self.seed, "agent samples", client)
        n = self._sizes[0]
        inputs = rng.normal(size=(n, self.features))
        inputs[:, -1] = 1.0
        if self.true_models is None:
            return inputs, rng.integers(0, 2, n)
        scores = inputs @ self.true_models[client].numpy() + rng.normal(size=n)
        return inputs, (scores > 0).astype(np.int64)

    @cached_property
    def true_models(self) -> Tensor | None:
        """x_i [M, d]; None for "weak"."""
        if self.non_iid == "weak":
            return None
        rngs = [generator(self.seed, "agent model", k) for k in range(self.num_clients)]
        return torch.from_numpy(np.stack([rng.uniform(-10, 10, self.features) for rng in rngs]))

    @cached_property
    def smoothness(self) -> float:
        """L = max_i 1/4 λ_max(A_i'A_i/n) + 2αβ."""
        # The logistic loss has second derivative p (1 - p) <= 1/4 in the score. That of
        # β α x^2 / (1 + α x^2) is 2αβ (1 - 3 α x^2) / (1 + α x^2)^3, at most 2αβ (at x = 0), and
        # never below -αβ/2 (at α x^2 = 1).
        return 0.25 * _largest_second_moment(self.train_arrays()[0]) + 2 * self.alpha * self.beta

    @property
    def heterogeneity(self) -> float | None:
        """The largest distance of a true model from their mean; None for "weak"."""
        if self.true_models is None:
            return None
        return float((self.true_models - self.true_models.mean(0)).norm(dim=1).max())

    def rule(self) -> str:
        """Say in words how the samples are made."""
        labels = {
            "weak": "random labels",
            "strong": "labels from a model of each client's own",
        }[self.non_iid]
        return f"binary logistic regression with {self.features} features, {labels}"


def _largest_second_moment(x: np.ndarray) -> float:
    """Return max_i λ_max(X_i'X_i/n) of X [M, n, d]."""
    moments = np.einsum("mnd,mne->mde", x, x, optimize=True) / x.shape[1]
    return float(np.linalg.eigvalsh(moments).max())
