"""Two processes compute what one process computes."""

import csv
import io
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch

from pfl import ClientParallelStrategy
from pfl.strategy import gather

ROOT = Path(__file__).parents[1]
# name: (algorithm and its network, arguments of the loop).
FITS = {
    "stateful": ("FedSLR(MLP(64, [6]), low_rank_penalty=0.01)", "clients_per_round=4"),
    "stateless": (
        "FedAvg(MLP(64, [6]), server_optimizer=partial(torch.optim.Adam, lr=0.02))",
        "clients_per_round=5, clients_at_once=2",
    ),
    "one client": ("FedSLR(MLP(64, [6]), low_rank_penalty=0.01)", "clients_per_round=1"),
    "alone": (
        "LocalTrain(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10)), "
        "batch_size=None)",
        "clients_per_round=3",
    ),
}
DRIVER = """
import sys
from pathlib import Path
from functools import partial
import torch
from torch import nn
from datamodules import DigitsDataModule, Dirichlet
from models import MLP
from pfl import FederatedLoop, Trainer
from pfl.algorithms import FedAvg, FedSLR, LocalTrain

root = sys.argv[1]
fits = {fits!r}
for name, (algorithm, loop) in fits.items():
    torch.manual_seed(0)
    algorithm = eval(algorithm)
    trainer = Trainer(
        name=name, max_epochs=3, default_root_dir=root, enable_progress_bar=False,
        accelerator="cpu", precision="64-true", {trainer}
    )
    data = DigitsDataModule(7, Dirichlet(1.0), seed=0)
    trainer.fit(algorithm, datamodule=eval(f"FederatedLoop(data, {{loop}})"))
    seen = Path(root + "-finished", name)
    seen.mkdir(parents=True, exist_ok=True)
    (seen / f"{{trainer.global_rank}} of {{trainer.world_size}}").touch()
"""


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """The folders of the runs in one process and in two, and what both printed."""
    root = tmp_path_factory.mktemp("strategy")
    one, two = root / "one", root / "two"
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", ["driver", str(one)])
        exec(DRIVER.format(fits=FITS, trainer=""), {})
    script = root / "driver.py"
    script.write_text(DRIVER.format(fits=FITS, trainer="strategy='client_parallel', devices=2"))
    done = subprocess.run(
        [sys.executable, str(script), str(two)],
        cwd=root,
        # The processes meet on this machine's own address, with or without a network.
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return (one, printed.getvalue()), (two, done.stdout)


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_two_processes_took_part(roots):
    (one, printed), (two, printed_by_two) = roots
    for name in FITS:
        for root, finished in ((one, {"0 of 1"}), (two, {"0 of 2", "1 of 2"})):
            assert {path.name for path in Path(f"{root}-finished", name).iterdir()} == finished
    # The table of each run is printed once.
    assert printed.count("everything else:") == len(FITS)
    assert printed_by_two.count("everything else:") == len(FITS)
    assert {path.name for path in one.iterdir()} == {path.name for path in two.iterdir()}
    assert {path.name for path in two.iterdir()} == set(FITS)


@pytest.mark.parametrize("name", FITS)
def test_metrics_and_clients_are_equal(roots, name):
    (one, _), (two, _) = roots
    rows, wanted = read(two / name / "metrics.csv"), read(one / name / "metrics.csv")
    assert len(rows) == 3
    for row, other in zip(rows, wanted, strict=True):
        assert list(row) == list(other)
        found, expected = (np.array(list(r.values()), np.float64) for r in (row, other))
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
        for count in ("round", "participants", "comm/uplink_bytes", "comm/downlink_bytes"):
            assert row[count] == other[count]
    clients, wanted = read(two / name / "clients.csv"), read(one / name / "clients.csv")
    for row, other in zip(clients, wanted, strict=True):
        assert list(row) == list(other)
        for column in row:
            if column.endswith("_loss"):
                assert float(row[column]) == pytest.approx(float(other[column]), rel=1e-9)
            else:
                assert row[column] == other[column], column


@pytest.mark.parametrize("name", FITS)
def test_checkpoints_are_equal(roots, name):
    one, two = (
        torch.load(root / name / "checkpoints" / "last.ckpt", weights_only=True)
        for root, _ in roots
    )
    assert one["state_dict"].keys() == two["state_dict"].keys()
    for key, value in one["state_dict"].items():
        assert_close(two["state_dict"][key], value)
        assert value.dtype == torch.float64 or not value.is_floating_point()
    saved, wanted = two["federated"], one["federated"]
    assert saved["ledger"].keys() == wanted["ledger"].keys()
    for way, counts in wanted["ledger"].items():
        assert torch.equal(saved["ledger"][way], counts)
    for key in ("rounds", "bytes", "samples_seen", "partition", "algorithm"):
        assert saved[key] == wanted[key], key
    assert saved["clients"].keys() == wanted["clients"].keys()
    for state, entry in wanted["clients"].items():
        order, other = (entry["ids"].argsort(), saved["clients"][state]["ids"].argsort())
        assert torch.equal(saved["clients"][state]["ids"][other], entry["ids"][order])
        assert_close(saved["clients"][state]["rows"][other], entry["rows"][order])
        assert_close(saved["clients"][state]["initial"], entry["initial"])
    if name != "stateless":
        assert len(wanted["clients"]) > 0
        assert all(len(entry["ids"]) > 0 for entry in wanted["clients"].values())


def assert_close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_a_process_without_clients_takes_part(roots):
    rows = read(roots[1][0] / "one client" / "metrics.csv")
    assert [row["participants"] for row in rows] == ["1", "1", "1"]


def test_without_processes_a_value_gathers_to_itself():
    assert gather({"a": 1}) == [{"a": 1}]
    assert ClientParallelStrategy.strategy_name == "client_parallel"
