"""Configurations that come with pfl: by name, from any folder."""

from pathlib import Path

import pytest

from pfl.configuration.app import FederatedCLI
from pfl.configuration.files import find, names, shipped
from pfl.experiments import Reproduction
from pfl.experiments.reproduction import figure_files
from tests.commands import ROOT, call

pytestmark = [pytest.mark.cli, pytest.mark.usefixtures("here")]


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_every_command_finds_the_quick_start(command, monkeypatch):
    monkeypatch.setattr(FederatedCLI, "run_subcommand", lambda self, subcommand: None)
    for option in ("--config quickstart", "-c quickstart.yaml", "--config=configs/quickstart.yaml"):
        words = [command, *option.split(), *([] if command == "fit" else ["--untrained=true"])]
        assert FederatedCLI(words).trainer.name == "quickstart"


def test_names_are_those_of_all_files():
    files = {path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*.yaml")}
    assert {Path(f"{name}.yaml") for name in names(shipped())} == files
    for name in names(shipped()):
        assert find(name).samefile(ROOT / "configs" / f"{name}.yaml")


def test_a_file_of_the_current_folder_comes_first(here):
    (here / "quickstart").mkdir()  # a folder is not a file
    assert find("quickstart").samefile(ROOT / "configs/quickstart.yaml")
    own = here / "quickstart.yaml"
    own.write_text("")
    assert find("quickstart.yaml").samefile(own)
    own.unlink()
    (here / "quickstart").rmdir()


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("quickstat", ["quickstat", "'quickstart'"]),
        ("nothing", ["nothing", "logger/wandb, ", "quickstart"]),
        ("papers/fedpd/figure2", ["figure2", "pfl reproduce"]),
    ],
)
def test_a_configuration_that_fit_cannot_use_is_refused(name, parts):
    status, _, err = call("fit", "--config", name)
    assert (status, err.count("\n")) == (2, 1), err
    assert err.startswith("error: config: ") and not [part for part in parts if part not in err]


@pytest.mark.parametrize("name", ["papers/fedpd/figure2", "configs/papers/fedpd/figure2.yaml"])
def test_reproduce_takes_the_names_of_files_too(name):
    assert Reproduction.from_file(name) == Reproduction.from_file("fedpd-figure2")


def test_reproduce_lists_every_figure_and_table():
    status, out, _ = call("reproduce", "--list")
    papers = [name for name in names(shipped()) if name.startswith("papers/")]
    assert status == 0 and len(figure_files()) == len(papers) == len(out.splitlines())
