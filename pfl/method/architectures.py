"""What travels where clients have networks of their own, as a stage of the run.

Who may average what follows from what is sent:

- A message whose width depends on no network, such as class means of features, is summed as it is.
- A message with a mask, such as a common head, travels as the values under the mask, of which every
  network has as many; each reader puts them where its own network has them.
- A message with `places` says where in the server's model its values lie. The server gets the mean
  of each value over the clients that have it; a value that nobody of the round has stays.
- A model without bytes, such as the one with which clients begin, is what each network has.
- Whole models of networks that differ are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from pfl.clients import Clients
from pfl.communication import Message, by_name
from pfl.errors import ConfigError
from pfl.method.hooks import Method
from pfl.parameters import ParameterSpace
from pfl.rounds.loop import FederatedLoop
from pfl.stages.stage import Messages, Place, Served, Stage
from pfl.stages.statistics import RunningStatistics

SHARE = " share"  # after the name of a message with places: the share of clients with each value
FITTING = (
    "FedProto, FedTGP, FedDistill, FML, FedKD, FedMRL, FedMD, FedDF, FedGen with shared: head, "
    "FedGH, LGFedAvg, LocalTrain, HeteroFL or FedRolex"
)


class Architectures(Stage):
    """Brings messages of different networks to one width, and the means back.

    Args:
        server: The method of the run.
        members: The methods of the clients, by the number of the network.
        names: The networks' names.
        kinds: The number of each client's network, int64.
        statistics: Keeps the running statistics of the clients of each network that has some.
    """

    place: ClassVar[Place] = Place.MODEL

    def __init__(
        self,
        server: Method,
        members: Sequence[Method],
        names: Sequence[str],
        kinds: np.ndarray,
        statistics: Mapping[int, RunningStatistics],
    ) -> None:
        self._server = server
        self._members = members
        self._names = names
        self._kinds = kinds
        self._statistics = statistics
        self._masks: dict[str, list[Tensor]] = {}  # by message: each network's, then the server's
        self._own: dict[str, list[Tensor]] = {}  # by message without bytes: what each network has
        self._spread: set[str] = set()  # messages with places
        self._widths: dict[str, int] = {}
        self._alike = all(member.follows for member in members)

    @property
    def key(self) -> str:
        return "model.network: Family"

    def set_up(self, served: Served) -> None:
        served.refuse_pooled(self.key)
        everyone = [*self._members, self._server]
        sent = [by_name(method.download()) for method in everyone]
        for name in sent[0]:
            self._check_down(name, [messages[name] for messages in sent])

    def _check_down(self, name: str, messages: list[Message]) -> None:
        """Notes the masks of a message that the server sends, or refuses it."""
        everyone = [*self._members, self._server]
        masks = [message.mask for message in messages]
        if all(mask is not None for mask in masks):
            known = [mask for mask in masks if mask is not None]
            pairs = list(zip(everyone, known, strict=True))
            parts = [_shapes(method.space, mask) for method, mask in pairs]
            for number, part in enumerate(parts):
                if part != parts[-1]:
                    raise ConfigError(
                        f"{self.key}: {type(self._server).__name__} shares a part of the model "
                        f"that has the shapes {_words(parts[-1])} in the network "
                        f"{self._names[0]!r} and {_words(part)} in {self._names[number]!r}; give "
                        f"Family.features, or networks that agree there"
                    )
            self._masks[name] = known
            return
        if not self._alike and all(
            self._is_known(*pair) for pair in zip(everyone, messages, strict=True)
        ):
            self._own[name] = [message.values.clone() for message in messages]
            return
        widths = {message.values.shape[-1] for message in messages}
        if len(widths) > 1 or self._is_model(name, messages[0].values, self._members[0]):
            raise self._refused(name)

    def _is_known(self, method: Method, message: Message) -> bool:
        """Returns whether a message is a model without bytes, as that with which clients begin."""
        nothing = isinstance(message.nbytes, int) and message.nbytes == 0
        return nothing and message.values.shape[-1] == method.space.size

    def _is_model(self, name: str, values: Tensor, member: Method) -> bool:
        """Returns whether a message is a whole model of a network that not all have."""
        return name == "w" and values.shape[-1] == member.space.size and not self._alike

    def _refused(self, name: str) -> ConfigError:
        networks = ", ".join(self._names)
        return ConfigError(
            f"{self.key}: the clients have the networks {networks}, and "
            f"{type(self._server).__name__} sends a message {name!r} whose values are other ones "
            f"in each; take {FITTING}, or networks with the same layers"
        )

    # ---- messages -----------------------------------------------------------------------------

    def down(self, messages: Messages) -> Messages:
        return {name: self._narrow(name, message, -1) for name, message in messages.items()}

    def received(self, clients: Clients) -> None:
        kind = self._kind(clients)
        size = self._members[kind].space.size
        received = {}
        for name, values in clients.received.items():
            if name in self._masks:
                values = _wide(values, self._masks[name][kind])
            if name in self._own:
                values = self._own[name][kind]
            if name == "w" and values.shape[-1] not in (0, size):
                raise self._refused(name)
            received[name] = values
        clients.received = received
        if kind in self._statistics:
            self._statistics[kind].received(clients)

    def sent(self, clients: Clients, messages: Messages) -> Messages:
        kind = self._kind(clients)
        if kind in self._statistics:
            messages = self._statistics[kind].sent(clients, messages)
        made: dict[str, Message] = {}
        for name, message in messages.items():
            if message.places is not None:
                made |= self._scattered(name, message)
                continue
            made[name] = self._narrow(name, message, kind)
            width = made[name].values.shape[-1]
            known = self._widths.setdefault(name, width)
            unlike = name not in self._masks
            if known != width or (
                unlike and self._is_model(name, message.values, self._members[kind])
            ):
                raise self._refused(name)
        return made

    def keep(self, clients: Clients) -> None:
        kind = self._kind(clients)
        if kind in self._statistics:
            self._statistics[kind].keep(clients)

    def read(self, means: dict[str, Tensor], metrics: dict[str, float]) -> None:
        for name, masks in self._masks.items():
            if name in means and len(means[name]) == int(masks[-1].sum()):
                means[name] = _wide(means[name], masks[-1])
        for name in self._spread:
            if name in means:
                share = means.pop(name + SHARE)
                mean = means[name] / share
                means[name] = torch.where(share > 0, mean, self._server.global_model)

    def _kind(self, clients: Clients) -> int:
        """Returns the number of the network that these clients have; 0 if there are none."""
        if not len(clients):
            return 0
        return int(self._kinds[clients.ids[0]])

    def _narrow(self, name: str, message: Message, kind: int) -> Message:
        """Returns a message as the values under its mask, if it has one."""
        if name not in self._masks or message.mask is None:
            return message
        return replace(message, values=message.values[..., self._masks[name][kind]], mask=None)

    def _scattered(self, name: str, message: Message) -> dict[str, Message]:
        """Returns a message with places as one of the server's width, and which values it has."""
        self._spread.add(name)
        places = message.places
        assert places is not None
        rows = len(message.values)
        has = message.values.new_zeros(self._server.space.size)
        has[places] = 1
        wide = message.values.new_zeros(rows, len(has))
        wide[:, places] = message.values
        return {
            name: replace(message, values=wide, places=None),
            name + SHARE: Message(has.expand(rows, -1), 0, weighting=message.weighting),
        }


def architectures_of(method: Method, loop: FederatedLoop) -> Architectures:
    """Returns the stage for a run whose clients have networks of their own.

    Raises:
        ConfigError: The run has something that needs one network.
    """
    assert method.family is not None
    key = "model.network: Family"
    names = method.family.names
    everyone = [method, *method.members]
    statistics: dict[int, RunningStatistics] = {}
    if any(one.oracle.buffers.size for one in everyone):
        for name, member in zip(names, method.members, strict=True):
            kind = type(method).__name__
            if member.oracle.buffers.size and (method.has_global or method.sends_statistics):
                raise ConfigError(
                    f"{key}: the network {name!r} has running statistics, and {kind} has a global "
                    f"model that other networks share, which has none; take GroupNorm, as norm: "
                    f"group, or a method without a global model, such as FedProto"
                )
        kept = [_own_statistics(one) for one in everyone]
        for one, own in zip(everyone, kept, strict=True):
            for state, initial in own.states().items():  # a network without any has 0 values
                one.states.declare(state, initial, rounded=own.rounded)
        for number, (member, own) in enumerate(zip(method.members, kept[1:], strict=True)):
            if member.oracle.buffers.size:
                statistics[number] = own
    return Architectures(method, method.members, names, method.kinds, statistics)


def _own_statistics(method: Method) -> RunningStatistics:
    """Returns the stage that keeps the statistics of the models that a network's clients train."""
    return RunningStatistics(
        method.network,
        method.space,
        method.oracle,
        travel=False,
        kept=True,
        personal=method.personal_buffers,
    )


def _shapes(space: ParameterSpace, mask: Tensor | None = None) -> list[tuple[int, ...]]:
    """Returns the shapes of a network's parameters, or of those under a mask, in their order."""
    layers = space.layers
    if mask is not None:
        layers = [layer for layer in layers if bool(mask[layer.span].any())]
    return [layer.shape for layer in layers]


def _words(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join("x".join(map(str, shape)) for shape in shapes)


def _wide(values: Tensor, mask: Tensor) -> Tensor:
    """Returns values [..., K] where a mask, bool [P], has its K places, and zeros elsewhere."""
    if values.shape[-1] == len(mask):  # they have been put there already
        return values
    wide = values.new_zeros(*values.shape[:-1], len(mask))
    wide[..., mask] = values
    return wide
