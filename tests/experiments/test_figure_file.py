"""The file of a figure or a table: bases, runs that are left out, sums, labels, changes."""

from pathlib import Path

import pytest
import yaml

from pfl.experiments import Reproduction
from pfl.experiments.grid import parse_changes
from pfl.report.curves import read_panel
from pfl.report.table import read_table
from tests.commands import call
from tests.refusal import refused

pytestmark = pytest.mark.cli
FILE = {
    "title": "Two methods",
    "common": {"trainer.max_epochs": 2},
    "runs": {"FedAvg": {"model.class_path": "FedAvg"}, "alone": {"model.class_path": "LocalTrain"}},
    "grid": {"data.n": [1, 2]},
    "panels": [{"y": "a"}],
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)


def read(content, path="configs/papers/paper/figure1.yaml"):
    """The figure of a file with this content."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(yaml.safe_dump(content, sort_keys=False))
    return Reproduction.from_file(path)


def places(figure):
    """The run and the axes of each job."""
    return [(job.run, *job.axes.values()) for job in figure.jobs()]


def test_only_what_panels_and_tables_show_is_run():
    assert places(read(FILE)) == [("FedAvg", 1), ("FedAvg", 2), ("alone", 1), ("alone", 2)]
    table = {"y": "a", "rows": ["run"], "where": {"n": 1}, "runs": ["alone"]}
    assert places(read({**FILE, "panels": [], "tables": [table]})) == [("alone", 1)]
    panel = {"y": "a", "where": {"n": 2}, "runs": ["FedAvg"]}
    shown = {**FILE, "panels": [panel], "tables": [table]}
    assert places(read(shown)) == [("FedAvg", 2), ("alone", 1)]


def test_a_point_of_the_grid_can_do_without_a_run():
    size = {"small": {"data.n": 1, "without": ["alone"]}, "large": {"data.n": 9}}
    figure = read({**FILE, "grid": {"size": size}})
    assert places(figure) == [("FedAvg", "small"), ("FedAvg", "large"), ("alone", "large")]
    assert not [job for job in figure.jobs() if "without" in job.config]
    with refused("grid.size.small.without", "'alone'", "list"):
        read({**FILE, "grid": {"size": {"small": {"without": "alone"}}}})
    with refused("'aloen'", "FedAvg, alone"):
        read({**FILE, "grid": {"size": {"small": {"without": ["aloen"]}}}})


def test_a_grid_and_what_is_shown_replace_those_of_the_base():
    """Over two levels: figure3 has the runs of figure1, and the folder of its runs."""
    read(FILE)
    second = {"base": "paper-figure1", "grid": {"data.m": [3]}}
    assert places(read(second, "configs/papers/paper/figure2.yaml")) == [
        ("FedAvg", 3),
        ("alone", 3),
    ]
    table = {"y": "a", "rows": ["run"], "runs": ["alone"]}
    third = {"base": "paper-figure2", "title": "Alone", "tables": [table]}
    figure = read(third, "configs/papers/paper/figure3.yaml")
    assert (places(figure), figure.runs_of, figure.title) == (
        [("alone", 3)],
        "paper-figure1",
        "Alone",
    )
    assert figure.drawn == [] and len(figure.written) == 1


def test_a_sum_of_metrics():
    """1 + 2 in the first round; the second one lacks b, so that `other` takes its place."""
    panel = read_panel("f", {"y": ["a + b", "other"]}, ["A"], {})
    assert panel.metrics == ["round", "round", "a", "b", "other"]
    place = {"run": "A", "seed": 0, "diverged": 0}
    rows = [
        {**place, "round": 1, "a": 1.0, "b": 2.0},
        {**place, "round": 2, "a": 1.0, "other": 7.0},
    ]
    (line,) = panel.lines(rows)
    assert (line.x.tolist(), line.y.tolist()) == ([1, 2], [3, 7])
    panel.check("f", rows, ["a"])
    alone = read_panel("f", {"y": "a + c"}, ["A"], {})
    with refused("'a + c'"):
        alone.check("f", rows, ["a"])


def test_labels_of_runs_in_tables():
    content = {"y": "a", "rows": ["run"], "runs": {"A": "FedSLR (GKR)"}}
    rows = [{"run": "A", "seed": 0, "diverged": 0, "round": 1, "a": 5.0}]
    text = read_table("t", content, ["A", "B"], {}).markdown(rows)
    assert text.splitlines()[-1] == "| FedSLR (GKR) | 5 |"


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ({"y": "a", "y_unit": "1.0e6"}, ["y_unit", "'1.0e6'", "1.0e+6"]),
        ({"y": "a", "x_unit": None}, ["x_unit", "None"]),
        ({"y": 3}, ["y: 3", "metric"]),
        ({"y": "a", "y_unit": 0}, ["y_unit", "0", "but 0"]),
        ({"y": "a", "x": None}, ["x: None", "metric"]),
        ({"y": "a", "where": ["n"]}, ["where", "['n']", "values of the grid's axes"]),
        ({"y": "a", "runs": {"A": 3}}, ["runs", "3", "label"]),
        ({"y": "a", "xlim": 5}, ["xlim: 5", "two numbers"]),
        ({"y": "a", "ylim": [0, "1e6"]}, ["ylim", "'1e6'", "1.0e+6"]),
        ({"y": "a", "at": {"a": "1e-3"}}, ["at", "'1e-3'", "number"]),
    ],
)
def test_impossible_panels_are_refused(content, parts):
    """Before the runs are made: a figure cannot be drawn with any of these."""
    with refused(*parts):
        read_panel("f", content, ["A"], {})


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ({"rows": "run"}, ["rows: 'run'", "list"]),
        ({"rows": ["run"], "columns": None}, ["columns: None", "list"]),
        ({"printed": [1.0]}, ["printed: [1.0]", "for each row"]),
        ({"printed": {"A": 1.0}}, ["printed: {'A': 1.0}", "1 numbers"]),
        ({"printed": {"A": ["1e-3"]}}, ["printed: {'A': ['1e-3']}", "1 numbers"]),
    ],
)
def test_impossible_tables_are_refused(content, parts):
    with refused(*parts):
        read_table("t", {"y": "a", "rows": ["run"], **content}, ["A"], {})


def test_a_number_as_the_key_of_an_axis_is_its_name():
    assert places(read({**FILE, "grid": {5: {"small": {"data.n": 1}}}}))[0] == ("FedAvg", "small")


def test_changes_come_after_all_others():
    job = read(FILE).jobs()[0]
    changes = parse_changes("reproduce", ["trainer.max_epochs=5", "data={m: 4}", "loop.seed=null"])
    config = job.with_changes(changes).config
    assert config["trainer"] == {"max_epochs": 5} and config["data"] == {"n": 1, "m": 4}
    assert config["loop"] == {"seed": None}


@pytest.mark.parametrize("change", ["trainer.max_epochs", "=3", "data={class_path"])
@pytest.mark.parametrize("command", ["reproduce", "compare"])
def test_a_change_without_key_and_value_gets_one_line(command, change):
    figure = {"reproduce": "fedpd-figure2", "compare": "papers/fedpd/figure2"}[command]
    status, _, err = call(command, figure, "--change", change)
    assert status == 2 and err.count("\n") == 1 and f"--change: {change};" in err
