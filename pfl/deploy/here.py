"""Runs a federation's processes on this machine, and ends them all together.

    python -m pfl.deploy.here app

A SuperLink, a `pfl node` for each party, and the run. With `--keys` the SuperLink has TLS and takes
the nodes of registered keys only; with `--server` the parties are elsewhere.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import yaml

from pfl.deploy.channel import EVERY
from pfl.deploy.gate import gate
from pfl.distributed.orphan import signal_with_parent
from pfl.errors import ConfigError

GRACE = 5.0  # seconds that processes have to end before they are killed
PROGRAMS = ("flower-superlink", "flower-superexec", "flwr", "flwr-serverapp")
COLORS = re.compile("\x1b\\[[0-9;]*m")
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
}
"""The environment of Flower's processes: nothing is told to its makers, and the server's app starts
at once."""


class Federation:
    """The processes of a federation.

    Args:
        app: The folder that `pfl deploy` has written.
        keys: The folder of certificates and keys; None: no TLS, for this machine alone.
        port: The SuperLink's port.
        parties: How many parties are started here.
        words: Further words of `flwr run`.
    """

    def __init__(
        self, app: Path, keys: Path | None, port: int, parties: int, words: list[str]
    ) -> None:
        self.app = app
        self.keys = keys
        self.port = port
        self.inner = port  # the SuperLink's own
        self.parties = parties
        self.words = words
        self.processes: dict[str, subprocess.Popen] = {}
        self.awaited = "the SuperLink"
        self._starting = False  # whether a process is being started
        self._asked = 0  # the signal that has come meanwhile
        self._last = time.monotonic()  # when something was printed

    def run(self, home: Path) -> int:
        """Runs the federation, and returns 0 if the run has ended well.

        Args:
            home: A folder for Flower's own files.
        """
        self._prepare(home)
        if self.keys is None:
            self._start_parties()
            return self._run()
        with gate(self.port, self.inner, self.keys / "server"):
            return self._run()

    def _run(self) -> int:
        while not self._answers():
            self._look()
        nodes = []
        if self.keys is not None:
            for folder in sorted(self.keys.glob("party-*"), key=_number):
                nodes.append(self._register(folder))
            self._start_parties()
        words = ["flwr", "run", str(self.app), "here", "--stream", *self.words]
        if nodes:
            words += ["--run-config", f'nodes="{",".join(nodes)}"']
        self.awaited = "the server's program"
        run = self._start("flwr run", words, subprocess.PIPE)
        assert run.stdout is not None
        lines: queue.Queue[str] = queue.Queue()
        reader = threading.Thread(target=_read_lines, args=(run.stdout, lines.put), daemon=True)
        reader.start()
        failed = False
        while reader.is_alive() or not lines.empty():
            with suppress(queue.Empty):
                line = lines.get(timeout=0.2)
                failed = failed or COLORS.sub("", line).startswith("error:")
                self.awaited = "the next line of the server's program"
                self._print(line)
            if "flwr run" in self.processes and run.poll() is None:
                self._look()
        return max(run.wait(), int(failed))

    def _prepare(self, home: Path) -> None:
        """Starts the SuperLink; a ConfigError says what is missing."""
        for program in PROGRAMS:
            if shutil.which(program) is None:
                raise ConfigError(
                    f"there is no program {program} beside {sys.executable}; pip install "
                    f"'.[deploy]' there"
                )
        if self.keys is None:
            _free_port(self.port)
        else:
            self.inner = _free_port(0)
        os.environ["FLWR_HOME"] = str(home)
        words = ["flower-superlink", "--disable-runtime-dependency-installation"]
        words += ["--port", str(self.inner)]
        safety = "insecure = true"
        if self.keys is None:
            words += ["--insecure"]
        else:
            server = self.keys / "server"
            path = json.dumps(str(server / "ca.crt"), ensure_ascii=False)  # a text of TOML, too
            safety = f"root-certificates = {path}"
            words += ["--ssl-ca-certfile", str(server / "ca.crt"), "--enable-supernode-auth"]
            words += ["--ssl-certfile", str(server / "server.crt")]
            words += ["--ssl-keyfile", str(server / "server.key")]
        text = f"""\
[superlink]
default = "here"
[superlink.here]
address = "127.0.0.1:{self.inner}"
{safety}
"""
        (home / "config.toml").write_text(text)
        self._start("flower-superlink", words)

    def _start_parties(self) -> None:
        for party in range(self.parties):
            file = self.app / "party.yaml"
            if self.keys is not None:
                file = self.keys / f"party-{party}" / "party.yaml"
            words = ["-m", "pfl", "node", "--config", str(file), "--client", str(party)]
            words += ["--superlink", f"127.0.0.1:{self.port}"]
            self._start(f"party-{party}", [sys.executable, *words])

    def _register(self, folder: Path) -> str:
        """Tells the SuperLink a party's public key, and returns the number of its node."""
        self.awaited = f"the SuperLink, which takes the key of {folder.name}"
        words = ["flwr", "supernode", "register", str(folder / "node.pub"), "here"]
        one = self._start("register", [*words, "--format", "json"], subprocess.PIPE)
        while one.poll() is None:
            self._look()
        assert one.stdout is not None
        told = COLORS.sub("", one.stdout.read())
        found = re.search(r'"node-id": *"?(\d+)', told)
        if found is None:
            line = " ".join(told.split())
            raise ConfigError(f"{folder / 'node.pub'}: the SuperLink does not take it: {line}")
        return found[1]

    def _start(self, name: str, words: list[str], out: Any = None) -> subprocess.Popen:
        """Starts a process, in a group of its own, whose output goes to `<name>.log` or a pipe."""
        options: dict[str, Any] = {"start_new_session": True, "stderr": subprocess.STDOUT}
        if sys.platform == "linux":
            options["preexec_fn"] = partial(_end_with_parent, os.getpid())
        self._starting = True
        if out is not None:
            process = subprocess.Popen(words, stdout=out, text=True, **options)
        else:
            with (self.app / f"{name}.log").open("w") as log:
                process = subprocess.Popen(words, stdout=log, **options)
        self.processes[name] = process
        self._starting = False
        if self._asked:
            self.leave(self._asked)
        return process

    def leave(self, number: int, _: object = None) -> None:
        """Ends this program at a signal; one that is being started is known first."""
        self._asked = number
        if not self._starting:
            print(f"error: ended by {signal.Signals(number).name}", file=sys.stderr, flush=True)
            sys.exit(128 + number)

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.inner), 1.0):
            return True
        return False

    def _look(self) -> None:
        """Waits for a moment; a ConfigError if the SuperLink has ended."""
        time.sleep(0.1)
        for name, process in [*self.processes.items()]:
            if process.poll() is None or name in ("flwr run", "register"):
                continue
            del self.processes[name]
            path = self.app / f"{name}.log"
            line = f"{name} has ended: {_last_line(path)} ({path})"
            if name == "flower-superlink":
                raise ConfigError(line)
            self._print(f"{line}\n")
        if time.monotonic() - self._last > EVERY:
            self._print(f"waiting for {self.awaited}\n")

    def _print(self, line: str) -> None:
        print(line, end="", flush=True)
        self._last = time.monotonic()

    def end(self) -> None:
        """Ends all processes and what they have started."""
        running = [*self.processes.values()]
        for process in running:
            _signal(process, signal.SIGTERM)
        end = time.monotonic() + GRACE
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        for process in running:
            _signal(process, signal.SIGKILL)
            process.wait()


def _free_port(port: int) -> int:
    """Returns a port that is free on this machine; a ConfigError if this one is not.

    Args:
        port: The port; 0: any.
    """
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                f"port {port} is in use ({error.strerror}); end what uses it, or give --port"
            ) from error
        return trial.getsockname()[1]


def _signal(process: subprocess.Popen, number: int) -> None:
    """Sends a signal to a process and to those that it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _end_with_parent(parent: int) -> None:
    """Has the system end this process if this program is killed."""
    signal_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # it was killed a moment ago
        os._exit(1)


def _read_lines(stream: IO[str], put: Callable[[str], None]) -> None:
    for line in stream:
        put(line)


def _last_line(path: Path) -> str:
    """Returns the last line of a log that says something."""
    lines = [COLORS.sub("", line).strip() for line in path.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "it has said nothing")


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("party-"))


def _adopt() -> None:
    """Makes orphans of this program's processes its own children (PR_SET_CHILD_SUBREAPER)."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def _end_children() -> None:
    """Kills all children of this program, and those that become its own by that."""
    while True:
        children = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                fields = path.read_text().rsplit(")", 1)[1].split()
                if int(fields[1]) == os.getpid():
                    children.append(int(path.parent.name))
        if not children:
            return
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(child, 0)


def _number_of_parties(path: Path) -> int:
    """Returns how many parties the run of an app has."""
    try:
        return int(yaml.safe_load(path.read_text())["data"]["init_args"]["num_clients"])
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{path.parent} is no folder that pfl deploy has written") from error


def main(words: list[str]) -> int:
    """Runs the command; returns its status."""
    parser = argparse.ArgumentParser("python -m pfl.deploy.here", description=__doc__)
    parser.add_argument("app", type=Path, help="the folder of pfl deploy")
    parser.add_argument("--keys", type=Path, help="the folder of certificates and keys")
    parser.add_argument("--port", type=int, default=8000, help="the SuperLink's; default: 8000")
    parser.add_argument("--server", action="store_true", help="start no party: they are elsewhere")
    given, others = parser.parse_known_args(words)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        parties = 0
        if not given.server:
            parties = _number_of_parties(given.app / "server.yaml")
        keys = given.keys
        if keys is not None:
            keys = keys.resolve()
        federation = Federation(given.app.resolve(), keys, given.port, parties, others)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, federation.leave)
        with tempfile.TemporaryDirectory() as home:
            try:
                return federation.run(Path(home))
            finally:
                federation.end()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    if sys.platform == "linux":  # a SuperLink's programs have groups of their own
        _adopt()
        try:
            sys.exit(main(sys.argv[1:]))
        finally:
            _end_children()
    sys.exit(main(sys.argv[1:]))
