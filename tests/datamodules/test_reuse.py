"""Use of `datamodules` outside this framework: its imports, and the projects in `examples`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# One process for both tests, as importing Lightning takes most of the time. Modules that `import
# lightning` loads do not count.
SCRIPT = """
import runpy, sys, lightning, torch, numpy, zipfile
before = set(sys.modules)

def ours():
    # The modules of pfl beside the data modules, and beside what makes their name one of pfl.
    names = {name for name in sys.modules if name.split(".")[0] == "pfl"} - {
        "pfl", "pfl._path", "pfl.distributed", "pfl.distributed.orphan"
    }
    return sorted(name for name in names if not name.startswith("pfl.datamodules"))

import datamodules
print("added:", *sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
print("loaded:", *{"models", "sklearn"} & set(sys.modules), *ours())
from datamodules import FederatedDataModule, Partitioner
print("rules:", *(rule.__name__ for rule in Partitioner.__subclasses__()))
runpy.run_path(sys.argv[1], run_name="__main__")
print("needed:", *{"models"} & set(sys.modules), *ours())
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Runs the Lightning project in an empty folder; returns its output and the folder."""
    return run("plain_lightning.py", tmp_path_factory.mktemp("project"))


def run(example, folder):
    """Runs an example in an empty folder; returns its output and the folder."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, ROOT / "examples" / example],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, folder


@pytest.mark.slow
@pytest.mark.processes
def test_importing_datamodules_imports_no_package_but_lightning_and_all_rules(project):
    lines = project[0].splitlines()
    assert lines[0] == "added: datamodules pfl"
    assert lines[1].strip() == "loaded:"
    # Command lines find every rule by its name once a data module is imported.
    assert {"Dirichlet", "FlowerRule", "Given"} <= set(lines[2].split())


@pytest.mark.slow
@pytest.mark.processes
def test_the_plain_lightning_example_learns_and_writes_no_files(project):
    printed, folder = project
    accuracies = [float(a) for a in re.findall(r"test accuracy ([\d.]+)", printed)]
    assert len(accuracies) == 2
    # Guessing one of ten classes has accuracy 0.1. The pooled network is trained on 3,500 digits.
    assert accuracies[0] > 0.5
    assert accuracies[1] > 0.85
    assert list(folder.iterdir()) == []
    assert printed.splitlines()[-1].strip() == "needed:"


@pytest.mark.slow
@pytest.mark.processes
def test_the_pytorch_loop_learns_and_needs_no_other_package_of_ours(tmp_path):
    printed, folder = run("plain_pytorch.py", tmp_path)
    own = [float(a) for a in re.findall(r"test accuracy ([\d.]+) on its own images", printed)]
    everybody = [float(a) for a in re.findall(r"([\d.]+) on all", printed)]
    # A client knows two of ten equally frequent digits: a fifth of all images.
    assert len(own) == 5 and min(own) > 0.8
    assert max(everybody[:5]) <= 0.2 < 0.8 < everybody[5]
    assert list(folder.iterdir()) == []
    assert printed.splitlines()[-1].strip() == "needed:"
