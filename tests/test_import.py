"""`import pfl` works without packages and modules that only some features need."""

import os
import subprocess
import sys

import pytest

from tests.sources import ROOT

SCRIPT = """
import sys
from importlib import machinery, metadata

hidden = set(sys.argv[1:])
find, distribution = machinery.PathFinder.find_spec, metadata.Distribution.from_name

def find_spec(name, *rest):
    return None if name.partition(".")[0] in hidden else find(name, *rest)

def from_name(name):
    if name.partition(".")[0] in hidden:
        raise metadata.PackageNotFoundError(name)
    return distribution(name)

machinery.PathFinder.find_spec = staticmethod(find_spec)
metadata.Distribution.from_name = staticmethod(from_name)
import pfl.algorithms, pfl.callbacks
from pfl.callbacks.run_result import peak_memory

assert not hidden & set(sys.modules)
print(peak_memory())
"""


@pytest.mark.slow
@pytest.mark.processes
def test_pfl_is_imported_without_optional_packages():
    """`resource`, which measures the peak memory, does not exist on Windows."""
    hidden = ["wandb", "matplotlib", "sklearn", "torchvision", "resource", "plotly", "optuna"]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *hidden],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "None\n"
