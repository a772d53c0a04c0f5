"""A method whose hooks are checked: what they read, what they change, and what they return.

One process simulates server and clients, and the contract must hold as if a network lay between
them. A `checked` method is a view of the method, with the same attributes, that marks each hook as
code of the server or of a client, refuses reads across, compares what clients share before and
after, and checks what is returned, in the words of the method's author.

The first round and the first evaluation of every run are checked, and all rounds of private runs;
with `strict`, as in the engine "debug", every attribute that a hook of the server has set counts as
the server's, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, Literal, TypeVar, cast

from torch import Tensor

from pfl.clients import Clients
from pfl.errors import ConfigError
from pfl.method import checks
from pfl.method.hooks import Method
from pfl.randomness import global_states

M = TypeVar("M", bound=Method)
Side = Literal["client", "server"]
SIDES: dict[str, Side] = {
    "begin_round": "server",
    "download": "server",
    "download_for": "server",
    "server_update": "server",
    "train_server": "server",
    "begin_evaluation": "server",
    "evaluation_for": "server",
    "after_evaluation": "server",
    "newcomer": "server",  # a newcomer's first model may need what the server has
    "first_upload": "client",
    "client_update": "client",
    "personalized": "client",
    "adaptation_start": "client",
}
"""On which side of the network each hook runs."""
OF_THE_SERVER = frozenset(
    {
        *("global_model", "global_buffers", "cohort"),
        *("kept_rows", "kept_ids", "kept_mean", "iter_kept", "kept_models", "ask_clients"),
    }
)
"""What only the server has, and a client's hook may not read."""
OF_THE_RUN = frozenset(
    {
        *("participants", "participant_ids", "rounds", "row", "recorded", "evaluation"),
        *("progress", "store", "trainer", "log_metric"),
    }
)
"""What else only the server has; refused in strict checks."""
OF_ALL_CLIENTS = frozenset({"client_rows", "iter_clients"})
"""What neither a client's hook nor the server's may read."""


class _Here(threading.local):
    """Which hook this thread is in."""

    side: Side | None = None
    hook: str = ""
    trained: bool = False  # whether a client's hook has called `local_sgd`


_here = _Here()


@contextmanager
def _inside(hook: str) -> Iterator[None]:
    """Marks the code inside, in this thread, as that of a hook."""
    before = (_here.side, _here.hook)
    _here.side = SIDES[hook]
    _here.hook = hook
    try:
        yield
    finally:
        _here.side, _here.hook = before


def checked(method: M, *, strict: bool) -> M:
    """Returns a view of a method that checks its hooks; it has the same attributes.

    Args:
        method: The method.
        strict: Whether all that a hook of the server has set is the server's.
    """
    original: Any = type(method)
    kind: Any = _checking_class(original, strict)
    view = kind.__new__(kind)
    object.__setattr__(view, "__dict__", method.__dict__)
    return cast(M, view)


def checked_as(view: Method, method: M) -> M:
    """Returns a method with its hooks checked as those of a view are, or as it is."""
    strict = getattr(type(view), "checks_strictly", None)
    if strict is None:
        return method
    return checked(method, strict=strict)


def _checking_class(kind: type, strict: bool) -> type:
    """Returns a subclass that looks like the class and checks what its objects do.

    The class itself has it, once it was made: a table of them would keep classes alive that a
    notebook has defined anew, and the command line would find two of one name.
    """
    place = "__checked__"
    if strict:
        place = "__checked_strictly__"
    if place in vars(kind):
        return vars(kind)[place]

    class Checked(kind):
        checks_strictly = strict

        def __getattribute__(self, name: str) -> Any:
            side = _here.side
            if side is not None:
                _refuse_read(self, kind.__name__, side, name, strict)
                _here.trained = _here.trained or name == "local_sgd"
            value = super().__getattribute__(name)
            if side is None and name in SIDES:
                return _checked_hook(self, name, value)
            return value

        def __setattr__(self, name: str, value: Any) -> None:
            if _here.side == "server":
                names = self.__dict__.setdefault("_set_by_server", set())
                names.add(name)
            super().__setattr__(name, value)

    # Its qualified name stays that of a local class of this module, which the command line can
    # import and does not offer; the module of `kind` may be a file that nothing can import.
    Checked.__name__ = kind.__name__
    setattr(kind, place, Checked)
    return Checked


def _refuse_read(method: Any, kind: str, side: Side, name: str, strict: bool) -> None:
    """Raises a ConfigError if a hook may not read an attribute."""
    where = f"model: {kind}.{_here.hook} reads self.{name}"
    if name in OF_ALL_CLIENTS and side == "server":
        raise ConfigError(
            f"{where}, the states that clients keep to themselves; let client_update send what the "
            f"server needs, and declare it with keep_messages if it is needed in later rounds"
        )
    if name == "participant_ids" and side == "server" and method.run.private is not None:
        raise ConfigError(
            f"loop.privacy: {kind}.{_here.hook} reads self.{name}, which is not private; take "
            f"another method"
        )
    if side == "client" and name in _names_of_server(method, strict):
        raise ConfigError(
            f"{where}, which the server has and a client has not; send it with download() and read "
            f"clients.received"
        )


def _names_of_server(method: Any, strict: bool) -> set[str]:
    """Returns the names of what a client's hook may not read."""
    own = object.__getattribute__(method, "__dict__")
    names = {*OF_THE_SERVER, *OF_ALL_CLIENTS, *own["server_states"]}
    if strict:
        names |= OF_THE_RUN
        names |= own.get("_set_by_server", set())
    return names


def _checked_hook(method: Any, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a hook that marks its code, and whose result is checked."""

    @wraps(hook)
    def call(*args: Any) -> Any:
        given = _arguments(method, name, args)
        _here.trained = False
        before = global_states()
        with _inside(name), _guard(method, name, args):
            result = hook(*given)
        if global_states() != before:
            checks.tell_draws(method, name)
        if name == "client_update" and not _here.trained:
            method.require_no_aids()
        _check_result(method, name, args, result)
        return result

    return call


def _arguments(method: Any, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments of a hook, of which some explain reads that are not possible."""
    if name in ("server_update", "train_server"):
        return (checks.ByName(args[0]),)
    if name == "after_evaluation" and method.run.private is not None:
        return (checks.HiddenScores(),)
    return args


def _check_result(method: Any, name: str, args: tuple[Any, ...], result: Any) -> None:
    """Refuses what a hook must not return."""
    if name in ("client_update", "first_upload"):
        checks.check_messages(method, result, args[0], name)
    elif name == "download":
        checks.check_downloads(method, result)
    elif name in ("download_for", "evaluation_for"):
        checks.check_downloads(method, result, args[0])
    elif name in ("personalized", "adaptation_start", "newcomer"):
        checks.check_models(f"{type(method).__name__}.{name}", result, args[0], method)
    elif name in ("server_update", "train_server"):
        checks.check_nothing(method, name, result)
    if name == "client_update":
        checks.check_declared(method, args[0].state)


def _guard(method: Any, name: str, args: tuple[Any, ...]) -> AbstractContextManager[None]:
    """Returns a context in which a hook must not change what other clients read."""
    if not args or not isinstance(args[0], Clients):
        return _nothing()
    clients = args[0]
    shared: dict[str, Tensor] = {}
    for message, values in clients.received.items():
        if message not in clients.personal_messages:
            shared["w" if message == "w" else f"clients.received[{message!r}]"] = values
    return method.oracle.engine.guard(clients, lambda: {**shared, **method.server_tensors()})


@contextmanager
def _nothing() -> Iterator[None]:
    yield
