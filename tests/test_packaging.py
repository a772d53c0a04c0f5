"""The wheel, its metadata, and the pins in requirements.txt and those of runs."""

import ast
import json
import os
import re
import stat
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from pfl.version import __version__
from tests.commands import ROOT, TWO_PROCESSES

PACKAGES = ["datamodules", "models", "pfl"]
# Packages whose name to import differs from their name to install.
DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """The wheel, built by the installed backend, without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT],
        check=True,
        capture_output=True,
    )
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel) -> Message:
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


@pytest.fixture(scope="module")
def requirements(metadata) -> list[Requirement]:
    return [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]


def pins(file: str = "requirements.txt") -> list[tuple[Requirement, str]]:
    """Returns the pins of a lock file, each with its lines."""
    text = (ROOT / file).read_text()
    entries = re.split(r"\n(?=\S)", text.strip())
    return [(Requirement(entry.split("\\")[0].strip()), entry) for entry in entries]


def test_wheel_holds_the_packages_and_nothing_else(wheel):
    names = set(wheel.namelist())
    expected = {str(path.relative_to(ROOT)) for path in sources()}
    expected |= {f"{package}/py.typed" for package in PACKAGES}
    expected = {f"pfl/{name}".replace("pfl/pfl/", "pfl/") for name in expected}
    expected |= {f"pfl/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}
    templates = (ROOT / "pfl" / "cli" / "templates").glob("*.txt")
    expected |= {f"pfl/cli/templates/{path.name}" for path in templates}  # of `pfl new`
    expected.add("pfl/cli/references.bib")  # of `pfl cite`
    expected.remove("pfl/_short_names.py")  # a checkout's
    info = {name for name in names if ".dist-info/" in name}
    assert expected <= names
    assert {name.split("/")[0] for name in names - info} == {"pfl"}
    assert any(name.endswith("/licenses/LICENSE") for name in info)


def test_the_wheel_has_no_links_no_import_finder_and_no_short_names(wheel):
    for entry in wheel.infolist():
        assert not stat.S_ISLNK(entry.external_attr >> 16), entry.filename
        if entry.filename.endswith(".py"):
            text = wheel.read(entry).decode()
            assert not re.search(r"\b(meta_path|path_hooks)\b", text), entry.filename
    assert "pfl/_short_names.py" not in wheel.namelist()


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder with the installed wheel, on a path without the checkout."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", folder, wheel.filename], check=True, capture_output=True)
    return folder


def pfl(*args: str, installed: Path, cwd: Path) -> str:
    """Returns what the command `pfl` of the installed wheel prints in the folder `cwd`."""
    done = subprocess.run(
        [installed / "bin" / "pfl", *args],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(installed), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.slow
@pytest.mark.cli
@pytest.mark.processes
def test_the_quick_start_of_the_wheel_trains_a_method_of_the_current_folder(installed, tmp_path):
    """In two processes, with a network of the user's own `models.py`."""
    net = "from pfl.models import SmallCNN\nclass Net(SmallCNN): pass"
    (tmp_path / "models.py").write_text(net)
    (tmp_path / "mine.py").write_text("from pfl.algorithms import FedAvg\nclass Mine(FedAvg): pass")
    options = ["--config", "quickstart", "--model", "mine.Mine", "--trainer.callbacks=[]"]
    options += ["--model.network", "models.Net"]
    options += ["--trainer.max_epochs=1", "--trainer.accelerator=cpu", *TWO_PROCESSES]
    assert "Mine, 1 round" in pfl("fit", *options, installed=installed, cwd=tmp_path)
    assert (tmp_path / "runs/quickstart/summary.json").is_file()


# A script beside packages of its own that are called like folders of a checkout.
BESIDE = """
import sys
import datamodules, models, tests
import pfl.datamodules
assert {name for name in sys.modules if name.startswith("pfl")} == {"pfl", "pfl.datamodules"}
from models.lenet import LeNet5
from pfl.datamodules import DigitsDataModule
from pfl.models import MLP
from pfl.models.lenet import LeNet5 as Ours
assert (datamodules.mine, models.mine, tests.mine, LeNet5) == (1, 1, 1, "mine")
assert Ours.__module__ == "pfl.models.lenet"
data = DigitsDataModule(num_clients=3)
data.setup()
inputs, targets = next(iter(data.client(1).train_dataloader()))
assert MLP(in_features=64)(inputs).shape == (len(targets), 10)
print(pfl.__file__)
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("kind", ["packages", "folders"])
def test_packages_of_the_user_beside_a_script_go_undisturbed(installed, tmp_path, kind):
    """Folders without `__init__.py` as well.

    By `-S` Python does not find the checkout, of which the tests' environment has an editable
    install.
    """
    for name in ("models", "datamodules", "tests"):
        (tmp_path / name).mkdir()
        if kind == "packages":
            (tmp_path / name / "__init__.py").write_text("mine = 1")
    (tmp_path / "models" / "lenet.py").write_text("LeNet5 = 'mine'")
    text = BESIDE
    if kind == "folders":
        text = text.replace("datamodules.mine, models.mine, tests.mine", "1, 1, 1")
    (tmp_path / "script.py").write_text(text)
    packages = Path(pytest.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-S", "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{installed}{os.pathsep}{packages}"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(installed / "pfl" / "__init__.py")


@pytest.mark.slow
@pytest.mark.cli
@pytest.mark.processes
def test_the_wheel_lists_the_figures_that_it_ships(installed, tmp_path):
    papers = (ROOT / "configs" / "papers").glob("*/*.yaml")
    lines = pfl("reproduce", "--list", installed=installed, cwd=tmp_path).splitlines()
    assert {line.split()[0] for line in lines} == {f"{p.parent.name}-{p.stem}" for p in papers}


def test_the_metadata_name_distribution_license_and_python(metadata):
    assert metadata["Name"] == "lightning-pfl"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"


def test_the_version_is_the_same_wherever_it_is_written():
    """In the package, in CITATION.cff, and in README's entry for BibTeX."""
    cff = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    (entry,) = re.findall(r"version = \{(.*)\}", (ROOT / "README.md").read_text())
    assert __version__ == cff["version"] == entry


def test_every_imported_package_is_declared(requirements):
    """No import relies on a package that only another dependency, or `dev`, installs."""
    own = {*PACKAGES, *sys.stdlib_module_names}
    imported = set()
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.split(".")[0])
    development = 'extra == "dev"'
    declared = {canonicalize_name(r.name) for r in requirements if str(r.marker) != development}
    needed = {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in imported - own}
    assert needed <= declared


@pytest.mark.parametrize("bad", ["2.6.2", "2.6.3", "2.5.4"])
def test_bad_versions_of_lightning_are_excluded(requirements, bad):
    (lightning,) = (r for r in requirements if r.name == "lightning")
    assert bad not in lightning.specifier


@pytest.mark.parametrize("name", ["jsonargparse", "lightning", "torch"])
def test_the_next_minor_release_of_what_we_use_privately_is_excluded(requirements, name):
    """The newest tested release is the one that requirements.txt pins."""
    (requirement,) = (r for r in requirements if r.name == name)
    versions = [str(pin.specifier)[2:] for pin, _ in pins() if pin.name == name]
    newest = max(map(Version, versions))
    assert f"{newest.major}.{newest.minor}.99" in requirement.specifier
    assert f"{newest.major}.{newest.minor + 1}.0" not in requirement.specifier


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_pins_satisfy_the_declared_ranges(requirements, python):
    """On every Python, each direct dependency has one pin, those for development included.

    Extras that development does without, such as `flower`, have none.
    """
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": "dev"}
    valid = [pin for pin, _ in pins() if pin.marker is None or pin.marker.evaluate(environment)]
    versions = {canonicalize_name(pin.name): str(pin.specifier)[2:] for pin in valid}
    assert len(versions) == len(valid)
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate(environment):
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)])


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_the_pins_of_runs_are_those_of_all_and_satisfy_what_runs_need(requirements, python):
    """`make quickstart` installs the two files of runs without looking for what they depend on."""
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    environment |= {"sys_platform": "linux", "platform_system": "Linux"}
    everything = {entry.split(" ")[0] for _, entry in pins()}
    versions = {}
    for pin, entry in [*pins("requirements-run.txt"), *pins("requirements-torch.txt")]:
        assert entry.split(" ")[0] in everything
        if pin.marker is None or pin.marker.evaluate(environment):
            assert canonicalize_name(pin.name) not in versions
            versions[canonicalize_name(pin.name)] = str(pin.specifier)[2:]
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate(environment):
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)])
    assert {"hatchling", "pip"} <= set(versions)  # they install this package
    assert not {"pytest", "mypy", "ruff", "mkdocs", "pandas"} & set(versions)


def test_only_the_file_of_pytorch_names_what_its_cpu_build_does_without():
    named = {canonicalize_name(pin.name) for pin, _ in pins("requirements-run.txt")}
    large = {name for name in named if name.startswith(("nvidia-", "cuda-"))}
    assert not large
    assert not {"torch", "torchvision", "triton"} & named
    assert "torchmetrics" in named


@pytest.mark.parametrize(
    "file", ["requirements.txt", "requirements-run.txt", "requirements-torch.txt"]
)
def test_pins_are_exact_have_hashes_and_name_no_host(file):
    for pin, entry in pins(file):
        assert [s.operator for s in pin.specifier] == ["=="], entry
        assert pin.url is None
        assert "--hash=sha256:" in entry
    text = (ROOT / file).read_text()
    assert not re.search(r"://|^\s*-|find-links|index", re.sub(r"    --hash=\S+", "", text), re.M)


def test_the_ranges_of_conda_are_the_declared_ones(requirements):
    """And each container installs by a target that the Makefile has."""
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    names = {"pytorch": "torch", "matplotlib-base": "matplotlib"}
    declared = {canonicalize_name(r.name): r.specifier for r in requirements if r.marker is None}
    for line in conda:
        if isinstance(line, str) and not line.startswith(("python>", "pip>")):
            package = Requirement(line)
            assert package.specifier == declared[names.get(package.name, package.name)], line
    makefile = (ROOT / "Makefile").read_text()
    editor = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert (ROOT / ".devcontainer" / editor["build"]["dockerfile"]).is_file()
    for command in (editor["postCreateCommand"], (ROOT / "Dockerfile").read_text()):
        (target,) = re.findall(r"make (\w+)(?= |$)", command)
        assert f"\n{target}:" in makefile
