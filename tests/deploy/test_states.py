"""A file of states is what was written for its party, run and round, or is refused by its path."""

import shutil
import stat

import numpy as np
import pytest
import torch

from pfl.deploy.worker import ABOUT, StateFiles
from tests.refusal import refused

STATES = {"v": torch.arange(6.0)[None], "c": torch.full((1, 2), torch.nan)}


@pytest.fixture
def kept(tmp_path):
    files = StateFiles(tmp_path / "run" / "client-1")
    files.save(0, STATES)
    files.save(1, {name: rows + 1 for name, rows in STATES.items()})
    return files


def path(files, index):
    return files.folder / f"round-{index}.npz"


def test_states_come_back_bit_for_bit(kept):
    read = kept.read(0)
    assert read.keys() == STATES.keys()
    for name, rows in STATES.items():
        assert read[name].numpy().tobytes() == rows.numpy().tobytes()
    assert stat.S_IMODE(path(kept, 0).stat().st_mode) == 0o600


@pytest.mark.parametrize("length", [0, 1, 100, -1, -30])
def test_a_cut_file_is_refused_by_its_path(kept, length):
    file = path(kept, 1)
    file.write_bytes(file.read_bytes()[:length])
    with refused(f"folder: {file} is damaged, or no file of states"):
        kept.load(1, None, False)


def test_a_changed_value_is_refused(kept):
    file = path(kept, 1)
    with np.load(file) as stored:
        rows = dict(stored)
    rows["v"][0, 3] += 1e-6
    np.savez(file, **rows)
    with refused(f"folder: {file} has another checksum than was written for it"):
        kept.load(1, None, False)
    del rows[ABOUT]
    np.savez(file, **rows)
    with refused(f"folder: {file} is damaged, or no file of states"):
        kept.load(1, None, False)


def test_a_renamed_or_foreign_file_is_refused(kept, tmp_path):
    shutil.copy(path(kept, 0), path(kept, 1))
    with refused(f"folder: {path(kept, 1)} has another round than was written for it"):
        kept.load(1, None, False)
    for key, name in (("client", "run/client-2"), ("run", "other/client-1")):
        other = StateFiles(tmp_path / name)
        other.folder.mkdir(parents=True)
        shutil.copy(path(kept, 0), path(other, 0))
        with refused(f"folder: {path(other, 0)} has another {key} than was written for it"):
            other.load(0, None, False)


@pytest.mark.parametrize("name", ["round-1.5.npz", "round-x.npz", "round-.npz", "round--2.npz"])
def test_a_file_with_another_name_is_refused_and_stays(kept, name):
    file = kept.folder / name
    file.write_text("mine")
    with refused(f"folder: {file} is no file of pfl node; move it away"):
        kept.load(0, None, False)
    assert file.read_text() == "mine"


def test_a_file_without_a_state_of_the_method_is_not_taken_as_none(federation):
    """A server that continues asks with states of round 1; one of them is not in the file."""
    parties = federation("SCAFFOLD, option I")

    def lose(answer):
        for file in parties.folder.glob("party-1/*/client-1/round-0.npz"):
            files = StateFiles(file.parent)
            states = files.read(0)
            assert states.keys() == {"c_i"}
            files.save(0, {"other": torch.zeros(1, 1)})
        return answer

    parties.channel.faults[0, "train", 1] = lose
    with pytest.warns(UserWarning, match="the file of states lacks 'c_i'"):
        parties.train()
