"""Running statistics, such as BatchNorm's, belong to a model and go where its parameters go.

With `buffers: average` the statistics of the global model are sent with the message "w", and the
clients send the statistics of their models with their messages; a model that a client keeps has
statistics of its own. With `buffers: local` no statistics are sent, and every client keeps those of
the model that it trained last.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pfl.clients import Clients
from pfl.communication import Message, dense
from pfl.errors import ConfigError

if TYPE_CHECKING:
    from pfl.method.algorithm import FederatedAlgorithm


def travel(method: FederatedAlgorithm) -> bool:
    """Returns whether models are sent with their statistics."""
    return method.oracle.buffers.size > 0 and method.buffer_policy == "average"


def send_down(method: FederatedAlgorithm, messages: dict[str, Message]) -> dict[str, Message]:
    """Returns the messages to all clients with the statistics of the global model, "w"."""
    if "w" not in messages or not travel(method):
        return messages
    return {**messages, "buffers": _message(method, method.global_buffers)}


def receive(method: FederatedAlgorithm, clients: Clients) -> None:
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


def keep_and_send(
    method: FederatedAlgorithm, clients: Clients, messages: dict[str, Message]
) -> dict[str, Message]:
    """Keeps the statistics of models that clients keep; returns the messages with what travels.

    Raises:
        ConfigError: The clients have trained a model without statistics.
    """
    if clients.buffers is None and method.oracle.buffers.size:
        name = type(method).__name__
        raise ConfigError(
            f'model.buffers: average; {name} sends its clients no model "w" with statistics of '
            f"{type(method.network).__name__}; use local"
        )
    known = "buffers" in clients.received or "buffers" in clients.state
    if "buffers" in clients.state and clients.buffers is not None:
        clients.state["buffers"] = clients.buffers
    if messages and known and clients.buffers is not None and travel(method):
        return {"buffers": _message(method, clients.buffers), **messages}
    return messages


def of_model(kind: str, method: FederatedAlgorithm, clients: Clients) -> Clients:
    """Returns the clients with the statistics of their "global" or "personalized" models."""
    if kind == "personalized":
        return clients.personal if method.personal_buffers else clients
    if travel(method):
        return replace(clients, buffers=method.global_buffers.repeat(len(clients), 1))
    return replace(clients, buffers=clients.state.get("buffers"))


def _message(method: FederatedAlgorithm, statistics: Tensor) -> Message:
    return Message(statistics, 0) if method.pooled else dense(statistics)
