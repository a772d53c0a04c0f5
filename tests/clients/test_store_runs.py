"""What clients remember, in whole runs and in a process that may take little memory."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from datamodules import ConfigError
from pfl import FederatedLoop
from pfl.algorithms import FedAMP, FedSLR, LocalTrain
from pfl.callbacks import RoundCheckpoint
from pfl.clients.state_rows import unpacked
from pfl.rounds.checkpoint_io import StreamedCheckpointIO
from tests.algorithms.methods import differing, everything
from tests.problems import least_squares, quiet, run

PROBLEM = least_squares([4] * 20, d=30, o=2)
ROW = 8 * PROBLEM.size
METHODS = {
    "FedSLR": lambda: FedSLR(PROBLEM.network(), lr=0.02, sparse_penalty=0.1, batch_size=2),
    "LocalTrain": lambda: LocalTrain(PROBLEM.network(), lr=0.02, batch_size=2),
    "FedAMP": lambda: FedAMP(PROBLEM.network(), lr=0.02, batch_size=2),  # and kept messages
}


@pytest.mark.parametrize("method", METHODS)
def test_a_run_with_more_client_state_than_memory(tmp_path, monkeypatch, method):
    """Memory for five of the 20 rows of a state: the rest goes to files, and nothing changes.

    Chunks of three clients: the rows of the next one are read while one trains.
    """
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    loop = {"clients_per_round": 10, "clients_at_once": 3}
    expected = run(METHODS[method](), PROBLEM, 4, root=tmp_path / "free", **loop)
    assert expected.store.tiers.used["file"] == 0
    limit = 5 * ROW
    loop["state_memory"] = limit / 2**30
    actual = run(METHODS[method](), PROBLEM, 4, root=tmp_path / "tight", **loop)
    used = actual.store.tiers.used
    assert used["memory"] <= limit and used["file"] >= 5 * ROW
    assert len(actual.store.seen(actual.store.names[0])) >= 10
    assert differing(everything(actual), everything(expected)) == set()
    assert {path.name for path in tmp_path.iterdir()} == {"free", "tight"}


def resumable(root, rounds, memory=None, dtype=None, ckpt_path=None):
    trainer = quiet(root, rounds, RoundCheckpoint(every_seconds=0), precision="64-true")
    arguments = dict(clients_per_round=10, clients_at_once=3, state_memory=memory)
    loop = FederatedLoop(PROBLEM.datamodule, state_dtype=dtype, **arguments)
    algorithm = METHODS["FedSLR"]()
    trainer.fit(algorithm, datamodule=loop, ckpt_path=ckpt_path)
    return algorithm, root / "run" / "checkpoints" / "last.ckpt"


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_run_goes_on_with_another_memory(tmp_path, dtype):
    """Saved from files and loaded into memory or the other way round: the same, also in 16 bits."""
    expected, _ = resumable(tmp_path / "straight", 4, dtype=dtype)
    for first, then in ((0.0, None), (None, 0.0)):
        root = tmp_path / f"{first} {then}"
        _, last = resumable(root, 2, first, dtype)
        actual, _ = resumable(root, 4, then, dtype, ckpt_path=last)
        assert differing(everything(actual), everything(expected)) == set()
        assert (actual.store.tiers.used["file"] > 0) == (then == 0.0)


def test_state_in_sixteen_bits_is_close_and_counts_the_same_bytes(tmp_path):
    """One rounding a round, relative error 2^-9, of what four rounds of contractions keep."""
    exact, _ = resumable(tmp_path / "exact", 4)
    rounded, _ = resumable(tmp_path / "rounded", 4, dtype="bfloat16")
    one, other = (a.store.read("gamma", np.arange(20)) for a in (exact, rounded))
    assert 0 < (one - other).abs().max() < 4 * 2**-9 * one.abs().max()
    assert (exact.progress.bytes_up, exact.progress.bytes_down) == (
        rounded.progress.bytes_up,
        rounded.progress.bytes_down,
    )


@pytest.mark.parametrize(
    "argument, value",
    [
        ("state_memory", -1.0),
        ("state_memory", np.nan),
        ("state_memory", np.inf),
        ("state_dtype", "int8"),
    ],
)
def test_impossible_values_are_refused(argument, value):
    with pytest.raises(ConfigError) as caught:
        FederatedLoop(PROBLEM.datamodule, **{argument: value})
    message = str(caught.value)
    assert message.startswith(f"loop.{argument}: {value!r}") and "\n" not in message


def test_a_cohort_of_ten_thousand_clients(tmp_path):
    """Everyone takes one step of full gradients from 0, and another one in the second round."""
    problem = least_squares([2] * 10_000, d=3, o=2)
    algorithm = LocalTrain(problem.network(), lr=0.1, batch_size=None)
    run(algorithm, problem, 2, root=tmp_path, clients_at_once=3_000)
    actual = algorithm.store.read("w", np.arange(10_000)).numpy()
    for client in range(10_000):
        w = np.zeros(problem.size)
        for _ in range(2):
            w -= 0.1 * problem.gradient(client, w)
        np.testing.assert_allclose(actual[client], w, rtol=1e-10, atol=1e-12)


LIMIT = """
import resource

def take_no_more_than(mib):
    with open("/proc/self/status") as file:
        (data,) = [int(line.split()[1]) * 1024 for line in file if line.startswith("VmData")]
    limit = data + mib * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
"""
SCRIPT = """
import numpy as np, torch
from pfl.clients.store import ClientStore

def keep(memory):
    kept = ClientStore(100, memory=memory)
    kept.declare("w", torch.zeros(2**18))
    for client in range(100):  # 1 MiB each
        kept.write("w", np.array([client]), torch.full((1, 2**18), float(client)))
    return [kept.read("w", np.array([c]))[0, -1].item() for c in (0, 50, 99)]

torch.set_num_threads(1)
take_no_more_than(64)
try:
    keep(2**30)
except RuntimeError as error:
    print("allocate memory" in str(error))
print(keep(2**20))
"""


LINUX = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="how much is taken is not known"
)


@pytest.mark.slow
@pytest.mark.processes
@LINUX
def test_a_process_that_may_not_take_the_memory_keeps_its_rows_in_files():
    """100 MiB of rows where the system allows 64: in memory that fails, in files it does not."""
    done = subprocess.run([sys.executable, "-c", LIMIT + SCRIPT], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["True", "[0.0, 50.0, 99.0]"], done.stderr


SAVING = """
import sys
import numpy as np, torch
from pfl.method.checkpoint import client_states
from pfl.rounds.checkpoint_io import StreamedCheckpointIO
from pfl.clients.store import ClientStore

torch.set_num_threads(1)
rank, folder = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2
)
store = ClientStore(2 * 63, memory=0)
store.declare("w", torch.zeros(2**18))
store.declare("p", torch.zeros(2**18), sparse=True)
for client in range(rank, 2 * 63, 2):  # 1 MiB each; 63 of them fill blocks of 1, 2, 4, ... 32
    store.write("w", np.array([client]), torch.full((1, 2**18), float(client)))
    store.write("p", np.array([client]), torch.full((1, 2**18), float(client)) * (client < 3))
torch.distributed.barrier()
take_no_more_than(40)
saved = {"clients": client_states(store)}
if rank == 0:
    StreamedCheckpointIO().save_checkpoint(saved, f"{folder}/last.ckpt")
torch.distributed.barrier()
"""


@pytest.mark.slow
@pytest.mark.processes
@LINUX
def test_a_checkpoint_of_several_processes_is_never_in_memory(tmp_path):
    """63 MiB of rows in each of two processes, which may take 40 MiB more for saving them."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LIMIT + SAVING, str(rank), str(tmp_path)],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(tmp_path)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert {path.name for path in tmp_path.iterdir()} <= {"last.ckpt", "meet"}
    states = StreamedCheckpointIO().load_checkpoint(tmp_path / "last.ckpt")["clients"]
    for name, values in (("w", np.arange(126)), ("p", [0, 1, 2] + [0] * 123)):
        pieces = [x for part in states[name]["parts"] for x in unpacked(part, 2**18)]
        ids, rows = map(torch.cat, zip(*((i, r[:, [0, -1]]) for i, r in pieces), strict=True))
        assert sorted(ids.tolist()) == list(range(126))
        assert all(
            row.tolist() == [values[client]] * 2 for client, row in zip(ids, rows, strict=True)
        )
