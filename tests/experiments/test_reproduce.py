"""`reproduce`: a figure's file, its runs and its data."""

import copy
import re
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
from tests.commands import ROOT, table

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
    assert ["as before" in line for line in lines[:3]] == [False, True, False]
    config = yaml.safe_load((here / "out/tiny/FedAvg/seed0/config.yaml").read_text())
    assert config["model"]["init_args"]["lr"] == 0.2
    assert {path.name for path in (here / "out/tiny/FedAvg").iterdir()} == {"seed0", "seed0.yaml"}


# ---- the papers' figures ------------------------------------------------------------------------
ALL = [Reproduction.from_file(name) for name in figure_files()]
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


# The figures that have a page with results.
FIGURES = [figure.name for figure in ALL if figure.panels and all(map(drawn, figure.jobs()))]


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


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", sorted(figure_files()))
def test_every_figure_can_be_read(name, full):
    figure = Reproduction.from_file(name, full=full)
    jobs = figure.jobs()
    assert len({job.folder for job in jobs}) == len(jobs)
    small = Reproduction.from_file(name)
    rounds = [job.config["trainer"]["max_epochs"] for job in jobs]
    before = {str(job): job.config["trainer"]["max_epochs"] for job in small.jobs()}
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
        if "local_steps" in job.config["model"]["init_args"]:
            changes.append(nest({"model.init_args.local_steps": 1}))
        job = job.with_changes(changes)
        outcome = execute(job, here)
        assert outcome["status"] == "finished"
        rows += rows_of(job, here, outcome)
    metrics = [name for row in rows for name in row]
    for figure in figures:
        for panel in figure.shown:
            panel.check(figure.name, rows, metrics)


PAGES = [ROOT / "docs" / "papers" / f"{paper}.md" for paper in ("fedpd", "fedclup")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_show_every_figure_and_its_data(page):
    links = re.findall(r"\]\((?!http)([^)#]+)", page.read_text())
    assert not [link for link in links if not (page.parent / link).exists()]
    names = [name for name in FIGURES if name.startswith(page.stem)]
    for file in (f"{name}.{kind}" for name in names for kind in ("png", "csv")):
        assert any(link.endswith(file) for link in links), file
    for name in names:
        assert name in page.read_text()


def curves(name, value, *keys):
    """The values of a column of published data by round, for each place that `keys` tell apart."""
    lines: dict[Any, list[float]] = {}
    for row in table(ROOT / "docs" / "data" / f"{name}.csv"):
        lines.setdefault(tuple(row[key] for key in keys), []).append(float(row[value] or "nan"))
    return lines


def until(line, target):
    """The first round, from 1, whose value is at most the target; infinity if there is none."""
    return next((k for k, value in enumerate(line, 1) if value <= target), np.inf)


def test_numbers_of_the_pages_are_those_of_their_data():
    """Those that were worked out from the published data without another run."""
    pages = {p.stem: p.read_text() for p in (ROOT / "docs" / "papers").glob("*.md")}
    labels = {"FedPD-GD, p=0": "FedPD-GD p=0, text", "FedPD-VR": "FedPD-VR, text"}
    labels |= {
        "FedPD-GD, p=0, η=0.5": "FedPD-GD p=0, theory",
        "FedPD-VR, η=0.2": "FedPD-VR, η = 0.2",
    }
    gaps = [curves(f"fedpd-figure{k}", "train/global/gap", "run") for k in (4, 5)]
    for run, label in labels.items():
        rounds = [[until(gap[run,], 10.0**-k) for gap in gaps] for k in range(6, 11)]
        cells = [", ".join(map(str, pair)).replace("inf", "–") for pair in rounds]
        assert f"| {label} | {' | '.join(cells)} |" in pages["fedpd"]

    gaps = curves("results/fedpd-further", "train/global/gap", "run", "non_iid")
    for run in {run for run, _ in gaps}:
        lines = [gaps[run, kind] for kind in ("weak", "strong")]
        rounds = ", ".join(str(until(line, 1e-8)) for line in lines).replace("inf", "–")
        ends = f"{lines[0][-1]:.1e}, {lines[1][-1]:.1e} after {len(lines[0])}"
        assert f"| {run} | {ends} | {rounds} |" in pages["fedpd"]
        assert all((np.diff(line) < 0).all() for line in lines)

    gaps = curves(
        "results/fedpd-floor", "train/global/gap", "heterogeneity", "skip_probability", "step"
    )
    floor = {tuple(map(float, key)): np.median(gap[100:]) for key, gap in gaps.items()}
    by_r = {r: floor[r, 0.5, 0.3] for r in (0, 0.1, 1, 10)}
    by_p = {p: floor[1, p, 0.3] for p in (0, 0.1, 0.25, 0.5, 0.75)}
    slopes = []
    for line in (by_r, by_p):
        assert f"| floor | {' | '.join(f'{f:.1e}' for f in line.values())} |" in pages["fedpd"]
        x, y = (np.log(list(values)[1:]) for values in (line, line.values()))
        slopes.append(np.polyfit(x, y, 1)[0])
    assert f"Slope of log floor on log R: {slopes[0]:.2f}." in pages["fedpd"]
    assert f"the slope {slopes[1]:.2f} of log floor on log p" in pages["fedpd"]
    cells = [
        [f"{max(x for x, f in line.items() if f <= 10.0**-k):g}" for k in (6, 5, 4, 3, 2)]
        for line in (by_p, by_r)
    ]
    assert f"| largest p at R = 1, of the five | {' | '.join(cells[0])} |" in pages["fedpd"]
    assert f"| largest R at p = 0.5, of the four | {' | '.join(cells[1])} |" in pages["fedpd"]
    for key in (("0", "0.5", "0.3"), ("1", "0", "0.3")):
        assert (np.diff(gaps[key]) < 0).all() and gaps[key][-1] < 1e-16

    gaps = curves("results/fedpd-floor-eta", "train/global/gap", "step", "seed")
    logs = {
        eta: [
            np.mean([np.log(np.median(gaps[eta, s][a:b])) for s in "012"])
            for a, b in ((300, 500), (300, 400), (400, 500))
        ]
        for eta in ("0.025", "0.05", "0.1", "0.2", "0.3")
    }
    assert f"the factor is {np.exp(np.ptp(logs.pop('0.025')[1:])):.1f}" in pages["fedpd"]
    assert all(np.ptp(halves[1:]) < np.log(2) for halves in logs.values())
    floors = [whole for whole, *_ in logs.values()]
    row = " | ".join(f"{f:.1e}" for f in np.exp(floors))
    assert f"| floor | {row} |" in pages["fedpd"]
    eta = np.array([*map(float, logs)])
    slope, other = (
        np.polyfit(np.log(x), floors[: len(x)], 1)[0] for x in (eta[:3], eta / (1 + eta))
    )
    assert f"log floor on log η: {slope:.2f}, just outside" in pages["fedpd"]
    assert f"it is {other:.2f} over all four" in pages["fedpd"]

    gaps = curves("results/fedpd-chain", "train/global/gap", "local_steps", "run")
    for steps in ("10", "100"):
        lines = [gaps[key] for key in gaps if key[0] == steps]
        row = " | ".join(str(until(line, 1.59)) for line in lines)
        assert f"| {steps} local steps | {row} |" in pages["fedpd"]
        assert min(min(line[:11]) for line in lines) > 19

    gaps = curves("results/fedslr-theory", "train/global/low_rank_gap", "setting")
    lines = [gaps[f"η_g = {eta}",] for eta in ("0.1", "0.5", "1", "10")]
    for k in (50, 200):
        row = " | ".join(f"{line[k - 1]:.1e}" for line in lines)
        assert f"| gap after {k} rounds | {row} |" in pages["fedslr"]
    row = " | ".join(f"{(line[49] / line[25]) ** (1 / 24):.3f}" for line in lines)
    assert f"| factor of a round, rounds 26 to 50 | {row} |" in pages["fedslr"]

    floors = [np.mean(gaps[f"B = {size}",][100:]) for size in (1, 4, 16)]
    row = " | ".join(f"{floor:.1e}" for floor in floors)
    assert f"| mean gap of the rounds 101 to 200 | {row} |" in pages["fedslr"]
    slope = np.polyfit(np.log([1, 4, 16]), np.log(floors), 1)[0]
    assert f"with the slope {slope:.2f} of log floor on log B" in pages["fedslr"]
    noise = curves("results/fedslr-noise", "train/global/low_rank_gap", "samples", "batch_size")
    found = {key: np.mean(line[40:]) for key, line in noise.items()}
    slopes = [np.log(floors[2] / floors[1]) / np.log(4)]
    for n, label in (("100", "100"), ("1000", "1,000")):
        line = [found[n, size] for size in ("4", "8", "16")]
        assert f"| {label} | {' | '.join(f'{f:.1e}' for f in line)} |" in pages["fedslr"]
        slopes.append(np.log(line[2] / line[0]) / np.log(4))
    assert f"is {slopes[1]:.2f} at\nthis rate and {slopes[0]:.2f} at 0.05" in pages["fedslr"]
    assert f"that is drawn. | {slopes[2]:.2f} | yes |" in pages["fedslr"]
    assert f"| {found['1000', '4'] / found['100', '4']:.1f} times. | just |" in pages["fedslr"]

    keys = ("low_rank_penalty", "sparse_penalty")
    ranks = curves("results/fedslr-planted", "train/global/rank", *keys)
    shares = curves("results/fedslr-planted", "train/personalized/support", *keys)
    penalties, weights = ("0.1", "0.3", "1", "2"), ("0.05", "0.15", "0.4")
    row = " | ".join(f"{ranks[k, '0.05'][-1]:g}" for k in penalties)
    assert f"| rank of w, of 12, with every μ | {row} |" in pages["fedslr"]
    assert all(ranks[k, m][-1] == ranks[k, "0.05"][-1] for k, m in ranks)
    for m in weights:
        row = " | ".join(f"{shares[k, m][-1]:.2f}" for k in penalties)
        assert f"| right share of the support of pᵢ, μ = {m} | {row} |" in pages["fedslr"]
    best = max(shares[key][-1] for key in shares if ranks[key][-1] == 2)
    assert f"where the rank is 2 the share is at most {best:.2f}" in pages["fedslr"]

    errors = curves("results/fedslr-kinds", "train/personalized/total_error", "run", *keys)
    kinds = ("LR+S", "LR+LR", "S+LR", "S+S")
    least = [
        min((k for k in errors if k[0] == kind), key=lambda k: errors[k][-1]) for kind in kinds
    ]
    assert {k[1:] for k in least} == {("0.1", "0.05")}
    row = " | ".join(f"{errors[k][-1]:.2f}" for k in least)
    assert f"| error | {row} |" in pages["fedslr"]
    assert errors["LR+S", "0.1", "0.4"][-1] > errors["S+LR", "0.1", "0.4"][-1]
    assert errors["LR+S", "0.1", "0.4"][-1] > errors["LR+LR", "0.1", "0.4"][-1]

    times = curves("results/fedslr-table9", "dense_ms", "parameters")
    thin = curves("results/fedslr-table9", "factored_ms", "parameters")
    medians = [(np.median(times[size]), np.median(thin[size])) for size in times]
    row = " | ".join(f"{b / a:.2f}" for a, b in medians)
    assert f"| thin / dense | {row} |" in pages["fedslr"]

    noise = curves(
        "results/fedclup-noise", "train/global/optimization_error", "batch_size", "num_clients"
    )
    mean = {tuple(map(int, key)): np.square(line[30:]).mean() for key, line in noise.items()}
    for points in ([(b, (b, 16)) for b in (1, 4, 16)], [(m, (4, m)) for m in (4, 16, 64)]):
        values = [mean[key] for _, key in points]
        assert f"| error | {' | '.join(f'{v:.1e}' for v in values)} |" in pages["fedclup"]
        slope = np.polyfit(np.log([x for x, _ in points]), np.log(values), 1)[0]
        assert f"Slope on log scales: {slope:.2f}." in pages["fedclup"]

    loss = curves("results/fedclup-figure2-synthetic", "train/loss", "run", "local_epochs", "seed")
    for run in ("FedCLUP, high", "FedCLUP, low"):
        lines = {k: [loss[run, k, s] for s in "01234"] for k in ("25", "50", "100", "150")}
        for number in (5, 20):
            means = [np.mean([line[number - 1] for line in own]) for own in lines.values()]
            assert f"round {number} | {' | '.join(f'{m:.4f}' for m in means)} |" in pages["fedclup"]
        goals = [line[-1] for line in lines["25"]]
        cells = [
            ", ".join(str(until(*pair)) for pair in zip(own, goals, strict=True))
            for own in list(lines.values())[1:]
        ]
        assert f"| 20 | {' | '.join(cells)} |".replace("inf", "–") in pages["fedclup"]
        falls = np.subtract(goals, [line[-1] for line in lines["150"]])
        ends = {"FedCLUP, high": ["0.0015", "0.0085"], "FedCLUP, low": ["-0.0002", "0.0006"]}
        assert [f"{fall:.4f}" for fall in (falls.min(), falls.max())] == ends[run]

    keys = ("samples_per_client", "num_clients", "heterogeneity")
    errors = curves(
        "results/fedclup-corollary1", "train/personalized/statistical_error", *keys, "run"
    )
    points: dict[Any, dict[str, float]] = {}
    for (*point, run), seeds in errors.items():
        points.setdefault(tuple(map(float, point)), {})[run] = np.square(seeds).mean()
    for (n, m, r), found in points.items():
        theirs = found.pop("Corollary 1's λ")
        best = min(found, key=lambda run: found[run])
        rate, least = 1 / (m * n) + min(r**2, 1 / n), found[best]
        numbers = f"{least:.3f} | {least / rate:.1f} | {theirs / least:.2f}"
        row = f"| {n:g} | {m:g} | {r:g} | {best} | {numbers} | {n * found['LocalTrain']:.0f} |"
        assert row in pages["fedclup"]

    error = "train/personalized/optimization_error"
    errors = curves("fedclup-figure7", error, "run", "condition", "seed")
    for penalty in (0.02, 0.1, 0.5):  # L = 1, μ = 1/κ
        cells = []
        for kappa in (2, 8, 64):
            factor = 1 - (penalty + 1) / (4 * kappa * (penalty + 1 / kappa))
            lines = [errors[f"FedCLUP λ={penalty}", str(kappa), seed] for seed in "012"]
            assert all((np.divide(e[1:], e[:-1]) ** 2 < factor).all() for e in lines)
            falls = [2 * np.log(e[-1] / e[0]) for e in lines]
            lengths = [len(e) for e in lines]
            mean = np.mean([np.exp(f / (n - 1)) for f, n in zip(falls, lengths, strict=True)])
            bound, rounds = 1 + np.mean(falls) / np.log(factor), np.mean(lengths)
            cells.append(f"{factor:.3f}, {mean:.3f}; {bound:.0f}, {rounds:.1f}")
        assert f"| λ = {penalty} | {' | '.join(cells)} |" in pages["fedclup"]

    keys = ("heterogeneity", "run", "seed")
    for name, label in (("results/fedclup-rounds", "10 steps, "), ("fedclup-figure1", "")):
        totals = curves(name, "train/personalized/total_error", *keys)
        for radius in ("0.1", "0.5", "2"):
            alone = np.zeros((3, 3))
            for seed in range(3):
                lines = [totals[radius, f"FedCLUP λ={k}", str(seed)] for k in (0.02, 0.1, 0.5)]
                low, high = min(map(min, lines)), max(line[0] for line in lines)
                for target in low + (high - low) * np.arange(1000) / 1000:
                    first = np.array([until(line, target) for line in lines])
                    if (first == first.min()).sum() == 1:
                        alone[first.argmin(), seed] += 0.1
            cells = [", ".join(f"{share:.0f}" for share in row) + " %" for row in alone]
            assert f"| {label}R = {radius} | {' | '.join(cells)} |" in pages["fedclup"]
    for radius, run, words in (
        ("0.1", "FedCLUP λ=0.02", "0.494 in round 1 to 0.634"),
        ("0.1", "LocalTrain", "0.509 to 0.920"),
        ("2", "FedCLUP λ=0.02", "5.042 to 4.465"),
    ):
        ends = np.mean([totals[radius, run, seed] for seed in "012"], axis=0)[[0, -1]]
        assert [f"{end:.3f}" for end in ends] == re.findall(r"\d\.\d{3}", words)
        assert words in pages["fedclup"]

    keys = ("run", "setting", "participation", "round")
    accuracy: dict[Any, list[float]] = curves(
        "results/fedagg-linear", "test/global/accuracy", *keys
    )
    for label, run, last in (("FedAvg, 60", "FedAvg", "30"), ("FedAgg, 67", "FedAgg", "10")):
        columns = [(s, p) for s in ("IID", "non-IID") for p in ("20 %", "100 %")]
        means = [np.mean(accuracy[run, f"linear, {s}", p, last]) for s, p in columns]
        row = " | ".join(f"{100 * mean:.2f}" for mean in means)
        assert f"| {label} models | {row} |" in pages["fedagg"]

    columns = ("test/personalized/accuracy", "test/global/accuracy", "collaborators")
    both = [curves("results/fedacs-fashion/runs", column, "run") for column in columns[:2]]
    scores = {run: [100 * np.array(own[run]) for own in both] for run in both[0]}
    for (run,), models in scores.items():
        cells = [f"{x.mean():.2f} ± {x.std(ddof=1):.2f}".replace("nan ± nan", "–") for x in models]
        assert f"| {run} | {' | '.join(cells)} |" in pages["fedacs"], run
    ditto, per = scores["Ditto",], scores["Per-FedAvg",]
    mean = {run: models[0].mean() for (run,), models in scores.items()}
    text = f"APFL is {mean['APFL'] - mean['FedACS']:.2f} points ahead; Ditto and FedAMP are"
    text += (
        f" {mean['FedACS'] - mean['Ditto']:.2f} and {mean['FedACS'] - mean['FedAMP']:.2f} behind."
    )
    assert text in pages["fedacs"]
    assert f"it is {mean['FedACS'] - mean['LocalTrain']:.2f} points ahead" in pages["fedacs"]
    gains = [np.subtract(*models).mean() for models in (ditto, per)]
    assert f"Ditto's by {gains[0]:.2f}, Per-FedAvg's by {gains[1]:.2f} points" in pages["fedacs"]
    lines = [curves("results/fedacs-groups", column, "run", "seed") for column in columns]
    weights = table(ROOT / "docs" / "data" / "results" / "fedacs-groups-weights.csv")
    shares: dict[Any, float] = {}
    for run, seed, number in {(row["run"], row["seed"], row["round"]) for row in weights}:
        own = [
            row for row in weights if (row["run"], row["seed"], row["round"]) == (run, seed, number)
        ]
        inside = sum(float(row["weight"]) for row in own if row["angle"] == row["partner_angle"])
        shares[run, seed, number] = inside / sum(float(row["weight"]) for row in own)
    assert len([key for key in shares if key[0] == "FedACS, p = 0.75"]) == 18
    assert {
        s for key, s in shares.items() if key[0] in ("FedACS, p = 0.75", "FedACS, p = 0.9")
    } == {1}
    plain = [float(row["weight"]) for row in weights if row["run"] == "FedACS, no threshold"]
    assert f"is {100 * (max(plain) / min(plain) - 1):.1f} % above the smallest" in pages["fedacs"]
    for run in {run for run, _ in lines[0]}:
        mine = [[own[run, seed][-1] for seed in "012"] for own in lines]
        scores = 100 * np.array(mine[1] if run == "FedAvg" else mine[0])
        text = f"{scores.mean():.2f} ± {scores.std(ddof=1):.2f}"
        if run == "FedACS, p = 0.75":
            text = f"**{text}**"
        partners = f" {np.mean(mine[2]):.1f}" if run.startswith("FedACS") else ""
        share = ", ".join(f"{shares[run, s, '40']:.2f}" for s in "012" if (run, s, "40") in shares)
        share = share or ("–" if partners else "")
        cells = f"| {run} | {text} |{partners} | {share} |".replace("|  |", "| |")
        assert cells in pages["fedacs"], cells

    errors = curves(
        "results/fedclup-figure6", "train/personalized/total_error", "heterogeneity", "run"
    )
    for radius, best in (("0.1", 2), ("0.5", 0), ("2", 0)):
        lines = [errors[radius, f"FedCLUP λ={k}"] for k in (0.02, 0.25, 0.5)]
        measured = [line for line in zip(*lines, strict=True) if not np.isnan(line).any()]
        assert len(measured) == 20 and {int(np.argmin(row)) for row in measured} == {best}
        cells = [f"{error:.3f}" for error in measured[-1]]
        cells[best] = f"**{cells[best]}**"
        assert f"| R = {radius} | {' | '.join(cells)} |" in pages["fedclup"]

    scores = curves("results/fedagg-dynamics", "test/global/accuracy", "setting", "run")
    for run in {run for _, run in scores}:
        cells = [
            ", ".join(f"{100 * scores[setting, run][k // 2 - 1]:.1f}" for k in (4, 10, 20, 30))
            for setting in ("IID", "non-IID")
        ]
        assert f"| {run} | {' | '.join(cells)} |" in pages["fedagg"]
    pairs = (("FedAgg", "FedAvg", [15, 9]), ("FedAgg", "FedAgg, aggregated", [13, 10]))
    for one, other, ahead in pairs:  # in how many of 15 rounds the one is above the other
        lines = [np.subtract(scores[s, one], scores[s, other]) for s in ("IID", "non-IID")]
        assert [int((line > 0).sum()) for line in lines] == ahead and len(lines[0]) == 15
    keys = ("run", "setting", "participation")
    for run, column in (("FedAvg", "global"), ("FedGH", "personalized")):
        own = curves("results/fedagg-fedgh", f"test/{column}/accuracy", *keys)
        cells = [
            f"{100 * own[run, f'linear, {s}', p][-1]:.2f}"
            for s in ("IID", "non-IID")
            for p in ("20 %", "100 %")
        ]
        assert f"| {run} | {' | '.join(cells)} |" in pages["fedagg"]

    ways = [
        curves("results/fedslr-penalties", f"comm/{k}link_bytes", "change") for k in ("down", "up")
    ]
    shares = {k[0]: np.divide(*(w[k][-1] - w[k][-2] for w in ways)) for k in ways[0]}
    other = {round(s, 2) for k, s in shares.items() if "pure personal" not in k}
    assert sorted(other) == [0.08, 0.15, 0.81, 1.0]
    assert [round(shares[k], 2) for k in ("λ = 5e-3", "η_g = 20", "η_g = 100")] == [
        0.15,
        0.81,
        0.08,
    ]


RESULTS = [f"results/{path.stem}" for path in (ROOT / "configs/results").glob("*.yaml")]


@pytest.mark.parametrize(
    "name",
    [name for name in FIGURES + RESULTS if (ROOT / "docs" / "data" / f"{name}.csv").exists()],
)
def test_data_of_the_pages_are_those_of_the_figures_file(name):
    """The data have every run at every point of the grid, and no other."""
    figure = Reproduction.from_file(name)
    data = table(ROOT / "docs" / "data" / f"{name}.csv")
    assert {"run", *figure.grid, "seed"} <= set(data[0])

    def place(*values):
        return tuple(f"{v:.7g}" if isinstance(v, float) else str(v) for v in values)

    last = {place(r["run"], *(r[k] for k in figure.grid), r["seed"]): r.get("round") for r in data}
    jobs = {place(job.run, *job.axes.values(), job.seed): job for job in figure.jobs()}
    assert last.keys() == jobs.keys()
    if "round" not in data[0]:  # a table of last rounds alone, without curves
        return
    for key, job in jobs.items():
        trainer = job.config["trainer"]
        stops = any(
            "EarlyStopping" in entry["class_path"] for entry in trainer.get("callbacks", [])
        )
        assert float(last[key]) == trainer["max_epochs"] or stops
