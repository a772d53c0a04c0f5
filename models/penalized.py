"""Logistic regression with a penalty that is part of the network's output, and its loss."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .classifier import Classifier


class PenalizedLogisticRegression(Classifier):
    """Binary logistic regression with weights x, whose output contains a penalty on x.

    Scores are (r, r + a'x) for a sample a, with r = Σ_d β α x_d^2 / (1 + α x_d^2). The softmax does
    not depend on the common r, so the probabilities are logistic regression's. With the loss
    `PenalizedCrossEntropy` the objective is equation (125) of FedPD (Zhang, Hong, Dhople, Yin,
    Liu, IEEE TSP 2021), mean_j log(1 + exp(-b_j a_j'x)) + r, with b = -1 for class 0 and b = 1 for
    class 1. The weights start at 0, as in the paper's code.

    The network has no bias, which a constant feature replaces. α and β are at least 0; β = 0 gives
    plain logistic regression.

    Shape: input [B, ...] with `in_features` values per sample; output [B, 2].

    Example:
        >>> PenalizedLogisticRegression(in_features=3)(torch.zeros(2, 3)).shape
        torch.Size([2, 2])
    """

    def __init__(self, in_features: int, alpha: float = 1.0, beta: float = 0.1) -> None:
        for name, value in (("alpha", alpha), ("beta", beta)):
            if not value >= 0:
                raise ValueError(
                    f"PenalizedLogisticRegression.{name}: {value}; it must be at least 0"
                )
        super().__init__(nn.Flatten(), nn.Linear(in_features, 1, bias=False))
        nn.init.zeros_(self.head.weight)
        self.alpha = alpha
        self.beta = beta

    def forward(self, x: Tensor) -> Tensor:
        second = self.head(self.body(x))
        squares = self.alpha * self.head.weight.square()
        penalty = self.beta * (squares / (1 + squares)).sum()
        return torch.cat([torch.zeros_like(second), second], 1) + penalty


class PenalizedCrossEntropy(nn.Module):
    """Cross entropy plus the first score, which is the penalty of `PenalizedLogisticRegression`.

    Shape: outputs scores [B, 2]; targets classes [B]; losses [B].

    Example:
        >>> PenalizedCrossEntropy()(torch.tensor([[0.5, 0.5]]), torch.tensor([1]))
        tensor([1.1931])
    """

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets, reduction="none") + outputs[:, 0]
