"""A second network common to all clients, which is trained beside each client's own.

A client's network and the common one, the *messenger*, are two parts of one module, `Joined`. Its
parameters are one row of values, first those of the client's network and then those of the
messenger, so that engines, states, messages, the ledger, checkpoints and families of networks are
what they are for any other module. The client's part is a client state; the messenger is the only
message.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax

from pfl.clients import Clients
from pfl.engines.objective import run_watched, watched_head
from pfl.errors import ConfigError
from pfl.method.features import require_classes
from pfl.method.local_training import Network, train_part
from pfl.method.partly_personal import PartlyPersonal
from pfl.models.adapters import Trainable
from pfl.models.classifier import Classifier, FirstOutputs, head_name
from pfl.models.family import Family
from pfl.parameters import refuse_computed


class Joined(nn.Module):
    """A client's own network and a messenger, which see the same samples.

    The outputs are those of the own network. In training, the *features* that an objective sees are
    the outputs of both, side by side; an evaluation runs the own network alone.

    Args:
        own: The client's network.
        messenger: The network that all clients have.
        compares_features: Whether the features that an objective sees have one number more, the
            mean squared distance of what the head of the own network gets from a trained linear map
            of what the messenger's gets. The map begins as the identity and belongs to the client.

    Example:
        >>> joined = Joined(nn.Linear(4, 3), nn.Linear(4, 3))
        >>> joined(torch.zeros(5, 4)).shape
        torch.Size([5, 3])
    """

    def __init__(
        self, own: nn.Module, messenger: nn.Module, compares_features: bool = False
    ) -> None:
        super().__init__()
        self.own = own
        self.messenger = messenger
        self.head = FirstOutputs(2)
        self.projection: nn.Linear | None = None
        if compares_features:
            self.projection = nn.Linear(head_width(messenger), head_width(own), bias=False)
            nn.init.eye_(self.projection.weight)
            self.projection.to(next(own.parameters()))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            scores: Tensor = self.own(x)
            return scores
        if self.projection is None:
            return self.side_by_side(self.own(x), self.messenger(x))
        mine = run_watched(self.own, head_name(self.own), partial(self.own, x))
        others = run_watched(self.messenger, head_name(self.messenger), partial(self.messenger, x))
        both = self._both(mine.outputs, others.outputs)
        away = mine.features - self.projection(others.features)
        apart = away.square().flatten(1).mean(1).view(-1, *[1] * (both.dim() - 1))
        apart = apart.expand(-1, 1, *both.shape[2:])  # methods refuse several places of a sample
        return self.head(torch.cat([both, apart], 1))

    @property
    def predictor(self) -> nn.Module:
        """What a client predicts with."""
        return self.own

    @property
    def given(self) -> nn.Module:
        """The client's network alone, without what the method adds to it."""
        return self.own

    def side_by_side(self, scores: Tensor, others: Tensor) -> Tensor:
        """Returns the scores of the own network, and shows an objective those of both."""
        outputs: Tensor = self.head(self._both(scores, others))
        return outputs

    def _both(self, scores: Tensor, others: Tensor) -> Tensor:
        if others.shape != scores.shape:
            raise ValueError(
                f"model.messenger: {type(self.messenger).__name__} gives outputs of shape "
                f"{list(others.shape[1:])} where {type(self.own).__name__} gives "
                f"{list(scores.shape[1:])}; both must have one for each class"
            )
        return torch.cat([scores, others], 1)


def head_width(network: nn.Module) -> int:
    """Returns how many features the head of a network gets.

    Raises:
        ConfigError: The head is no linear layer.
    """
    head = network.get_submodule(head_name(network))
    if not isinstance(head, nn.Linear):
        raise ConfigError(
            f"model.network: the head of {type(network).__name__} is a {type(head).__name__}; the "
            f"method compares features and needs a linear layer"
        )
    return head.in_features


def features_before(network: nn.Module, place: str, x: Tensor) -> tuple[Tensor, nn.Module]:
    """Returns what the head of a network gets for inputs x, and the head.

    Args:
        network: The network.
        place: Its `head_name`, which is known while the parameters are trained.
        x: The inputs.

    Raises:
        ConfigError: The output of the network is not that of its head.
    """
    with watched_head(network, place) as calls:
        outputs = network(x)
    if not calls or calls[-1][1] is not outputs:
        raise ConfigError(
            f"model.network: the output of {type(network).__name__} is not that of its last layer "
            f"{place!r}, whose input the method replaces; call the layer last"
        )
    (features,), _ = calls[-1]
    return features, network.get_submodule(place)


def own_network(network: nn.Module) -> nn.Module:
    """Returns what a client predicts with, which may be a part of a network with a messenger."""
    if isinstance(network, Joined):
        return network.predictor
    return network


class MessengerMethod(PartlyPersonal):
    """Clients keep networks of their own, and share a messenger, which the server averages.

    m <- sum_S n_i m_i / sum_S n_i, with the messengers m_i after the local steps, in which a client
    trains its own network u_i and m_i on the same mini-batches. A subclass writes how:
    `client_update` starts at `personalized(clients)` and returns `keep_and_send(clients, v)`.
    The `features` of an objective are the outputs of u_i and of m_i; `both_outputs` parts them.

    Evaluated: u_i. Personal: u_i, and the running statistics of both networks. Cost: the messenger
    down and up. Client state: u_i (the state `head`, a name that `PartlyPersonal` gives). A
    newcomer has the initial u_i. `pfl export --global` writes the messenger.

    Args:
        network: The clients' network, or a `Family` of networks.
        messenger: The network that all clients have besides, a small one perhaps. null: one as the
            clients' network, or as the first of a family.
        trainable: What is trained of the clients' networks, and so of a messenger that is as these.
            A messenger that is given is trained as it is.

    Example:
        >>> from pfl.models import MLP
        >>> method = MessengerMethod(MLP(64, (32,)), messenger=MLP(64, (8,)))
        >>> method.download().nbytes // 4  # the messenger, 64 * 8 + 8 + 8 * 10 + 10
        610
    """

    def __init__(
        self,
        network: Network,
        *,
        messenger: Classifier | nn.Module | None = None,
        trainable: Trainable | str | None = None,
        **kwargs: Any,
    ) -> None:
        both = joined(network, messenger, trainable, self.joint)
        super().__init__(both, personal=_is_own, buffers="local", **kwargs)

    @staticmethod
    def joint(own: nn.Module, messenger: nn.Module) -> Joined:
        """Returns one module of a client's network and a messenger."""
        return Joined(own, messenger)

    def check_setup(self) -> None:
        require_classes(self)

    def parameters_personalized(self, clients: Clients, w: Tensor) -> Tensor:
        own = [layer.size for layer in self.space.layers if layer.name.startswith("own.")]
        return torch.full((len(clients),), sum(own))

    def shared_network(self) -> nn.Module:
        """Returns a copy of the messenger with its newest values."""
        network = copy.deepcopy(self.network.get_submodule("messenger")).eval()
        prefix = "messenger."
        for name, values in self.space.split(self.global_model).items():
            if name.startswith(prefix):
                network.get_parameter(name.removeprefix(prefix)).data = values.clone()
        return network


def joined(
    network: Network,
    messenger: nn.Module | None,
    trainable: Trainable | str | None,
    joint: Callable[[nn.Module, nn.Module], Joined],
) -> Network:
    """Returns a network, or each network of a family, with a copy of the messenger beside it.

    Raises:
        ConfigError: A network has nothing of what is to be trained, or cannot be copied.
    """
    if isinstance(network, Joined):  # a member's network, with the values of the run
        return network
    if messenger is not None:
        refuse_computed(messenger)
    if not isinstance(network, Family):
        refuse_computed(network)
        train_part(network, trainable)
        return joint(network, copy.deepcopy(messenger or network))
    family = copy.copy(network)
    family.networks = {}
    for name, one in network.networks.items():
        refuse_computed(one)
        train_part(one, trainable)
        messenger = messenger or one
        family.networks[name] = joint(one, copy.deepcopy(messenger))
    return family


def both_outputs(features: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the outputs of the own network and of the messenger, from an objective's features."""
    mine, others = features.tensor_split(2, 1)
    return mine, others


def divergence(scores: Tensor, held: Tensor) -> Tensor:
    """Returns KL(softmax(held) || softmax(scores)) of each sample, [n], where `held` is given."""
    target = log_softmax(held.detach(), 1)
    return kl_div(log_softmax(scores, 1), target, reduction="none", log_target=True).sum(1)


def _is_own(name: str, module: nn.Module) -> bool:
    """Returns whether a parameter belongs to the client's own network."""
    return not name.startswith("messenger.")
