"""The base of methods that share some layers of the network and leave the others to the clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pfl.clients import Clients
from pfl.communication import Message, masked
from pfl.errors import ConfigError, require
from pfl.method.algorithm import FederatedAlgorithm
from pfl.method.local_training import Network
from pfl.models.classifier import head_name
from pfl.parameters import ParameterSpace, replace_values_in, values_in

Part: TypeAlias = str | Sequence[str] | Callable[[str, nn.Module], bool]
"""A part of a network: "head", "body", shell patterns of names, or a function (name, module)."""


def select_part(network: nn.Module, space: ParameterSpace, part: Part, argument: str) -> Tensor:
    """Returns a mask, bool [P], of a part of a network.

    Args:
        network: The network.
        space: The map of the network's parameters.
        part: "head", all parameters of the network's head (`head_name`); "body", all others; a
            shell pattern of names; a list of these; or a function of a parameter's name and of the
            module that owns the parameter. A parameter that several layers share is one parameter,
            with the name and the owner that the network lists first; it belongs to the head if the
            head has it.
        argument: The argument that the error names.

    Raises:
        ConfigError: A pattern matches no parameter, or the function chooses none.

    Example:
        >>> network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> mask = select_part(network, ParameterSpace(network), "head", "model.personal")
        >>> int(mask.sum())  # 4 * 2 + 2
        10
    """
    mask = torch.zeros(space.size, dtype=torch.bool, device=space.vector.device)
    names = [layer.name for layer in space.layers]
    if callable(part):
        chosen = [n for n in names if part(n, network.get_submodule(n.rpartition(".")[0]))]
        if not chosen:
            raise ConfigError(
                f"{argument}: the function chooses none of what is trained, {', '.join(names)}"
            )
    elif part in ("head", "body"):
        # A network whose `head` is None has none: a language model predicts by its embedding.
        has_head = getattr(network, "head", network) is not None
        layers = network.get_submodule(head_name(network)).parameters() if has_head else ()
        head = {id(p) for p in layers}
        owned = zip(names, space.parameters_of(network), strict=True)
        chosen = [n for n, p in owned if (id(p) in head) == (part == "head")]
    elif isinstance(part, str):
        return space.mask([part], argument)
    else:
        for one in part:
            mask |= select_part(network, space, one, argument)
        return mask
    for layer in space.layers:
        mask[layer.span] = layer.name in chosen
    return mask


def require_part(name: str, part: Part, mask: Tensor) -> None:
    """Raises a ConfigError about a method's argument `name` unless a part leaves something over.

    Args:
        name: The argument, which the command line calls `model.<name>`.
        part: What was given for the argument.
        mask: The parameters in the part, bool [P].
    """
    holds = bool(mask.any()) and not bool(mask.all())
    shown = getattr(part, "__name__", part)
    require(name, shown, holds, "some of the parameters, and not all")


class PartlyPersonal(FederatedAlgorithm):
    """Clients share the body φ of the network, and each keeps a personal head h_i.

    The server sends φ and replaces it by the mean of the clients' bodies. A subclass writes how a
    client trains: `client_update` starts at `personalized(clients)` and returns
    `keep_and_send(clients, v)`. The personalized model of a client is (φ, h_i), with the initial
    head if it never took part. A body without a head predicts nothing, so there is no global model;
    `global_model` has φ and the initial head.

    Cost: the body down, the body up. Client state: h_i (`head`).

    Args:
        personal: The parameters that are personal: "head", the network's module `head` or, where
            there is none, its last layer with parameters; "body", all others; shell patterns of
            their names; or, from Python, a function of a parameter's name and of the module that
            owns it.

    Attributes:
        personal_part: Which of the P values are personal, bool [P].

    Example:
        >>> from pfl.models import MLP
        >>> method = PartlyPersonal(MLP(64, (8,)), personal="head")  # the head: 8 * 10 + 10
        >>> int(method.personal_part.sum()), method.download().nbytes // 4
        (90, 520)
    """

    has_global = False
    has_personalized = True
    personalization_penalty = None
    personal_part: Tensor

    def __init__(self, network: Network, *, personal: Part = "head", **kwargs: Any) -> None:
        super().__init__(network, server_optimizer=None, **kwargs)
        part = select_part(self.network, self.space, personal, "model.personal")
        require_part("personal", personal, part)
        self.add_constant("personal_part", part)
        self.add_client_state("head", self.first_head)

    def first_head(self) -> Tensor:
        """Returns the head of the global model, [H], which stays the initial one."""
        return self.global_model[self.personal_part]

    def download(self) -> Message | dict[str, Message]:
        return masked(self.global_model, ~self.personal_part)

    def keep_and_send(self, clients: Clients, v: Tensor) -> Message:
        """Keeps the heads of the models v [C, P] with the clients, and sends the bodies."""
        clients.state["head"] = values_in(self.personal_part, v)
        return masked(v, ~self.personal_part)

    def server_update(self, mean: dict[str, Tensor]) -> None:
        self.global_model.copy_(torch.where(self.personal_part, self.global_model, mean["w"]))

    def personalized(self, clients: Clients) -> Tensor:
        v = clients.received["w"].repeat(len(clients), 1)
        replace_values_in(self.personal_part, v, clients.state["head"])
        return v
