"""The command line in a user's folder that has modules called like ours."""

import json
import sys

import pytest
import yaml

from tests.commands import TWO_PROCESSES, call, finish

NET = """
import torch
import utils  # of this folder

class Net(torch.nn.Sequential):
    def __init__(self, width: int = 4):
        super().__init__(
            torch.nn.Flatten(), torch.nn.Linear(64, width), torch.nn.Linear(width, 10)
        )
"""
DATA = """
from pfl.datamodules import DigitsDataModule

class Data(DigitsDataModule):
    pass
"""
METHOD = """
from pfl.algorithms import FedAvg

class Mine(FedAvg):
    pass
"""
OWN = "from models.net import Net; from datamodules.data import Data; import models, datamodules"
THEIRS = "import pfl; from pfl.models import MLP; from pfl.datamodules import DigitsDataModule"
CHECK = """
assert issubclass(Data, DigitsDataModule) and Net()[1].out_features == 4 and MLP(in_features=4)
assert models.__name__ == "models" and not hasattr(models, "MLP")
assert not hasattr(datamodules, "DigitsDataModule")
"""
# A script of a project without such folders; `{}` is an import of ours, by either name, or nothing.
ALONE = """
{}
import pickle
import datamodules.rules.label_skew, models.lenet, pfl.datamodules, pfl.models
from datamodules import rules
assert models.lenet is pfl.models.lenet and models.LeNet5 is pfl.models.LeNet5
assert rules is pfl.datamodules.rules and datamodules.Dirichlet is pfl.datamodules.Dirichlet
assert datamodules.__all__ == pfl.datamodules.__all__
# What was saved when the modules were called by their short names.
assert pickle.loads(b"cmodels.lenet\\nLeNet5\\n.") is pfl.models.LeNet5
try:
    import models.nothing
except ModuleNotFoundError as error:
    assert str(error) == "No module named 'models.nothing'"
"""


@pytest.fixture(params=["packages", "folders"])
def folder(tmp_path, request):
    """A project with its own `models/` and `datamodules/`, packages or mere folders."""
    for name, text in {"models/net.py": NET, "datamodules/data.py": DATA}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
        if request.param == "packages":
            (tmp_path / name).with_name("__init__.py").write_text("")
    (tmp_path / "utils.py").write_text("")
    (tmp_path / "mine.py").write_text(METHOD)
    return tmp_path


@pytest.mark.slow
@pytest.mark.cli
@pytest.mark.processes
@pytest.mark.parametrize(
    ("folder", "network"),
    [("packages", "models.net.Net"), ("folders", "models.net.Net"), ("packages", "MLP")],
    indirect=["folder"],
)
def test_two_processes_train_classes_of_the_folder_and_ours(folder, network):
    command = ["-m", "pfl", "fit", "--config", "quickstart", "--model", "mine.Mine"]
    command += ["--data", "datamodules.data.Data", "--model.network", network]
    command += ["--model.network.in_features=64"] if "MLP" in network else []
    command += ["--trainer.max_epochs=1", "--trainer.callbacks=[]", *TWO_PROCESSES]
    finish(*command, "--trainer.accelerator=cpu", cwd=folder)
    summary = json.loads((folder / "runs/quickstart/summary.json").read_text())
    assert summary["algorithm"] == "Mine"
    config = yaml.safe_load((folder / "runs/quickstart/config.yaml").read_text())
    named = network if "." in network else f"pfl.models.{network}"
    assert config["model"]["init_args"]["network"]["class_path"] == named
    assert config["data"]["class_path"] == "datamodules.data.Data"


@pytest.mark.slow
@pytest.mark.processes
def test_a_project_with_such_packages_and_ours_are_imported_together(folder):
    """The project's folder is the script's, or one that an editable install puts after a checkout.

    In the second case, and where the folders have no `__init__.py`, the checkout has the names, and
    what the folders have is found in them.
    """
    last = f"import sys; sys.path = [p for p in sys.path if p] + [{str(folder)!r}]"
    shared = CHECK.split("assert models.__name__")[0]
    has_names = (folder / "models/__init__.py").exists()
    for order in ((OWN, THEIRS), (THEIRS, OWN)):
        finish("-c", "\n".join([*order, CHECK if has_names else shared]), cwd=folder)
        finish("-c", "\n".join([last, *order, shared]), cwd=folder)


@pytest.mark.slow
@pytest.mark.processes
def test_short_names_are_the_same_modules_in_either_order(tmp_path):
    first = ["", "import pfl", "import models", "import datamodules", "import pfl.models"]
    for code in first:
        finish("-c", ALONE.format(code), cwd=tmp_path)


@pytest.mark.cli
def test_our_class_by_a_short_name_that_the_folder_has_is_refused_with_both(tmp_path, monkeypatch):
    """A configuration may have been written where there was no such module."""
    (tmp_path / "models.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "models", raising=False)
    options = ["--config", "quickstart", "--model.network", "models.LeNet5"]
    status, _, err = call("fit", *options)
    monkeypatch.delitem(sys.modules, "models", raising=False)
    assert (status, err.count("\n")) == (2, 1), err
    assert f"; models is {tmp_path / 'models.py'}, pfl's own is pfl.models" in err
