"""Losses of one value per sample."""

from torch import Tensor, nn


class HalfSquaredError(nn.Module):
    """1/2 |output - target|^2 of each sample, summed over its outputs.

    The objective of a client is then 1/(2n) |Xw - y|^2, the convention of most theory: its Hessian
    is X'X/n.

    Shape:
        Output: [B, ...]; target: as many values a sample, [B, ...]. Loss: [B].
    """

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the losses."""
        residuals = outputs.reshape(targets.shape) - targets
        return 0.5 * residuals.square().reshape(len(targets), -1).sum(1)
