"""Logistic regression whose penalty is part of the network's output."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from models.classifier import Classifier


class PenalizedLogisticRegression(Classifier):
    """Binary logistic regression with weights x that carries a penalty on x along.

    Scores are (r, r + a'x) for a sample a, with r = Σ_d β α x_d^2 / (1 + α x_d^2). A softmax does
    not see the common r: probabilities are those of logistic regression. With the loss
    ``PenalizedCrossEntropy`` the objective is equation (125) of FedPD (Zhang, Hong, Dhople, Yin,
    Liu, IEEE TSP 2021), mean_j log(1 + exp(-b_j a_j'x)) + r, with b = -1 for class 0 and b = 1 for
    class 1. The weights start at 0, as in the paper's code: one layer has no symmetry to break.

    Args:
        in_features: Number of values of a sample. There is no bias: a constant feature is one.
        alpha: α, at least 0.
        beta: β, at least 0; 0 is plain logistic regression.

    Shape:
        Input: [B, ...] with ``in_features`` values a sample. Output: [B, 2].

    Raises:
        ValueError: ``alpha`` or ``beta`` is negative: the penalty would be, or have poles.
    """

    def __init__(self, in_features: int, alpha: float = 1.0, beta: float = 0.1) -> None:
        for name, value in (("alpha", alpha), ("beta", beta)):
            if not value >= 0:
                raise ValueError(f"{name}={value} must be at least 0")
        super().__init__(nn.Flatten(), nn.Linear(in_features, 1, bias=False))
        nn.init.zeros_(self.head.weight)
        self.alpha, self.beta = alpha, beta

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores."""
        second = self.head(self.body(x))
        squares = self.alpha * self.head.weight.square()
        penalty = self.beta * (squares / (1 + squares)).sum()
        return torch.cat([torch.zeros_like(second), second], 1) + penalty


class PenalizedCrossEntropy(nn.Module):
    """Cross entropy plus the first score, in which ``PenalizedLogisticRegression`` has its penalty.

    Shape:
        Scores: [B, 2]; target: classes, [B]. Loss: [B].
    """

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the losses."""
        return cross_entropy(outputs, targets, reduction="none") + outputs[:, 0]
