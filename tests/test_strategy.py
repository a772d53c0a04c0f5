"""Two processes compute what one process computes."""

import csv
import io
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from pfl import ClientParallelStrategy
from pfl.strategy import gather
from tests.algorithms.methods import METHODS

ROOT = Path(__file__).parents[1]
# name: (algorithm and its network, data, arguments of the loop).
DIGITS = "DigitsDataModule(7, Dirichlet(1.0), seed=0)"
FITS = {
    "stateless": (
        "FedAvg(MLP(64, [6]), server_optimizer=partial(torch.optim.Adam, lr=0.02))",
        DIGITS,
        "clients_per_round=5, clients_at_once=2",
    ),
    "alone": (
        "LocalTrain(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10)), "
        "batch_size=None)",
        DIGITS,
        "clients_per_round=3",
    ),
}
for method in METHODS.values():
    # Of four clients, a process has two: in the first round the first process has none that
    # trains, in the last the second. Where everyone must take part, in one round nobody does, and
    # in another run there is only one client.
    algorithm = f"METHODS[{method.name!r}].make(small_network(), loss=HalfSquaredError(), **TRAIN)"
    trace = [range(4), [], range(4)] if method.everyone else [[1], range(4), [2]]
    FITS[method.name] = (algorithm, "small_world()", f"trace={[list(c) for c in trace]}")
    if method.everyone:
        FITS[f"{method.name}, one client"] = (algorithm, "small_world(clients=1)", "")
DRIVER = """
import sys
from pathlib import Path
from functools import partial
import torch
from torch import nn
from datamodules import DigitsDataModule, Dirichlet
from models import MLP
from pfl import FederatedLoop, Trainer
from pfl.algorithms import FedAvg, LocalTrain
from tests.algorithms.methods import METHODS, small_network, small_world
from models import HalfSquaredError

TRAIN = dict(lr=0.2, local_epochs=2, batch_size=2)
root = sys.argv[1]
fits = {fits!r}
for name, (algorithm, data, loop) in fits.items():
    torch.manual_seed(0)
    algorithm = eval(algorithm)
    trainer = Trainer(
        name=name, max_epochs=3, default_root_dir=root, enable_progress_bar=False,
        accelerator="cpu", precision="64-true", {trainer}
    )
    trainer.fit(algorithm, datamodule=eval(f"FederatedLoop({{data}}, {{loop}})"))
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


def same(found, wanted):
    """Whether two entries of a table agree: text and whole numbers exactly."""
    if found == wanted:
        return True
    inexact = "." in wanted or "e" in wanted
    return inexact and float(found) == pytest.approx(float(wanted), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", FITS)
def test_metrics_and_clients_are_equal(roots, name):
    """And the tables that a method records."""
    (one, _), (two, _) = roots
    files = {path.name for path in (one / name).glob("*.csv")}
    assert {path.name for path in (two / name).glob("*.csv")} == files >= {"metrics.csv"}
    for file in files:
        rows, wanted = read(two / name / file), read(one / name / file)
        for row, other in zip(rows, wanted, strict=True):
            assert list(row) == list(other)
            for column, value in other.items():
                if not same(row[column], value):
                    raise AssertionError(f"{file} {column}: {row[column]}, not {value}")
    assert len(read(one / name / "metrics.csv")) == 3


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
    assert all(len(entry["ids"]) > 0 for entry in wanted["clients"].values())


def assert_close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9, equal_nan=True)


def test_a_process_without_clients_takes_part(roots):
    for name, (_, _, loop) in FITS.items():
        rows = read(roots[1][0] / name / "metrics.csv")
        participants = [row["participants"] for row in rows]
        if "one client" in name:
            assert participants == ["1", "1", "1"]
        elif "trace" in loop:
            assert participants in (["1", "4", "1"], ["4", "0", "4"])


def test_without_processes_a_value_gathers_to_itself():
    assert gather({"a": 1}) == [{"a": 1}]
    assert ClientParallelStrategy.strategy_name == "client_parallel"
