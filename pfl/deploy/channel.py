"""How messages reach the parties: a channel carries bytes there and answers back."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from multiprocessing import connection
from pathlib import Path
from typing import Any

Answer = bytes | str
"""The bytes of an answer, or in one line why there is none."""


class Channel(ABC):
    """Carries messages to peers, which are numbers that the channel gives to parties."""

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


class Sockets(Channel):
    """Workers of parties on this machine, each at a socket file (`Worker.serve`).

    Args:
        paths: The socket of each peer, whose number is the place in the list.
    """

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def peers(self) -> set[int]:
        return {peer for peer, path in enumerate(self.paths) if path.exists()}

    def ask(self, messages: Mapping[int, bytes], timeout: float) -> dict[int, Answer]:
        answers: dict[int, Answer] = {}
        waiting: dict[Any, int] = {}  # the connections to peers
        worker: Any
        for peer, message in messages.items():
            try:
                worker = connection.Client(str(self.paths[peer]), "AF_UNIX")
                worker.send_bytes(message)
                waiting[worker] = peer
            except OSError as error:
                answers[peer] = f"{self.paths[peer]}: {error.strerror or error}"
        end = time.monotonic() + timeout
        while waiting and (left := end - time.monotonic()) > 0:
            for ready in connection.wait(list(waiting), left):
                peer, worker = waiting.pop(ready), ready
                try:
                    answers[peer] = worker.recv_bytes()
                except (EOFError, OSError) as error:
                    answers[peer] = f"the worker has ended ({type(error).__name__})"
                worker.close()
        for worker in waiting:
            worker.close()
        return answers
