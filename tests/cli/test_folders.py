"""The command line in a user's folder that has modules called like ours."""

import json

import pytest

from tests.commands import call, finish, python

OURS = "raise ImportError('a package of the user')"
OWN = """
import utils  # of this folder
from pfl.algorithms import FedAvg

class Mine(FedAvg):
    pass
"""
TEST = """
import pfl
from datamodules import DigitsDataModule
from models import MLP
import data

def test_packages():
    assert MLP(in_features=4) and DigitsDataModule(num_clients=2) and data.SIZE == 3
"""


@pytest.fixture
def folder(tmp_path):
    """The folder of a user with `models/`, `datamodules/`, `data.py`, `utils.py` and a method."""
    for name in ("models", "datamodules"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(OURS)
    (tmp_path / "data.py").write_text("SIZE = 3")
    (tmp_path / "utils.py").write_text("")
    (tmp_path / "mine.py").write_text(OWN)
    return tmp_path


@pytest.mark.slow
@pytest.mark.cli
@pytest.mark.processes
def test_two_processes_train_a_method_of_the_folder(folder):
    command = ["-m", "pfl", "fit", "--config", "quickstart", "--model", "mine.Mine"]
    command += ["--trainer.max_epochs=1", "--trainer.callbacks=[]", "--trainer.devices=2"]
    finish(*command, "--trainer.accelerator=cpu", cwd=folder)
    summary = json.loads((folder / "runs/quickstart/summary.json").read_text())
    assert summary["algorithm"] == "Mine"


@pytest.mark.slow
@pytest.mark.processes
def test_pytest_in_the_folder_finds_our_packages(folder):
    (folder / "test_own.py").write_text(TEST)
    assert "1 passed" in finish("-m", "pytest", "-p", "no:cacheprovider", cwd=folder)


@pytest.mark.processes
@pytest.mark.parametrize("statement", ["import models", "import models.cnn"])
def test_packages_imported_before_pfl_are_named(folder, statement):
    (folder / "models/__init__.py").write_text("")
    (folder / "models/cnn.py").write_text("")
    done = python("-c", f"{statement}\nimport pfl", cwd=folder)
    line = done.stderr.splitlines()[-1]
    assert line.startswith("ImportError: models") and "rename" in line
    assert str(folder / "models") in line


@pytest.mark.cli
@pytest.mark.parametrize("name", ["models.py", "models/net.py"])
def test_a_class_of_a_hidden_module_is_refused_with_the_file_to_rename(name, tmp_path, monkeypatch):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("class Net: pass")
    monkeypatch.chdir(tmp_path)
    for network in ("models.Net", "models.net.Net"):
        status, _, err = call("fit", "--config", "quickstart", "--model.network", network)
        assert (status, err.count("\n")) == (2, 1), err
        hidden = tmp_path / name.partition("/")[0]
        assert "model.network: " in err and network in err and f"rename {hidden}\n" in err


def test_our_own_folder_hides_nothing(monkeypatch):
    from pfl._path import PACKAGES, ROOT, hidden_by

    monkeypatch.chdir(ROOT)
    assert [hidden_by(name) for name in PACKAGES] == [None, None]


MISSING = """
import sys

class Missing:
    @staticmethod
    def find_spec(name, *_):
        if name in ("resource", "fcntl", "grp", "pwd", "termios", "wandb"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing)
import pfl, pfl.cli, pfl.algorithms
"""


@pytest.mark.slow
@pytest.mark.processes
def test_import_needs_neither_unix_nor_wandb(tmp_path):
    finish("-c", MISSING, cwd=tmp_path)
