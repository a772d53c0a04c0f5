"""The page of three hospitals, docs/hospitals.md, can be followed, and prints what it shows."""

import re
import runpy
import shlex
from pathlib import Path

import pytest

from tests.commands import call, table

TEXT = (Path(__file__).parents[1] / "docs" / "hospitals.md").read_text()
FILES = re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", TEXT, re.S)
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.S)
    for line in block.splitlines()
]
SHOWN = [
    line for block in re.findall(r"\n\n```\n(.*?)```", TEXT, re.S) for line in block.splitlines()
]


def words(line):
    """The words of a line in one order; rounding on another processor may change its numbers."""
    return sorted(re.sub(r"\d+(\.\d+)?", "0", line).replace(",", " ").split())


@pytest.mark.cli
@pytest.mark.usefixtures("run_figures")
def test_the_page_can_be_followed(tmp_path, monkeypatch):
    """With one round of one seed in the comparison."""
    monkeypatch.chdir(tmp_path)
    for name, block in FILES:
        Path(name).write_text(block.replace("seeds: 10", "seeds: 1"))
    printed = ""
    for program, *arguments in COMMANDS:
        if program == "python":
            runpy.run_path(*arguments)
            continue
        if arguments[0] == "compare":
            arguments += ["--jobs", "1", "--change", "trainer.max_epochs=1"]
        status, out, err = call(*arguments)
        assert status == 0, err
        printed += out
    printed += Path("predictions.csv").read_text()
    lines = [words(line) for line in printed.splitlines()]
    assert [line for line in SHOWN if words(line) not in lines] == []

    clients = table(Path("runs/hospitals/clients.csv"))
    assert [row["name"] for row in clients] == ["coast", "north", "south"]
    train, val, test = (clients[1][f"{split}_samples"] for split in ("train", "val", "test"))
    # The north as a party divides its file as the run has divided it.
    assert f"{train} to train with, {val} to validate, {test} to test" in printed
    assert [row["model"] for row in table(Path("predictions.csv"))] == ["north", "coast"] * 4
    # Cells are riskier where more are malignant: the odds are those of the hospital's own labels.
    risk = [float(row["probability of malignant"]) for row in table(Path("predictions.csv"))]
    assert all(coast > north for north, coast in zip(risk[::2], risk[1::2], strict=True))
    for path in (
        "runs/hospitals/report.html",
        "runs/hospitals/evaluation/matrix.png",
        "models-of-run/client1/card.json",
        "app/run.yaml",
    ):
        assert Path(path).is_file(), path
