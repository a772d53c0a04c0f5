"""The user's own modules, which the app of a federation brings to its parties."""

import sys

import pytest
import yaml

from pfl.deploy.own_code import own_modules
from tests.commands import python
from tests.deploy.hospitals import RUN, party, write_hospitals

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


def write(folder):
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def test_modules_are_those_that_a_configuration_needs(tmp_path, monkeypatch):
    """`loose` has no __init__.py; `torch` is no module of the folder, and `other` not imported.

    To look for `mine.Net` imports `mine`, here without classes of torch, which would stay.
    """
    write(tmp_path)
    plain = {
        "pack/net.py": "from . import more\n\nLinear = object\n",
        "loose/losses.py": "Loss = 1\n",
    }
    for name, text in plain.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    values = {
        "model": {"network": NETWORK, "loss": "loose.losses.Loss", "other": ["torch.nn.Linear"]},
        "data": {"file": "other.csv", "names": ["other.name", "a.b", "mine"]},
    }
    before = set(sys.modules)
    try:
        found = own_modules(values, tmp_path, {"mine", "loose", "torch"})
        assert own_modules({"model": "torch.nn.Linear"}, tmp_path, {"torch"}) == {}
    finally:
        for name in set(sys.modules) - before:
            del sys.modules[name]
    assert found == {name: (FILES | plain)[name] for name in {*NEEDED, "loose/losses.py"}}


def deploy(folder, **model):
    """The process that writes an app; classes of user's modules would stay in this one."""
    write_hospitals(folder)
    given = {"class_path": "FedAvg", "init_args": {**RUN["model"]["init_args"], **model}}
    (folder / "own.yaml").write_text(yaml.safe_dump({"model": given}))
    words = ["--config", "run.yaml", "--config", "own.yaml", "--out", "app"]
    return python("-m", "pfl", "deploy", *words, cwd=folder)


@pytest.mark.cli
def test_a_party_elsewhere_has_the_network_of_the_app(tmp_path):
    """Neither its folder nor that of `pfl` has a module `mine`."""
    project = tmp_path / "project"
    project.mkdir()
    write(project)
    done = deploy(project, network=NETWORK)
    assert done.returncode == 0, done.stderr
    app = project / "app"
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


@pytest.mark.cli
def test_a_module_called_as_a_file_of_the_app_is_refused(tmp_path):
    (tmp_path / "server_app.py").write_text(FILES["loose/losses.py"])
    done = deploy(tmp_path, loss={"class_path": "server_app.Loss"})
    assert done.returncode == 2
    assert "deploy: server_app.py is a file of the app" in done.stderr
