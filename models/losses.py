"""Losses with one value per sample."""

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
