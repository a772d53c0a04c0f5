"""The base class of all networks, and helpers to build them."""

from torch import Tensor, nn


class Classifier(nn.Module):
    """A network of a body, which computes features, and a linear head, which computes scores.

    The names of the parameters are the same for every network, so that a method can personalize
    some layers only: `head.*` is the last layer, `body.*` are all layers before the head. The
    constructor of a network raises a ValueError if an argument is out of its range, or does not fit
    another one.

    Args:
        body: A module that maps inputs [B, ...] to features [B, F].
        head: A linear layer that maps features [B, F] to scores [B, num_classes].

    Shape:
        Input: that of the body. Output: scores [B, num_classes], before the softmax.

    Example:
        >>> network = Classifier(torch.nn.Flatten(), torch.nn.Linear(12, 3))
        >>> network(torch.zeros(5, 3, 4)).shape, [name for name, _ in network.named_parameters()]
        (torch.Size([5, 3]), ['head.weight', 'head.bias'])
    """

    def __init__(self, body: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Returns the scores [B, num_classes] of inputs `x` [B, ...]."""
        return self.head(self.body(x))


def group_norm(network: str, groups: int, channels: int) -> nn.GroupNorm:
    """Returns a GroupNorm layer.

    Args:
        network: The class of the network, for the message of an error.
        groups: The number of groups.
        channels: The number of channels.

    Raises:
        ValueError: `groups` does not divide `channels`.
    """
    if groups < 1 or channels % groups:
        raise ValueError(
            f"{network}.norm_groups: {groups}; it must divide {channels}, the channels of a layer"
        )
    return nn.GroupNorm(groups, channels)


def replace_layer(network: nn.Module, path: str, layer: nn.Module) -> None:
    """Puts a layer in the place of the one that a network calls `path`, such as "body.conv1"."""
    parent, _, name = path.rpartition(".")
    setattr(network.get_submodule(parent), name, layer)
