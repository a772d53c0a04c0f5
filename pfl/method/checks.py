"""Checks of what a method's own code returns, in the words of its author."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from pfl.clients import Clients
from pfl.communication import Message, dense
from pfl.errors import ConfigError
from pfl.method.module import FederatedModule


def check_complete(method: FederatedModule, base: type) -> None:
    """Refuses a method that lacks a function which the framework calls.

    Args:
        method: The method.
        base: The class whose functions of these names do nothing.

    Raises:
        ConfigError: A function is missing.
    """
    needed = {"client_update": True, "personalized": method.has_personalized}
    for name, called in needed.items():
        if called and getattr(type(method), name) is getattr(base, name):
            why = " (has_personalized is True)" if name == "personalized" else ""
            raise ConfigError(
                f"model: {type(method).__name__} has no {name}{why}; docs/add-a-method.md says "
                f"what a method must define"
            )


def messages(method: FederatedModule, sent: Any, clients: Clients) -> dict[str, Message]:
    """Returns what `client_update` returned as messages by name.

    Args:
        method: The method.
        sent: What its `client_update` returned.
        clients: The C clients that were trained.

    Raises:
        ConfigError: It is something else than models [C, P], a message, or messages by name.
    """
    where, count = f"{type(method).__name__}.client_update", len(clients)
    by_name = sent if isinstance(sent, dict) else {"w": sent}
    result = {}
    for name, message in by_name.items():
        what = "returned" if by_name is not sent else f"returned as {name!r}"
        if not isinstance(message, Tensor | Message):
            raise ConfigError(
                f"model: {where} {what} {described(message)}; it must return the clients' models "
                f"[{count}, {method.space.size}], a Message, or a dict of them by name"
            )
        result[name] = message if isinstance(message, Message) else dense(message)
        values = result[name].values
        if name == "w" and isinstance(message, Tensor):
            check_models(where, message, clients, method)
        elif values.dim() == 0 or len(values) != count:
            raise ConfigError(
                f"model: {where} {what} {described(values)}; the first dimension must be that of "
                f"the {count} clients"
            )
    return result


def check_models(where: str, models: Any, clients: Clients, method: FederatedModule) -> None:
    """Refuses models of clients that are not a tensor [C, P] of the method's dtype.

    Raises:
        ConfigError: They are something else.
    """
    shape, dtype = (len(clients), method.space.size), method.space.vector.dtype
    if not isinstance(models, Tensor) or tuple(models.shape) != shape or models.dtype != dtype:
        raise ConfigError(
            f"model: {where} returned {described(models)}; it must return the clients' models, a "
            f"tensor {list(shape)} of {dtype}"
        )


def check_nothing(method: FederatedModule, name: str, returned: Any) -> None:
    """Refuses what a function returns that has to change the method itself.

    Raises:
        ConfigError: It returned something, which would be forgotten.
    """
    if returned is not None:
        raise ConfigError(
            f"model: {type(method).__name__}.{name} returned {described(returned)}; it must return "
            f"nothing, and change self.global_model with copy_ or leave a gradient"
        )


def check_declared(method: FederatedModule, state: Iterable[str]) -> None:
    """Refuses client states that were written without being declared.

    Raises:
        ConfigError: There are some; they would be forgotten after the round.
    """
    names = method.store.names
    if unknown := sorted(set(state) - {*names, "buffers"}):
        declared = ", ".join(names) or "none"
        raise ConfigError(
            f"model: {type(method).__name__} writes clients.state[{unknown[0]!r}], which it has "
            f"not declared with add_client_state; declared are: {declared}"
        )


def described(value: Any) -> str:
    """Returns a value's kind in words: "a tensor [3, 4] of torch.float64", "None"."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    return "None" if value is None else f"an object of the class {type(value).__name__}"
