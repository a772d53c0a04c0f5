"""Checks of what a method's own code returns, in the words of its author."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from pfl.clients import Clients
from pfl.communication import Message, by_name
from pfl.errors import ConfigError
from pfl.method.hooks import Method
from pfl.method.states import KEPT
from pfl.models.adapters import LoRALayer


def refuse_factors(network: nn.Module, method: str) -> None:
    """Refuses LoRA for a method that acts on matrices by their singular values.

    The factors of an update have rank r whatever the update is, and their nuclear norms are not its
    own.

    Raises:
        ConfigError: The network has LoRA's factors.
    """
    if any(isinstance(layer, LoRALayer) for layer in network.modules()):
        raise ConfigError(
            f"model.trainable: lora; {method} lowers the ranks of matrices, and the factors of "
            f"LoRA are no updates of weights; give delta, a dense update"
        )


def check_complete(method: Method, base: type) -> None:
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


def check_messages(method: Method, sent: Any, clients: Clients, hook: str) -> None:
    """Refuses what is not messages of C clients.

    Args:
        method: The method.
        sent: What its function returned.
        clients: The C clients that were trained.
        hook: The name of the function.

    Raises:
        ConfigError: It is something else than models [C, P], a message [C, K], or messages by name.
    """
    where = f"{type(method).__name__}.{hook}"
    count = len(clients)
    result = _by_name(where, sent, f"the clients' models [{count}, {method.space.size}]")
    for name, message in result.items():
        values = message.values
        what = "returned"
        if name != "w":
            what = f"returned as {name!r}"
        if name == "w" and isinstance(sent, Tensor):
            check_models(where, values, clients, method)
        elif values.dim() != 2 or len(values) != count:
            raise ConfigError(
                f"model: {where} {what} {kind_text(values)}; a message of the {count} clients has "
                f"the shape [{count}, K], [{count}, 1] for one number of each"
            )
        nbytes = message.nbytes
        if isinstance(nbytes, int) and nbytes < 0:
            raise ConfigError(
                f"model: {where} {what} a message of {nbytes} bytes; it must be at least 0"
            )
        if name in method.states.messages:
            width = len(method.states.store.initial(KEPT + name))
            if values.shape[1] != width:
                raise ConfigError(
                    f"model: {where} {what} {kind_text(values)}; keep_messages declared "
                    f"[{count}, {width}]"
                )
        elif hook == "first_upload":
            raise ConfigError(
                f"model: {where} {what} a message that the server would forget; declare it with "
                f"keep_messages({name!r}, ...)"
            )


def check_states(method: Method, clients: Clients) -> None:
    """Refuses rows of client states that were not declared, or have another width or kind.

    Raises:
        ConfigError: There are some.
    """
    check_declared(method, clients.state)
    for name in method.states.store.names:
        values = clients.state.get(name)
        first = method.states.store.initial(name)
        shape = (len(clients), method.states.width(name))
        fits = (
            isinstance(values, Tensor)
            and tuple(values.shape) == shape
            # Whole numbers would lose what comes after the point.
            and (first.is_floating_point() or not values.is_floating_point())
        )
        if not fits:
            raise ConfigError(
                f"model: {type(method).__name__}.client_update leaves {kind_text(values)} in "
                f"clients.state[{name!r}]; it was declared as {list(shape)} of {first.dtype}"
            )


def check_downloads(method: Method, sent: Any, clients: np.ndarray | None = None) -> None:
    """Refuses what is not messages [K] of the server to all, or [C, K] to each of C clients.

    Raises:
        ConfigError: It is something else.
    """
    name = type(method).__name__
    size = method.space.size
    where = f"{name}.download"
    model = f"a message [{size}] of the global model"
    shape = "a message to all clients is [K]"
    axes = 1
    if clients is not None:
        where = f"{name}.download_for"
        model = f"models [{len(clients)}, {size}]"
        shape = f"each of the {len(clients)} clients must have a row"
        axes = 2
    result = _by_name(where, sent, model)
    for name, message in result.items():
        values = message.values
        rows_fit = clients is None or len(values) == len(clients)
        if values.dim() != axes or not rows_fit:
            raise ConfigError(f"model: {where} returned {kind_text(values)} as {name!r}; {shape}")


def _by_name(where: str, sent: Any, model: str) -> dict[str, Message]:
    """Returns messages by name, and refuses anything that is not a tensor or a message."""
    named = sent if isinstance(sent, dict) else {"w": sent}
    for name, message in named.items():
        if not isinstance(message, Tensor | Message):
            what = "returned"
            if isinstance(sent, dict):
                what = f"returned as {name!r}"
            raise ConfigError(
                f"model: {where} {what} {kind_text(message)}; it must return {model}, a Message, "
                f"or a dict of them by name"
            )
        if isinstance(message, Message) and message.reduce not in ("mean", "rows"):
            raise ConfigError(
                f"model: {where}: reduce: {message.reduce!r} of the message {name!r}; it must be "
                f"mean or rows"
            )
    return by_name(sent)


def check_models(where: str, models: Any, clients: Clients, method: Method) -> None:
    """Refuses models of clients that are not a tensor [C, P] of the method's dtype.

    Raises:
        ConfigError: They are something else.
    """
    shape = (len(clients), method.space.size)
    dtype = method.space.vector.dtype
    if not isinstance(models, Tensor) or tuple(models.shape) != shape or models.dtype != dtype:
        raise ConfigError(
            f"model: {where} returned {kind_text(models)}; it must return the clients' models, a "
            f"tensor {list(shape)} of {dtype}"
        )


def check_nothing(method: Method, name: str, returned: Any) -> None:
    """Refuses what a function returns that has to change the method itself.

    Raises:
        ConfigError: It returned something, which would be forgotten.
    """
    if returned is not None:
        raise ConfigError(
            f"model: {type(method).__name__}.{name} returned {kind_text(returned)}; it must return "
            f"nothing, and change self.global_model with copy_ or leave a gradient"
        )


def check_declared(method: Method, state: Iterable[str]) -> None:
    """Refuses client states that were written without being declared.

    Raises:
        ConfigError: There are some; they would be forgotten after the round.
    """
    names = method.states.names
    if unknown := sorted(set(state) - {*names, "buffers"}):
        declared = ", ".join(names) or "none"
        raise ConfigError(
            f"model: {type(method).__name__} writes clients.state[{unknown[0]!r}], which it has "
            f"not declared with add_client_state; declared are: {declared}"
        )


def tell_draws(method: Method, hook: str) -> None:
    """Warns of a function that draws from a global generator, whose state nothing restores."""
    rank_zero_warn(
        f"{type(method).__name__}.{hook}, or the data that it reads, draws from PyTorch's or "
        f"NumPy's global generator: a resumed run and other groups of clients then draw something "
        f'else; draw with generator(self.seed, "purpose", round, client) of pfl.method'
    )


def kind_text(value: Any) -> str:
    """Returns a value's kind in words: "a tensor [3, 4] of torch.float64", "None"."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    if value is None:
        return "None"
    return f"an object of the class {type(value).__name__}"


class ByName(dict[str, Tensor]):
    """Messages by name, whose names are told where one is missing."""

    def __missing__(self, name: str) -> Tensor:
        """Refuses the read."""
        raise ConfigError(
            f"model: the server reads the message {name!r}, which clients do not send; they send "
            f"{', '.join(map(repr, self)) or 'nothing'}"
        )


class HiddenScores(dict[str, float]):
    """An evaluation's numbers in a private run, which `after_evaluation` must not read."""

    def __getitem__(self, name: str) -> float:
        raise ConfigError(
            f"loop.privacy: after_evaluation reads {name!r}; the clients' scores are not private, "
            f"and what follows from them would not be either"
        )
