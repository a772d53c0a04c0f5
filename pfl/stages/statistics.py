"""Running statistics, such as BatchNorm's, belong to a model and go where its parameters go.

With `buffers: average` the statistics of the global model are sent with the message "w", and the
clients send the statistics of their models with their messages; a model that a client keeps has
statistics of its own. With `buffers: local` no statistics are sent, and every client keeps those of
the model that it trained last.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from pfl.clients import Clients
from pfl.communication import Message, dense
from pfl.engines.oracle import Oracle
from pfl.errors import ConfigError
from pfl.parameters import ParameterSpace
from pfl.stages.stage import Initial, Messages, Place, Served, Stage


class RunningStatistics(Stage):
    """The running statistics of a network that has some.

    Args:
        network: The network, whose statistics are those of the global model.
        space: The map between the network and its model.
        oracle: Knows which buffers of the network change.
        travel: Whether the statistics are sent with the models.
        kept: Whether each client keeps the statistics of the model that it trained last.
        personal: How the personalized model's own statistics begin, as
            `FederatedAlgorithm.personal_buffers`; None: it has none.
    """

    place: ClassVar[Place] = Place.MODEL
    rounded: ClassVar[bool] = False

    def __init__(
        self,
        network: nn.Module,
        space: ParameterSpace,
        oracle: Oracle,
        *,
        travel: bool,
        kept: bool,
        personal: Literal["initial", "received"] | None,
    ) -> None:
        self._network = network
        self._space = space
        self._oracle = oracle
        self._travel = travel
        self._kept = kept
        self._personal = personal
        self._pooled = False
        self._method = ""

    def set_up(self, served: Served) -> None:
        self._method = served.method
        self._pooled = served.pooled

    def states(self) -> dict[str, Initial]:
        states: dict[str, Initial] = {}
        if self._kept:
            states["buffers"] = self.of_global_model
        if self._personal == "initial":
            states["personal_buffers"] = self.of_global_model
        if self._personal == "received":
            states["personal_buffers"] = self.untrained
        return states

    def untrained(self) -> Tensor:
        """Returns NaN, which stands for the received model's statistics until training, [B]."""
        return torch.full_like(self.of_global_model(), torch.nan)

    def of_global_model(self) -> Tensor:
        """Returns the statistics of the global model, [B]."""
        return self._oracle.buffers.read(self._network, self._space.vector.detach())

    def down(self, messages: Messages) -> Messages:
        """Returns the messages to all clients with the statistics of the global model, "w"."""
        if "w" not in messages or not self._travel:
            return messages
        return {**messages, "buffers": self._message(self.of_global_model())}

    def received(self, clients: Clients) -> None:
        """Gives clients the statistics of the model with which they begin.

        This is a model of their own that the server has sent, or the model that they keep, or the
        global model. Where none of them has any, the method sets `clients.buffers` itself.
        """
        clients.buffers = clients.state.get("buffers")
        received = clients.received.get("buffers")
        if "buffers" in clients.personal_messages:
            clients.buffers = clients.received["buffers"].clone()
        elif clients.buffers is None and received is not None:
            clients.buffers = received.repeat(len(clients), 1)
        own = clients.state.get("personal_buffers")
        if own is not None and clients.buffers is not None:  # NaN: no training yet
            clients.state["personal_buffers"] = torch.where(own.isnan(), clients.buffers, own)

    def sent(self, clients: Clients, messages: Messages) -> Messages:
        """Keeps the statistics of models that clients keep, and adds what travels.

        Raises:
            ConfigError: The clients have trained a model without statistics.
        """
        if clients.buffers is None:
            raise ConfigError(
                f'model.buffers: average; {self._method} sends its clients no model "w" with '
                f"statistics of {type(self._network).__name__}; use local"
            )
        known = "buffers" in clients.received or "buffers" in clients.state
        if "buffers" in clients.state:
            clients.state["buffers"] = clients.buffers
        if messages and known and self._travel:
            return {"buffers": self._message(clients.buffers), **messages}
        return messages

    def keep(self, clients: Clients) -> None:
        """Marks the personalized models' statistics of clients without samples as untrained."""
        if self._personal == "received":
            clients.state["personal_buffers"][clients.empty] = torch.nan

    def read(self, means: dict[str, Tensor], metrics: dict[str, float]) -> None:
        """Gives the global model the mean of its statistics."""
        if "buffers" in means:
            self._oracle.buffers.write(self._network, means.pop("buffers"))

    def _message(self, statistics: Tensor) -> Message:
        if self._pooled:
            return Message(statistics, 0)
        return dense(statistics)
