"""`import pfl` works without packages and modules that only some features need."""

import pytest

import pfl
from tests.commands import finish

# Packages that only some features need, and modules that Windows lacks.
PACKAGES = ["wandb", "matplotlib", "sklearn", "torchvision", "plotly", "optuna"]
MODULES = ["resource", "fcntl", "grp", "pwd", "termios"]
SCRIPT = """
import sys
from importlib import machinery, metadata

hidden = set(sys.argv[1:])
distribution = metadata.Distribution.from_name

def hide(finder):
    find = finder.find_spec
    finder.find_spec = staticmethod(
        lambda name, *rest: None if name.partition(".")[0] in hidden else find(name, *rest)
    )

def from_name(name):
    if name.partition(".")[0] in hidden:
        raise metadata.PackageNotFoundError(name)
    return distribution(name)

for name in hidden & set(sys.modules):
    del sys.modules[name]
hide(machinery.PathFinder)
hide(machinery.BuiltinImporter)
metadata.Distribution.from_name = staticmethod(from_name)
import pfl.algorithms, pfl.callbacks, pfl.cli
from pfl.callbacks.run_result import peak_memory

assert not hidden & set(sys.modules)
print(peak_memory())
"""


@pytest.mark.slow
@pytest.mark.processes
def test_pfl_is_imported_without_optional_packages_and_unix(tmp_path):
    assert finish("-c", SCRIPT, *PACKAGES, *MODULES, cwd=tmp_path, fresh=True) == "None\n"


OWN = "raise ValueError('this is the user's own file')"


def test_files_of_the_user_do_not_stand_for_those_of_python(tmp_path):
    """`python -m pfl` begins with the current folder on Python's path."""
    for name in ("random", "lightning", "typing"):
        (tmp_path / f"{name}.py").write_text(OWN)
    for module in (["-m", "pfl"], ["-mpfl"], ["-m", "pfl.__main__"]):
        version = finish(*module, "--version", cwd=tmp_path, fresh=True)
        assert version == f"pfl {pfl.__version__}\n"


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_finds_lightning_beside_a_file_of_that_name_and_the_users_own_module(tmp_path):
    for name in ("random", "lightning", "torch"):
        (tmp_path / f"{name}.py").write_text(OWN)
    (tmp_path / "mine.py").write_text("from pfl.datamodules import DigitsDataModule as Mine")
    words = ["-m", "pfl", "partition", "--data", "mine.Mine", "--data.num_clients", "3"]
    assert "3 clients" in finish(*words, cwd=tmp_path, fresh=True)
