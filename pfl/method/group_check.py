"""A check that clients which train in one group do not influence each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pfl.clients import Clients
from pfl.errors import ConfigError
from pfl.method.client_side import train_clients

if TYPE_CHECKING:
    from pfl.method.algorithm import FederatedAlgorithm


def check_group(
    method: FederatedAlgorithm, group: Clients, receive: Callable[[Clients], int | Tensor]
) -> None:
    """Refuses a method whose clients influence each other if they train in one group.

    Values, states and bytes of clients that train together must be those of each client that trains
    alone.

    Args:
        method: The method.
        group: Some clients with their states; neither they nor the method's states change.
        receive: Gives clients what they receive.

    Raises:
        ConfigError: They are not.
    """

    def train(clients: Clients) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
        state = {name: rows.clone() for name, rows in clients.state.items()}
        buffers = state.get("buffers", None if clients.buffers is None else clients.buffers.clone())
        trial = replace(clients, state=state, buffers=buffers)
        receive(trial)
        sent = train_clients(method, trial)
        values = {f"the message {name!r}": m.values for name, m in sent.items()}
        values |= {f"clients.state[{name!r}]": rows for name, rows in trial.state.items()}
        nbytes = {
            name: torch.as_tensor(m.nbytes).expand(len(trial)).tolist() for name, m in sent.items()
        }
        return values, nbytes

    each = [train(one) for one in group.groups(1)]  # first, so that an error names one client
    together, bytes_together = train(group)
    for row, client in enumerate(group.ids.tolist()):
        alone, bytes_alone = each[row]
        for name, values in alone.items():
            actual, expected = together[name][row], values[0]
            scale = float(expected.abs().max()) if expected.numel() else 0.0
            precision = 1e-3 if expected.dtype.itemsize < 8 else 1e-7
            if not torch.allclose(
                actual, expected, rtol=0, atol=precision * (scale + 1e-6), equal_nan=True
            ):
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
