"""How messages reach the parties: a channel carries bytes there and answers back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

Answer = bytes | str
"""The bytes of an answer, or in one line why there is none."""
EVERY = 10.0  # seconds between two lines that say who is awaited


class Channel(ABC):
    """Carries messages to peers, which are numbers that the channel gives to parties.

    Attributes:
        waits: Is called every ten seconds with the peers that have not answered.
    """

    waits: Callable[[set[int]], None] | None = None

    @abstractmethod
    def peers(self) -> set[int]:
        """Returns the peers that can be reached now."""

    @abstractmethod
    def ask(self, messages: Mapping[int, bytes], timeout: float) -> dict[int, Answer]:
        """Sends a message to each of some peers, and returns the answers.

        Args:
            messages: The messages by peer.
            timeout: The seconds after which a peer without an answer is left out.
        """
