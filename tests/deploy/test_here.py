"""One program runs a federation on this machine: it names what is wrong, and leaves nothing."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pfl.deploy import here
from pfl.deploy.flower import is_orphan
from pfl.deploy.keys import keys_folder, write_keys
from pfl.deploy.link import Link
from tests.commands import ROOT, free_port
from tests.deploy.real import REAL
from tests.refusal import refused

WORDS = ["--config", "quickstart", "--data.num_clients", 2, "--loop.clients_per_round", "null"]
WORDS += ["--trainer.callbacks", "[]", "--trainer.max_epochs", 500]


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Stand-ins for Flower's programs and Python, which do nothing for a minute."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in (*here.PROGRAMS, "python"):
        (folder / name).write_text("#!/bin/sh\nexec sleep 60\n")
        (folder / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    for name in here.QUIET:
        monkeypatch.setenv(name, "0")
    return folder


# ---- one line -----------------------------------------------------------------------------------


@pytest.mark.cli
def test_a_program_that_is_missing_is_one_line(app, programs, capsys, monkeypatch):
    monkeypatch.setattr(here.shutil, "which", lambda name: None)
    assert here.main([str(app)]) == 2
    line = f"error: there is no program flower-superlink beside {programs / 'python'}; pip install "
    assert capsys.readouterr().err.startswith(line)


@pytest.mark.cli
def test_a_port_in_use_is_one_line(app, programs, capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert here.main([str(app), "--port", str(port)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: port {port} is in use") and told.count("\n") == 1


@pytest.mark.cli
def test_a_superlink_that_ends_is_one_line_within_five_seconds(app, programs, capsys):
    """The line has the last line of its log, and what else was started has ended."""
    (programs / "flower-superlink").write_text("#!/bin/sh\necho no database\nexit 1\n")
    begin = time.monotonic()
    assert here.main([str(app), "--port", str(free_port())]) == 2
    assert time.monotonic() - begin < 5
    log = app / "flower-superlink.log"
    line = f"error: flower-superlink has ended: no database ({log})\n"
    assert capsys.readouterr().err == line


@pytest.mark.cli
def test_a_script_whose_python_is_gone_says_so(app):
    script = app / "here.sh"
    script.write_text(script.read_text().replace(sys.executable, "/nowhere/python"))
    done = subprocess.run(["/bin/sh", script], capture_output=True, text=True, timeout=60)
    line = "here.sh: there is no /nowhere/python; write the app anew with pfl deploy\n"
    assert (done.returncode, done.stderr) == (1, line)


def test_a_process_that_is_started_when_a_signal_comes_is_ended_too(tmp_path, monkeypatch):
    federation = here.Federation(tmp_path, None, 1, 0, [])
    start = subprocess.Popen

    def interrupted(*arguments, **options):
        process = start(*arguments, **options)
        federation.leave(signal.SIGINT)
        return process

    monkeypatch.setattr(here.subprocess, "Popen", interrupted)
    with pytest.raises(SystemExit) as ended:
        federation._start("one", ["sleep", "60"])
    assert ended.value.code == 128 + signal.SIGINT
    federation.end()
    assert federation.processes["one"].poll() == -signal.SIGTERM


# ---- how a party and its server know each other -------------------------------------------------


def test_a_link_is_read_strictly(tmp_path):
    file = tmp_path / "party.yaml"
    (tmp_path / "ca.crt").write_text("")
    assert Link.read(file, None) is None
    found = Link.read(file, {"address": "a:1", "certificates": "ca.crt"})
    assert found == Link("a:1", tmp_path / "ca.crt", None)
    wrong = {
        "superlink: 'a:1'; it must have the address": "a:1",
        "superlink: cert: the keys are address, certificates, key": {"address": "a:1", "cert": 1},
        f"superlink.key: there is no file {tmp_path / 'k'}": {"address": "a:1", "key": "k"},
        "superlink.key: a key needs TLS": {"address": "a:1", "key": "ca.crt"},
    }
    for line, given in wrong.items():
        with refused(line):
            Link.read(file, given)


@pytest.mark.cli
def test_keys_need_cryptography_and_a_new_folder(tmp_path, monkeypatch):
    with refused("deploy: --tls: ''; it must be the server's name"):
        write_keys(tmp_path / "app", "", 2)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with refused("deploy: --tls: cryptography is not installed"):
        write_keys(tmp_path / "app", "a", 2)
    keys_folder(tmp_path / "app").mkdir()
    with refused(f"deploy: --tls: {tmp_path / 'app-keys'} is there"):
        write_keys(tmp_path / "app", "a", 2)


def test_only_their_owner_reads_keys_and_ssh_and_openssl_read_them(tmp_path):
    pytest.importorskip("cryptography", reason="Flower is not installed: make test-more has it")
    folder = write_keys(tmp_path / "app", "fl.example.org,10.1.2.3", 2)
    for path in folder.rglob("*"):
        expected = 0o600
        if path.is_dir():
            expected = 0o700
        assert path.stat().st_mode & 0o777 == expected, path
    server = folder / "server"
    text = tell("openssl", "x509", "-in", server / "server.crt", "-noout", "-text")
    for name in ("DNS:fl.example.org", "IP Address:10.1.2.3", "DNS:localhost", "127.0.0.1"):
        assert name in text
    tell("openssl", "verify", "-x509_strict", "-CAfile", folder / "ca.crt", server / "server.crt")
    own = [tell("ssh-keygen", "-y", "-f", folder / f"party-{k}/node.key") for k in (0, 1)]
    for party, text in enumerate(own):
        public = (folder / f"party-{party}/node.pub").read_text()
        assert public.split()[:2] == text.split()[:2]
    assert own[0] != own[1]


def tell(*words):
    try:
        return subprocess.run([*map(str, words)], check=True, capture_output=True, text=True).stdout
    except FileNotFoundError:
        pytest.skip(f"there is no {words[0]}")


# ---- real processes -----------------------------------------------------------------------------

REAPER = """
import ctypes, json, os, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # orphans of all below become children of this process
process = subprocess.Popen(sys.argv[1:], stdout=sys.stderr)
print(process.pid, flush=True)
process.wait()
end = time.monotonic()
while time.monotonic() < end + 60:
    try:
        if os.waitpid(-1, os.WNOHANG)[0] == 0:
            time.sleep(0.05)
    except ChildProcessError:
        break
print(json.dumps([process.returncode, time.monotonic() - end]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("seconds", [3.0, None])
class TestEndings:
    pytestmark = REAL

    def test_nothing_is_left_ten_seconds_after_a_signal(self, app, number, seconds):
        """Early, and once the first round is over (None)."""
        left = ending(app, number, seconds)
        assert left < 10


def ending(app, number, seconds):
    """Runs a federation, ends it, and returns how many seconds the last process has outlived it."""
    words = [sys.executable, "-c", REAPER, sys.executable, "-m", "pfl.deploy.here", str(app)]
    with Path("out.log").open("w") as log:  # of the federation
        process = subprocess.Popen(
            [*words, "--port", str(free_port())],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        end = time.monotonic() + 240
        while seconds is None and time.monotonic() < end:
            path = Path("runs/quickstart/metrics.csv")
            if path.exists() and len(path.read_text().splitlines()) > 2:
                break
            time.sleep(0.2)
        time.sleep(seconds or 0.0)
        os.kill(pid, number)
        told = process.communicate()[0].splitlines()[-1]
    code, left = json.loads(told)
    assert code != 0
    return left


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_server_knows_that_the_superlink_that_has_started_it_is_gone():
    """Its parent is then this package's program, or the first process of the system."""
    wait = ["-c", "import time; time.sleep(60)"]
    for words, expected in (
        (["/bin/flower-superexec"], False),
        (["-m", "pfl.deploy.here"], True),
        (["something"], False),
    ):
        process = subprocess.Popen(["python", *wait, *words], executable=sys.executable)
        try:
            end = time.monotonic() + 20
            path = Path(f"/proc/{process.pid}/cmdline")
            while words[-1].encode() not in path.read_bytes():  # the system has not begun it yet
                assert time.monotonic() < end
            assert is_orphan(process.pid) is expected
        finally:
            process.kill()
            process.wait()
    assert is_orphan(1) is True
