"""Two processes compute the same as one, for every method; three do for methods of each kind."""

import fcntl
import io
import os
import sys
from contextlib import redirect_stdout
from datetime import timedelta

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy

from pfl import ClientParallelStrategy
from pfl.clients.state_rows import unpacked
from pfl.distributed import collectives
from pfl.distributed.collectives import _gloo_group, gather
from tests.algorithms.methods import METHODS, small_network
from tests.commands import finish, table
from tests.refusal import refused

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
    "local buffers": (
        "FedAvg(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10)), "
        "batch_size=None, buffers='local')",
        DIGITS,
        "clients_per_round=3",
    ),
    "failures": (
        "FedAvg(MLP(64, [6]), buffers='local')",
        DIGITS,
        "clients_per_round=5, clients_at_once=2, dropout=0.4, stragglers=0.5, unseen=[3]",
    ),
    "messages as they come": (
        "FedBuff(MLP(64, [6]), buffer_size=3)",
        DIGITS,
        "clients_per_round=5, clients_at_once=2, dropout=0.2, clock=Clock(5000.0, 1.0)",
    ),
    "metrics": (
        "FedAvg(MLP(64, [6]))",
        "DigitsDataModule(7, Dirichlet(0.1), seed=0)",
        "clients_per_round=5, clients_at_once=2, metrics=[MulticlassAUROC(10, average='weighted')]",
    ),
    "failures with states": (
        "FedSLR(MLP(64, [6]), memory_efficient=False)",
        DIGITS,
        "clients_at_once=1, dropout=[[0, 1], [], [0, 1, 2, 4, 5, 6]], stragglers=0.5, unseen=[3]",
    ),
    "privacy": (
        "SCAFFOLD(MLP(64, [6]))",
        DIGITS,
        "clients_per_round=3, sampling='bernoulli', clients_at_once=2, "
        "privacy=Privacy(1.0, 1.0, adaptive=AdaptiveClip(), reproducible=True)",
    ),
    "sample privacy": (
        "Ditto(MLP(64, [6]))",
        DIGITS,
        "clients_per_round=3, clients_at_once=2, dropout=0.4, "
        "sample_privacy=SamplePrivacy(1.0, 1.0, reproducible=True)",
    ),
    "drawn family": (
        "FedProto(drawn(4), **TRAIN)",
        DIGITS,
        "clients_per_round=5, clients_at_once=2, dropout=0.3, unseen=[3]",
    ),
    "family with a common head": (
        "LGFedAvg(drawn(2), **TRAIN)",
        DIGITS,
        "clients_at_once=1, dropout=0.3",
    ),
    "nested family": ("HeteroFL(nested(), **TRAIN)", DIGITS, "clients_per_round=5"),
    "distilled family": (
        "FedDF(nested(), public=DigitsDataModule(num_clients=1), server_steps=3, **TRAIN)",
        DIGITS,
        "clients_per_round=5, clients_at_once=2, dropout=0.3",
    ),
    "median": (
        "FedAvg(MLP(64, [6]))",
        DIGITS,
        "clients_at_once=2, aggregation=Median(), attackers=Attackers([0, 3], InnerProduct())",
    ),
    "norm bound": (
        "FedAvg(MLP(64, [6]))",
        DIGITS,
        "clients_at_once=2, aggregation=NormBound(0.1), attackers=Attackers([0], SignFlip(9.0))",
    ),
    "compression": (
        "FedAvg(MLP(64, [6]))",
        DIGITS,
        "clients_per_round=4, clients_at_once=2, dropout=0.3, stages=[TopK(0.1)]",
    ),
}
SPECIAL = list(FITS)
for method in METHODS.values():
    # With client state, two processes own two of the four clients each; three processes own two,
    # one and one. In the first round no client of the first process trains, in the last round none
    # of the second, and in the second round some processes have a chunk more than others. If the
    # method needs all clients, nobody trains in one round, and a second run has only one client.
    algorithm = f"METHODS[{method.name!r}].make(small_network(), **TRAIN)"
    trace = [range(4), [], range(4)] if method.everyone else [[1], range(4), [2]]
    loop = f"trace={[list(c) for c in trace]}, clients_at_once=1"
    FITS[method.name] = (algorithm, f"small_world(classes={method.classes})", loop)
    if method.everyone:
        FITS[f"{method.name}, one client"] = (algorithm, "small_world(clients=1)", "")


def kind(entry):
    """What a method keeps, and who sends what when: all that the processes have to care about."""
    method = entry.make(small_network())
    kept = bool(method.states.declared), bool(method.states.messages), bool(method.tables)
    return *kept, entry.everyone, entry.pooled, method.sends_first


ONE_OF_EACH_KIND = {kind(entry): name for name, entry in METHODS.items()}
IN_THREE = [
    name
    for name in FITS
    if name in SPECIAL or name.removesuffix(", one client") in ONE_OF_EACH_KIND.values()
]
IN = {1: list(FITS), 2: list(FITS), 3: IN_THREE}
RUNS = [(name, processes) for processes in (2, 3) for name in IN[processes]]
DRIVER = """
import sys
from pathlib import Path
from functools import partial
import torch
from torch import nn
from torchmetrics.classification import MulticlassAUROC
from datamodules import DigitsDataModule, Dirichlet
from models import MLP
from pfl import FederatedLoop, Trainer
from pfl.aggregation.attacks import Attackers, InnerProduct, SignFlip
from pfl.aggregation.privacy import AdaptiveClip, Privacy, SamplePrivacy
from pfl.aggregation.robust import Median, NormBound
from pfl.algorithms import (
    SCAFFOLD, Ditto, FedAvg, FedBuff, FedDF, FedProto, FedSLR, HeteroFL, LGFedAvg, LocalTrain
)
from pfl.rounds.clock import Clock
from pfl.stages.compression import TopK
from tests.algorithms.methods import METHODS, small_network, small_world
from tests.families import drawn, nested

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
def root(tmp_path_factory):
    """The folder of the runs in 1, 2 and 3 processes, and of their output.

    The first worker of pytest-xdist makes the runs for all workers.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    with (shared / "strategy.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "strategy").exists():
            make_runs(shared / "strategy.part")
            (shared / "strategy.part").rename(shared / "strategy")
    return shared / "strategy"


def make_runs(root):
    """Runs one process here, two that Lightning starts, and three that torchrun starts."""
    root.mkdir()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as own:
        patch.setattr(sys, "argv", ["driver", str(root / "1")])
        exec(DRIVER.format(fits=FITS, trainer=""), {})
    (root / "1.txt").write_text(own.getvalue())
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "3"]
    for processes, starter in ((2, []), (3, torchrun)):
        script = root / f"driver_{processes}.py"
        trainer = f"strategy='client_parallel', devices={processes}"
        fits = {name: FITS[name] for name in IN[processes]}
        script.write_text(DRIVER.format(fits=fits, trainer=trainer))
        # Two processes are fresh ones, so that each has its own order of sets.
        fresh = processes == 2
        printed = finish(*starter, script, root / str(processes), cwd=root, fresh=fresh)
        (root / f"{processes}.txt").write_text(printed)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_all_processes_took_part(root, processes):
    for name in IN[processes]:
        finished = {path.name for path in (root / f"{processes}-finished" / name).iterdir()}
        assert finished == {f"{rank} of {processes}" for rank in range(processes)}
    # The table of each run is printed once.
    printed = (root / f"{processes}.txt").read_text()
    assert printed.count("everything else:") == len(IN[processes])
    assert {path.name for path in (root / str(processes)).iterdir()} == set(IN[processes])


def same(actual, expected):
    """Whether two entries of a table agree; text and whole numbers must be equal."""
    if actual == expected:
        return True
    inexact = "." in expected or "e" in expected
    return inexact and float(actual) == pytest.approx(float(expected), rel=1e-9, abs=1e-9)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("name", "processes"), RUNS)
def test_metrics_clients_and_recorded_tables_are_equal(root, name, processes):
    one, two = root / "1", root / str(processes)
    files = {path.name for path in (one / name).glob("*.csv")}
    assert {path.name for path in (two / name).glob("*.csv")} == files >= {"metrics.csv"}
    for file in files:
        rows, expected = table(two / name / file), table(one / name / file)
        for row, other in zip(rows, expected, strict=True):
            assert list(row) == list(other)
            for column, value in other.items():
                if not same(row[column], value):
                    raise AssertionError(f"{file} {column}: {row[column]}, not {value}")
    assert len(table(one / name / "metrics.csv")) == 3


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("name", "processes"), RUNS)
def test_checkpoints_are_equal(root, name, processes):
    one, two = (
        torch.load(root / run / name / "checkpoints" / "last.ckpt", weights_only=True)
        for run in ("1", str(processes))
    )
    assert one["state_dict"].keys() == two["state_dict"].keys()
    for key, value in one["state_dict"].items():
        assert_close(two["state_dict"][key], value)
        assert value.dtype == torch.float64 or not value.is_floating_point()
    saved, expected = two["federated"], one["federated"]
    assert saved["ledger"].keys() == expected["ledger"].keys()
    for way, counts in expected["ledger"].items():
        assert torch.equal(saved["ledger"][way], counts)
    for key in ("rounds", "bytes", "samples_seen", "partition", "algorithm"):
        assert saved[key] == expected[key], key
    assert saved["clients"].keys() == expected["clients"].keys()
    for state, entry in expected["clients"].items():
        (ids, rows), (saved_ids, saved_rows) = map(kept, (entry, saved["clients"][state]))
        assert torch.equal(saved_ids, ids) and len(ids) > 0
        assert_close(saved_rows, rows)
        assert_close(saved["clients"][state]["initial"], entry["initial"])


def kept(entry):
    """Ids and rows of a client state in a checkpoint, sorted by id."""
    pieces = [piece for part in entry["parts"] for piece in unpacked(part, len(entry["initial"]))]
    ids, rows = map(torch.cat, zip(*pieces, strict=True))
    return ids.sort().values, rows[ids.argsort()]


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("processes", [2, 3])
def test_a_process_without_clients_takes_part(root, processes):
    for name in IN[processes]:
        loop = FITS[name][2]
        rows = table(root / str(processes) / name / "metrics.csv")
        participants = [row["participants"] for row in rows]
        if "one client" in name or (name in METHODS and METHODS[name].pooled):
            assert participants == ["1", "1", "1"]
        elif "trace" in loop:
            assert participants in (["1", "4", "1"], ["4", "0", "4"])


def test_without_processes_a_value_gathers_to_itself():
    assert gather({"a": 1}) == [{"a": 1}]


# ---- several processes on one GPU ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("shared", "indices", "backend"), [(1, [0, 1], "nccl"), (2, [0, 0, 1, 1], "gloo")]
)
def test_processes_share_gpus(monkeypatch, shared, indices, backend):
    strategy = ClientParallelStrategy(processes_per_device=shared)
    strategy.parallel_devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    strategy.cluster_environment = LightningEnvironment()
    assert strategy.num_processes == len(indices)
    for rank, index in enumerate(indices):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert strategy.root_device == torch.device("cuda", index)
    assert strategy._get_process_group_backend() == backend


def test_a_given_backend_is_kept():
    strategy = ClientParallelStrategy(2, process_group_backend="mpi")
    assert strategy._get_process_group_backend() == "mpi"


def test_at_least_one_process_runs_on_a_device():
    with refused("trainer.strategy.processes_per_device: 0", "at least 1"):
        ClientParallelStrategy(0)


def test_windows_has_one_process(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    for devices in (1, 2):
        strategy = ClientParallelStrategy()
        strategy.parallel_devices = [torch.device("cpu")] * devices
        strategy.cluster_environment = LightningEnvironment()
        if devices == 1:
            assert strategy.launcher is not None
        else:
            with refused("trainer.devices: 2 processes", "Windows"):
                strategy.launcher  # noqa: B018


def test_processes_wait_for_each_other_as_long_as_the_strategy_says(monkeypatch):
    monkeypatch.setattr(collectives, "_timeout", None)
    monkeypatch.setattr(DDPStrategy, "setup_distributed", lambda self: None)
    monkeypatch.setattr(torch.distributed, "new_group", lambda **arguments: arguments)
    ClientParallelStrategy(timeout=timedelta(hours=3)).setup_distributed()
    try:
        assert _gloo_group("a world") == {"backend": "gloo", "timeout": timedelta(hours=3)}
    finally:
        _gloo_group.cache_clear()
