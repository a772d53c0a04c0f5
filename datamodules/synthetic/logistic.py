"""Synthetic logistic regression problems of FedCLUP (Section 6.1) and FedPD (Section IV)."""

from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..errors import require_value
from ..randomness import generator
from ..ranges import Count, CountOrZero, NonNegative, TwoOrMore
from .newton import coupled_softmax
from .problem import TheoryProblem


class HeterogeneousLogistic(TheoryProblem):
    """Softmax regression in which every client has its own true model and feature mean.

    With d `features` and c `classes`, client k has a true model W_k [c, d] with entries from N(0,
    R^2), a feature mean v_k ~ N(0, I) and inputs x ~ N(v_k, diag(j^-1.2)), j = 1..d; there is no
    bias. The label is the class with the largest score in W_k x, as in the paper's code, or is
    drawn from softmax(W_k x). This is the synthetic experiment of FedCLUP (Yu, He, Sun, Xue, Li,
    "Understanding the Statistical Accuracy-Communication Trade-off in Personalized Federated
    Learning with Minimax Guarantees", ICML 2025, Section 6.1).

    With `labels="argmax"` no client alone has a maximum-likelihood solution: its true model
    separates its samples, and so does any multiple, with a smaller loss for a larger multiple. R
    then has no influence on the data at all, and errors against the true models say little.
    `labels="sampled"` is the statistical model of the paper's theory. There, too, the samples of a
    client whose feature mean is far from 0 can be separable, less often for smaller R.

    Inputs are float64 [N, d]. The paper's code divides the features of every client by their
    standard deviations for training, and divides the models by them again before it measures
    errors. Here features are not scaled, and errors are measured in the same coordinates.

    The network is `LogisticRegression(d, c, bias=False)`, whose parameters have the order of
    `true_models`. Adding one vector to all rows of W_k changes no probability: `identified`
    subtracts the mean over the rows from a model, and `solve` gives the solution with mean 0.

    Args:
        samples_per_client: n, the number of training samples of each client.
        heterogeneity: R, the standard deviation of the entries of W_k.
        validation_samples, test_samples: How many more each client has, for runs that show
            accuracies beside the distance to the optimum.

    Example:
        >>> problem = HeterogeneousLogistic(num_clients=4, features=3, labels="sampled")
        >>> common, personal = problem.solve(penalty=0.1)
        >>> common.shape, personal.shape
        (torch.Size([6]), torch.Size([4, 6]))
    """

    def __init__(
        self,
        num_clients: int = 10,
        samples_per_client: Count = 200,
        features: Count = 10,
        classes: TwoOrMore = 2,
        heterogeneity: NonNegative = 1.0,
        validation_samples: CountOrZero = 0,
        test_samples: CountOrZero = 0,
        labels: Literal["argmax", "sampled"] = "argmax",
        **kwargs: Any,
    ) -> None:
        sizes = (samples_per_client, validation_samples, test_samples)
        super().__init__(num_clients, sizes, **kwargs)
        self.features = features
        self.classes = classes
        self.labels = labels
        self.deviation = float(heterogeneity)

    def draw(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        n = sum(self._sizes)
        d = self.features
        rng = generator(self.seed, "logistic features", client)
        mean = rng.normal(size=d)
        inputs = mean + rng.normal(size=(n, d)) * np.arange(1, d + 1) ** -0.6
        scores = inputs @ self.true_models[client].view(self.classes, d).numpy().T
        if self.labels == "sampled":
            # Of scores plus Gumbel noise, that of class c is largest with probability
            # softmax(scores)_c.
            scores += generator(self.seed, "logistic labels", client).gumbel(size=scores.shape)
        return inputs, scores.argmax(1)

    @cached_property
    def true_models(self) -> Tensor:
        """The true models W_k, row after row, float64 [M, c d]."""
        size = self.classes * self.features
        rngs = [generator(self.seed, "logistic model", k) for k in range(self.num_clients)]
        return torch.from_numpy(np.stack([rng.normal(0, self.deviation, size) for rng in rngs]))

    @cached_property
    def smoothness(self) -> float:
        """The upper bound L = max_i 1/2 λ_max(X_i'X_i/n) of the eigenvalues of every Hessian."""
        # The Hessian is the mean of S ⊗ xx', where S = diag(p) - pp' is the Hessian of the loss as
        # a function of the scores. By Gershgorin's theorem no eigenvalue of S exceeds
        # max_c p_c (1 - p_c) + p_c (1 - p_c) <= 1/2.
        return 0.5 * _largest_second_moment(self.train_arrays()[0])

    @property
    def heterogeneity(self) -> float:
        """The largest distance of an identified true model from the mean; not the argument R."""
        models = self.identified(self.true_models)
        return float((models - models.mean(0)).norm(dim=1).max())

    def solve(self, penalty: float) -> tuple[Tensor, Tensor] | None:
        """Solves the problem by Newton's method; see `TheoryProblem.solve`.

        None if the samples of all clients together (for a penalty of 0: of any single client) are
        separable, or if float64 does not show whether they are, as for a penalty near 0 (1e-9).
        """
        require_value("solve.penalty", penalty, penalty >= 0, "at least 0")
        solution = coupled_softmax(*self.train_arrays(), self.classes, penalty)
        return solution and (torch.from_numpy(solution[0]), torch.from_numpy(solution[1]))

    def identified(self, models: Tensor) -> Tensor:
        """Returns models [..., P] minus the mean of their rows, which changes no probability."""
        rows = models.unflatten(-1, (self.classes, self.features))
        return (rows - rows.mean(-2, keepdim=True)).flatten(-2)

    def rule(self) -> str:
        label = {"argmax": "the most likely class", "sampled": "drawn from the model"}[self.labels]
        return (
            f"logistic regression with {self.features} features and {self.classes} classes, "
            f"true models with entries from N(0, {self.deviation:g}^2), labels {label}"
        )


class AgentLogistic(TheoryProblem):
    """Binary logistic regression with a nonconvex penalty, for global-model methods such as FedPD.

    f_i(x) = 1/n Σ_j log(1 + exp(-b_j a_j'x)) + Σ_d β α x_d^2 / (1 + α x_d^2), equation (125) of
    Zhang, Hong, Dhople, Yin, Liu, "FedPD: A Federated Learning Framework with Adaptivity to Non-IID
    Data", IEEE TSP 2021 (Figures 2, 4 and 5). Features a_j are N(0, 1), except the last one, which
    is 1.

    With `non_iid="weak"` the labels b_j are ±1 with equal probabilities, whatever the features.
    With `non_iid="strong"` every client has a true model x_i, uniform in [-10, 10]^d, and
    b_j = sign(a_j'x_i + N(0, 1)).

    Inputs are float64 [N, d]; b = -1 is class 0, b = 1 is class 1. The penalty is a part of the
    network's output: the network is `PenalizedLogisticRegression(d)` with the loss
    `PenalizedCrossEntropy`.

    Args:
        samples_per_client: n.
        features: d, with the constant feature; also the number of weights P.
        alpha: α of the network; only `smoothness` depends on this argument.
        beta: β of the network; only `smoothness` depends on this argument.

    Example:
        >>> problem = AgentLogistic(num_clients=4, features=3, non_iid="strong")
        >>> problem.true_models.shape, problem.num_classes
        (torch.Size([4, 3]), 2)
    """

    def __init__(
        self,
        num_clients: int = 100,
        samples_per_client: Count = 400,
        features: Count = 20,
        non_iid: Literal["weak", "strong"] = "weak",
        alpha: NonNegative = 1.0,
        beta: NonNegative = 0.1,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_clients, (samples_per_client, 0, 0), **kwargs)
        self.features = features
        self.non_iid = non_iid
        self.alpha = float(alpha)
        self.beta = float(beta)

    def draw(self, client: int) -> tuple[np.ndarray, np.ndarray]:
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
        """The true models x_i, float64 [M, d]; None for `non_iid="weak"`."""
        if self.non_iid == "weak":
            return None
        rngs = [generator(self.seed, "agent model", k) for k in range(self.num_clients)]
        return torch.from_numpy(np.stack([rng.uniform(-10, 10, self.features) for rng in rngs]))

    @cached_property
    def smoothness(self) -> float:
        """The bound L = max_i 1/4 λ_max(A_i'A_i/n) + 2αβ of the eigenvalues of every Hessian."""
        # The second derivative of the logistic loss by the score is p (1 - p) <= 1/4. The second
        # derivative of β α x^2 / (1 + α x^2) is 2αβ (1 - 3 α x^2) / (1 + α x^2)^3, which is at most
        # 2αβ (at x = 0) and at least -αβ/2 (at α x^2 = 1).
        return 0.25 * _largest_second_moment(self.train_arrays()[0]) + 2 * self.alpha * self.beta

    @property
    def heterogeneity(self) -> float | None:
        """The largest distance of a true model from the mean; None for `non_iid="weak"`."""
        if self.true_models is None:
            return None
        return float((self.true_models - self.true_models.mean(0)).norm(dim=1).max())

    def rule(self) -> str:
        own = "labels from a model of each client's own"
        labels = {"weak": "random labels", "strong": own}[self.non_iid]
        return f"binary logistic regression with {self.features} features, {labels}"


def _largest_second_moment(x: np.ndarray) -> float:
    """Returns max_i λ_max(X_i'X_i/n) for inputs X [M, n, d]."""
    moments = np.einsum("mnd,mne->mde", x, x, optimize=True) / x.shape[1]
    return float(np.linalg.eigvalsh(moments).max())
