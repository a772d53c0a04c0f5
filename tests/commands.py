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
from tests.forks import Popen

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
TWO_PROCESSES = ["--trainer.strategy=client_parallel", "--trainer.devices=2"]


def call(*args):
    """Returns the status, standard output and standard error of a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(a) for a in args])
    return status, out.getvalue(), err.getvalue()


def done(*args):
    """Runs a command in this process, which must end without an error."""
    status, _, error = call(*args)
    assert status == 0, error


@contextlib.contextmanager
def elsewhere(folder):
    """Runs the commands of the block in an empty folder, in which they must leave nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield patch
    assert list(folder.iterdir()) == []


def python(*command, cwd, path=ROOT, fresh=False):
    """Runs Python in another process, with `pfl` from `path`; returns the completed process.

    A process that is not `fresh` is a fork of one that has imported the large packages of others.
    """
    start = subprocess.Popen if fresh or path != ROOT else Popen
    process = start(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        # The processes meet on this machine's own address, with or without a network.
        env={**os.environ, "PYTHONPATH": str(path), "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        out, err = process.communicate(timeout=400)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def finish(*command, **options):
    """Returns what Python in another process prints until it ends without an error."""
    done = python(*command, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def free_port():
    """Returns a port of this machine at which no program listens."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


def table(path):
    """Returns the rows of a CSV file, by the names of its columns."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
