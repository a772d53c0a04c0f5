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


def wait_for(log, text, count):
    """Waits until a log has a text in so many lines, at least."""
    end = time.monotonic() + 60
    while sum(text in line for line in log.read_text().splitlines()) < count:
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)
