"""How much of a GPU and of pinned memory client states take, where a GPU is made up."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from datamodules import DigitsDataModule
from pfl import FederatedLoop
from pfl.clients.memory_tiers import DEVICE_SHARE, Tiers, mapped
from pfl.machine import RUNS_HERE, RUNS_ON_CARD

FREE = 1 << 20
ROW = 10  # floats, 40 bytes


@pytest.fixture
def tiers(monkeypatch):
    """Makes the tiers of a GPU with one MiB free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (FREE, 2 * FREE))

    class OfGPU(Tiers):
        full = ()

        def _empty(self, tier, rows, width, dtype):
            if tier in self.full:
                raise RuntimeError("CUDA error: out of memory")
            return torch.empty(rows, width, dtype=dtype)

    return lambda **arguments: OfGPU("cuda:0", **arguments)


def test_processes_that_share_a_device_share_its_memory(tiers):
    assert tiers().limit["device"] == DEVICE_SHARE * FREE
    assert tiers(sharing=2).limit["device"] == DEVICE_SHARE * FREE / 2
    loop = FederatedLoop(DigitsDataModule(4))
    assert loop.sharing == 1
    loop.trainer = SimpleNamespace(strategy=SimpleNamespace(processes_per_device=2))
    assert loop.sharing == 2


def test_pinned_memory_is_counted_as_it_is_taken(tiers):
    """In powers of two. Of 1000 bytes a block may take 512, which hold 12 rows; then 256, ..."""
    created = tiers()
    created.limit.update(device=0, memory=1000)
    blocks = [created.block(0, ROW, torch.float32, 1, 100) for _ in range(5)]
    assert [len(block.rows) for block in blocks] == [12, 6, 3, 1, 100]
    assert [block.tier for block in blocks] == ["memory"] * 4 + ["file"]
    assert created.used["memory"] == 512 + 256 + 128 + 64
    created.free(blocks[0])
    assert created.used["memory"] == 256 + 128 + 64
    odd = created.block(0, ROW, torch.float32, 1, 7)  # 280 bytes
    assert len(odd.rows) == 7 and created.used["memory"] == 512 + 256 + 128 + 64


def test_a_tier_that_turns_out_to_be_full_is_left_out(tiers):
    created = tiers()
    created.block(0, ROW, torch.float32, 1, 2)
    created.full = ("device",)
    assert created.block(0, ROW, torch.float32, 1, 2).tier == "memory"
    created.full = ()
    assert created.block(0, ROW, torch.float32, 1, 2).tier == "memory"  # nothing is tried again
    assert created.used["device"] == 80
    created.full = ("memory",)
    assert created.block(0, ROW, torch.float32, 1, 2).tier == "file"


def test_a_store_takes_half_of_the_memory_that_is_free(monkeypatch):
    monkeypatch.setattr("pfl.clients.memory_tiers.free_memory", lambda: 4000)
    assert Tiers().limit["memory"] == 2000
    assert Tiers(processes=2).limit["memory"] == 1000


def test_runs_beside_each_other_share_the_machine_and_the_card(monkeypatch):
    """Of four runs three have the same GPU, each with two processes."""
    monkeypatch.setattr("pfl.clients.memory_tiers.free_memory", lambda: 4000)
    monkeypatch.setenv(RUNS_HERE, "4")
    monkeypatch.setenv(RUNS_ON_CARD, "3")
    loop = FederatedLoop(DigitsDataModule(4))
    assert loop.client_store(torch.device("cpu")).tiers.limit["memory"] == 4000 // 2 // 4
    loop.trainer = SimpleNamespace(strategy=SimpleNamespace(processes_per_device=2))
    assert loop.sharing == 6
    given = FederatedLoop(DigitsDataModule(4), state_memory=1.0)  # is what the user says
    assert given.client_store(torch.device("cpu")).tiers.limit["memory"] == 2**30


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists how memory is used")
def test_the_system_reads_only_the_rows_of_a_file_that_are_asked_for(tmp_path):
    """`rr` is Linux's flag of memory that is read in random order."""
    rows = mapped(1 << 18, torch.float32, "rows", str(tmp_path))
    rows[:2] = torch.tensor([1.5, -2.0])
    assert rows[:3].tolist() == [1.5, -2.0, 0.0]
    maps = Path("/proc/self/smaps").read_text().partition(str(tmp_path))[2]
    flags = next(line for line in maps.splitlines() if line.startswith("VmFlags"))
    assert "rr" in flags.split()
