"""How much of a GPU and of pinned memory client states take, where a GPU is made up."""

from types import SimpleNamespace

import pytest
import torch

from datamodules import DigitsDataModule
from pfl import FederatedLoop
from pfl.tiers import DEVICE_SHARE, Tiers

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
    made = tiers()
    made.limit.update(device=0, memory=1000)
    blocks = [made.block(0, ROW, torch.float32, 1, 100) for _ in range(5)]
    assert [len(block.rows) for block in blocks] == [12, 6, 3, 1, 100]
    assert [block.tier for block in blocks] == ["memory"] * 4 + ["file"]
    assert made.used["memory"] == 512 + 256 + 128 + 64
    made.free(blocks[0])
    assert made.used["memory"] == 256 + 128 + 64
    odd = made.block(0, ROW, torch.float32, 1, 7)  # 280 bytes
    assert len(odd.rows) == 7 and made.used["memory"] == 512 + 256 + 128 + 64


def test_a_tier_that_turns_out_to_be_full_is_left_out(tiers):
    made = tiers()
    made.block(0, ROW, torch.float32, 1, 2)
    made.full = ("device",)
    assert made.block(0, ROW, torch.float32, 1, 2).tier == "memory"
    made.full = ()
    assert made.block(0, ROW, torch.float32, 1, 2).tier == "memory"  # nothing is tried again
    assert made.used["device"] == 80
    made.full = ("memory",)
    assert made.block(0, ROW, torch.float32, 1, 2).tier == "file"
