"""A run over Flower's processes: the grid of a ServerApp as a channel."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfl.deploy.channel import Answer, Channel

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.serverapp import Grid

SHORTEST = 0.1  # seconds between two looks for answers, at first
LONGEST = 0.5  # and later
EVERY = 10.0  # seconds between two lines that say who has not answered


class FlowerGrid(Channel):
    """The SuperNodes of a Flower run; a peer is a node.

    Args:
        grid: What Flower gives to the ServerApp.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def peers(self) -> set[int]:
        return set(self.grid.get_node_ids())

    def ask(self, messages: Mapping[int, bytes], timeout: float) -> dict[int, Answer]:
        from flwr.app import ConfigRecord, Message, RecordDict

        sent = []
        for node, message in messages.items():
            content = RecordDict({"pfl": ConfigRecord({"message": message})})
            sent.append(Message(content, node, "query", ttl=timeout))
        replies = self.replies(sent, timeout)
        return {reply.metadata.src_node_id: _content(reply) for reply in replies}

    def replies(self, sent: list[Message], timeout: float) -> list[Message]:
        """Sends Flower's messages, and returns the replies that have come in time."""
        replies: list[Message] = []
        waiting: set[str] = set()
        if sent:
            waiting = {name for name in self.grid.push_messages(sent) if name}
        end = time.monotonic() + timeout
        line = time.monotonic() + EVERY
        pause = SHORTEST
        while waiting and time.monotonic() < end:
            replies += self.grid.pull_messages(waiting)
            waiting -= {reply.metadata.reply_to_message_id for reply in replies}
            if waiting and time.monotonic() > line and self.waits is not None:
                line = time.monotonic() + EVERY
                answered = {reply.metadata.src_node_id for reply in replies}
                self.waits({one.metadata.dst_node_id for one in sent} - answered)
            if waiting:
                time.sleep(pause)
                pause = min(1.2 * pause, LONGEST)
        return replies


def _content(reply: Message) -> Answer:
    """Returns the bytes of a reply, or why there are none."""
    if reply.has_error():
        return f"Flower: {reply.error.reason}"
    record: Any = reply.content.get("pfl", {})
    answer = record.get("answer", record.get("lost"))
    if isinstance(answer, bytes | str):
        return answer
    return "the answer is not one of pfl"


def serve(grid: Grid, app: Path, options: Mapping[str, Any]) -> None:
    """Runs the server of an app that `pfl deploy` has written; the ServerApp calls it."""
    from pfl.deploy.app import run_server

    run_server(FlowerGrid(grid), app, options)
