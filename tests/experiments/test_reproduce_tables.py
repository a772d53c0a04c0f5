"""Tables of `reproduce`: the values of their cells."""

import numpy as np
import pytest
import yaml

from pfl.cli import main
from pfl.report.table import read_table
from tests.refusal import refused

RUNS = ["A", "B"]
GRID = {"data": ["x", "y"], "size": [1, 2]}


def row(run, data, size, seed, round_num, **values):
    place = {"run": run, "data": data, "size": size, "seed": seed}
    return {**place, "round": round_num, "diverged": 0, **values}


def cells(markdown):
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_cells_are_means_and_deviations_of_the_last_round():
    content = {
        "title": "T",
        "y": ["own", "shared"],
        "y_unit": 0.01,
        "rows": ["run"],
        "columns": ["data"],
        "where": {"size": 2},
    }
    data = []
    for seed, last in ((0, 0.5), (1, 0.7)):
        data += [row("A", "x", 2, seed, r, own=value) for r, value in ((1, 0.1), (2, last))]
        data.append(row("A", "x", 1, seed, 1, own=9.0))  # of another size
        data.append(row("A", "y", 2, seed, 1, shared=0.25))  # the second name of y
    data.append(row("B", "x", 2, 0, 1, other=1.0))  # has no such metric
    data.append(row("B", "y", 2, 0, 1, own=0.125))
    text = read_table("t", content, RUNS, GRID).markdown(data)
    assert text.startswith("**T**\n\n| run | x | y |\n")
    # 50 and 70 have the mean 60 and the sample standard deviation sqrt(10^2 + 10^2) = 14.142; 25
    # twice has 25 and 0; one seed has no deviation.
    assert cells(text)[2:] == [["A", "60.00 ± 14.14", "25.00 ± 0.00"], ["B", "–", "12.5"]]


def test_printed_numbers_stand_beside_ours():
    content = {"y": "own", "rows": ["run"], "columns": ["data"], "where": {"size": 1}}
    content["printed"] = {"B": [0.5, None]}
    data = [row(run, x, 1, 0, 1, own=2.0) for run in RUNS for x in "xy"]
    table = read_table("t", content, RUNS, GRID)
    assert cells(table.markdown(data))[2:] == [["A", "2", "2"], ["B", "2 (0.5)", "2"]]
    for wrong in ({"C": [1.0, 2.0]}, {"A": [1.0]}):
        with refused("tables.printed", next(iter(wrong))):
            read_table("t", {**content, "printed": wrong}, RUNS, GRID)


def test_a_diverged_run_has_no_cell():
    content = {"y": "own", "rows": ["run"], "runs": ["A"], "where": {"data": "x", "size": 1}}
    fine = row("A", "x", 1, 0, 1, own=1.0)
    table = read_table("t", content, RUNS, GRID)
    assert cells(table.markdown([fine])) == [["run", "own"], ["---", "---"], ["A", "1"]]
    broken = {**row("A", "x", 1, 1, 2), "diverged": 1}
    assert cells(table.markdown([fine, broken]))[2] == ["A", "–"]


def test_the_heading_names_all_metrics_that_a_row_may_show():
    """A has the first metric, and B the second one only."""
    content = {"y": ["own", "shared"], "rows": ["run"], "where": {"data": "x", "size": 1}}
    rows = [row("A", "x", 1, 0, 1, own=1.0), row("B", "x", 1, 0, 1, shared=2.0)]
    found = cells(read_table("t", content, RUNS, GRID).markdown(rows))
    assert found == [["run", "own or shared"], ["---", "---"], ["A", "1"], ["B", "2"]]


def test_rows_and_columns_cross_several_axes():
    content = {"y": "own", "rows": ["size", "run"], "columns": ["data"]}
    data = [
        row(run, x, size, 0, 1, own=100 * (run == "B") + 10 * (x == "y") + size)
        for run in RUNS
        for x in "xy"
        for size in (1, 2)
    ]
    text = read_table("t", content, RUNS, GRID).markdown(data)
    assert cells(text)[0] == ["size / run", "x", "y"]
    assert cells(text)[2:] == [
        ["1, A", "1", "11"],
        ["1, B", "101", "111"],
        ["2, A", "2", "12"],
        ["2, B", "102", "112"],
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"columns": []},  # data has no place
        {"columns": ["data", "run"]},
        {"rows": []},
        {"columns": ["dates"]},
    ],
)
def test_every_axis_has_one_place(change):
    content = {"y": "own", "rows": ["run"], "columns": ["data"], "where": {"size": 1}, **change}
    with refused("tables", "data"):
        read_table("t", content, RUNS, GRID)


@pytest.mark.cli
def test_a_table_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    network = {"class_path": "LogisticRegression", "init_args": {"in_features": 64}}
    content = {
        "title": "Two methods",
        "seeds": 2,
        "common": {
            "trainer.max_epochs": 2,
            "model.init_args": {"network": network, "batch_size": None},
            "data": {"class_path": "DigitsDataModule", "init_args": {"num_clients": 3}},
        },
        "runs": {"FedAvg": {"model.class_path": "FedAvg"}, "none": {"model.class_path": "FedProx"}},
        "tables": [{"y": "test/global/accuracy", "y_unit": 0.01, "rows": ["run"]}],
    }
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    assert main(["reproduce", "two.yaml", "--out", "out", "--jobs", "1"]) == 0
    capsys.readouterr()
    text = (tmp_path / "out" / "two.md").read_text()
    assert text.startswith("# Two methods\n") and not (tmp_path / "out" / "two.png").exists()
    accuracies = []
    for seed in (0, 1):
        lines = (tmp_path / f"out/two/FedAvg/seed{seed}/metrics.csv").read_text().splitlines()
        last = dict(zip(lines[0].split(","), lines[-1].split(","), strict=True))
        accuracies.append(100 * float(last["test/global/accuracy"]))
    mean, deviation = np.mean(accuracies), np.std(accuracies, ddof=1)
    assert 10 <= mean < 100  # four digits of it have two decimals
    assert cells(text)[2][1] == f"{mean:.2f} ± {deviation:.2f}"
    assert "Made by `pfl reproduce two.yaml`: 4 runs that took " in text
