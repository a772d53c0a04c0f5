"""The commands of docs/deploy.md, in a process of their own."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT, call, table
from tests.refusal import refused

WORDS = ["--data.num_clients", 3, "--loop.clients_per_round", "null", "--trainer.callbacks", "[]"]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.cli
def test_the_page_makes_a_federation_on_one_machine(tmp_path):
    bin_folder = Path(sys.executable).parent
    if not (bin_folder / "flower-superlink").exists():
        pytest.skip("flwr is not installed: pip install '.[deploy]'")
    (block,) = re.findall(r"```sh\n(pfl deploy.*?)```", (ROOT / "docs/deploy.md").read_text(), re.S)
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["sh", "-ec", block], cwd=tmp_path, env=env, timeout=280)
    assert done.returncode == 0
    rows = table(tmp_path / "runs/quickstart/metrics.csv")
    assert [row["participants"] for row in rows] == ["3"] * 3
    assert all(float(row["comm/uplink_wire_bytes"]) > 0 for row in rows)


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
