"""Networks with the layers that methods add to a given one: GPFL's valve and FedCP's policy."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize, relu

from .classifier import Classifier, without_head


def _vectors(features: Tensor) -> Tensor:
    """Returns features [n, K]; a ValueError if they have other axes."""
    if features.dim() != 2:
        raise ValueError(
            f"without its head it gives {list(features.shape[1:])} for a sample, and not K "
            f"features; call the layer last, as self.head(features)"
        )
    return features


# ---- GPFL ----------------------------------------------------------------------------------------


class FirstFeatures(nn.Module):
    """A head that reads the first of its inputs, as many as it has."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.own = layer

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.own(features[:, : self.own.in_features])
        return scores


class Valve(nn.Module):
    """GPFL's conditional valve: ReLU((1 + γ(c)) z + β(c)) of K features z and a condition c.

    γ and β are a linear layer, ReLU and LayerNorm each.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.gamma = self._layers(features)
        self.beta = self._layers(features)

    @staticmethod
    def _layers(features: int) -> nn.Module:
        return nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.LayerNorm(features))

    def forward(self, z: Tensor, condition: Tensor) -> Tensor:
        return relu(z * (1 + self.gamma(condition)) + self.beta(condition))


class WithValve(nn.Module):
    """A network with a valve between body and head, and a vector of K values for each class.

    Its outputs are the head's, of the features for the condition `personal`. What the head is given
    has after these the features for the condition `common`, and their cosines with the vectors.

    Args:
        network: A network whose head is a linear layer with K inputs.

    Raises:
        ValueError: The head is no linear layer, or something comes after it.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.body, head = without_head(network)
        self.head = FirstFeatures(head)
        self.valve = Valve(head.in_features).to(head.weight)
        self.vectors = nn.Parameter(torch.randn(head.weight.shape).to(head.weight))
        self.conditions = nn.ParameterDict(
            {name: torch.zeros(head.in_features).to(head.weight) for name in ("common", "personal")}
        )

    def forward(self, x: Tensor) -> Tensor:
        z = _vectors(self.body(x))
        personal = self.valve(z, self.conditions["personal"])
        common = self.valve(z, self.conditions["common"])
        cosines = linear(normalize(common), normalize(self.vectors))
        scores: Tensor = self.head(torch.cat([personal, common, cosines], 1))
        return scores

    @property
    def given(self) -> nn.Module:
        """The network that was given: the body and the head alone."""
        return Classifier(self.body, self.head.own)


# ---- FedCP ---------------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    """The sum of two linear heads: the first reads the first half of the inputs."""

    def __init__(self, own: nn.Linear, common: nn.Linear) -> None:
        super().__init__()
        self.own = own
        self.common = common

    def forward(self, parts: Tensor) -> Tensor:
        own, common = parts.tensor_split(2, 1)
        scores: Tensor = self.own(own) + self.common(common)
        return scores


class WithPolicy(nn.Module):
    """A network whose features are divided, for each sample, between two heads.

    The shares are a softmax of two values for each feature, which a linear layer, LayerNorm and
    ReLU compute of the features times the `context`.

    Args:
        network: A network whose head is a linear layer; both heads begin as this one.

    Raises:
        ValueError: The head is no linear layer, or something comes after it.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.body, head = without_head(network)
        _, copied = without_head(network)
        self.head = TwoHeads(head, copied)
        width = head.in_features
        layers = (nn.Linear(width, 2 * width), nn.LayerNorm(2 * width), nn.ReLU())
        self.policy = nn.Sequential(*layers).to(head.weight)
        self.context = nn.Parameter(torch.zeros(width).to(head.weight))

    def forward(self, x: Tensor) -> Tensor:
        z = _vectors(self.body(x))
        shares = self.policy(z * self.context).unflatten(1, (2, -1)).softmax(1)
        scores: Tensor = self.head((z[:, None] * shares).flatten(1))
        return scores

    @property
    def given(self) -> nn.Module:
        """The network that was given: the body and one head, as both are in the beginning."""
        return Classifier(self.body, self.head.own)
