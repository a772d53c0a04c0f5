"""The form that all networks here share."""

from torch import Tensor, nn


class Classifier(nn.Module):
    """A body that turns a sample into features, and a linear head that turns these into scores.

    Methods that personalize some layers only can name them in the same way for every network:
    ``head.*`` is the last layer, ``body.*`` is everything before it.

    Args:
        body: Maps [B, ...] to features [B, F].
        head: Maps features to scores, one for each class.

    Shape:
        Input: what the body takes. Output: [B, num_classes], before the softmax.
    """

    def __init__(self, body: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores."""
        return self.head(self.body(x))


def pooled_size(network: str, image_size: int, padding: int) -> int:
    """Return the side of an image after two rounds of a 5x5 convolution and 2x2 pooling.

    Raises:
        ValueError: Nothing is left of the image.
    """
    size = image_size
    for _ in range(2):
        size = (size + 2 * padding - 4) // 2
    if size < 1:
        # Backwards from a side of 1: pooling halves, a convolution takes 4 - 2 padding.
        least = 2 * (2 + 4 - 2 * padding) + 4 - 2 * padding
        raise ValueError(
            f"image_size={image_size} is too small for {network}; the least is {least}"
        )
    return size


def group_norm(groups: int, channels: int) -> nn.GroupNorm:
    """Return a GroupNorm.

    Raises:
        ValueError: ``groups`` does not divide ``channels``.
    """
    if groups < 1 or channels % groups:
        raise ValueError(f"norm_groups={groups} must divide the {channels} channels of a layer")
    return nn.GroupNorm(groups, channels)
