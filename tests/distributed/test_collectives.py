"""What travels between the processes of a run in a round."""

import json

import pytest
import torch

from pfl.distributed.collectives import TOGETHER, in_parts, sum_and_gather
from tests.commands import finish, table
from tests.device import DEVICE, OtherDevice

# Two clients of unequal size, one for each process; client 0 logs one more loss in the second and
# the third round, which the process of client 1 has never met when the second one begins.
SCRIPT = """
import json
from pathlib import Path
import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from pfl import FederatedLoop, Trainer
from pfl.algorithms import FedAvg
from pfl.clients.schedule import LocalSchedule
from pfl.distributed.collectives import first_says
from tests.algorithms.methods import small_network, small_world

class Spy(pl.Callback):
    def __init__(self):
        self.rounds = []
    def on_train_batch_start(self, *_):
        self.mode = Collectives(self.rounds)
        self.mode.__enter__()
    def on_train_batch_end(self, *_):
        self.mode.__exit__(None, None, None)
    def on_train_end(self, trainer, pl_module):
        self.says = [first_says(trainer.global_rank == rank) for rank in range(2)]

class Collectives(TorchDispatchMode):
    def __init__(self, rounds):
        super().__init__()
        self.names = []
        rounds.append(self.names)
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

class Late(FedAvg):
    def client_update(self, clients, w):
        sent = super().client_update(clients, w)
        if clients.round > 0:
            mine = clients.rows(np.flatnonzero(clients.ids == 0))
            for batch in mine.batches(LocalSchedule(None)):
                loss, _ = self.oracle.gradient(w.repeat(len(mine), 1), batch, mine.buffers)
                self.log_loss("late", loss, batch.counts)
        return sent

found = {}
for method in (FedAvg, Late):
    torch.manual_seed(0)
    spy = Spy()
    trainer = Trainer(
        name=method.__name__, max_epochs=4, accelerator="cpu", devices=2,
        strategy="client_parallel", callbacks=[spy], enable_progress_bar=False,
        enable_checkpointing=False, default_root_dir="runs",
    )
    network = small_network().float()
    loop = FederatedLoop(small_world(), clients_at_once=1)
    trainer.fit(method(network, lr=0.1), datamodule=loop)
    found[method.__name__] = spy.rounds
    found["first says"] = spy.says
rank = trainer.global_rank
Path(f"{rank}.json").write_text(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_round_has_one_collective(tmp_path):
    """It has words as well (their sizes, then their bytes) where a loss has a new name."""
    (tmp_path / "script.py").write_text(SCRIPT)
    finish(tmp_path / "script.py", cwd=tmp_path)
    plain = ["allreduce_"]
    words = ["allreduce_", "_allgather_base_", "_allgather_base_"]
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["FedAvg"] == [words, plain, plain, plain]
        assert found["first says"] == [True, False]
        assert found["Late"] == [words, words, plain, plain]
    late = [row["late/loss"] != "" for row in table(tmp_path / "runs/Late/metrics.csv")]
    assert late == [False, True, True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parts_have_all_digits(dtype):
    """53 bits are 24, 24 and 5; infinity and NaN are whole in the first part."""
    values = [0.0, 1 / 3, -1e30 / 7, 2.0**53 - 1, 1e-20 / 3, torch.inf, -torch.inf]
    numbers = torch.tensor(values, dtype=torch.float64)
    parts = in_parts(numbers, dtype)
    assert parts.dtype == dtype
    assert torch.equal(parts.double().sum(0), numbers)
    assert in_parts(numbers / numbers, dtype).double().sum(0)[-1].isnan()


@pytest.fixture
def alone(tmp_path):
    """A process group of one process, which really communicates."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_what_travels_is_on_the_device():
    """Sums of all lengths and dtypes stay what they are; operations on two devices would fail."""
    numbers = torch.tensor([2.0**40 + 1, 1 / 3, torch.nan], dtype=torch.float64)
    counts = torch.tensor([0, 2, 1])
    values = [torch.ones(2, 3), torch.tensor(5.0), torch.ones(TOGETHER + 1), torch.ones(2).double()]
    with OtherDevice():
        sums = [one.to(DEVICE) for one in values]
        gathered = sum_and_gather(sums, counts, numbers, like=torch.zeros(1).to(DEVICE))
        for one, expected in zip(sums, values, strict=True):
            assert one.device == DEVICE and torch.equal(one.to("cpu"), expected)
    assert torch.equal(gathered.counts.long(), counts)
    assert torch.equal(gathered.numbers[0, :2], numbers[:2]) and gathered.numbers[0, 2].isnan()
