"""Commands of `python -m pfl` within this process, and the tables that they leave."""

import contextlib
import csv
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pfl.cli import main

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def call(*args):
    """Status, standard output and standard error of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(a) for a in args])
    return status, out.getvalue(), err.getvalue()


@contextlib.contextmanager
def elsewhere(folder):
    """Commands run in an empty folder, and leave nothing there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["pfl"])  # LightningCLI warns where it has arguments
        yield patch
    assert list(folder.iterdir()) == []


def finish(*command, cwd):
    """What a program of several processes, run by Python, prints until it ends well."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        # The processes meet on this machine's own address, with or without a network.
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def table(path):
    """The rows of a CSV file, by the names of its columns."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
