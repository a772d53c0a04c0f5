"""What is published and what is pinned: the wheel, its metadata, requirements.txt."""

import ast
import re
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PACKAGES = ["datamodules", "models", "pfl"]
# Where the name to import is not the name to install.
DISTRIBUTIONS = {"sklearn": "scikit-learn", "yaml": "pyyaml"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Built by the installed backend: without a network."""
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


def pins() -> list[tuple[Requirement, str]]:
    """What requirements.txt pins, and the lines that belong to it."""
    text = (ROOT / "requirements.txt").read_text()
    entries = re.split(r"\n(?=\S)", text.strip())
    return [(Requirement(entry.split("\\")[0].strip()), entry) for entry in entries]


def test_wheel_holds_the_packages_and_nothing_else(wheel):
    names = set(wheel.namelist())
    expected = {str(path.relative_to(ROOT)) for path in sources()}
    expected |= {f"{package}/py.typed" for package in PACKAGES}
    info = {name for name in names if ".dist-info/" in name}
    assert expected <= names
    assert {name.split("/")[0] for name in names - info} == set(PACKAGES)
    assert any(name.endswith("/licenses/LICENSE") for name in info)


def test_metadata(metadata):
    assert metadata["Name"] == "lightning-pfl"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"


def test_every_imported_package_is_declared(requirements):
    """Nothing works only because something else happens to bring it along."""
    own = {*PACKAGES, *sys.stdlib_module_names}
    imported = set()
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.split(".")[0])
    declared = {canonicalize_name(r.name) for r in requirements if r.marker is None}
    needed = {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in imported - own}
    assert needed <= declared


@pytest.mark.parametrize("bad", ["2.6.2", "2.6.3", "2.5.4"])
def test_bad_versions_of_lightning_are_excluded(requirements, bad):
    (lightning,) = (r for r in requirements if r.name == "lightning")
    assert bad not in lightning.specifier


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_pins_satisfy_the_declared_ranges(requirements, python):
    """On every Python: one pin for each direct dependency, those for development included."""
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": "dev"}
    valid = [pin for pin, _ in pins() if pin.marker is None or pin.marker.evaluate(environment)]
    versions = {canonicalize_name(pin.name): str(pin.specifier)[2:] for pin in valid}
    assert len(versions) == len(valid)
    for requirement in requirements:
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)])


def test_pins_are_exact_have_hashes_and_name_no_host():
    for pin, entry in pins():
        assert [s.operator for s in pin.specifier] == ["=="], entry
        assert pin.url is None
        assert "--hash=sha256:" in entry
    text = (ROOT / "requirements.txt").read_text()
    assert not re.search(r"://|^\s*-|find-links|index", re.sub(r"    --hash=\S+", "", text), re.M)
