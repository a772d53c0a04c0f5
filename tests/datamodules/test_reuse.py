"""Use of `datamodules` outside this framework: its imports, and the projects in `examples`."""

import re

import pytest

from tests.commands import ROOT, finish

# One process for all tests, as importing Lightning takes most of the time. Modules that `import
# lightning` loads do not count.
SCRIPT = """
import runpy, sys, lightning, torch, numpy, zipfile
before = set(sys.modules)

def ours():
    # The modules of pfl beside the data modules, and beside what a checkout's short name needs.
    names = {name for name in sys.modules if name.split(".")[0] == "pfl"} - {
        "pfl", "pfl._short_names", "pfl.current_folder"
    }
    return sorted(name for name in names if not name.startswith("pfl.datamodules"))

import datamodules
print("added:", *sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
print("loaded:", *{"models", "sklearn"} & set(sys.modules), *ours())
from datamodules import FederatedDataModule, Partitioner

def rules(kind):
    return {kind.__name__}.union(*map(rules, kind.__subclasses__()))

print("rules:", *rules(Partitioner))
for example in sys.argv[1:]:
    print("example")
    runpy.run_path(example, run_name="__main__")
    print("needed:", *{"models"} & set(sys.modules), *ours())
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What the process prints before each example and in it, in an empty folder."""
    folder = tmp_path_factory.mktemp("project")
    files = [ROOT / "examples" / f"plain_{name}.py" for name in ("lightning", "pytorch")]
    parts = finish("-c", SCRIPT, *files, cwd=folder, fresh=True).split("example\n")
    assert list(folder.iterdir()) == []
    assert [part.splitlines()[-1].strip() for part in parts[1:]] == ["needed:"] * 2
    return parts


@pytest.mark.slow
@pytest.mark.processes
def test_importing_datamodules_imports_no_package_but_lightning_and_all_rules(printed):
    lines = printed[0].splitlines()
    assert lines[0] == "added: datamodules pfl"
    assert lines[1].strip() == "loaded:"
    # Command lines find every rule by its name once a data module is imported.
    assert {"Dirichlet", "FlowerRule", "Given"} <= set(lines[2].split())


@pytest.mark.slow
@pytest.mark.processes
def test_the_plain_lightning_example_learns(printed):
    accuracies = [float(a) for a in re.findall(r"test accuracy ([\d.]+)", printed[1])]
    assert len(accuracies) == 2
    # Guessing one of ten classes has accuracy 0.1. The pooled network is trained on 3,500 digits.
    assert accuracies[0] > 0.5
    assert accuracies[1] > 0.85


@pytest.mark.slow
@pytest.mark.processes
def test_the_pytorch_loop_learns(printed):
    own = [float(a) for a in re.findall(r"test accuracy ([\d.]+) on its own images", printed[2])]
    everybody = [float(a) for a in re.findall(r"([\d.]+) on all", printed[2])]
    # A client has two of ten equally frequent digits: a fifth of all images.
    assert len(own) == 5 and min(own) > 0.8
    assert max(everybody[:5]) <= 0.2 < 0.8 < everybody[5]
