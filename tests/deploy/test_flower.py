"""One method of each kind over a real SuperLink and SuperNodes on this machine, bit for bit."""

import contextlib
import multiprocessing
import os
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import yaml

from pfl.cli import main
from pfl.deploy.here import QUIET
from tests.algorithms.methods import differing
from tests.commands import ROOT, call, free_port
from tests.deploy.computed import computed
from tests.deploy.real import BIN, REAL

PARTIES = 3
pytestmark = REAL
BASE = f"""
seed_everything: 0
trainer: {{name: run, max_epochs: 2}}
data:
  class_path: DigitsDataModule
  init_args:
    num_clients: {PARTIES}
    partition: {{class_path: Dirichlet, init_args: {{alpha: 0.3}}}}
loop: {{clients_per_round: 2, clients_at_once: 1, evaluate: [test]}}
"""
PRIVACY = "{noise_multiplier: 0.5, clip: 0.1, delta: 0.01, reproducible: true}"
KINDS = {
    "stateless": ["FedAvg"],
    "by SuperNodes": ["FedAvg"],
    "client state": ["SCAFFOLD"],
    "personal layers": ["FedPer"],
    "models of their own": ["Ditto"],
    "kept messages": ["FedAMP"],
    "sent first": ["FedPAC"],
    "low-rank messages": ["FedSLR"],
    "privacy": ["FedAvg", "--loop.privacy", PRIVACY, "--model.weighting", "uniform"],
    "float32": ["FedAvg", "--trainer.precision", "32-true"],
}


class Flower:
    """A SuperLink, to which parties connect by themselves or by SuperNodes."""

    def __init__(self, folder):
        self.folder = folder
        self.processes = []
        self.port = free_port()
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        self.env = {**os.environ, **QUIET, "PATH": path, "PYTHONPATH": str(ROOT)}
        self.env["FLWR_HOME"] = str(folder / ".flwr")
        (folder / ".flwr").mkdir()
        address = f'address = "127.0.0.1:{self.port}"\ninsecure = true\n'
        (folder / ".flwr/config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\n{address}'
        )
        options = ["--insecure", "--disable-runtime-dependency-installation"]
        self.start("superlink", "flower-superlink", *options, "--port", self.port)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.2)
        raise TimeoutError("there is no SuperLink")

    def start(self, name, *command):
        """Starts a process whose output is in a file."""
        with (self.folder / f"{name}.log").open("w") as log:
            words = [*map(str, command)]
            options = {"env": self.env, "stdout": log, "stderr": subprocess.STDOUT}
            self.processes.append(subprocess.Popen(words, **options))
        return self.processes[-1]

    def end(self):
        for process in self.processes[::-1]:
            process.terminate()
            process.wait(60)

    def run(self, app, supernodes):
        """Runs an app with a worker for each party, and returns what the run has printed."""
        context = multiprocessing.get_context("forkserver")
        workers = []
        others = []
        for party in range(PARTIES):
            file = app / f"party-{party}.yaml"
            content = {"client": party, "socket": f"{self.folder}/{party}.sock", "folder": "states"}
            if supernodes:
                words = [
                    "--insecure",
                    "--superlink",
                    f"127.0.0.1:{self.port}",
                    "--port",
                    free_port(),
                ]
                words += ["--node-config", f'worker="{content["socket"]}"']
                others.append(self.start(f"node-{party}", "flower-supernode", *words))
            else:
                content["superlink"] = {"address": f"127.0.0.1:{self.port}"}
            file.write_text(yaml.safe_dump(content))
            node = context.Process(target=main, args=(["node", "--config", str(file)],))
            node.start()
            workers.append(node)
        words = [BIN / "flwr", "run", app, "here", "--stream"]
        options = {"text": True, "timeout": 900, "env": self.env, "capture_output": True}
        try:
            return subprocess.run(words, **options).stdout
        finally:
            for node in (*workers, *others):
                node.terminate()
            for node in workers:
                node.join(60)
            for node in others:
                node.wait(60)


@pytest.fixture(scope="module")
def flower():
    with tempfile.TemporaryDirectory() as folder:  # sockets have short names
        flower = Flower(Path(folder))
        yield flower
        flower.end()


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_over_flower_is_the_simulation(flower, tmp_path, kind, monkeypatch):
    """Iterates, states, scores and bytes; two of three parties train in each of two rounds."""
    monkeypatch.chdir(tmp_path)
    name, *more = KINDS[kind]
    words = ["--config", "base.yaml", "--trainer.precision", "64-true", "--model", name]
    words += ["--model.network", "SmallCNN", "--model.lr", 0.05, "--model.batch_size", 20, *more]
    (tmp_path / "base.yaml").write_text(BASE)
    status, _, err = call("deploy", *words, "--out", "app")
    assert status == 0, err
    printed = flower.run(tmp_path / "app", supernodes=kind == "by SuperNodes")
    status, _, err = call("fit", *words, "--trainer.default_root_dir", "simulated")
    assert status == 0, err
    assert (tmp_path / "runs/run/summary.json").is_file(), printed
    actual = computed(tmp_path / "runs/run", tmp_path / "app/states")
    wire = {name for name in actual if "wire" in name or name.endswith("dropped")}
    assert len(wire) == 6
    assert differing(actual, computed(tmp_path / "simulated/run")) == wire
