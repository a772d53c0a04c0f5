"""What all compressors share: updates become payloads at the clients, and values at the server."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from pfl.clients import Clients
from pfl.communication import Message
from pfl.datamodules.errors import require_value
from pfl.errors import ConfigError
from pfl.randomness import generator
from pfl.stages.stage import Initial, Messages, Place, Served, Stage


@dataclass(frozen=True)
class Known:
    """What client and server both know of an update that a client sends.

    Attributes:
        size: The number of its values, K.
        seed: The seed of the run.
        purpose: What is drawn, for which message.
        round: The round, from 0.
        client: The client.
        mask: Which of the message's values these are, bool; None: all.
    """

    size: int
    seed: int = 0
    purpose: str = "compression"
    round: int = 0
    client: int = 0
    mask: Tensor | None = None

    def draws(self) -> np.random.Generator:
        """Returns the generator that both have, at its beginning."""
        return generator(self.seed, self.purpose, self.round, self.client)


class Compressor(Stage):
    """A stage that sends a payload in place of an update, from which the server reads the values.

    An update is a message minus its reference: the public reference that the message names; for the
    message "w" what the client has received under this name; otherwise zero. A subclass writes
    `encode` and `decode`. A message whose payload would have at least the bytes of its values is
    sent as it is: a compressor that leaves nothing out changes no bit.

    Args:
        messages: The names of the messages that are compressed; others are sent as they are.
    """

    place: ClassVar[Place] = Place.CODE
    needs: ClassVar[frozenset[str]] = frozenset({"true messages"})
    takes: ClassVar[frozenset[str]] = frozenset({"true messages"})
    error_feedback: ClassVar[bool] = False
    """Whether a client remembers what its payloads have left out, and adds it to the next update.

    The memory is a client state: it changes only if the client's message arrives.
    """

    def __init__(self, messages: Sequence[str] = ("w",)) -> None:
        named = not isinstance(messages, str) and len(messages) > 0
        if named:  # else a message would be coded twice, and its memory moved twice
            named = len({*map(str, messages)}) == len(messages)
        require_value(
            self.argument_key("messages"),
            messages,
            named,
            "a list of names, such as [w], each once",
        )
        self.messages = list(messages)
        self._served: Served

    @abstractmethod
    def encode(self, x: Tensor, known: Known) -> dict[str, Tensor]:
        """Returns what is sent of an update x [K]: tensors [n] by name, as long for every x."""

    @abstractmethod
    def decode(self, parts: Mapping[str, Tensor], known: Known) -> Tensor:
        """Returns the update [K] that the server reads of what was sent.

        Raises:
            ValueError, IndexError: `encode` makes no such parts.
        """

    def encode_for(
        self, clients: Clients, row: int, name: str, x: Tensor, known: Known
    ) -> dict[str, Tensor]:
        """Returns `encode`'s parts for one of the clients, with its states where they matter."""
        return self.encode(x, known)

    def remember(self, clients: Clients, name: str, payload: Mapping[str, Tensor]) -> None:
        """Changes the clients' states once the payload of a message is made."""

    # ---- what a stage does --------------------------------------------------------------------

    def describe(self) -> str:
        public = {name: value for name, value in vars(self).items() if name[0] != "_"}
        if public["messages"] == ["w"]:
            del public["messages"]
        values = ", ".join(f"{name}={value}" for name, value in public.items())
        return f"{type(self).__name__}({values})"

    def set_up(self, served: Served) -> None:
        self._served = served
        served.refuse_pooled(self.key)
        if served.kept:
            raise ConfigError(
                f"{self.key}: the server of {served.method} keeps the messages of single clients, "
                f"and only messages that it adds up are compressed; take another method"
            )

    def states(self) -> dict[str, Initial]:
        if not self.error_feedback:
            return {}
        return {self.memory(name): 0.0 for name in self.messages}

    def memory(self, name: str) -> str:
        """Returns the name of the client state with what was left out of a message, [P]."""
        return f"{type(self).__name__} memory of {name}"

    def sent(self, clients: Clients, messages: Messages) -> Messages:
        coded = dict(messages)
        for name in self._names(messages):
            coded[name] = self._code(clients, name, messages[name])
        return coded

    def arrived(self, clients: Clients, messages: Messages) -> Messages:
        read = dict(messages)
        for name in self.messages:
            message = messages.get(name)
            if message is not None and message.payload is not None:
                updates = self._decode(clients, name, message, message.payload)
                read[name] = replace(message, values=_moved(clients, name, message, updates))
        return read

    # ---- a message ----------------------------------------------------------------------------

    def _names(self, messages: Messages) -> list[str]:
        """Returns the names of the messages that are compressed now.

        Raises:
            ConfigError: They are not sent, not added up, or not alone.
        """
        method = self._served.method
        free = [name for name, message in messages.items() if _is_free(message)]
        read = [name for name in free if messages[name].values.any()]
        names = []
        for name in self.messages if messages else []:
            if name not in messages:
                raise ConfigError(
                    f"{self.key}.messages: {name}; the clients of {method} send "
                    f"{', '.join(messages)}; give some of these"
                )
            if messages[name].reduce == "rows":
                raise ConfigError(
                    f"{self.key}: the server of {method} reads the message {name!r} of every "
                    f"client by itself, and only messages that it adds up are compressed; take "
                    f"another method"
                )
            width = messages[name].values.shape[1]
            if self.states() and width > self._served.size:
                raise ConfigError(
                    f"{self.key}.messages: {name} of {method} has {width} values, and the memory "
                    f"of the stage as many as the model, {self._served.size}; take RandomK or QSGD"
                )
            if name not in free:  # else nothing is sent in this round
                names.append(name)
        if read and len(free) < len(messages):
            raise ConfigError(
                f"{self.key}: the message {read[0]!r} of {method} has no bytes, since the server "
                f"can compute it from the others, which compression changes; take another method"
            )
        return names

    def _code(self, clients: Clients, name: str, message: Message) -> Message:
        """Returns a message with its payload, and the values that the server will read."""
        places = _places(message)
        x = (message.values - _reference(clients, name, message))[:, places]
        if self.error_feedback:
            x = x + clients.state[self.memory(name)][:, places]
        payload = self._encode(clients, name, message, x)
        nbytes = sum(part.shape[1] * part.element_size() for part in payload.values())
        if nbytes >= x.shape[1] * x.element_size():
            return message
        updates = self._decode(clients, name, message, payload)
        if self.error_feedback:
            memory = clients.state[self.memory(name)].clone()
            memory[:, places] = (x - updates).to(memory)
            clients.state[self.memory(name)] = memory
        self.remember(clients, name, payload)
        values = _moved(clients, name, message, updates)
        return replace(message, values=values, nbytes=nbytes, payload=payload)

    def _encode(
        self, clients: Clients, name: str, message: Message, x: Tensor
    ) -> dict[str, Tensor]:
        """Returns the payload [C, n] of the updates x [C, K] of C clients, by part."""
        rows = []
        for row in range(len(clients)):
            known = self._known(clients, name, message, row)
            rows.append(self.encode_for(clients, row, name, x[row], known))
        if not rows:  # the parts have names and lengths all the same
            known = Known(x.shape[1], mask=message.mask)
            empty = self.encode(x.new_zeros(x.shape[1]), known)
            return {part: values[None][:0] for part, values in empty.items()}
        return {part: torch.stack([one[part] for one in rows]) for part in rows[0]}

    def _decode(
        self, clients: Clients, name: str, message: Message, payload: Mapping[str, Tensor]
    ) -> Tensor:
        """Returns the updates [C, K] of C clients."""
        updates = message.values.new_zeros(len(clients), message.values.shape[1])
        updates = updates[:, _places(message)]
        for row in range(len(clients)):
            parts = {part: values[row] for part, values in payload.items()}
            updates[row] = self.decode(parts, self._known(clients, name, message, row))
        return updates

    def _known(self, clients: Clients, name: str, message: Message, row: int) -> Known:
        size = message.values.shape[1]
        if message.mask is not None:
            size = int(message.mask.sum())
        seed = self._served.context.seed
        purpose = f"{type(self).__name__} of {name}"
        return Known(size, seed, purpose, clients.round, int(clients.ids[row]), message.mask)


def _is_free(message: Message) -> bool:
    """Returns whether a message is said to have no bytes."""
    return isinstance(message.nbytes, int) and message.nbytes == 0


def _places(message: Message) -> slice | Tensor:
    """Returns where the values that travel are among the K values of a message."""
    if message.mask is None:
        return slice(0, message.values.shape[1])
    return message.mask.nonzero()[:, 0]


def _reference(clients: Clients, name: str, message: Message) -> Tensor:
    """Returns that from which a message [C, K] is measured, [K] or [C, K]."""
    if message.reference is not None:
        return message.reference
    received = clients.received.get("w")
    width = message.values.shape[1]
    if name == "w" and received is not None and received.shape[-1] == width:
        return received
    return message.values.new_zeros(width)


def _moved(clients: Clients, name: str, message: Message, updates: Tensor) -> Tensor:
    """Returns the values [C, K] of a message, given the updates of those that travel."""
    places = _places(message)
    reference = _reference(clients, name, message).expand(len(clients), -1)
    values = updates.new_zeros(len(clients), message.values.shape[1])
    values[:, places] = reference[:, places] + updates
    return values


# ---- bits ---------------------------------------------------------------------------------------


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Returns whole numbers [n] from 0 to 2^bits - 1 as bytes, uint8 [ceil(n bits / 8)].

    Example:
        >>> pack(torch.tensor([1, 0, 3]), bits=2)  # 01 00 11, and two zeros: 01001100
        tensor([76], dtype=torch.uint8)
    """
    given = numbers.cpu().numpy()
    planes = np.empty((len(given), bits), np.uint8)
    for bit in range(bits):
        planes[:, bit] = (given >> (bits - 1 - bit)) & 1
    return torch.from_numpy(np.packbits(planes))


def unpack(packed: Tensor, count: int, bits: int) -> Tensor:
    """Returns the whole numbers, int64 [count], that `pack` has packed.

    Example:
        >>> unpack(torch.tensor([76], dtype=torch.uint8), count=3, bits=2)
        tensor([1, 0, 3])
    """
    planes = np.unpackbits(packed.cpu().numpy(), count=count * bits).reshape(count, bits)
    numbers = np.zeros(count, np.int64)
    for bit in range(bits):
        numbers = 2 * numbers + planes[:, bit]
    return torch.from_numpy(numbers)
