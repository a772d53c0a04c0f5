"""A party as a node of Flower's SuperLink, within the process of its worker.

`flower-supernode` starts a process for each message, which runs whatever program the SuperLink
sends. A link fetches messages and sends answers, and runs nothing: no code of the server reaches a
party, and a message costs the fetching only.

It uses the client of the Fleet API that `flower-supernode` itself uses, which Flower may change;
`connect` says so in one line.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfl import files
from pfl.deploy.here import QUIET
from pfl.errors import ConfigError

SHORTEST = 0.1  # seconds between two looks for messages while a round is going on
LONGEST = 2.0  # and where nothing has come for a while
KEYS = ("address", "certificates", "key")


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
        if unknown := given.keys() - {*KEYS}:
            raise ConfigError(f"{name}: {min(unknown)}: the keys are {', '.join(KEYS)}")
        found: dict[str, Path | None] = {}
        for key in ("certificates", "key"):
            found[key] = None
            if given.get(key) is None:
                continue
            found[key] = path.parent / str(given[key])
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
        patience: float | None = None,
    ) -> None:
        """Answers the messages that the SuperLink has for this party, one after another.

        Where the connection ends, it is made again.

        Args:
            answer: Returns the answer to a message.
            ready: Called once messages can come.
            in_hand: The file that says which message is being answered. If the process is killed,
                the next one tells the server that there is no answer.
            until: Whether to end. It is asked after each look for messages.
            patience: The seconds after which a SuperLink that cannot be reached is an error; None:
                it may be started later.
        """
        taken = False
        number = in_hand.with_suffix(".node")
        while not until():
            try:
                with connect(self, number, patience) as node:
                    if not taken:
                        ready()
                    taken = True
                    node.tell_lost(in_hand)
                    pause = SHORTEST
                    while not until():
                        if node.answer_next(answer, in_hand):
                            pause = SHORTEST
                        else:
                            pause = min(1.2 * pause, LONGEST)
                            time.sleep(pause)
            except ConfigError as error:
                if not taken:
                    raise
                print(error, file=sys.stderr, flush=True)  # a new SuperLink, which has no keys yet
            if not until():
                time.sleep(LONGEST)


class Node:
    """A node that is connected: it fetches messages, and sends answers.

    Args:
        number: The number that the SuperLink has given to it.
        calls: The functions of Flower's connection, by name.
    """

    def __init__(self, number: int, calls: dict[str, Callable[..., Any]]) -> None:
        self.number = number
        self.calls = calls

    def answer_next(self, answer: Callable[[bytes], bytes], in_hand: Path) -> bool:
        """Answers one message; returns False if there is none."""
        from flwr.app import ConfigRecord, Message, RecordDict
        from flwr.common.serde import message_to_proto
        from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree

        found = self.calls["receive"]()
        if found is None:
            return False
        head, tree = found
        run = head.metadata.run_id
        files.write(in_hand, message_to_proto(head).SerializeToString().hex())
        message = pull_and_inflate_object_from_tree(
            tree,
            lambda name: self.calls["pull_object"](run, name),
            lambda name: self.calls["confirm"](run, name),
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
        self._send(reply, time.monotonic() - begin)
        in_hand.unlink(missing_ok=True)
        return True

    def tell_lost(self, in_hand: Path) -> None:
        """Tells the server that the message that an ended process had in hand is lost."""
        from flwr.app import ConfigRecord, Message, RecordDict
        from flwr.common.serde import message_from_proto
        from flwr.proto.message_pb2 import Message as MessageProto

        from pfl.deploy.schema import one_line

        if not in_hand.is_file():
            return
        lost = {"lost": "the party has ended while it worked on this message"}
        try:
            head = message_from_proto(MessageProto.FromString(bytes.fromhex(in_hand.read_text())))
            self._send(Message(RecordDict({"pfl": ConfigRecord(lost)}), reply_to=head), 0.0)
        except Exception as error:  # of another run, another Flower, or too late: it is over
            print(f"superlink: {one_line(str(error))}", file=sys.stderr, flush=True)
        in_hand.unlink(missing_ok=True)

    def _send(self, reply: Any, seconds: float) -> None:
        from flwr.supercore.inflatable.inflatable_object import (
            get_all_nested_objects,
            get_object_tree,
            no_object_id_recompute,
        )
        from flwr.supercore.inflatable.inflatable_utils import push_objects

        run = reply.metadata.run_id
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            tree = get_object_tree(reply)
            parts = get_all_nested_objects(reply)
            wanted, session = self.calls["send"](reply, tree, seconds)
            push_objects(
                parts,
                lambda name, content: self.calls["push_object"](run, session, name, content),
                object_ids_to_push=wanted,
            )


@contextmanager
def connect(link: Link, note: Path, patience: float | None = None) -> Iterator[Node]:
    """Connects with a SuperLink; errors within the block end the connection, and are printed.

    Args:
        link: Where the SuperLink is.
        note: A file for the number of the node. If it is there, its process was killed, and the
            SuperLink would take no other one for a minute.
        patience: The seconds after which a SuperLink that cannot be reached is an error.

    Raises:
        ConfigError: There is no Flower that this can use, the key is no key, or the SuperLink does
            not take the party.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key
        from flwr.supernode.fleet_http_connection import http_request_response
    except ImportError as error:
        raise ConfigError(
            f"superlink: this needs Flower 1.42 ({error}); pip install '.[deploy]', or leave "
            f"superlink out and run flower-supernode"
        ) from error
    keys = None
    certificates = None
    if link.certificates is not None:
        certificates = link.certificates.read_bytes()
    if link.key is not None:
        try:
            private = load_ssh_private_key(link.key.read_bytes(), None)
        except ValueError as error:
            raise ConfigError(f"superlink.key: {link.key} is no private key: {error}") from error
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise ConfigError(
                f"superlink.key: {link.key} is not of ECDSA; make one with ssh-keygen -t ecdsa"
            )
        keys = (private, private.public_key())
        if note.is_file():
            _leave(link.address, certificates, keys, note.read_text())
    names = ("receive", "send", "get_run", "get_fab", "pull_object", "push_object", "confirm")
    try:
        with http_request_response(
            link.address,
            certificates is None,
            certificates,
            keys,
            max_wait_time=patience,
        ) as (number, *calls):
            files.write(note, str(number))
            yield Node(number, dict(zip(names, calls, strict=True)))
        note.unlink(missing_ok=True)
    except SystemExit as error:
        if error.code != 1:  # a signal
            raise
        raise ConfigError(
            f"superlink: {link.address} does not take this party; the lines above say why. Is the "
            f"SuperLink there, and has it the party's key (flwr supernode register)?"
        ) from error


def _leave(address: str, certificates: bytes | None, keys: Any, number: str) -> None:
    """Tells a SuperLink that the process of a node has ended."""
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
    interceptors = [version, NodeAuthHttpInterceptor(*keys)]
    with (
        suppress(Exception),  # it is another SuperLink, or not there: connecting says so
        FleetHttpClient.from_server_address(
            address, False, certificates, interceptors=interceptors
        ) as client,
    ):
        client.DeactivateNode(DeactivateNodeRequest(node_id=int(number)))
