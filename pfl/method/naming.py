"""The clients and the round in the line of an error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pfl.clients import Clients
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


@contextmanager
def naming(method: Method, loop: FederatedLoop, clients: Clients, when: str) -> Iterator[None]:
    """Names inside, in the line of an error, the clients that ran, and when.

    A line of the framework's own says so at its end. Any other error, as of a method's own code,
    keeps its type and its traceback, and has a note.
    """
    try:
        yield
    except Diverged:  # it names its clients
        raise
    except Exception as error:
        place = when
        if not method.pooled:
            place = f"{clients_text(loop, clients.ids.tolist())}, {when}"
        if isinstance(error, ConfigError):
            raise ConfigError(f"{error} ({place})") from error
        if hasattr(error, "add_note"):  # since Python 3.11
            error.add_note(place)
        raise
