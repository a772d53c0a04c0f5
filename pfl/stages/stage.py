"""A stage: what acts on the messages of a round between their sender and their reader.

A round has a list of stages and calls all of them at the same points:

    begin(round)                  # once a round, before anything is sent
    down(messages)                # on what the server sends to all clients
    received(clients)             # at the clients, when they have received everything
    sent(clients, messages)       # at the clients, on what they send
    arrived(clients, messages)    # at a server that has got payloads over a wire, on these
    keep(clients)                 # at the clients, on the states that they will keep
    read(means, metrics)          # at the server, on the means, before the method reads them

A stage that makes the means itself, in place of the weighted mean, is a `Mean`
(`pfl.stages.mean`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, TypeAlias

from torch import Tensor

from pfl.clients import Clients
from pfl.communication import Message
from pfl.context import RunContext
from pfl.datamodules.ranges import Checked
from pfl.errors import ConfigError
from pfl.parameters import Layer

Messages: TypeAlias = Mapping[str, Message]
"""Messages by name."""
Initial: TypeAlias = Callable[[], Tensor] | float
"""The first row of a state: a function that returns it, or a number for P copies of it."""


class Place(IntEnum):
    """Where a stage acts; stages act in this order, those of one place in the order given."""

    MODEL = 0
    """At the client, on what belongs to the model that it sends, such as running statistics."""
    CLIENT = 1
    """At the client, on finished messages."""
    CODE = 2
    """At the client, at last: how messages are written as bytes, such as compression."""
    WIRE = 3
    """On the way: what attackers send in place of their messages."""
    SERVER = 4
    """At the server, on the sum or the single messages of a round."""


@dataclass(frozen=True)
class Served:
    """What a stage knows of the method and the run that it serves, before the first round.

    Attributes:
        method: The name of the method's class.
        context: The facts of the run.
        size: P, the number of values of a model.
        layers: The places of the parameter tensors among these values.
        cohort_size: The (expected) number of clients in a round.
        kept: The names of the messages that the server keeps for each client.
        pooled: Whether the method trains on the samples of all clients, which send nothing.
        sends_first: Whether clients send something before they receive anything.
        statistics: Whether running statistics are sent with the models, and averaged.
    """

    method: str
    context: RunContext
    size: int
    cohort_size: int
    layers: Sequence[Layer] = ()
    kept: Sequence[str] = ()
    pooled: bool = False
    sends_first: bool = False
    statistics: bool = False

    def refuse_pooled(self, key: str) -> None:
        """Refuses a method whose clients send no messages, for the stage that `key` asks for.

        Raises:
            ConfigError: The method trains on the samples of all clients in one place.
        """
        if self.pooled:
            raise ConfigError(
                f"{key}: {self.method} trains on the samples of all clients in one place, which "
                f"send no messages; take another method"
            )


class Stage(Checked):
    """What acts on messages between their sender and their reader; this class does nothing.

    A subclass overrides what it needs. `loop.stages` takes a list of stages.

    Class attributes:
        place: Where the stage acts.
        needs: What must be true of the messages for this stage, a set of the keys of `NEEDS`.
        takes: What is no longer true of the messages for other stages, as `needs`.

    Example:
        A stage that halves what clients send, with the bytes of 16-bit numbers:

        >>> import torch
        >>> from dataclasses import replace
        >>> class Half(Stage):
        ...     def sent(self, clients, messages):
        ...         return {
        ...             name: replace(m, values=m.values / 2, nbytes=2 * m.values.shape[1])
        ...             for name, m in messages.items()
        ...         }
        >>> sent = {"w": Message(torch.ones(3, 4), nbytes=16)}
        >>> Half().sent(None, sent)["w"].nbytes
        8
    """

    place: ClassVar[Place] = Place.CLIENT
    needs: ClassVar[frozenset[str]] = frozenset()
    takes: ClassVar[frozenset[str]] = frozenset()
    always_kept: ClassVar[frozenset[str]] = frozenset()
    """Client states of the stage that are kept even if the client's message is lost."""
    rounded: ClassVar[bool] = True
    """Whether `loop.state_dtype` may round the stage's client states."""

    @property
    def key(self) -> str:
        """The argument of the loop that asks for this stage, for error messages."""
        return f"loop.stages: {type(self).__name__}"

    @classmethod
    def argument_key(cls, name: str) -> str:
        return f"loop.stages: {cls.__name__}.{name}"

    def describe(self) -> str:
        """Returns what the stage is, for a description of the run; here the name of its class."""
        return type(self).__name__

    def set_up(self, served: Served) -> None:
        """Checks once, before the first round, that the stage fits the method and the run.

        Raises:
            ConfigError: It does not fit.
        """

    def states(self) -> dict[str, Initial]:
        """Returns the first row of each client state that the stage keeps, by name.

        A function is called when training begins. The clients' rows are in `clients.state[name]`
        while they train; what the stage leaves there is kept once the message has arrived.
        """
        return {}

    def begin(self, round_index: int) -> None:
        """Prepares a round, from 0."""

    def down(self, messages: Messages) -> Messages:
        """Returns what the server sends to all clients, messages [K] by name."""
        return messages

    def received(self, clients: Clients) -> None:
        """Changes clients that have received their messages and have their states."""

    def sent(self, clients: Clients, messages: Messages) -> Messages:
        """Returns what C clients send, messages [C, K] by name. Runs in several threads."""
        return messages

    def arrived(self, clients: Clients, messages: Messages) -> Messages:
        """Returns messages [C, K] whose payloads came over a wire, with their values.

        Args:
            clients: The C clients that have sent them, as the server knows them: they have their
                ids, the round and what they have received.
            messages: The messages; where one has a payload, its values are still missing.

        Raises:
            ValueError: A payload is none that `sent` would have made.
        """
        return messages

    def keep(self, clients: Clients) -> None:
        """Changes what C clients will keep, once all of it is known to be finite."""

    def read(self, means: dict[str, Tensor], metrics: dict[str, float]) -> None:
        """Takes from the means [K] by name what is the stage's; adds numbers to the round's row."""


NEEDS = {
    "single messages": "the messages of single clients",
    "true messages": "messages as the clients have computed them",
    "products": "the mean of the products B A of LoRA's factors",
}
"""What a stage may need, in words."""


def by_place(stages: Sequence[Stage]) -> list[Stage]:
    """Returns stages in the order in which they act.

    Raises:
        ConfigError: One of them takes what another one needs.
    """
    for stage in stages:
        for other in stages:
            if other is stage:
                continue
            for need in sorted(stage.needs & other.takes):
                raise ConfigError(
                    f"{other.key}: {stage.key} needs {NEEDS[need]}, which {other.key} takes away; "
                    f"leave one of them out"
                )
    return sorted(stages, key=lambda stage: stage.place)


class References:
    """The public values near which the messages of all clients lie, by name.

    These are the references that messages name, and for a message "w" without one the "w" that the
    server has sent to everyone, if it has the same width. A stage that measures messages has one.
    """

    def __init__(self) -> None:
        self._sent: Tensor | None = None

    def begin(self) -> None:
        """Forgets what the server has sent in the round before."""
        self._sent = None

    def note(self, download: Messages) -> None:
        """Notes what the server sends to everyone."""
        if "w" in download:
            self._sent = download["w"].values.clone()  # the server may write into what it sent

    def of(self, messages: Messages) -> dict[str, Tensor]:
        """Returns the references [K] of messages [C, K] by name, where they are not zero."""
        found = {name: m.reference for name, m in messages.items() if m.reference is not None}
        if "w" not in messages or "w" in found or self._sent is None:
            return found
        if self._sent.shape == messages["w"].values.shape[1:]:
            found["w"] = self._sent
        return found
