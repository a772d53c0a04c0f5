"""The base class of all networks, and helpers to build them."""

import copy
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn


class Classifier(nn.Module):
    """A network of a body, which computes features, and a linear head, which computes scores.

    The names of the parameters are the same for every network, so that a method can personalize
    some layers only: `head.*` is the last layer, `body.*` are all layers before the head. The
    constructor of a network raises a ValueError if an argument is out of its range, or does not fit
    another one.

    Arguments of one name mean the same in all networks: `num_classes`, the number of scores;
    `in_channels`, 1 for gray images, 3 for color; `image_size`, the side of square images; `norm`,
    "group" for GroupNorm or "batch" for BatchNorm, whose running statistics are buffers;
    `norm_groups`, the number of groups of every GroupNorm, which divides the channels of a layer;
    `small_images`, whether images are of 32x32 or so; `hidden`, the units of the hidden layers;
    `in_features`, the values of a sample, 784 for 28x28 gray images; `dropout`, the share of
    features that training sets to zero.

    Args:
        body: A module that maps inputs [B, ...] to features [B, F].
        head: A linear layer that maps features [B, F] to scores [B, num_classes].

    Shape: input that of the body, for networks with an `image_size` [B, in_channels, image_size,
    image_size]; output scores [B, num_classes], before the softmax.

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
        return self.head(self.body(x))


class FirstOutputs(nn.Module):
    """The head of a network of several: of what they give side by side, the outputs of the first.

    Args:
        count: How many there are, all of them with as many outputs.

    Shape: input [B, count * K, ...], output [B, K, ...].
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, side_by_side: Tensor) -> Tensor:
        return side_by_side[:, : side_by_side.shape[1] // self.count]


def head_name(network: nn.Module) -> str:
    """Returns the name of a network's head, "" for a network that is a single layer.

    The head is the module `head` of the network or, where there is none, the last module that has
    trainable parameters of its own, in the order in which the network lists its modules.

    Example:
        >>> layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Flatten()]
        >>> head_name(nn.Sequential(*layers))
        '2'
    """
    head = getattr(network, "head", None)
    if isinstance(head, FirstOutputs):
        return "head"
    if isinstance(head, nn.Module) and any(True for _ in head.parameters()):
        return "head"
    modules = network.named_modules(remove_duplicate=False)
    own = ((name, module.parameters(recurse=False)) for name, module in modules)
    return [name for name, parameters in own if any(p.requires_grad for p in parameters)][-1]


def without_head(network: nn.Module) -> tuple[nn.Module, nn.Linear]:
    """Returns a copy of a network without its head, which gives the features, and the head.

    Raises:
        ValueError: The head is no linear layer, or something comes after it.

    Example:
        >>> body, head = without_head(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
        >>> body, head.in_features
        (Sequential(
          (0): Linear(in_features=3, out_features=4, bias=True)
          (1): Tanh()
          (2): Identity()
        ), 4)
    """
    frozen = {id(p): p for p in network.parameters() if not p.requires_grad}
    network = copy.deepcopy(network, frozen)  # which exist once
    place = head_name(network)
    head = network.get_submodule(place)
    if not isinstance(head, nn.Linear):
        kind = type(head).__name__
        raise ValueError(f"the head {place!r} is a {kind}; the method needs a linear layer")
    if not place:
        return nn.Identity(), head
    if isinstance(network, nn.Sequential) and network[-1] is not head:
        last = type(network[-1]).__name__
        raise ValueError(f"a {last} comes after the head {place!r}; call the layer last")
    replace_layer(network, place, nn.Identity())
    return network, head


def group_norm(network: str, groups: int, channels: int) -> nn.GroupNorm:
    """Returns a GroupNorm layer of the class `network`; a ValueError if the numbers do not fit."""
    if groups < 1 or channels % groups:
        raise ValueError(
            f"{network}.norm_groups: {groups}; it must divide {channels}, the channels of a layer"
        )
    return nn.GroupNorm(groups, channels)


def norm_maker(
    network: str, norm: str, groups: int, known: str = "'group' or 'batch'"
) -> Callable[[int], nn.Module]:
    """Returns a function from a number of channels to the layer that `norm` names."""
    if norm not in ("group", "batch"):
        raise ValueError(f"{network}.norm: {norm!r}; it must be {known}")
    return nn.BatchNorm2d if norm == "batch" else partial(group_norm, network, groups)


def draw_convolutions(network: nn.Module) -> None:
    """Draws the weights of convolutions from He's normal distribution (fan out); biases are 0."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def replace_layer(network: nn.Module, path: str, layer: nn.Module) -> None:
    """Puts a layer in the place of the one that a network calls `path`, such as "body.conv1"."""
    parent, _, name = path.rpartition(".")
    setattr(network.get_submodule(parent), name, layer)
