"""Commands of `python -m pfl` within this process, and the tables that they leave."""

import contextlib
import csv
import io
from pathlib import Path

from pfl.cli import main

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def call(*args):
    """Status, standard output and standard error of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(a) for a in args])
    return status, out.getvalue(), err.getvalue()


def table(path):
    """The rows of a CSV file, by the names of its columns."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
