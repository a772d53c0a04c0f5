"""`import pfl` works without packages and modules that only some features need."""

import pytest

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
