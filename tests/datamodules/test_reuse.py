"""Use outside this framework: what an import brings along, and a plain Lightning project."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# One process for both tests, as importing Lightning takes most of the time. What `import
# lightning` loads by itself is not of interest.
SCRIPT = """
import runpy, sys, lightning, torch, numpy, zipfile
before = set(sys.modules)
import datamodules
print("added:", *{name.partition(".")[0] for name in set(sys.modules) - before})
print("loaded:", *{"pfl", "models", "sklearn"} & set(sys.modules))
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Run the example in an empty folder; return what it printed and the folder."""
    folder = tmp_path_factory.mktemp("project")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, ROOT / "examples" / "plain_lightning.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, folder


@pytest.mark.slow
@pytest.mark.processes
def test_import_brings_nothing_but_lightning(project):
    lines = project[0].splitlines()
    assert lines[0] == "added: datamodules"
    assert lines[1].strip() == "loaded:"


@pytest.mark.slow
@pytest.mark.processes
def test_plain_lightning_example(project):
    printed, folder = project
    accuracies = [float(a) for a in re.findall(r"test accuracy ([\d.]+)", printed)]
    assert len(accuracies) == 2
    # Ten classes: far better than a guess. The pooled network is trained on 1,250 digits.
    assert accuracies[0] > 0.5
    assert accuracies[1] > 0.85
    assert list(folder.iterdir()) == []
