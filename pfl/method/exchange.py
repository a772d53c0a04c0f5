"""The client's half of a round: what clients receive, what they do with it, and what they send."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pfl.clients import Clients
from pfl.communication import by_name
from pfl.method import checks
from pfl.method.hooks import Method
from pfl.stages.stage import Messages, Stage


def receive(clients: Clients, common: Messages, own: Messages) -> int | Tensor:
    """Gives clients what they receive; returns each client's bytes.

    Args:
        clients: C clients.
        common: The messages [K] to all clients, by name.
        own: The messages [C, K] to each of these clients alone, by name.
    """
    messages = {**common, **own}
    clients.received = {name: message.values for name, message in messages.items()}
    clients.personal_messages = frozenset(own)
    return number_of_bytes(messages)


def number_of_bytes(messages: Messages) -> int | Tensor:
    """Returns the bytes of messages together, of each client."""
    return sum(message.nbytes for message in messages.values())


def begin(method: Method, stages: Sequence[Stage], clients: Clients) -> None:
    """Gives clients that have received everything their states, unless they have them, and more.

    A stage may add what belongs to the model that a client has received or kept.
    """
    clients.dtype = method.space.vector.dtype
    if method.states.declared and not clients.state:
        method.states.read(clients)
    for stage in stages:
        stage.received(clients)


def train_clients(method: Method, stages: Sequence[Stage], clients: Clients) -> Messages:
    """Trains clients for a round; returns what they send, and leaves their states in `clients`.

    Args:
        method: The method. Of what the server has, nothing but `clients.received` is read.
        stages: What acts on the messages.
        clients: C clients with their states, running statistics and received messages.
    """
    w = clients.received.get("w")
    if w is None:
        w = torch.empty(0)
    returned = method.client_update(clients, w)
    shape = (len(clients), method.space.size)
    vector = method.space.vector
    if not (
        isinstance(returned, torch.Tensor)
        and returned.shape == shape
        and returned.dtype == vector.dtype
    ):
        checks.check_messages(method, returned, clients, "client_update")
    sent: Messages = by_name(returned)
    for stage in stages:
        sent = stage.sent(clients, sent)
    store = method.states.store
    if clients.state or store.names:
        checks.check_states(method, clients)
    for name in store.names:
        clients.state[name] = store.rounded(name, clients.state[name])
    return sent


def send_first(method: Method, stages: Sequence[Stage], clients: Clients) -> Messages:
    """Returns what clients with their states send before they receive anything."""
    sent: Messages = by_name(method.first_upload(clients))
    for stage in stages:
        sent = stage.sent(clients, sent)
    return sent
