"""Losses with one value per sample."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class HalfSquaredError(nn.Module):
    """Half of the squared error of each sample, 1/2 |output - target|^2, summed over its outputs.

    The objective of a client is then 1/(2n) |Xw - y|^2, the convention of most theory, with the
    Hessian X'X/n.

    Shape: outputs [B, ...]; targets [B, ...] with as many values per sample; losses [B].

    Example:
        >>> HalfSquaredError()(torch.tensor([[1.0], [5.0]]), torch.tensor([1.0, 2.0]))
        tensor([0.0000, 4.5000])
    """

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        residuals = outputs.reshape(targets.shape) - targets
        return 0.5 * residuals.square().reshape(len(targets), -1).sum(1)


class WeightedCrossEntropy(nn.CrossEntropyLoss):
    """The cross entropy of each sample, times the weight of its class, -w_y log p_y.

    A client's loss is the mean over its samples, so that weights twice as large are steps twice as
    large. (PyTorch's mean over a batch divides by the sum of the batch's weights instead, and would
    depend on the classes that happen to be in it.) Weights n / (K n_k) for n_k of n samples of
    class k of K have the mean 1 over the samples.

    Args:
        weights: The weight w of each class [K].
        ignore_index: A target that counts nowhere.

    Shape: outputs [B, K] or [B, K, ...]; targets [B] or [B, ...]; losses like the targets.

    Example:
        >>> loss = WeightedCrossEntropy([1.0, 3.0])
        >>> loss(torch.zeros(2, 2), torch.tensor([0, 1]))  # log 2 and 3 log 2
        tensor([0.6931, 2.0794])
    """

    def __init__(self, weights: Sequence[float], ignore_index: int = -100) -> None:
        checked = torch.tensor(_checked("WeightedCrossEntropy.weights", weights))
        super().__init__(checked, ignore_index=ignore_index, reduction="none")


class WeightedBinaryCrossEntropy(nn.BCEWithLogitsLoss):
    """The binary cross entropy of each output, with a weight on the samples where the label is 1.

    The loss of an output z with the label y is -w y log s(z) - (1 - y) log(1 - s(z)), with the
    logistic function s; that of a sample is the mean over its outputs. This is PyTorch's
    `pos_weight`. With w = (samples with 0) / (samples with 1) both labels have the same weight.

    Args:
        positive_weights: The weight w of each output [L], or one number for all.

    Shape: outputs [B, L] or [B]; targets of as many values, floating 0 and 1; losses [B].

    Example:
        >>> loss = WeightedBinaryCrossEntropy(3.0)
        >>> loss(torch.zeros(2, 1), torch.tensor([0.0, 1.0]))  # log 2 and 3 log 2
        tensor([0.6931, 2.0794])
    """

    def __init__(self, positive_weights: float | list[float]) -> None:
        if not isinstance(positive_weights, list):
            positive_weights = [positive_weights]
        key = "WeightedBinaryCrossEntropy.positive_weights"
        checked = torch.tensor(_checked(key, positive_weights))
        super().__init__(reduction="none", pos_weight=checked)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = super().forward(outputs, targets.reshape(outputs.shape))
        return losses.reshape(len(targets), -1).mean(1)


def _checked(key: str, weights: Sequence[float]) -> list[float]:
    """Returns weights that are at least 0, not all 0, and finite; else raises a ValueError."""
    values = [float(weight) for weight in weights]
    if not values or not all(0 <= value < float("inf") for value in values) or not any(values):
        raise ValueError(f"{key}: {weights}; they must be at least 0, finite, and not all 0")
    return values
