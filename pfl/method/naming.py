"""The clients and the round in the line of an error."""

from __future__ import annotations

from collections.abc import Sequence

from pfl.clients import Clients
from pfl.datamodules.errors import add_note
from pfl.errors import ConfigError, Diverged
from pfl.method.hooks import Method
from pfl.rounds.loop import FederatedLoop

SHOWN = 3  # clients that an error names


def clients_text(loop: FederatedLoop, clients: Sequence[int]) -> str:
    """Returns clients by number and name: "client 0 (north), client 1 (south), 2 more"."""
    shown = [loop.name_of(client) for client in clients[:SHOWN]]
    if len(clients) > SHOWN:
        shown.append(f"{len(clients) - SHOWN} more")
    return ", ".join(shown)


def name_clients(
    error: Exception, method: Method, loop: FederatedLoop, clients: Clients, when: str
) -> None:
    """Adds to an error which clients ran, and when.

    A line of the framework's own says so at its end. Any other error, as of a method's own code,
    has a note.
    """
    if isinstance(error, Diverged):  # it names its clients
        return
    place = when
    if not method.pooled:
        place = f"{clients_text(loop, clients.ids.tolist())}, {when}"
    if isinstance(error, ConfigError):
        error.args = (f"{error} ({place})",)
    else:
        add_note(error, f"({place})")
