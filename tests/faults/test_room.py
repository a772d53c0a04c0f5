"""Files that do not fit on the disk, and checkpoints of others: one line, nothing half written."""

import resource
from contextlib import contextmanager
from fractions import Fraction

import pytest
import torch

from datamodules import DigitsDataModule
from pfl.datamodules.exports import write_pfllib
from pfl.report.partition import partition_columns, write_files
from pfl.rounds.checkpoint_io import StreamedCheckpointIO
from tests.refusal import refused


@contextmanager
def limited(size):
    """Lets no file grow beyond some bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write_partition(data, folder):
    """Writes the files of `pfl partition --out`."""
    write_files(data, partition_columns(data), folder)


@pytest.mark.parametrize("write", [write_partition, write_pfllib])
@pytest.mark.parametrize("size", [0, 1000])
def test_a_file_that_does_not_fit_is_not_there(tmp_path, write, size):
    data = DigitsDataModule(3)
    data.setup()
    with limited(size), refused(str(tmp_path), "can be written", "File too large"):
        write(data, tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_checkpoint_that_cannot_be_created_is_one_line(tmp_path, monkeypatch):
    def full(*_):
        raise RuntimeError("[enforce] . open file failed with strerror: No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with refused(str(tmp_path / "last.ckpt"), "cannot be saved (No space left on device)"):
        StreamedCheckpointIO().save_checkpoint({}, tmp_path / "last.ckpt")


def test_an_object_in_a_checkpoint_is_named_without_advice_to_run_it(tmp_path):
    torch.save({"half": Fraction(1, 2)}, tmp_path / "a.ckpt")
    with refused("a.ckpt", "an object of the class fractions.Fraction", "only tensors"):
        StreamedCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")
