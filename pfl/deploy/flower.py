"""A run over Flower's processes: the grid of a ServerApp as a channel."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfl.deploy.channel import EVERY, Answer, Channel
from pfl.distributed.orphan import signal_with_parent

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.serverapp import Grid

SHORTEST = 0.1  # seconds between two looks for answers, at first
LONGEST = 1.0  # and later


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
        """Sends Flower's messages, and returns the replies that have come in time.

        Each is fetched by a thread of its own: one that is announced and does not come holds up
        nobody else.
        """
        replies: list[Message] = []
        waiting: set[str] = set()
        if sent:
            waiting = {name for name in self.grid.push_messages(sent) if name}
        end = time.monotonic() + timeout
        line = time.monotonic() + EVERY
        _bound_fetching(timeout)
        found: queue.Queue[Message | Exception] = queue.Queue()
        for name in waiting:
            fetch = threading.Thread(target=self._fetch, args=(name, end, found.put), daemon=True)
            fetch.start()
        while waiting and time.monotonic() < end:
            try:
                reply = found.get(timeout=max(0.0, min(line, end) - time.monotonic()))
            except queue.Empty:
                line = time.monotonic() + EVERY
                if self.waits is not None:
                    answered = {one.metadata.src_node_id for one in replies}
                    self.waits({one.metadata.dst_node_id for one in sent} - answered)
                continue
            if isinstance(reply, Exception):
                raise reply
            replies.append(reply)
            waiting.discard(reply.metadata.reply_to_message_id)
        return replies

    def _fetch(self, name: str, end: float, put: Callable[[Message | Exception], None]) -> None:
        """Looks for the reply to one message until it is there."""
        pause = SHORTEST
        try:
            while time.monotonic() < end:
                for reply in self.grid.pull_messages([name]):
                    put(reply)
                    return
                time.sleep(pause)
                pause = min(1.2 * pause, LONGEST)
        except Exception as error:  # the SuperLink is gone
            put(error)


def _bound_fetching(seconds: float) -> None:
    """Has Flower wait no longer than this, in place of two hours, for the parts of a reply."""
    from flwr.supercore.inflatable.inflatable_utils import pull_objects

    defaults = getattr(pull_objects, "__kwdefaults__", None) or {}
    if "max_time" in defaults:
        defaults["max_time"] = seconds


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

    end_with_parent()
    run_server(FlowerGrid(grid), app, options)


def end_with_parent() -> None:
    """Has the system end this process when that of Flower ends which has started it."""
    signal_with_parent(signal.SIGKILL)  # a reply that is still being fetched would keep it alive
    if is_orphan(os.getppid()):  # it was killed while this process has started
        print("error: the SuperLink that has started this server has ended", flush=True)
        os._exit(1)


def is_orphan(parent: int) -> bool:
    """Returns whether a parent is not the process of Flower that has started its child.

    It is then the first process, or `pfl.deploy.here`, which takes orphans of Flower's programs.

    Args:
        parent: The id of the parent.
    """
    try:
        words = Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")
    except OSError:  # another system, or a process of somebody else
        return parent == 1
    if any(os.path.basename(word).startswith((b"flower", b"flwr")) for word in words):
        return False
    return parent == 1 or b"pfl.deploy.here" in words
