"""The base of methods whose clients train a part of the server's network: fewer units a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pfl.clients import Clients
from pfl.communication import Message, ToSend, dense
from pfl.engines.objective import BatchSamples, Objective
from pfl.errors import ConfigError
from pfl.method.algorithm import FederatedAlgorithm
from pfl.method.features import number_of_classes
from pfl.method.labels import label_counts
from pfl.method.local_training import Network
from pfl.parameters import Layer


def nested_places(wide: Sequence[Layer], narrow: Sequence[Layer], shift: int = 0) -> Tensor:
    """Returns where in a wide network the values of a narrow one lie, int64 [P of the narrow].

    The narrow network has the same layers with fewer units: of the S units of a layer its s units
    are shift, shift + 1, ..., shift + s - 1, counted modulo S. The inputs of a layer are the units
    of the layer before, or several values of each of these where features were made flat.

    Args:
        wide: The parameters of the wide network, in their order.
        narrow: Those of the narrow network.
        shift: The first unit.

    Raises:
        ConfigError: The layers do not correspond.

    Example:
        >>> from torch import nn
        >>> from pfl.parameters import ParameterSpace
        >>> layers = [ParameterSpace(nn.Linear(2, units)).layers for units in (3, 2)]
        >>> nested_places(*layers, shift=2)  # units 2 and 0, with two weights each, and biases
        tensor([4, 5, 0, 1, 8, 6])
    """
    return _nested_places(tuple(wide), tuple(narrow), shift)


@lru_cache(maxsize=8)  # of the networks of a round; each is as long as its network
def _nested_places(wide: tuple[Layer, ...], narrow: tuple[Layer, ...], shift: int) -> Tensor:
    if len(wide) != len(narrow):
        raise ConfigError(
            f"model.network: the server's network has {len(wide)} parameters and a client's "
            f"{len(narrow)}; they must have the same layers, with fewer units"
        )
    places = []
    units = torch.arange(0)  # of the layer before, and how many it has in the wide network
    total = 0
    for large, small in zip(wide, narrow, strict=True):
        axes = []
        for axis, (size, own) in enumerate(zip(large.shape, small.shape, strict=False)):
            if own == size:
                at = torch.arange(size)
            elif axis == 0 and len(large.shape) == 1 and (size, own) == (total, len(units)):
                at = units  # biases and scales belong to the units of their layer
            elif axis == 0 and own < size:
                at = (shift + torch.arange(own)) % size
            elif axis == 1 and total and size % total == 0 and own == size // total * len(units):
                values = size // total  # of each unit of the layer before
                at = (units[:, None] * values + torch.arange(values)).flatten()
            else:
                raise _unlike(large, small)
            axes.append(at)
        if len(large.shape) != len(small.shape):
            raise _unlike(large, small)
        index = torch.zeros(1, dtype=torch.int64)
        for at, size in zip(axes, large.shape, strict=True):
            index = (index[:, None] * size + at).flatten()
        places.append(large.start + index)
        if len(large.shape) > 1:
            units = axes[0]
            total = large.shape[0]
    return torch.cat(places)


def _unlike(large: Layer, small: Layer) -> ConfigError:
    return ConfigError(
        f"model.network: {small.name} of a client's network has the shape {list(small.shape)}, "
        f"which is no part of {large.name} {list(large.shape)} of the server's; give networks with "
        f"the same layers and fewer units, the widest one first"
    )


class NestedNetworks(FederatedAlgorithm):
    """Clients train parts of the server's network, and the server averages each value by itself.

    w_i = w^t at the places P_i;  w_i <- w_i - η g_i(w_i), local steps;
    w^{t+1}[p] = the mean of w_i[p] over the clients of the round whose parts have p, and w^t[p]
    where none has it.

    The networks are a `pfl.models.Family`, the widest one first, which is that of the server. A
    subclass says with `first_unit` which units the parts have.

    Args:
        mask_classes: Whether scores of classes that a client does not have are set to 0 in its
            loss, where a sample has one class.
    """

    has_personalized = True
    personalization_penalty = None

    def __init__(
        self,
        network: Network,
        *,
        weighting: Literal["samples", "uniform"] = "uniform",
        mask_classes: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, weighting=weighting, **kwargs)
        self.mask_classes = mask_classes
        self.classes: int | None = None

    def first_unit(self, round_index: int) -> int:
        """Returns the first unit of each layer that the parts have in a round (from 0)."""
        return 0

    def check_setup(self) -> None:
        if self.problem_constant("has_labels"):
            self.classes = number_of_classes(self)
        for member in self.members:
            nested_places(self.space.layers, member.space.layers)

    def download(self) -> ToSend:
        """Returns w, where all clients have the server's network."""
        if self.family is None:
            return dense(self.global_model)
        return {}

    def download_for(self, ids: np.ndarray) -> ToSend:
        """Returns the clients' parts of w, where they have networks of their own."""
        if self.family is None:
            return {}
        layers = self.space.layers
        if len(ids):
            layers = self.members[int(self.kinds[ids[0]])].space.layers
        places = nested_places(self.space.layers, layers, self.first_unit(self.rounds))
        return dense(self.global_model[places].expand(len(ids), -1))

    evaluation_for = download_for

    def client_update(self, clients: Clients, w: Tensor) -> Message:
        objective = None
        if self.mask_classes and self.classes:
            has = label_counts(clients, self.classes, w).sign()
            objective = Objective(self._masked_losses, {"has": has})
        v = self.local_sgd(clients, w, objective=objective)
        message = dense(v)
        if self.family is not None:
            shift = self.first_unit(clients.round)
            message.places = nested_places(self.server_layers, self.space.layers, shift)
        return message

    def personalized(self, clients: Clients) -> Tensor:
        return clients.received["w"].expand(len(clients), -1)

    def newcomer(self, clients: Clients) -> Tensor:
        return self.personalized(clients)

    def _masked_losses(
        self, outputs: Tensor, features: Tensor, samples: BatchSamples, own: Mapping[str, Any]
    ) -> Tensor:
        """Returns the loss of each sample, [n], with scores 0 of classes that the client lacks."""
        return self.oracle.losses(outputs * own["has"], samples.targets)
