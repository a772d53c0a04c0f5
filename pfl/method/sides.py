"""On which side of the network a method's code runs, what it logs there, and what it may read.

One process simulates server and clients, and the contract must hold as if a network lay between
them. `on_client` and `on_server` mark the code of a method by the side on which it belongs. On the
client's side, the server's tensors and functions are refused by name. In the engine "debug", and
where a test asks for it (`refuse_all_reads`), so is every attribute that a hook of the server set.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import numpy as np
from torch import Tensor

from pfl.errors import ConfigError

Side = Literal["client", "server"]


@dataclass
class Log:
    """What a method's code has logged for the round's row and tables.

    Attributes:
        losses: By name, losses [A] of a batch's rows and the rows' numbers of samples.
        tables: By name, chunks of rows as arrays by column.
        taken: Numbers of sample gradients, one for each call of the oracle.
    """

    losses: dict[str, list[tuple[Tensor, list[int]]]] = field(default_factory=dict)
    tables: dict[str, list[dict[str, np.ndarray]]] = field(default_factory=dict)
    taken: list[int] = field(default_factory=list)

    def extend(self, other: Log) -> None:
        """Adds what another log has."""
        for name, losses in other.losses.items():
            self.losses.setdefault(name, []).extend(losses)
        for name, rows in other.tables.items():
            self.tables.setdefault(name, []).extend(rows)
        self.taken.extend(other.taken)

    @property
    def gradients(self) -> int:
        """Number of sample gradients that the oracle took."""
        return sum(self.taken)


class _Here(threading.local):
    side: Side | None = None
    hook: str = ""
    log: Log | None = None


_here = _Here()


@contextmanager
def on_side(side: Side, hook: str) -> Iterator[None]:
    """Marks the code inside, in this thread, as code of the server or of a client.

    Args:
        side: "client" or "server".
        hook: The method's function that runs, for error messages.
    """
    before = _here.side, _here.hook
    _here.side, _here.hook = side, hook
    try:
        yield
    finally:
        _here.side, _here.hook = before


@contextmanager
def logging_to(log: Log | None) -> Iterator[None]:
    """Makes what this thread logs inside go to `log`, or nowhere for None."""
    before = _here.log
    _here.log = log
    try:
        yield
    finally:
        _here.log = before


def current_log() -> Log | None:
    """Returns the log of this thread; None outside of `logging_to`."""
    return _here.log


def count_gradients(count: int) -> None:
    """Adds sample gradients to the log of this thread, if it has one; the oracle calls it."""
    if _here.log is not None:
        _here.log.taken.append(count)


def refuse_on_client(method: Any, name: str) -> None:
    """Raises a ConfigError if a client's code reads something of the server.

    Args:
        method: The method.
        name: The attribute or function that was read, as `self.<name>`.
    """
    if _here.side == "client":
        raise ConfigError(
            f"model: {type(method).__name__}.{_here.hook} reads self.{name}, which the server has "
            f"and a client has not; send it with download() and read clients.received"
        )


def refuse_on_server(method: Any, name: str) -> None:
    """Raises a ConfigError if the server's code reads the clients' states."""
    if _here.side == "server":
        raise ConfigError(
            f"model: {type(method).__name__}.{_here.hook} reads self.{name}, the states that "
            f"clients keep to themselves; let client_update send what the server needs, and "
            f"declare it with keep_messages if it is needed in later rounds"
        )


def refuse_private(method: Any, name: str) -> None:
    """Raises a ConfigError if the server's code of a private run reads what is not private."""
    if _here.side == "server":
        raise ConfigError(
            f"loop.privacy: {type(method).__name__}.{_here.hook} reads self.{name}, which is not "
            f"private; take another method"
        )


SERVER_ONLY = frozenset(
    {
        *("cohort", "participants", "participant_ids", "rounds", "row", "recorded", "evaluation"),
        *("ledger", "store", "samples_seen", "bytes_up", "bytes_down", "trainer", "log_metric"),
    }
)
"""Attributes of the framework that only the server's code may read."""


def refuse_all_reads(method: Any) -> None:
    """Makes a method refuse, on the client's side, all that only the server has.

    These are the attributes that a hook of the server has set, and the names in `SERVER_ONLY`.
    Every read of an attribute is checked from now on, which takes time.
    """
    if not hasattr(type(method), "_server_names"):
        method.__class__ = _checking_class(type(method))  # type: ignore[arg-type]


@cache
def _checking_class(kind: type) -> type:
    """Returns a subclass that looks like the class and checks the reads of its objects."""

    class Checked(kind):
        _server_names = SERVER_ONLY

        def __getattribute__(self, name: str) -> Any:
            if _here.side == "client":
                names = super().__getattribute__("_server_names")
                if name in names:
                    refuse_on_client(self, name)
            return super().__getattribute__(name)

        def __setattr__(self, name: str, value: Any) -> None:
            if _here.side == "server":
                names = super().__getattribute__("_server_names") | {name}
                super().__setattr__("_server_names", names)
            super().__setattr__(name, value)

    # Its qualified name stays that of a local class, which the command line does not offer.
    Checked.__name__, Checked.__module__ = kind.__name__, kind.__module__
    return Checked
