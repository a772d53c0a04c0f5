"""The client's half of a round: what C clients do with what they have received."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pfl.clients import Clients
from pfl.communication import Message
from pfl.engines.private import PrivateEngine
from pfl.errors import ConfigError
from pfl.method import checks, statistics
from pfl.method.sides import on_side
from pfl.method.states import GRADIENTS

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
    with on_side("client", "client_update"), guard(method, clients):
        sent = method.client_update(clients, w)
    messages = checks.messages(method, sent, clients)
    if isinstance(method.oracle.engine, PrivateEngine):
        taken = method.oracle.engine.take_counts(clients.ids)
        clients.state[GRADIENTS] = clients.state[GRADIENTS] + taken.to(clients.state[GRADIENTS])
    checks.check_declared(method, clients.state)
    messages = statistics.keep_and_send(method, clients, messages)
    for name in method.states.store.names:
        clients.state[name] = method.states.store.rounded(name, clients.state[name])
    return messages


def first_messages(method: FederatedAlgorithm, clients: Clients) -> dict[str, Message]:
    """Returns what clients with their states send before they receive anything."""
    with on_side("client", "first_upload"), guard(method, clients):
        sent = method.first_upload(clients)
    messages = checks.messages(method, sent, clients, "first_upload")
    return statistics.keep_and_send(method, clients, messages)


def guard(method: FederatedAlgorithm, clients: Clients) -> AbstractContextManager[None]:
    """Returns a context in which the method's code must not change what other clients read."""
    names = {f"clients.received[{name!r}]": value for name, value in clients.received.items()}
    if "w" in clients.received:
        names["w"] = names.pop("clients.received['w']")
    own = {f"clients.received[{name!r}]" for name in clients.personal_messages}
    shared = {name: value for name, value in names.items() if name not in own}
    return method.oracle.engine.guard(clients, lambda: {**shared, **server_tensors(method)})


def server_tensors(method: FederatedAlgorithm) -> dict[str, Tensor]:
    """Returns the global model and the server states, by the names that a method has for them."""
    states = {f"self.{name}": state for name, state in method.named_buffers(recurse=False)}
    for name, module in method.named_children():
        if name in method.server_states:
            states |= {f"self.{name}.{key}": value for key, value in module.state_dict().items()}
    return {"self.global_model": method.space.vector.detach(), **states}


def check_group(
    method: FederatedAlgorithm, group: Clients, receive: Callable[[Clients], int | Tensor]
) -> None:
    """Refuses a method whose clients influence each other if they train in one group.

    Values, states and bytes of clients that train together must be the same as if each client
    trained alone.

    Args:
        method: The method.
        group: Some clients with their states; neither they nor the method's states change.
        receive: Gives clients what they receive.

    Raises:
        ConfigError: They are not.
    """

    def train(clients: Clients) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
        state = {name: rows.clone() for name, rows in clients.state.items()}
        trial = replace(clients, state=state)
        receive(trial)
        sent = train_clients(method, trial)
        values = {f"the message {name!r}": m.values for name, m in sent.items()}
        values |= {f"clients.state[{name!r}]": rows for name, rows in trial.state.items()}
        nbytes = {name: torch.as_tensor(m.nbytes).expand(len(trial)) for name, m in sent.items()}
        return values, {name: counts.tolist() for name, counts in nbytes.items()}

    each = [train(one) for one in group.groups(1)]  # first, so that an error names one client
    together, bytes_together = train(group)
    for row, client in enumerate(group.ids.tolist()):
        alone, bytes_alone = each[row]
        for name, values in alone.items():
            actual, expected = together[name][row], values[0]
            scale = float(expected.abs().max()) if expected.numel() else 0.0
            atol = (1e-3 if expected.dtype.itemsize < 8 else 1e-7) * (scale + 1e-6)
            if not torch.allclose(actual, expected, rtol=0, atol=atol, equal_nan=True):
                raise ConfigError(
                    f"model: {type(method).__name__}.client_update: {name} of client {client} is "
                    f"another one if the client trains in a group of {len(group)} than alone; "
                    f"keep one row for each client, [C, K] and [C, 1], and move only the first "
                    f"`batch.clients` rows in a step"
                )
        for name, (nbytes,) in bytes_alone.items():
            if (counted := bytes_together[name][row]) != nbytes:
                raise ConfigError(
                    f"model: {type(method).__name__}.client_update: the message {name!r} of client "
                    f"{client} has {counted} bytes in a group of {len(group)} clients and {nbytes} "
                    f"alone; a message has the shape [C, K]"
                )
