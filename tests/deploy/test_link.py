"""A party stays while its SuperLink is away, does not know its key yet, or is another one."""

import os
import subprocess
import sys
import time

from pfl.deploy.here import QUIET
from pfl.deploy.keys import write_keys
from tests.commands import ROOT, free_port
from tests.deploy.real import BIN, REAL


class SuperLink:
    """A SuperLink with TLS, which takes registered keys only and forgets them when it ends."""

    def __init__(self, folder, keys, port):
        self.keys = keys
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        self.env = {**os.environ, **QUIET, "PATH": path, "FLWR_HOME": str(folder)}
        (folder / "config.toml").write_text(
            f'[superlink.here]\naddress = "127.0.0.1:{port}"\n'
            f'root-certificates = "{keys}/server/ca.crt"\n'
        )
        words = ["--disable-runtime-dependency-installation", "--enable-supernode-auth"]
        words += ["--port", str(port), "--ssl-ca-certfile", keys / "server/ca.crt"]
        words += ["--ssl-certfile", keys / "server/server.crt"]
        words += ["--ssl-keyfile", keys / "server/server.key"]
        self.log = (folder / "superlink.log").open("a")
        options = {"env": self.env, "stdout": self.log, "stderr": self.log}
        self.process = subprocess.Popen([BIN / "flower-superlink", *words], **options)

    def register(self):
        """Tells it the key of party 0, once it is there."""
        words = [BIN / "flwr", "supernode", "register", self.keys / "party-0/node.pub", "here"]
        end = time.monotonic() + 60
        while time.monotonic() < end:
            done = subprocess.run(words, env=self.env, capture_output=True, text=True)
            if done.returncode == 0:
                return
            time.sleep(0.5)
        raise TimeoutError(done.stdout + done.stderr)

    def end(self):
        self.process.kill()
        self.process.wait()
        self.log.close()


PARTY = """
import sys
from pathlib import Path
from pfl.deploy.link import Link
own = Path(sys.argv[1])
link = Link(sys.argv[2], own / "ca.crt", own / "node.key")
link.serve(bytes, lambda: print("connected", file=sys.stderr, flush=True), Path("party.in-hand"))
"""


SENDING = """
import sys
from pathlib import Path
from types import SimpleNamespace
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto.node_pb2 import Node as NodeProto
from flwr.supercore.task_identity import TaskIdentity
from pfl.deploy.link import Node, reply_file

sent = []
class Fleet:
    ends = 3
    def PushMessages(self, request):
        sent.append("PushMessages")
        names = list(tree(request.message_object_trees[0]))
        return SimpleNamespace(session_id="s", objects_to_push=names)
    def PushObject(self, request):
        sent.append((request.object_id, request.session_id, len(request.object_content)))
        if len(sent) == self.ends:
            raise KeyboardInterrupt
def tree(one):
    yield one.object_id
    for child in one.children:
        yield from tree(child)

folder = Path(sys.argv[1])
path = reply_file(folder / "0.in-hand")
(folder / "0.in-hand").write_text("")
TaskIdentity.run_id = 5
TaskIdentity.node_id = 1
TaskIdentity.task_id = 2
asked = Message(RecordDict({"pfl": ConfigRecord({"message": b"x"})}), 7, "query")
asked.metadata.__dict__["_message_id"] = "m"
reply = Message(RecordDict({"pfl": ConfigRecord({"answer": bytes(999)})}), reply_to=asked)
for ends in (3, 0):
    node = Node("here", Fleet(), lambda: False)
    node.client.ends = ends
    node.node = NodeProto(node_id=7)
    try:
        if ends:
            node._write_reply(reply, 0.0, path)
            node._send_reply(path)
        else:
            node.go_on(folder / "0.in-hand")
    except KeyboardInterrupt:
        assert path.stat().st_mode & 0o777 == 0o600
assert [one for one in sent if one == "PushMessages"] == ["PushMessages"]
before, after = sent[1:3], sent[3:]
assert after[:2] == before, "the parts are sent again, in the same session"
assert {one[1] for one in after} == {"s"} and max(one[2] for one in after) > 999
assert len(after) == 3, after
assert list(folder.iterdir()) == []
"""


class TestLink:
    pytestmark = REAL

    def test_a_party_stays_while_superlinks_come_and_go(self, tmp_path, monkeypatch):
        """Flower's own node ends where a SuperLink does not know it, as each new one does not."""
        monkeypatch.chdir(tmp_path)
        keys = write_keys(tmp_path / "app", "localhost", 1)
        port = free_port()
        words = [sys.executable, "-c", PARTY, keys / "party-0", f"localhost:{port}"]
        log = tmp_path / "party.log"
        options = {"env": {**os.environ, "PYTHONPATH": str(ROOT)}}
        with log.open("w") as file:
            party = subprocess.Popen(words, stderr=file, **options)
        try:
            for place, name in enumerate(("first", "second")):
                (tmp_path / name).mkdir()
                superlink = SuperLink(tmp_path / name, keys, port)
                try:
                    wait_for(log, "does not take this party", place + 1)
                    superlink.register()
                    wait_for(log, "connected", place + 1)
                finally:
                    superlink.end()
            assert party.poll() is None
        finally:
            party.kill()
            party.wait()

    def test_the_reply_of_a_party_that_was_killed_while_it_sent_it_is_sent(self, tmp_path):
        """The reply, its record, and the answer; the process ends at the second one."""
        options = {"env": {**os.environ, "PYTHONPATH": str(ROOT)}, "text": True}
        words = [sys.executable, "-c", SENDING, tmp_path]
        done = subprocess.run(words, capture_output=True, **options)
        assert done.returncode == 0, done.stderr


def wait_for(log, text, count):
    """Waits until a log has a text in so many lines, at least."""
    end = time.monotonic() + 60
    while sum(text in line for line in log.read_text().splitlines()) < count:
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)
