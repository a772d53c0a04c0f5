"""Files change as a whole, and what a killed process has left is removed."""

import os
import platform
import subprocess
import sys

import pytest

from datamodules.files import new_content, remove_parts


def test_a_file_has_its_old_content_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with new_content(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    with pytest.raises(KeyError), new_content(path) as file:
        file.write(b"half")
        raise KeyError
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["a"]


@pytest.mark.skipif(os.name != "posix", reason="nothing is removed there")
def test_only_parts_of_ended_processes_of_this_machine_are_removed(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    here = platform.node()
    stays = {
        f"a.{here}.{os.getpid()}.part",  # it runs
        f"a.{here}x.{process.pid}.part",  # of another machine
        f"a.{here}.1x.part",
        "a.part",
        f"a.{here}.{process.pid}",
    }
    for name in (*stays, f"a.{here}.{process.pid}.part", f"b.c.{here}.{process.pid}.part"):
        (tmp_path / name).touch()
    remove_parts(tmp_path)
    assert set(os.listdir(tmp_path)) == stays
