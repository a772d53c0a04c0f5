"""The commands of docs/deploy.md, in a process of their own."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from tests.commands import ROOT, call, free_port, table
from tests.deploy.real import REAL
from tests.refusal import refused

WORDS = ["--data.num_clients", 3, "--loop.clients_per_round", "null", "--trainer.callbacks", "[]"]


PAGE = (ROOT / "docs/deploy.md").read_text()
BLOCKS = re.findall(r"```sh\n(pfl (?:deploy|node).*?)```", PAGE, re.S)


def shell(block, folder, log=None, **options):
    """Starts a shell with the lines of a block, for which `pfl` is that of this environment."""
    program = folder / "bin/pfl"
    if not program.exists():  # one that is being started cannot be written
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m pfl "$@"\n')
        program.chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}/bin{os.pathsep}{os.environ['PATH']}"}
    env["PYTHONPATH"] = str(ROOT)
    return subprocess.Popen(["sh", "-ec", block], cwd=folder, env=env, stdout=log, **options)


def all_took_part(folder):
    rows = table(folder / "runs/quickstart/metrics.csv")
    assert [row["participants"] for row in rows] == ["3"] * 3
    assert all(float(row["comm/uplink_wire_bytes"]) > 0 for row in rows)


class TestThePage:
    pytestmark = REAL

    def test_it_makes_a_federation_on_one_machine(self, tmp_path):
        block = BLOCKS[0].replace("here.sh", f"here.sh --port {free_port()}")
        assert shell(block, tmp_path).wait(280) == 0
        all_took_part(tmp_path)

    def test_it_makes_a_federation_on_several_machines(self, tmp_path):
        """With TLS and keys; all of them are this one. A party compares itself, and then trains."""
        port = free_port()
        _, server, party = BLOCKS
        server = server.replace("fl.example.org", "localhost")
        deploy, run = server.strip().splitlines()
        assert shell(deploy, tmp_path).wait(120) == 0
        for file in tmp_path.glob("app-keys/party-*/party.yaml"):
            file.write_text(file.read_text().replace("localhost:8000", f"localhost:{port}"))
        with (tmp_path / "server.log").open("w") as log:
            started = shell(f"{run} --port {port}", tmp_path, log, start_new_session=True)
        nodes = []
        try:
            for client in range(3):
                # It ends with an error until the SuperLink has its key; systemd starts it again.
                again = "\n".join(
                    f"until {line}; do sleep 1; done" for line in party.split("\n")[:2]
                )
                text = again.replace("party-0", f"party-{client}")
                with (tmp_path / f"{client}.log").open("w") as log:
                    nodes.append(shell(text, tmp_path, log, start_new_session=True))
            assert started.wait(400) == 0, (tmp_path / "server.log").read_text()
        finally:
            for process in (started, *nodes):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                process.wait(60)
        all_took_part(tmp_path)
        for client in range(3):
            told = (tmp_path / f"{client}.log").read_text()
            assert f"party {client} agrees with the server at localhost:{port}" in told


@pytest.mark.cli
def test_an_app_and_its_party_agree(tmp_path):
    """The party names what differs: here the learning rate, changed in its own copy."""
    from pfl.deploy.app import read_node
    from pfl.deploy.wire import pack, unpack

    app = tmp_path / "app"
    status, out, err = call("deploy", "--config", "quickstart", *WORDS, "--out", app)
    assert (status, out) == (0, f"{app} (an app for 3 parties)\n"), err
    worker, socket = read_node(app / "party.yaml", client=2)
    assert socket == app / "parties/2.sock"
    agreed = dict(worker.agreed)
    hello = unpack(worker.answer(pack({"do": "hello", "agreed": agreed})))
    assert (hello["client"], hello["classes"], hello["input"]) == (2, 10, ["float32", [1, 8, 8]])
    agreed["model.init_args.lr"] = 0.2
    answer = unpack(worker.answer(pack({"do": "hello", "agreed": agreed})))
    line = "model.init_args.lr: 0.05 at the party and 0.2 at the server; both must have the same"
    assert answer == {"refused": line}

    shutil.copy(app / "party.yaml", app / "other.yaml")
    (app / "other.yaml").write_text("app: .\nclint: 2\n")
    with refused(f"{app / 'other.yaml'}: clint: the keys are"):
        read_node(app / "other.yaml")
    (app / "other.yaml").write_text("client: 3\n")
    with refused("client: 3; it must be from 0 to 2"):
        read_node(app / "other.yaml")
    (app / "other.yaml").write_text("{client: 1, folder: run.yaml/states}")
    with refused("other.yaml: folder: there can be no folder"):
        read_node(app / "other.yaml")
    (app / "mine.csv").write_text("a,b,y\n" + 9 * "1,2,0\n2,1,1\n")
    options = f"{{file: {app}/mine.csv, target_column: y, num_clients: 1}}"
    data = f"{{class_path: TableDataModule, init_args: {options}}}"
    (app / "other.yaml").write_text(f"{{client: 1, data: {data}}}")
    with refused("network: SmallCNN cannot process inputs of shape [2]"):
        read_node(app / "other.yaml")
