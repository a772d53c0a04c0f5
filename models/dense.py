"""Networks without convolutions."""

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from .classifier import Classifier


class LogisticRegression(Classifier):
    """Multinomial logistic regression: one linear layer.

    With weight decay the loss is strongly convex, the setting of most convergence theorems.

    Shape: input [B, ...] with `in_features` values per sample; output [B, num_classes].

    Example:
        >>> LogisticRegression(in_features=784)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(self, in_features: int, num_classes: int = 10, bias: bool = True) -> None:
        super().__init__(nn.Flatten(), nn.Linear(in_features, num_classes, bias=bias))


class LinearRegression(Classifier):
    """Linear regression: one linear layer with one output.

    Shape: input [B, ...] with `in_features` values per sample; output [B, 1].

    Example:
        >>> LinearRegression(in_features=3)(torch.zeros(2, 3)).shape
        torch.Size([2, 1])
    """

    def __init__(self, in_features: int, bias: bool = False) -> None:
        super().__init__(nn.Flatten(), nn.Linear(in_features, 1, bias=bias))


class MLP(Classifier):
    """Multilayer perceptron: linear layers with ReLU between them.

    `hidden=(200, 200)` with `in_features=784` is the network "2NN" of McMahan et al.,
    "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.

    Shape: input [B, ...] with `in_features` values per sample; output [B, num_classes].

    Example:
        >>> MLP(in_features=64, hidden=(32, 16), num_classes=3)(torch.zeros(2, 8, 8)).shape
        torch.Size([2, 3])
    """

    def __init__(
        self, in_features: int, hidden: Sequence[int] = (200,), num_classes: int = 10
    ) -> None:
        body: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
        width = in_features
        for i, next_width in enumerate(hidden, start=1):
            body[f"linear{i}"] = nn.Linear(width, next_width)
            body[f"relu{i}"] = nn.ReLU()
            width = next_width
        super().__init__(nn.Sequential(body), nn.Linear(width, num_classes))
