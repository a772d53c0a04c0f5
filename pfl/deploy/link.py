"""A party as a node of Flower's SuperLink, within the process of its worker.

`flower-supernode` starts a process for each message, which runs whatever program the SuperLink
sends. A link fetches messages and sends answers, and runs nothing: no code of the server reaches a
party, and a message costs the fetching only.

It uses the client of the Fleet API that `flower-supernode` itself uses, which Flower may change;
`connect` says so in one line. That program ends where a SuperLink does not know its node, as one
that has been started anew; a link connects again.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pfl import files
from pfl.datamodules.errors import check_keys
from pfl.deploy.here import QUIET
from pfl.deploy.schema import one_line
from pfl.deploy.wire import pack, unpack
from pfl.errors import ConfigError

if TYPE_CHECKING:
    import httpx

SHORTEST = 0.1  # seconds between two looks for messages while a round is going on
LONGEST = 2.0  # and where nothing has come for a while
KEYS = ("address", "certificates", "key")


OWN = ("RegisterNode", "ActivateNode", "PullMessages")
"""Requests that are about the node, and not about a message of a run."""
AWAY = (502, 503, 504)
"""What a gate or a proxy answers where the SuperLink is not there."""


class NotTaken(ConfigError):
    """A SuperLink does not take a party, or does not know its node any more."""


@dataclass(frozen=True)
class Link:
    """Where a party's SuperLink is, and how the two know each other.

    Attributes:
        address: The host and the port.
        certificates: The file of the authority that has signed the SuperLink's certificate; None:
            there is no TLS.
        key: The file of the party's private key (ECDSA, as OpenSSH writes it); None: the SuperLink
            knows nobody.
    """

    address: str
    certificates: Path | None = None
    key: Path | None = None

    @classmethod
    def read(cls, path: Path, given: Any) -> Link | None:
        """Returns the link in a party's file; a ConfigError names a value that cannot be.

        Args:
            path: The party's file, at which the paths begin.
            given: The value of `superlink`; None: `flower-supernode` brings the messages.
        """
        if given is None:
            return None
        name = f"{path}: superlink"
        if not isinstance(given, dict) or not isinstance(given.get("address"), str):
            raise ConfigError(f"{name}: {given!r}; it must have the address, as host:port")
        check_keys(name, given, KEYS)
        found: dict[str, Path | None] = {}
        for key in ("certificates", "key"):
            found[key] = None
            if given.get(key) is None:
                continue
            found[key] = own_path(path, str(given[key]))
            if not found[key].is_file():  # type: ignore[union-attr]
                raise ConfigError(f"{name}.{key}: there is no file {found[key]}")
        if found["key"] is not None and found["certificates"] is None:
            raise ConfigError(f"{name}.key: a key needs TLS; give certificates as well")
        return cls(given["address"], found["certificates"], found["key"])

    def serve(
        self,
        answer: Callable[[bytes], bytes],
        ready: Callable[[], None],
        in_hand: Path,
        until: Callable[[], bool] = lambda: False,
    ) -> None:
        """Answers the messages that the SuperLink has for this party, one after another.

        A SuperLink that cannot be reached, or does not take the party, is asked again: it may be
        started later, and may have been told the party's key later.

        Args:
            answer: Returns the answer to a message.
            ready: Called when messages can come, each time that the connection is made.
            in_hand: The file that says which message is being answered; its reply is beside it. If
                the process is killed, the next one sends the reply, or tells that there is none.
            until: Whether to end. It is asked after each look for messages.

        Raises:
            ConfigError: There is no Flower that this can use, or the key is no key.
        """
        number = in_hand.with_suffix(".node")
        told = ""
        while not until():
            try:
                with connect(self, number, until) as node:
                    ready()
                    told = ""
                    node.go_on(in_hand)
                    pause = SHORTEST
                    while not until():
                        if node.answer_next(answer, in_hand):
                            pause = SHORTEST
                        else:
                            pause = min(1.2 * pause, LONGEST)
                            time.sleep(pause)
            except NotTaken as error:
                if str(error) != told and not until():
                    told = str(error)
                    print(told, file=sys.stderr, flush=True)
            if not until():
                time.sleep(LONGEST)


class Node:
    """A node that is connected: it fetches messages, and sends answers.

    Args:
        address: The SuperLink's host and port.
        client: Flower's client of the SuperLink.
        until: Whether to wait no longer for a SuperLink that cannot be reached.
    """

    def __init__(self, address: str, client: Any, until: Callable[[], bool]) -> None:
        self.address = address
        self.client = client
        self.until = until
        self.closing = threading.Event()  # Flower sends parts of a message in threads
        self.node: Any = None

    def ask(self, name: str, request: Any) -> Any:
        """Returns the SuperLink's answer to a request; one that cannot be reached is asked again.

        Args:
            name: The name of the request in the Fleet API.
            request: The request.

        Raises:
            NotTaken: It does not know the node, or nobody waits for it any more.
        """
        import httpx

        pause = SHORTEST
        told = False
        while True:
            try:
                answer = getattr(self.client, name)(request)
            except httpx.HTTPError as error:
                status = 503
                if isinstance(error, httpx.HTTPStatusError):
                    status = error.response.status_code
                if status == 401 or (status not in AWAY and name in OWN):
                    raise NotTaken(self._refusal(error)) from error
                if status not in AWAY:  # of a run that is over
                    raise
                line = f"superlink: {self.address} cannot be reached ({_words(error)})"
                if self.until() or self.closing.is_set():
                    raise NotTaken(line) from error
                if not told:
                    print(f"{line}; it is asked again", file=sys.stderr, flush=True)
                told = True
            else:
                if told:
                    print(f"superlink: {self.address} is there", file=sys.stderr, flush=True)
                return answer
            self.closing.wait(pause)
            pause = min(1.2 * pause, LONGEST)

    def _refusal(self, error: httpx.HTTPError) -> str:
        """Returns in one line that the SuperLink does not take the party."""
        return (
            f"superlink: {self.address} does not take this party ({_words(error)}); it is asked "
            f"again. Has it the party's key (flwr supernode register), and are the clocks right?"
        )

    def activate(self, public_key: Any, register: bool) -> None:
        """Tells the SuperLink that the node is there.

        Args:
            public_key: The node's public key.
            register: Whether the node tells its key itself.
        """
        from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
        from flwr.proto.fleet_pb2 import ActivateNodeRequest, RegisterNodeFleetRequest
        from flwr.proto.node_pb2 import Node as NodeProto
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes

        text = public_key_to_bytes(public_key)
        if register:
            self.ask("RegisterNode", RegisterNodeFleetRequest(public_key=text))
        request = ActivateNodeRequest(
            public_key=text, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
        )
        self.node = NodeProto(node_id=self.ask("ActivateNode", request).node_id)

    def is_seen(self) -> bool:
        """Tells the SuperLink that the node is still there; False if that has failed."""
        from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
        from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

        request = SendNodeHeartbeatRequest(
            node=self.node, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
        )
        try:
            return bool(self.client.SendNodeHeartbeat(request).success)
        except Exception:  # the next request of `ask` says what is wrong
            return False

    def answer_next(self, answer: Callable[[bytes], bytes], in_hand: Path) -> bool:
        """Answers one message; returns False if there is none."""
        from flwr.app import ConfigRecord, Message, RecordDict
        from flwr.common.serde import message_from_proto
        from flwr.proto.fleet_pb2 import PullMessagesRequest
        from flwr.supercore.inflatable.inflatable_protobuf_utils import (
            make_confirm_message_received_fn_protobuf,
            make_pull_object_fn_protobuf,
        )
        from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree

        found = self.ask("PullMessages", PullMessagesRequest(node=self.node))
        if not found.messages_list:
            return False
        head = found.messages_list[0]
        tree = found.message_object_trees[0]
        run = message_from_proto(head).metadata.run_id
        files.write(in_hand, head.SerializeToString().hex())
        try:
            message = pull_and_inflate_object_from_tree(
                tree,
                make_pull_object_fn_protobuf(partial(self.ask, "PullObject"), self.node, run),
                make_confirm_message_received_fn_protobuf(
                    partial(self.ask, "ConfirmMessageReceived"), self.node, run
                ),
                return_type=Message,
            )
            message.metadata.__dict__["_message_id"] = tree.object_id  # as flwr-clientapp does it
            begin = time.monotonic()
            record: dict[str, Any] = {}
            try:
                record["answer"] = answer(message.content["pfl"]["message"])
            except (KeyError, TypeError):
                record["lost"] = "the message is not one of pfl"
            reply = Message(RecordDict({"pfl": ConfigRecord(record)}), reply_to=message)
            self._write_reply(reply, time.monotonic() - begin, reply_file(in_hand))
            self._send_reply(reply_file(in_hand))
        except NotTaken:
            raise
        except Exception as error:  # of a run that is over
            print(f"superlink: no answer to a message ({_words(error)})", file=sys.stderr)
        _forget(in_hand)
        return True

    def go_on(self, in_hand: Path) -> None:
        """Ends what an ended process had in hand: sends its reply, or tells that there is none."""
        from flwr.app import ConfigRecord, Message, RecordDict
        from flwr.common.serde import message_from_proto
        from flwr.proto.message_pb2 import Message as MessageProto

        path = reply_file(in_hand)
        lost = {"lost": "the party has ended while it worked on this message"}
        try:
            if not path.is_file() and in_hand.is_file():
                told = MessageProto.FromString(bytes.fromhex(in_hand.read_text()))
                content = RecordDict({"pfl": ConfigRecord(lost)})
                reply = Message(content, reply_to=message_from_proto(told))
                self._write_reply(reply, 0.0, path)
            if path.is_file():
                self._send_reply(path)
        except NotTaken:
            raise
        except Exception as error:  # of another run, another Flower, or too late: it is over
            print(f"superlink: no answer to an old message ({_words(error)})", file=sys.stderr)
        _forget(in_hand)

    def _write_reply(self, reply: Any, seconds: float, path: Path) -> None:
        """Writes a reply with its parts into a file, from which any process can send it."""
        from flwr.app.message import remove_content_from_message
        from flwr.common.serde import message_to_proto
        from flwr.proto.fleet_pb2 import PushMessagesRequest
        from flwr.supercore.inflatable.inflatable_object import (
            get_all_nested_objects,
            get_object_tree,
            no_object_id_recompute,
        )

        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            request = PushMessagesRequest(
                node=self.node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[seconds],
            )
            nested = get_all_nested_objects(reply).items()
            parts = {name: _array(one.deflate()) for name, one in nested}
        content = {
            "run": str(reply.metadata.run_id),
            "request": _array(request.SerializeToString()),
            "parts": parts,
        }
        with files.replaced(path) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(pack(content))

    def _send_reply(self, path: Path) -> None:
        """Sends the reply in a file; where that was begun, its parts are sent again."""
        from flwr.proto.fleet_pb2 import PushMessagesRequest
        from flwr.proto.message_pb2 import PushObjectRequest

        content = unpack(path.read_bytes())
        begun = path.with_suffix(".sent")
        if not begun.is_file():
            request = PushMessagesRequest.FromString(content["request"].tobytes())
            told = self.ask("PushMessages", request)
            wanted = {"session": told.session_id, "parts": [*told.objects_to_push]}
            files.write_json(begun, wanted)
        wanted = files.read_json(begun)
        for name in wanted["parts"]:
            request = PushObjectRequest(
                node=self.node,
                run_id=int(content["run"]),
                object_id=name,
                object_content=content["parts"][name].tobytes(),
                session_id=wanted["session"],
            )
            self.ask("PushObject", request)


def own_path(file: Path, given: str) -> Path:
    """Returns a path of a party's file, at which it begins unless it begins at ~ or /."""
    return file.parent / Path(given).expanduser()


def reply_file(in_hand: Path) -> Path:
    """Returns the file of the reply to the message that a party has in hand."""
    return in_hand.with_suffix(".reply")


def _forget(in_hand: Path) -> None:
    """Removes the files of a message that is answered."""
    path = reply_file(in_hand)
    for one in (in_hand, path.with_suffix(".sent"), path):
        one.unlink(missing_ok=True)


def _array(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.uint8)


@contextmanager
def connect(link: Link, note: Path, until: Callable[[], bool] = lambda: False) -> Iterator[Node]:
    """Connects with a SuperLink, and tells it every few seconds that the party is there.

    Args:
        link: Where the SuperLink is.
        note: A file for the number of the node. If it is there, its process was killed, and the
            SuperLink would take no other one for a minute.
        until: Whether to wait no longer for a SuperLink that cannot be reached.

    Raises:
        ConfigError: There is no Flower that this can use, or the key is no key.
        NotTaken: The SuperLink does not take the party.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        from flwr.proto.fleet_pb2 import DeactivateNodeRequest, UnregisterNodeFleetRequest
        from flwr.supercore.heartbeat import HeartbeatSender
        from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
        from flwr.supercore.primitives.asymmetric import generate_key_pairs
        from flwr.supernode.fleet_http_client import FleetHttpClient
        from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
    except ImportError as error:
        raise ConfigError(
            f"superlink: this needs Flower 1.42 ({error}); pip install '.[deploy]', or leave "
            f"superlink out and run flower-supernode"
        ) from error
    certificates = None
    if link.certificates is not None:
        certificates = link.certificates.read_bytes()
    if link.key is not None:
        keys = _read_key(link.key)
    else:
        keys = generate_key_pairs()
    version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
    interceptors = [version, NodeAuthHttpInterceptor(*keys)]
    with FleetHttpClient.from_server_address(
        link.address, certificates is None, certificates, interceptors=interceptors
    ) as client:
        node = Node(link.address, client, until)
        if link.key is not None and note.is_file():
            with suppress(Exception):  # it is another SuperLink, or not there
                client.DeactivateNode(DeactivateNodeRequest(node_id=int(note.read_text())))
        node.activate(keys[1], register=link.key is None)
        number = node.node.node_id
        files.write(note, str(number))
        heart = HeartbeatSender(node.is_seen)
        heart.start()
        try:
            yield node
        finally:
            node.closing.set()
            if heart.is_running:
                heart.stop()
            with suppress(Exception):
                client.DeactivateNode(DeactivateNodeRequest(node_id=number))
                note.unlink(missing_ok=True)
            if link.key is None:
                with suppress(Exception):
                    client.UnregisterNode(UnregisterNodeFleetRequest(node_id=number))


def _read_key(path: Path) -> tuple[Any, Any]:
    """Returns the private and the public key of a party; a ConfigError if the file has none."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        private = load_ssh_private_key(path.read_bytes(), None)
    except ValueError as error:
        raise ConfigError(f"superlink.key: {path} is no private key: {error}") from error
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise ConfigError(
            f"superlink.key: {path} is not of ECDSA; make one with ssh-keygen -t ecdsa"
        )
    return private, private.public_key()


def _words(error: Exception) -> str:
    """Returns in words why a request has failed."""
    import httpx

    if not isinstance(error, httpx.HTTPStatusError):
        return one_line(str(error)) or type(error).__name__
    try:
        return one_line(str(error.response.json()["detail"]))
    except (ValueError, LookupError, TypeError):
        return f"status {error.response.status_code}"
