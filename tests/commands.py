"""Commands of `pfl` in this process and in others, and the tables that they write."""

import contextlib
import csv
import io
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pfl.cli import main

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def call(*args):
    """Returns the status, standard output and standard error of a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(a) for a in args])
    return status, out.getvalue(), err.getvalue()


@contextlib.contextmanager
def elsewhere(folder):
    """Runs the commands of the block in an empty folder, in which they must leave nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield patch
    assert list(folder.iterdir()) == []


def python(*command, cwd, path=ROOT):
    """Runs Python in another process, with `pfl` from `path`; returns the completed process."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        # The processes meet on this machine's own address, with or without a network.
        env={**os.environ, "PYTHONPATH": str(path), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=400,
    )


def finish(*command, cwd, path=ROOT):
    """Returns what Python in another process prints until it ends without an error."""
    done = python(*command, cwd=cwd, path=path)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


FORKS = """
import os, traceback
import lightning.pytorch, matplotlib, scipy.stats, torchvision  # of others, which take seconds
for code in {codes!r}:
    child = os.fork()
    if not child:
        try:
            exec(code, {{"__name__": "__main__"}})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, code
"""


def finish_each(codes, cwd):
    """Runs each piece of Python in a process of its own, before which nothing of ours is imported.

    The processes are forks of one that has imported the large packages.
    """
    finish("-c", FORKS.format(codes=list(codes)), cwd=cwd)


def free_port():
    """Returns a port of this machine that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


def table(path):
    """Returns the rows of a CSV file, by the names of its columns."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
