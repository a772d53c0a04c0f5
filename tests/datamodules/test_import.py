"""What `import datamodules` loads, and that its table of names is complete."""

import ast
import subprocess
import sys

import pytest

import datamodules
from tests.sources import ROOT

SCRIPT = """
import sys
{}
heavy = ("torch", "lightning", "torchvision", "sklearn", "scipy", "pandas", "matplotlib", "pyarrow")
print(*(name for name in heavy if name in sys.modules))
"""
USE = """
import tempfile
import numpy as np
from datamodules import Dirichlet, Given, Natural, Sampled, SplitOwn, Within
labels, rng = np.arange(60) % 3, np.random.default_rng(0)
rules = [Within(Natural(labels), Sampled(4)), Dirichlet(1.0, min_size=1)]
for rule in rules:
    owned = rule.assign(labels, 3, rng)
    partition = SplitOwn().split(owned, labels, 60, 60, rng)
file = tempfile.mkdtemp() + "/p.npz"
partition.save(file)
assert Given(file).count() == 3
"""


def loaded_by(code):
    """Returns the large packages that Python has loaded after some code."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(code)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.processes
@pytest.mark.parametrize("code", ["import datamodules", USE], ids=["import", "use"])
def test_rules_need_numpy_only(code):
    assert loaded_by(code) == []


def test_the_table_of_names_is_that_of_the_imports():
    """Type checkers read the imports; `__getattr__` reads the table."""
    tree = ast.parse((ROOT / "datamodules" / "__init__.py").read_text())
    imported = {
        alias.name: node.module.removeprefix("datamodules.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("datamodules.")
        for alias in node.names
    }
    assert imported == datamodules._MODULES
    assert sorted(imported) == sorted(datamodules.__all__) == sorted(set(datamodules.__all__))
    assert set(datamodules.__all__) <= set(dir(datamodules))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        datamodules.Nothing  # noqa: B018


@pytest.mark.slow
@pytest.mark.processes
def test_command_lines_find_every_class_once_a_data_module_is_imported():
    code = "from datamodules import FederatedDataModule, Partitioner\n"
    code += "assert 'Dirichlet' in [rule.__name__ for rule in Partitioner.__subclasses__()]"
    assert {"torch", "lightning"} <= set(loaded_by(code))
