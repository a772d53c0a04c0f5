"""The user's own modules, which the app of a federation brings to its parties."""

import sys

import pytest
import yaml

from pfl.deploy.own_code import own_modules
from tests.commands import python
from tests.deploy.hospitals import RUN, deployed, party

FILES = {
    "mine.py": "import helper\nfrom pack import net\n\n\nclass Net(net.Linear):\n    pass\n",
    "helper.py": "import json\nimport torch\n",
    "other.py": "",  # nobody needs it
    "pack/__init__.py": "",
    "pack/net.py": "from torch.nn import Linear as Base\n\nfrom . import more\n\n\n"
    "class Linear(Base):\n    pass\n",
    "pack/more.py": "",
    "pack/unused.py": "",
    "loose/losses.py": "from torch import nn\n\n\nclass Loss(nn.CrossEntropyLoss):\n    pass\n",
}
NEEDED = {"mine.py", "helper.py", "pack/__init__.py", "pack/net.py", "pack/more.py"}
NETWORK = {"class_path": "mine.Net", "init_args": {"in_features": 2, "out_features": 3}}


@pytest.fixture(autouse=True)
def _forgotten():
    """Forgets the modules of a test, whose names the next one has, too."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("mine", "helper", "pack", "loose", "server_app"):
            del sys.modules[name]


def write(folder):
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def test_modules_are_those_that_a_configuration_needs(tmp_path, monkeypatch):
    """`loose` has no __init__.py; `torch` is no module of the folder."""
    write(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    __import__("mine")
    __import__("loose.losses")
    values = {
        "model": {"network": NETWORK, "loss": "loose.losses.Loss", "other": ["torch.nn.Linear"]},
        "data": {"file": "other.csv", "names": ["other.name", "a.b", "mine"]},
    }
    found = own_modules(values, tmp_path)
    assert found == {name: FILES[name] for name in {*NEEDED, "loose/losses.py"}}
    assert own_modules({"model": "torch.nn.Linear"}, tmp_path) == {}


@pytest.mark.cli
def test_a_party_elsewhere_has_the_network_of_the_app(tmp_path, monkeypatch):
    """Neither its folder nor that of `pfl` has a module `mine`."""
    project = tmp_path / "project"
    project.mkdir()
    write(project)
    monkeypatch.chdir(project)
    model = {"class_path": "FedAvg", "init_args": {**RUN["model"]["init_args"], "network": NETWORK}}
    (project / "own.yaml").write_text(yaml.safe_dump({"model": model}))
    monkeypatch.syspath_prepend(project)  # of the process that writes the app
    app = deployed(project, "--config", "own.yaml")
    written = {path.relative_to(app).as_posix() for path in app.rglob("*.py")}
    assert written == NEEDED | {"client_app.py", "server_app.py"}
    path = party(app, 0)
    app.rename(tmp_path / "app")
    path.write_text(path.read_text().replace("../app", str(tmp_path / "app")))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    checked = python("-m", "pfl", "node", "--config", path, "--check", cwd=elsewhere)
    assert checked.returncode == 0, checked.stderr
    assert "party 0 agrees with run.yaml and server.yaml" in checked.stdout


def test_a_module_called_as_a_file_of_the_app_is_refused(tmp_path, monkeypatch):
    (tmp_path / "server_app.py").write_text(FILES["loose/losses.py"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text("model: {init_args: {loss: server_app.Loss}}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AssertionError, match=r"deploy: server_app\.py is a file of the app"):
        deployed(tmp_path, "--config", "own.yaml")
