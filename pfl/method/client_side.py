"""The client's half of a round: what C clients do with what they have received."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pfl.clients import Clients
from pfl.communication import Message, dense
from pfl.method import checks
from pfl.method.sides import on_side

if TYPE_CHECKING:
    from pfl.method.algorithm import FederatedAlgorithm


def received_model(clients: Clients) -> Tensor:
    """Returns the message "w", [P] or [C, P]; an empty tensor if the server sends none."""
    return clients.received.get("w", torch.empty(0))


def train_clients(method: FederatedAlgorithm, clients: Clients) -> dict[str, Message]:
    """Trains clients for a round; returns what they send, and leaves their states in `clients`.

    Args:
        method: The method. Of what the server has, nothing but `clients.received` is read.
        clients: C clients with their states, running statistics and received messages.
    """
    w = received_model(clients)
    with on_side("client", "client_update"), guarded(method, clients):
        sent = method.client_update(clients, w)
    messages = checks.messages(method, sent, clients)
    checks.check_declared(method, clients.state)
    if clients.buffers is not None:
        if method.buffer_policy == "average":
            messages["buffers"] = dense(clients.buffers)
        else:
            clients.state["buffers"] = clients.buffers
    for name in method.states.store.names:
        clients.state[name] = method.states.rounded(name, clients.state[name])
    return messages


def first_messages(method: FederatedAlgorithm, clients: Clients) -> dict[str, Message]:
    """Returns what clients with their states send before they receive anything."""
    with on_side("client", "first_upload"), guarded(method, clients):
        sent = method.first_upload(clients)
    return checks.messages(method, sent, clients, "first_upload")


def guarded(method: FederatedAlgorithm, clients: Clients):  # type: ignore[no-untyped-def]
    """Returns a context in which the method's code must not change what other clients read."""
    names = {f"clients.received[{name!r}]": value for name, value in clients.received.items()}
    if "w" in clients.received:
        names["w"] = names.pop("clients.received['w']")
    own = {f"clients.received[{name!r}]" for name in clients.personal_messages}
    shared = {name: value for name, value in names.items() if name not in own}
    return method.oracle.guard(clients, lambda: {**shared, **method.shared_tensors()})
