"""`reproduce`: a figure's file, its runs and its data."""

import copy
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from pfl.configuration.files import read
from pfl.errors import ConfigError
from pfl.experiments import Reproduction
from pfl.experiments.grid import Job, merge, nest
from pfl.experiments.jobs import execute
from pfl.experiments.reproduction import figure_files, rows_of
from tests import commands
from tests.commands import table

pytestmark = pytest.mark.cli

TINY: dict[str, Any] = {
    "title": "Three methods",
    "seeds": 2,
    "common": {
        "trainer.max_epochs": 2,
        "trainer.accelerator": "cpu",
        "model.init_args": {
            "network": {"class_path": "MLP", "init_args": {"in_features": 64, "hidden": [4]}},
            "batch_size": None,
        },
        "data": {"class_path": "DigitsDataModule", "init_args": {"num_clients": 3}},
    },
    "runs": {
        "FedAvg": {"model.class_path": "FedAvg"},
        "too fast": {"model": {"class_path": "FedAvg", "init_args": {"lr": 9e37}}},
        "alone": {"model.class_path": "LocalTrain"},
    },
    "grid": {"model.init_args.local_steps": [1, 2]},
    "panels": [
        {"y": ["test/global/loss", "test/personalized/loss"], "log": "xy"},
        {"x": "local_steps", "y": "train/samples", "at": "best", "runs": ["alone", "FedAvg"]},
    ],
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(content, path="tiny.yaml"):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(yaml.safe_dump(content, sort_keys=False))
    return str(path)


def changed(content, **keys):
    """Returns a copy with other values for some keys of the first level."""
    return {**copy.deepcopy(content), **keys}


call = partial(commands.call, "reproduce", "--jobs", "1")


# ---- the file of a figure -----------------------------------------------------------------------


def test_changes_replace_values_of_the_common_configuration():
    base = nest({"a.b": 1, "a.c": {"d": 2}, "e": [1, 2]})
    assert base == {"a": {"b": 1, "c": {"d": 2}}, "e": [1, 2]}
    assert merge(base, nest({"a.c.d": 3, "e": [4]})) == {"a": {"b": 1, "c": {"d": 3}}, "e": [4]}


def test_arguments_of_another_class_are_not_kept():
    sgd = {"class_path": "FedAvg", "init_args": {"lr": 1.0}}
    assert merge(sgd, {"init_args": {"lr": 2.0}}) == {**sgd, "init_args": {"lr": 2.0}}
    assert merge(sgd, {"class_path": "FedAvg", "init_args": {"x": 1}})["init_args"]["lr"] == 1.0
    other = {"class_path": "FedProx", "init_args": {"x": 1}}
    assert merge(sgd, other) == other
    # what all classes have in common is written without a class
    assert merge({"init_args": {"lr": 1.0}}, other)["init_args"] == {"lr": 1.0, "x": 1}


def test_a_class_is_the_same_with_and_without_its_module():
    """A saved configuration has pfl.algorithms.FedAvg where a file says FedAvg."""
    args = {"init_args": {"lr": 1.0}}
    for one, two in (
        ("pfl.algorithms.FedAvg", "FedAvg"),
        ("FedAvg", "pfl.algorithms.FedAvg"),
        ("models.CNN", "pfl.models.CNN"),
    ):
        merged = merge({"class_path": one, **args}, {"class_path": two})
        assert merged == {"class_path": two, **args}
    for one, two in (
        ("mine.FedAvg", "FedAvg"),
        ("pfl.algorithms.FedAvg", "pfl.algorithms.FedProx"),
        ("torch.nn.Linear", "mine.Linear"),
    ):
        merged = merge({"class_path": one, **args}, {"class_path": two})
        assert merged == {"class_path": two}


def test_every_run_meets_every_value_and_every_seed():
    grid = {"loop.rounds": [5, 6], "size": {"small": {"data.n": 1}, "large": {"data.n": 9}}}
    figure = Reproduction.from_file(
        write(changed(TINY, grid=grid, seeds=[3, 4], panels=[{"y": "a/b"}]))
    )
    jobs = figure.jobs()
    assert len(jobs) == len({job.folder for job in jobs}) == 3 * 2 * 2 * 2
    assert len({str(job) for job in jobs}) == len(jobs)
    last = jobs[-1]
    assert (last.run, last.axes, last.seed) == ("alone", {"rounds": 6, "size": "large"}, 4)
    assert last.config["loop"]["rounds"] == 6 and last.config["data"]["n"] == 9
    assert last.config["seed_everything"] == 4
    assert last.config["data"]["class_path"] == "DigitsDataModule"


def test_a_value_of_the_grid_can_change_one_run_in_its_own_way():
    steps = {"alone": {"model.init_args.local_steps": 5}}
    grid = {"size": {"small": {"data.n": 1, "runs": steps}, "large": {"data.n": 9}}}
    figure = Reproduction.from_file(write(changed(TINY, grid=grid, panels=[{"y": "a/b"}])))
    actual = {
        (job.run, job.axes["size"]): job.config["model"]["init_args"].get("local_steps")
        for job in figure.jobs()
    }
    assert {place: steps for place, steps in actual.items() if steps} == {("alone", "small"): 5}
    assert not [job for job in figure.jobs() if "runs" in job.config]


def test_full_and_base_change_a_figure():
    write(TINY, "configs/papers/paper/figure1.yaml")
    panels = [{"y": "train/loss"}]
    derived = {
        "base": "paper-figure1",
        "panels": panels,
        "full": {"common": {"trainer.max_epochs": 7}},
    }
    write(derived, "configs/papers/paper/figure2.yaml")
    assert {"paper-figure1", "paper-figure2"} <= set(figure_files())

    first, second = (Reproduction.from_file(f"paper-figure{k}") for k in (1, 2))
    full = Reproduction.from_file("paper-figure2", full=True)
    assert first.jobs() == second.jobs() and first.runs_of == second.runs_of
    assert [panel.y for panel in second.drawn] == [["train/loss"]]
    assert {job.config["trainer"]["max_epochs"] for job in full.jobs()} == {7}
    assert full.runs_of not in (first.runs_of, second.runs_of)


BAD = {
    "title": ({"tilte": 1}, ["tilte", "title"]),
    "runs": ({"runs": {}}, ["runs"]),
    "seeds": ({"seeds": "many"}, ["seeds", "many"]),
    "grid": ({"grid": {"data.n": 3}}, ["data.n", "3", "list"]),
    "no grid": ({"grid": [1]}, ["grid: [1]", "dict"]),
    "grid of lists": ({"grid": {"hidden": [[8], [8, 8]]}}, ["grid.hidden: [[8], [8, 8]]", "name"]),
    "grid change": ({"grid": {"size": {"small": 3}}}, ["grid.size.small: 3", "keys"]),
    "grid run change": ({"grid": {"size": {"small": {"runs": 3}}}}, ["grid.size.small.runs: 3"]),
    "run": ({"runs": {"FedAvg": 3}}, ["runs.FedAvg: 3", "keys and their values"]),
    "no panels": ({"panels": 3}, ["panels: 3", "list"]),
    "axis": ({"grid": {"model.seed": [1]}}, ["grid", "'seed'", "column"]),
    "seed": (
        {"common": {**TINY["common"], "seed_everything": 3}},
        ["common.seed_everything", "seeds"],
    ),
    "outside": ({"runs": {"..": {"model.class_path": "FedAvg"}}}, ["runs: '..'", "folder"]),
    "nothing left": (
        {"grid": {"n": {1: {"without": ["FedAvg"]}}}},
        ["grid: `without` leaves no run"],
    ),
    "no full": ({"full": 3}, ["full: 3", "keys"]),
    "no base": ({"base": 3}, ["base: 3", "name"]),
    "grid runs": ({"grid": {"n": {1: {"runs": {"FedAgv": {}}}}}}, ["FedAgv", "FedAvg"]),
    "panel key": ({"panels": [{"y": "a", "colour": 1}]}, ["colour", "xlabel"]),
    "panel": ({"panels": [{"x": "round"}]}, ["y"]),
    "panel runs": ({"panels": [{"y": "a", "runs": ["FedAgv"]}]}, ["FedAgv", "FedAvg"]),
    "where": ({"panels": [{"y": "a", "where": {"local_steps": 3}}]}, ["where", "local_steps", "3"]),
    "log": ({"panels": [{"y": "a", "log": "z"}]}, ["log", "'z'", "xy"]),
    "at": ({"panels": [{"y": "a", "at": "first"}]}, ["at", "first", "best"]),
    "nested class": ({"runs": {"FedAvg": {"model.class_path": "FedAgv"}}}, ["FedAgv", "FedAvg"]),
    "option": ({"common": {**TINY["common"], "data.init_args.clients": 2}}, ["clients"]),
    "metric": ({"panels": [{"y": "test/loss"}]}, ["'test/loss'", "test/global/loss"]),
    "x": ({"panels": [{"y": "train/loss", "x": "sample"}]}, ["'sample'", "train/samples"]),
    "round": (
        {"panels": [{"y": "train/loss", "x": "local_steps", "at": {"gap": 1}}]},
        ["'gap'", "train/loss"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_gets_one_line(case):
    keys, parts = BAD[case]
    small = changed(TINY, runs={"FedAvg": {"model.class_path": "FedAvg"}}, seeds=1)
    small["panels"][1]["runs"] = ["FedAvg"]
    status, _, err = call(write(changed(small, **keys)))
    assert status == 2
    assert err.startswith("error: ") and err.count("\n") == 1
    assert not [part for part in parts if part not in err], err


def test_unknown_figures_and_options_get_one_line():
    status, _, err = call("fedpd-figure3")
    assert (
        status == 2 and "fedpd-figure3" in err and "fedpd-figure2" in err and err.count("\n") == 1
    )
    status, _, err = call("fedpd-figure2", "--fast")
    assert status == 2 and "--fast" in err and err.count("\n") == 1
    Path("broken.yaml").write_text("a: [1")
    status, _, err = call("broken.yaml")
    assert status == 2 and "broken.yaml" in err and err.count("\n") == 1
    Path("broken.yaml").write_bytes("title: café".encode("latin1"))
    status, _, err = call("broken.yaml")
    assert status == 2 and "broken.yaml" in err and "utf-8" in err and err.count("\n") == 1
    status, _, err = call("fedpd-figure2", "--out", "broken.yaml")  # a file
    assert status == 2 and "--out" in err and "broken.yaml" in err and err.count("\n") == 1


def test_a_dry_run_shows_runs_and_remarks_and_makes_none(here):
    """Table 3 starts from Table 1: remarks of both files, and a row for each value of the grid."""
    status, out, err = call("fedslr-table3", "--dry-run")
    assert (status, err, [*here.iterdir()]) == (0, "", [])
    assert "All values are the paper's." in out and "Not given: seeds" in out
    rows = [line.split("  ")[0] for line in out.splitlines() if "CIFAR100DataModule" in line]
    assert len(rows) == 5 and rows[0] == "FedSLR, low_rank_penalty 1e-05"
    assert "1000        10 of 100" in out

    # A file that starts from a results file, which starts from a recipe.
    status, out, err = call("results/fedclup-figure5", "--dry-run")
    assert (status, err) == (0, "") and "the whole test set, where" in out


def test_a_panel_that_starts_from_a_changed_panel_has_its_changes(tmp_path):
    """YAML's rule for `<<`: what a mapping names itself comes before what it merges, and the first
    of several merged mappings before the others. PyYAML 6.0.4 has y: 1 in the third."""
    path = tmp_path / "merged.yaml"
    path.write_text("[&a {y: 1, x: 2}, &b {<<: *a, y: 3}, {<<: *b, x: 4}, {<<: [*b, *a]}]")
    assert read(path)[2:] == [{"y": 3, "x": 4}, {"y": 3, "x": 2}]
    path.write_text("a: {<<: 3}")
    with pytest.raises(ConfigError, match="<< needs keys"):
        read(path)


# ---- from the command to the files --------------------------------------------------------------


@pytest.fixture(scope="module")
def figure(tmp_path_factory):
    """The folder of the tiny figure, and what the command printed."""
    folder = tmp_path_factory.mktemp("figure")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        status, out, err = call(write(TINY), "--out", "out")
    assert status == 0 and err == ""
    return folder, out


@pytest.mark.slow
def test_a_figure_writes_its_files(figure):
    folder, printed = figure
    assert {path.name for path in folder.iterdir()} == {"tiny.yaml", "out"}
    names = {path.name for path in (folder / "out").iterdir()}
    assert names == {"tiny", "tiny.csv", "tiny.png", "tiny.pdf"}
    assert (folder / "out/tiny.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pdf = (folder / "out/tiny.pdf").read_bytes()
    assert pdf.startswith(b"%PDF-") and b"CreationDate" not in pdf
    lines = printed.splitlines()
    assert len(lines) == 3 * 2 * 2 + 1
    assert lines[0].startswith("[ 1/12] FedAvg, local_steps=1, seed=0: ")
    assert all(f"tiny.{kind}" in lines[-1] for kind in ("csv", "png", "pdf"))


@pytest.mark.slow
def test_data_equal_the_metrics_of_the_runs(figure):
    rows = table(figure[0] / "out/tiny.csv")
    metrics = ["test/global/loss", "test/personalized/loss", "train/samples"]
    assert list(rows[0]) == ["run", "local_steps", "seed", "diverged", "round", *metrics]
    runs = figure[0] / "out/tiny"
    for run in ("FedAvg", "alone"):
        for steps in "12":
            for seed in "01":
                source = table(runs / run / f"local_steps={steps}" / f"seed{seed}/metrics.csv")
                place = {"run": run, "local_steps": steps, "seed": seed, "diverged": "0"}
                mine = [row for row in rows if place.items() <= row.items()]
                assert [row["round"] for row in mine] == ["1", "2"]
                for row, original in zip(mine, source, strict=True):
                    for name in metrics:
                        if original.get(name, "") == "":
                            assert row[name] == ""
                        else:
                            np.testing.assert_allclose(
                                float(row[name]), float(original[name]), 1e-6
                            )


@pytest.mark.slow
def test_a_diverged_run_ends_in_a_row_without_values(figure):
    rows = [row for row in table(figure[0] / "out/tiny.csv") if row["run"] == "too fast"]
    assert len(rows) == 2 * 2  # all fail in their first round
    assert {(row["diverged"], row["round"], row["test/global/loss"]) for row in rows} == {
        ("1", "1", "")
    }
    assert figure[1].count("diverged") == 4


@pytest.mark.slow
@pytest.mark.usefixtures("quick_figures")
def test_finished_runs_are_used_again_unless_their_configuration_changed(here):
    small = changed(TINY, seeds=1, grid={})
    first = call(write(small), "--out", "out")[1]
    assert first.count("as before") == 0
    again = call(write(small), "--out", "out")[1]
    assert again.count("as before") == 3 and again.count("diverged") == 1
    # a run that was broken off has no outcome
    (here / "out/tiny/alone/seed0/outcome.json").unlink()
    small["runs"]["FedAvg"]["model.init_args.lr"] = 0.2
    lines = call(write(small), "--out", "out")[1].splitlines()
    assert lines[0].startswith("runs made again, since the configuration changed: 1; ")
    assert ["as before" in line for line in lines[1:4]] == [False, True, False]
    config = yaml.safe_load((here / "out/tiny/FedAvg/seed0/config.yaml").read_text())
    assert config["model"]["init_args"]["lr"] == 0.2
    names = {path.name for path in (here / "out/tiny/FedAvg").iterdir()}
    assert names == {"seed0", "seed0.yaml", ".seed0.lock"}


# ---- the papers' figures ------------------------------------------------------------------------
READ = {name: Reproduction.from_file(name) for name in figure_files()}
ALL = list(READ.values())
TINY_RUN = nest({"trainer.max_epochs": 1, "data.init_args.num_clients": 3})
# In place of images that would have to be downloaded.
ON_DIGITS = nest(
    {
        "trainer": {"max_epochs": 1, "check_val_every_n_epoch": 1},
        "model.init_args.network": {"class_path": "MLP", "init_args": {"in_features": 64}},
        "data": {
            "class_path": "DigitsDataModule",
            "init_args": {
                "num_clients": 3,
                "protocol": {"class_path": "SharedTest", "init_args": {"validation": 0.0}},
            },
        },
        "loop.clients_per_round": 3,
    }
)


def drawn(job):
    """Returns whether the data of a run are drawn or installed, and need no download."""
    kind = job.config["data"]["class_path"]
    return kind in ("AgentLogistic", "DigitsDataModule", "HeterogeneousLogistic", "LeastSquares")


def test_every_figure_of_the_papers_is_listed():
    figures = {
        "fedpd": (2, 4, 5, 6, 7, 8),
        "fedclup": range(1, 10),
        "fedslr": (2, 3, 5),
        "fedagg": (12,),
        "fedacs": (1,),
    }
    names = {f"{paper}-figure{k}" for paper, numbers in figures.items() for k in numbers}
    assert names <= set(figure_files())
    status, out, _ = call("--list")
    assert status == 0 and not [name for name in names if name not in out]


def test_a_broken_file_does_not_hide_the_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "configs" / "papers"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("title: a\ntitle: b\n")
    status, out, err = call("--list")
    assert (status, err) == (0, "")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert "broken: " in lines["mine"] and "line 2: title" in lines["mine"]
    assert not [name for name in lines if name != "mine" and "broken" in lines[name]]
    assert len(lines) > 20


@pytest.mark.parametrize("name", sorted(READ))
def test_every_figure_can_be_read(name):
    small = READ[name].jobs()
    jobs = Reproduction.from_file(name, full=True).jobs()
    for several in (small, jobs):
        assert len({job.folder for job in several}) == len(several)
    rounds = [job.config["trainer"]["max_epochs"] for job in jobs]
    before = {str(job): job.config["trainer"]["max_epochs"] for job in small}
    assert all(r >= before.get(str(job), 0) for r, job in zip(rounds, jobs, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("folder", sorted({figure.runs_of for figure in ALL}))
def test_every_run_of_a_figure_runs_and_has_what_it_shows(folder, here):
    """Every run trains three clients for a round, at one point of the grid, on digits if its own
    data would have to be downloaded."""
    figures = [figure for figure in ALL if figure.runs_of == folder]
    first: dict[Any, Job] = {}
    for figure in figures:
        for job in figure.jobs():
            first.setdefault((job.run, drawn(job)), job)
    rows = []
    for job in first.values():
        changes = [TINY_RUN, nest({"loop.clients_per_round": None})] if drawn(job) else [ON_DIGITS]
        arguments = job.config["model"]["init_args"]
        for name in ("local_steps", "local_epochs"):
            if (arguments.get(name) or 0) > 1:
                changes.append(nest({f"model.init_args.{name}": 1}))
        job = job.with_changes(changes)
        outcome = execute(job, here)
        assert outcome["status"] == "finished"
        rows += rows_of(job, here, outcome)
    metrics = [name for row in rows for name in row]
    for figure in figures:
        for panel in figure.shown:
            panel.check(figure.name, rows, metrics)


# ---- one row ------------------------------------------------------------------------------------


def test_one_row_of_one_seed_is_the_row_of_the_whole(here, figure):
    """The others are not run, and what all rows have shown stays as it was."""
    path = write(TINY)
    row = ["--only", "alone, local_steps 2", "--seed", "1"]
    assert call(path, "--out", "first", *row)[0] == 0
    assert [found.parent for found in here.glob("first/*/**/outcome.json")] == [
        here / "first" / "tiny" / "alone" / "local_steps=2" / "seed1"
    ]
    assert sorted(found.name for found in here.glob("first/*.*")) == ["tiny-part.csv"]
    shutil.copytree(figure[0] / "out", here / "whole")
    part = table(here / "first" / "tiny-part.csv")
    whole = table(here / "whole" / "tiny.csv")
    same = {"run": "alone", "local_steps": "2", "seed": "1"}
    expected = []
    for line in whole:
        if line | same == line:  # without columns that other runs alone have
            expected.append({name: line[name] for name in part[0]})
    assert part == expected and len(part) == 2
    status, printed, _ = call(path, "--out", "whole", "--only", "alone")
    assert (status, printed.count("as before")) == (0, 4)  # its runs, made before
    assert len(table(here / "whole" / "tiny-part.csv")) == 4 * 2
    assert table(here / "whole" / "tiny.csv") == whole


@pytest.mark.parametrize(
    "wrong",
    [
        {"y": ["test/global/acuracy", "test/personal/loss"]},
        {"y": "test/global/accuracy + test/finetuned/5/accuracy"},
        {"y": "test/global/loss", "x": "val/personalised/loss_std"},
        {"y": "train/loss", "at": {"test/knn/accuraty": 0.5}, "x": "local_steps"},
    ],
)
def test_no_run_begins_with_a_score_that_no_run_can_have(wrong, here):
    status, _, error = call(write(changed(TINY, panels=[wrong, *TINY["panels"]])), "--out", "out")
    assert status == 2 and error.startswith("error: tiny: panels: no run has ")
    assert error.count("\n") == 1 and "test/global/accuracy, test/global/loss" in error
    assert not list((here / "out" / "tiny").iterdir())


def test_statistics_of_scores_and_other_columns_are_not_refused_before_the_runs():
    panel = {"y": "mine/number", "x": "test/personalized/loss_worst10", "at": {"test/a/b": 1}}
    shown = Reproduction.from_file(write(changed(TINY, panels=[panel]))).shown[0]
    shown.check_scores("tiny", ["global/accuracy", "personalized/loss"])


def test_a_row_without_what_some_panels_show_is_the_others(here):
    """FedAvg has no personalized models, of which one of the panels is."""
    panels = [{"y": "test/personalized/loss"}, {"y": "test/global/loss"}]
    path = write(changed(TINY, panels=panels))
    row = ["--only", "FedAvg, local_steps 1", "--seed", "0"]
    assert call(path, "--out", "out", *row)[0] == 0
    part = table(here / "out" / "tiny-part.csv")
    assert [line["round"] for line in part] == ["1", "2"]
    assert all(float(line["test/global/loss"]) > 0 for line in part)
    assert "test/personalized/loss" not in part[0]
    status, _, error = call(write(changed(TINY, panels=panels[:1])), "--out", "out", *row)
    assert status == 2
    assert "no run has 'test/personalized/loss'" in error


def test_a_whole_figure_is_no_part_of_itself():
    """Its name is that of the folder of `pfl compare`."""
    figure = Reproduction.from_file(write(TINY))
    assert figure.part(None, None).name == figure.name == "tiny"
    assert figure.part("alone", None).name == "tiny-part"


def test_a_row_that_there_is_not_is_refused_with_those_that_there_are():
    path = write(TINY)
    runs = ("FedAvg", "too fast", "alone")
    known = "; ".join(f"{run}, local_steps {steps}" for run in runs for steps in (1, 2))
    status, _, error = call(path, "--only", "alone, local_steps 3")
    assert status == 2
    assert error == (
        f"error: reproduce: --only: alone, local_steps 3; there is no such row; there are {known}\n"
    )
    status, _, error = call(path, "--seed", "7")
    assert (status, error) == (2, "error: reproduce: --seed: 7; it must be one of 0, 1\n")
