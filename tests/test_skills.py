"""The short skills for programs and people: their size, and that their commands run."""

import re
from pathlib import Path

import pytest

from tests.commands import QUICKSTART, python

ROOT = Path(__file__).parents[1]
SKILLS = {path.stem: path.read_text() for path in (ROOT / "docs" / "skills").glob("*.md")}
NET = """from torch import nn


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten())
        self.add_module("head", nn.Linear(64, 10))
"""
PATIENTS = ["age,weight,hospital,outcome"] + [
    f"{40 + k},{70 + k % 7},{'ABC'[k % 3]},{'yes' if k % 5 < 2 else 'no'}" for k in range(60)
]
FAILS = {"python -m pytest test_mine.py"}  # until the class is right


def commands(skill):
    """The commands of a skill's blocks, with the lines that continue them."""
    blocks = re.findall(r"```sh\n(.*?)```", SKILLS[skill], re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in lines if line.strip()]


def test_there_are_four_short_ones():
    assert len(SKILLS) == 4
    for skill, text in SKILLS.items():
        assert len(text.splitlines()) <= 40
        assert "Done when" in text
        for page in ("AGENTS.md", "mkdocs.yml"):  # llms.txt lists the pages of the menu
            assert f"skills/{skill}.md" in (ROOT / page).read_text()


@pytest.mark.slow
@pytest.mark.cli
@pytest.mark.parametrize("skill", SKILLS)
def test_its_commands_run_in_a_folder_of_ones_own(skill, tmp_path):
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "patients.csv").write_text("\n".join(PATIENTS) + "\n")
    assert commands(skill)
    for command in commands(skill):
        words = command.replace("--config quickstart", f"--config {QUICKSTART}").split()
        if words[0] == "pfl":
            words = ["-m", *words]
        else:
            words = words[1:]  # of Python
        if words[1] == "pytest":
            words += ["-p", "no:cacheprovider", "-o", "addopts="]
        done = python(*words, cwd=tmp_path)
        assert (done.returncode != 0) is (command in FAILS), done.stderr[-2000:] + done.stdout
