"""`pfl compare`: what runs, what is run again, and what comes out."""

import csv
import json
import shutil
from pathlib import Path

import lightning.pytorch as pl
import pytest
import yaml

from pfl import files
from pfl.cli.commands import compare as compare_command
from pfl.cli.main import main, parser
from pfl.distributed.launch import Ended
from pfl.errors import ConfigError
from pfl.experiments import comparison_of, jobs
from pfl.experiments.jobs import with_own_logs
from pfl.report.comparison_tables import check_columns, score_table
from pfl.scores.runs import find_runs
from tests.cli.configurations import SMALL
from tests.refusal import refused

pytestmark = pytest.mark.usefixtures("quick_figures")  # but not in `finished`
RUNS = {
    "FedAvg": {"model": {"class_path": "FedAvg"}},
    "LocalTrain": {"model": {"class_path": "LocalTrain"}},
}


class FailsOnce(pl.Callback):
    """Ends a run in a round, once: as if the process had been killed."""

    def __init__(self, flag, rounds, within=""):
        self.flag, self.rounds, self.within = Path(flag), rounds, within

    def on_train_epoch_start(self, trainer, pl_module):
        here = self.within in str(trainer.run_dir) and pl_module.rounds == self.rounds
        if here and not self.flag.exists():
            self.flag.touch()
            raise RuntimeError("killed")


def comparison(tmp_path, **changes):
    """The path of a comparison of two methods and two seeds, two rounds each."""
    common = {key: value for key, value in SMALL.items() if key != "seed_everything"}
    common |= {"trainer": {"max_epochs": 2, "accelerator": "cpu"}}
    common |= {"model": {"init_args": SMALL["model"]["init_args"]}}  # each run names its class
    content = {"seeds": 2, "common": common, "runs": RUNS, **changes}
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def command(words):
    compare_command(parser().parse_args(["compare", *words]))


def compare(path, out, *words):
    command([str(path), "--out", str(out), "--jobs", "1", *words])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The output folder of a comparison."""
    folder = tmp_path_factory.mktemp("comparison")
    compare(comparison(folder), folder / "out")
    return folder / "out"


def copy(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "out")


def test_each_run_has_files_of_loggers_of_its_own(tmp_path):
    """Runs that begin at the same moment, in two processes, had taken one version of a folder."""
    common = yaml.safe_load(comparison(tmp_path).read_text())["common"]
    kinds = {"csv": "CSVLogger", "board": "lightning.pytorch.loggers.TensorBoardLogger"}
    loggers = [
        {"class_path": kind, "init_args": {"save_dir": str(tmp_path / "one"), "name": name}}
        for name, kind in kinds.items()
    ]
    common["trainer"]["logger"] = loggers
    out = tmp_path / "out"
    compare(comparison(tmp_path, common=common), out)
    for run in ("FedAvg/seed0", "FedAvg/seed1", "LocalTrain/seed0", "LocalTrain/seed1"):
        method, seed = run.split("/")
        folder = out / method / "logs" / seed
        logged = files.read_records(folder / "csv" / "version_0" / "metrics.csv")
        own = files.read_records(out / run / "metrics.csv")
        assert [row["train/loss"] for row in logged] == [row["train/loss"] for row in own]
        assert len([*folder.glob("board/version_0/events.*")]) == 1
    assert not (tmp_path / "one").exists()


def test_a_single_logger_and_none_are_kept():
    """The name that the user has given to runs of W&B stays."""
    folder = Path("out", "FedAvg", "seed0")
    for logger in (True, None):
        config = {"trainer": {"logger": logger}}
        assert with_own_logs(config, folder) == config
    for given, expected in (({}, "out/FedAvg/seed0"), ({"name": "mine"}, "mine")):
        wandb = {"class_path": "a.WandbLogger", "init_args": {"project": "p", **given}}
        (found,) = with_own_logs({"trainer": {"logger": wandb}}, folder)["trainer"]["logger"]
        assert found["init_args"] == {"project": "p", "name": expected}
    (found,) = with_own_logs({"trainer": {"logger": "WandbLogger"}}, folder)["trainer"]["logger"]
    assert found == {"class_path": "WandbLogger", "init_args": {"name": "out/FedAvg/seed0"}}


def test_tables_and_figures_are_written(finished):
    names = {path.name for path in finished.iterdir()}
    assert {"comparison.md", "comparison.tex", "comparison.csv", "curves.png", "gains.pdf"} <= names
    text = (finished / "comparison.md").read_text()
    assert "| FedAvg |" in text and "difference to FedAvg" in text and "2 seeds" in text
    for name, methods in {
        "comparison.csv": ["FedAvg", "LocalTrain"],
        "runs.csv": ["FedAvg", "FedAvg", "LocalTrain", "LocalTrain"],
    }.items():
        with (finished / name).open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["method"] for row in rows] == methods
        if name == "comparison.csv":
            assert "± is the standard deviation over 2 seeds." in rows[0]["notes"]
    assert text.startswith("# small\n") and text.count("small") == 1
    tex = (finished / "comparison.tex").read_text()
    assert r"$\pm$ is the standard deviation" in tex
    floats = tex.split(r"\end{table}")
    assert [part.count(r"\begin{table}") for part in floats] == [1, 1, 0] and not floats[2].strip()
    assert [part.count(r"\caption") for part in floats] == [1, 1, 0]
    assert [part.count(r"\par\footnotesize The score is") for part in floats] == [1, 0, 0]
    heads = next(line for line in tex.splitlines() if line.startswith("method"))
    assert "gradients" in heads and "seconds" not in heads and "parameters" not in heads
    assert not (finished / "communication.png").exists()  # no bandwidth


def test_methods_share_partitions_and_cohorts(finished):
    """Paired means: the same seed gives every method the same clients and the same training."""
    for seed in (0, 1):
        runs = [finished / name / f"seed{seed}" for name in RUNS]
        hashes = [json.loads((r / "summary.json").read_text())["partition_hash"] for r in runs]
        assert hashes[0] == hashes[1]
        tables = [(r / "metrics.csv").read_text().splitlines() for r in runs]
        samples = [[row["train/samples"] for row in csv.DictReader(table)] for table in tables]
        assert samples[0] == samples[1]


def test_finished_runs_are_not_repeated(finished, tmp_path, capsys):
    compare(comparison(tmp_path), copy(finished, tmp_path))
    assert capsys.readouterr().out.count("as before") == 4


def test_other_code_runs_again_with_a_remark(finished, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(jobs, "code_version", lambda config="": "other")
    compare(comparison(tmp_path, seeds=1), copy(finished, tmp_path))
    told = capsys.readouterr().out
    assert told.count("(again, since the code changed)") == 2
    place = tmp_path / "out" / ".replaced"
    assert "runs made again, since the code changed: 2; what they had left" in told
    assert {path.parent.name for path in find_runs([place], "report")} == {*RUNS}


class Interrupts(pl.Callback):
    """Ctrl-C in the second round."""

    def on_train_epoch_start(self, trainer, pl_module):
        if pl_module.rounds == 1:
            raise KeyboardInterrupt


def test_a_comparison_that_is_ended_says_how_it_goes_on(tmp_path, capsys):
    """Not by --ckpt_path, which `pfl compare` does not have."""
    callbacks = [f"{__name__}.Interrupts"]
    trainer = {"max_epochs": 2, "accelerator": "cpu", "callbacks": callbacks}
    common = {key: value for key, value in SMALL.items() if key != "seed_everything"}
    common |= {"trainer": trainer, "model": {"init_args": SMALL["model"]["init_args"]}}
    with pytest.raises(Ended):
        compare(comparison(tmp_path, common=common), tmp_path / "out")
    said = "error: ended by SIGINT in round 2 of 2; the same command, given again, goes on from the"
    assert capsys.readouterr().err.splitlines()[-1].startswith(said)


def test_runs_of_another_configuration_keep_what_those_before_have_left(finished, tmp_path, capsys):
    """Each of two changes moves the runs before it: their tables are found again, as they were."""
    out = copy(finished, tmp_path)
    tables = []
    for lr in (0.2, 0.4):
        tables.append((out / "FedAvg/seed0/metrics.csv").read_bytes())
        compare(comparison(tmp_path, seeds=1), out, "--change", f"model.init_args.lr={lr}")
        told = capsys.readouterr().out
        assert "runs made again, since the configuration changed: 2" in told
    kept = [out / ".replaced/FedAvg" / name / "metrics.csv" for name in ("seed0", "seed0-2")]
    assert [path.read_bytes() for path in kept] == tables
    assert (out / "FedAvg/seed0/metrics.csv").read_bytes() not in tables
    assert len(find_runs([out], "report")) == 4  # without those that were replaced


@pytest.mark.parametrize("wrong", [{"lrr": 0.1}, {"lr": -1.0}])
def test_no_run_begins_before_a_mistake_in_the_last_one_is_found(tmp_path, wrong):
    """A key that the parser does not know, and a value that only the method refuses."""
    last = {"model": {"class_path": "LocalTrain", "init_args": wrong}}
    path = comparison(tmp_path, runs={**RUNS, "last": last})
    with pytest.raises(ConfigError, match=rf"^last, seed=1: .*{next(iter(wrong))}"):
        compare(path, tmp_path / "out")
    assert not (tmp_path / "out" / "FedAvg").exists()


def test_no_run_begins_before_a_cohort_of_too_many_clients_is_found(tmp_path):
    """The first point of the grid is right; the second has more clients a round than there are."""
    clients = SMALL["data"]["init_args"]["num_clients"]
    path = comparison(tmp_path, grid={"loop.clients_per_round": [1, clients + 1]})
    words = f"clients_per_round: {clients + 1}; it must be from 1 to {clients} (data.num_clients)"
    with refused(f"FedAvg, clients_per_round={clients + 1}, seed=1: loop.{words}"):
        compare(path, tmp_path / "out")
    assert not (tmp_path / "out" / "FedAvg").exists()


def test_no_run_begins_without_the_metric_that_counts(tmp_path):
    path = comparison(tmp_path, metric="f1_score")
    with pytest.raises(ConfigError, match=r"^FedAvg, seed=1: metric: 'f1_score'; .*accuracy, loss"):
        compare(path, tmp_path / "out")
    assert not (tmp_path / "out" / "FedAvg").exists()


@pytest.mark.parametrize("word", ["percnt", "f1_score", "accuracy", "finetuned/5", "tuning trials"])
def test_no_run_begins_with_a_column_that_no_run_can_have(word, tmp_path):
    """A slip, a metric and a model that are not asked for, the score that counts, no tuning."""
    with refused(f"compare: --latex: {word}; it must be one of percent, score, worst, model"):
        compare(comparison(tmp_path), tmp_path / "out", "--latex", f"percent,{word}")
    assert not (tmp_path / "out" / "FedAvg").exists()


def test_every_column_of_a_table_is_known_before_the_runs(tmp_path):
    """The columns of four runs, with a metric and fine-tuned models, by what they were made of."""
    metric = {"class_path": "MulticlassF1Score", "init_args": {"num_classes": 10}}
    loop = {"metrics": [metric], "finetune": [2], "unseen": 0.5, "finetune_lr": 0.1}
    common = yaml.safe_load(comparison(tmp_path).read_text())["common"]
    file = comparison_of(comparison(tmp_path, common={**common, "loop": loop}))
    results = file.run(tmp_path / "out", paper=["f1_score", "finetuned/2", "unseen/0"])
    heads = score_table(results.points[0]).heads[1:]
    assert {"f1_score", "finetuned/2", "unseen/0", "unseen/2"} < set(heads)
    check_columns(heads, jobs.check_jobs(file.jobs()), None, tuned=False)


def test_a_metric_that_the_runs_do_not_have_is_refused(finished, tmp_path):
    with pytest.raises(ConfigError, match="metric: auroc; the runs have accuracy, loss"):
        compare(comparison(tmp_path), copy(finished, tmp_path), "--metric", "auroc")


def test_a_killed_run_continues_where_it_was(tmp_path, monkeypatch):
    """Two rounds of four are over when the run ends; the rest gives the result of one run."""
    fits = []
    fit = jobs._fit
    monkeypatch.setattr(jobs, "_fit", lambda *args: fits.append(args[1:]) or fit(*args))

    def run(flag):
        arguments = {"rounds": 2, "flag": str(tmp_path / "flag")}
        callbacks = [{"class_path": f"{__name__}.FailsOnce", "init_args": arguments}]
        callbacks += [{"class_path": "RoundCheckpoint", "init_args": {"every_seconds": 0.0}}]
        trainer = {"max_epochs": 4, "accelerator": "cpu", "callbacks": callbacks}
        path = comparison(tmp_path, seeds=1, runs={"FedAvg": RUNS["FedAvg"]})
        content = yaml.safe_load(path.read_text())
        content["common"]["trainer"] = trainer
        path.write_text(yaml.safe_dump(content))
        compare(path, tmp_path / flag)
        return (tmp_path / flag / "FedAvg" / "seed0" / "metrics.csv").read_bytes()

    with pytest.raises(RuntimeError, match="killed"):
        run("out")
    actual = run("out")
    assert [bool(args and args[0]) for args in fits] == [False, True]  # from its checkpoint
    assert actual == run("whole")
    assert not (tmp_path / "out" / "FedAvg" / "seed0" / "checkpoints").exists()


def test_shares_of_the_grid_make_a_whole(tmp_path, capsys):
    path, out = comparison(tmp_path, seeds=1), tmp_path / "out"
    compare(path, out, "--share", "1/2")
    assert "1 runs of other machines are missing" in capsys.readouterr().out
    assert not (out / "comparison.md").exists()
    compare(path, out, "--share", "2/2")
    assert (out / "comparison.md").exists()


def test_one_row_of_a_comparison_keeps_the_tables_of_all_rows(finished, tmp_path, capsys):
    out = copy(finished, tmp_path)
    whole = (out / "comparison.csv").read_bytes()
    compare(comparison(tmp_path), out, "--only", "LocalTrain", "--seed", "1")
    with (out / "runs.csv").open() as file:
        runs = list(csv.DictReader(file))
    with (out / "part" / "runs.csv").open() as file:
        part = list(csv.DictReader(file))
    (row,) = [run for run in runs if (run["method"], run["seed"]) == ("LocalTrain", "1")]
    names = part[0].keys() - {"folder"}  # a copy; and without columns of FedAvg alone
    assert [{name: one[name] for name in names} for one in part] == [{n: row[n] for n in names}]
    assert (out / "comparison.csv").read_bytes() == whole


def test_a_share_does_not_take_runs_of_another_configuration(finished, tmp_path, capsys):
    """The other half of the runs have two rounds, this one has three."""
    out = copy(finished, tmp_path)
    words = ["--change", "trainer.max_epochs=3", "--share", "1/2"]
    compare(comparison(tmp_path), out, *words)
    assert "2 runs of other machines are missing, or have another" in capsys.readouterr().out
    compare(comparison(tmp_path), out, *words[:2], "--share", "2/2")
    assert "difference to FedAvg" in capsys.readouterr().out


def test_a_change_of_the_users_code_is_seen(tmp_path, monkeypatch):
    """In a package, in a class that is given as a loss or a callback, in a module below.

    The packages of a virtual environment inside the user's package do not count as user's code.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "ours" / "below").mkdir(parents=True)
    files = [tmp_path / "ours" / name for name in ("__init__.py", "losses.py", "below/deep.py")]
    files.append(tmp_path / "stopper.py")
    for path in files:
        path.write_text("")
    config = json.dumps(
        {"loss": "ours.losses.Loss", "callbacks": ["stopper.Stop"], "data": "a.npz"}
    )
    seen = []
    for path in [None, *files]:
        if path is not None:
            path.write_text("changed = True")
        jobs._version_of.cache_clear()
        seen.append(jobs.code_version(config))
    assert len(set(seen)) == len(seen)
    installed = tmp_path / "ours" / ".venv" / "lib" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "other.py").write_text("import pip")
    jobs._version_of.cache_clear()
    assert jobs.code_version(config) == seen[-1]
    jobs._version_of.cache_clear()


@pytest.mark.slow
def test_side_by_side_gives_the_same(finished, tmp_path):
    command([str(comparison(tmp_path)), "--out", str(tmp_path / "two"), "--jobs", "2"])
    for path in finished.glob("*/*/metrics.csv"):
        twin = tmp_path / "two" / path.relative_to(finished)
        assert twin.read_bytes() == path.read_bytes()


def test_folders_of_finished_runs(finished, tmp_path, capsys):
    folders = [str(finished / name) for name in RUNS]  # which hold the folders of the seeds
    words = ["--baseline", "LocalTrain", "--bandwidth", "1e8"]
    command([*folders, "--out", str(tmp_path / "out"), *words])
    assert (tmp_path / "out" / "communication.pdf").exists()
    out = capsys.readouterr().out
    assert "difference to LocalTrain" in out and "2 seeds" in out
    assert (tmp_path / "out" / "runs.csv").read_text() == (finished / "runs.csv").read_text()


def test_the_columns_of_a_paper_are_written(finished, tmp_path):
    folder = copy(finished, tmp_path)
    with refused("compare: --latex: best", "percent, score, worst", "gradients"):
        command([str(folder), "--out", str(tmp_path / "tables"), "--latex", "best"])
    assert not (tmp_path / "tables").exists()
    command([str(folder), "--out", str(tmp_path / "tables"), "--latex", "worst, gradients"])
    lines = (tmp_path / "tables" / "paper.tex").read_text().splitlines()
    assert r"method & worst 10\% & gradients \\" in lines
    assert [line.split(" & ")[0] for line in lines if " & " in line][1:] == ["FedAvg", "LocalTrain"]
    drawn = sorted((tmp_path / "tables").glob("paper-*.pdf"))
    assert len(drawn) == len(sorted((tmp_path / "tables").glob("*.png")))


def test_the_folder_that_does_not_exist_is_named(finished, tmp_path):
    for words in ([finished, tmp_path / "absent"], [tmp_path / "absent", finished]):
        with refused(f"compare: {tmp_path / 'absent'}: there is no such folder"):
            command([str(word) for word in words])


def test_diverged_runs_and_files_of_loggers_are_recognised_in_folders(finished, tmp_path, capsys):
    out = copy(finished, tmp_path)
    lost = out / "LocalTrain" / "seed1" / "outcome.json"
    lost.write_text(lost.read_text().replace('"finished"', '"diverged"'))
    logged = out / "FedAvg" / "seed0" / "csv" / "version_0"
    logged.mkdir(parents=True)
    (logged / "metrics.csv").write_text("epoch,round,step\n0,1,1\n")
    command([str(out / name) for name in RUNS] + ["--out", str(tmp_path / "table")])
    assert "Diverged, and left out: LocalTrain, seed 1." in capsys.readouterr().out


def test_a_grid_gives_a_table_for_each_point(tmp_path, capsys):
    path = comparison(
        tmp_path, seeds=1, grid={"data.init_args.partition.init_args.alpha": [0.1, 9]}
    )
    compare(path, tmp_path / "out")
    text = (tmp_path / "out" / "comparison.md").read_text()
    assert "## alpha 0.1" in text and "## alpha 9" in text
    assert "| method | model | alpha 0.1 | alpha 9 | mean rank |" in text
    assert (tmp_path / "out" / "curves-2.png").exists()


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"baseline": "FedPrix"}, ["baseline", "FedPrix", "FedAvg"]),
        ({"budget": {"hours": 3}}, ["budget", "hours", "bytes"]),
        ({"budget": {"bytes": -1}}, ["budget", "-1"]),
        ({"runs": {}}, ["runs"]),
        ({"panels": []}, ["panels", "baseline"]),
        ({"common": "nothing.yaml"}, ["common", "nothing.yaml", "no such file"]),
        ({"bandwidth": "fast"}, ["bandwidth", "fast", "float"]),
        ({"bandwidth": 0}, ["bandwidth", "0", "1e8"]),
        ({"tuning": {"FedPrix": {"trials": 2}}}, ["tuning", "FedPrix", "FedAvg"]),
        ({"tuning": {"FedAvg": {"hours": 2}}}, ["tuning", "hours", "trials"]),
        ({"tuning": {"FedAvg": 20}}, ["tuning", "20"]),
        ({"metric": "val/global/loss"}, ["metric", "val/global/loss", "f1_score"]),
        ({"seeds": 0}, ["seeds", "0", "at least 1"]),
        ({"seeds": [1, 1]}, ["seeds", "[1, 1]", "different"]),
        ({"seeds": "many"}, ["seeds", "many"]),
        ({"seeds": True}, ["seeds", "True"]),
        ({"grid": {"data.a.alpha": [1], "model.b.alpha": [2]}}, ["grid", "'alpha'"]),
        ({"grid": {"alpha": []}}, ["grid.alpha", "list of values"]),
        ({"grid": {"alpha": [1, 1]}}, ["grid.alpha: [1, 1]", "different"]),
        ({"runs": {"lr < 1": None, "lr > 1": None}}, ["runs", "'lr-1'"]),
        ({"runs": {"FedAvg": None, "ü" * 128: None}}, ["runs or grid: 'ü", "at most 255 bytes"]),
    ],
)
def test_a_mistake_in_the_file_gets_one_line(tmp_path, capsys, changes, words):
    status = main(["compare", str(comparison(tmp_path, **changes)), "--out", str(tmp_path / "o")])
    error = capsys.readouterr().err
    assert status == 2 and error.count("\n") == 1
    assert not [word for word in words if word not in error], error


@pytest.mark.parametrize(
    "words, expected",
    [
        (["nothing.yaml"], ["nothing.yaml", "folders"]),
        (["FILE", "--share", "3/2"], ["--share", "3/2"]),
        (["FILE", "--budget", "bytes"], ["--budget", "bytes"]),
        (["FILE", "--jobs", "two"], ["--jobs", "two"]),
        (["FILE", "--jobs", "0"], ["--jobs", "at least 1"]),
        (["FILE", "--budget", "steps=2"], ["--budget", "steps", "rounds, bytes, gradients"]),
        (["FILE", "--budget", "virtual_seconds=2"], ["budget: 'virtual_seconds'", "loop.clock"]),
        (["FILE", "--baseline", "FedPrix"], ["--baseline", "FedPrix", "FedAvg"]),
        (["FILE", "--metric", "val/global/loss"], ["--metric", "val/global/loss"]),
        (["FOLDER", "--share", "1/2"], ["--share", "folders"]),
        (["FOLDER", "--seed", "0"], ["--seed", "folders"]),
        (["FILE", "--only", "FedPrix"], ["--only: FedPrix", "there are FedAvg; LocalTrain"]),
        (["FILE", "--seed", "2"], ["--seed: 2", "one of 0, 1"]),
        (["FILE", "--latex", "percent"], ["--latex", "percent", "columns"]),
        (["FILE", "--bandwidth", "0"], ["--bandwidth", "0", "positive number"]),
        (["FOLDER"], ["metrics.csv"]),
    ],
)
def test_a_mistake_on_the_command_line_gets_one_line(tmp_path, capsys, words, expected):
    replaced = {"FILE": str(comparison(tmp_path)), "FOLDER": str(tmp_path)}
    words = [replaced.get(word, word) for word in words]
    assert main(["compare", *words, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert not [word for word in expected if word not in error], error


def test_runs_with_other_partitions_are_refused(finished, tmp_path, capsys):
    out = copy(finished, tmp_path)
    path = out / "FedAvg" / "seed0" / "summary.json"
    path.write_text(path.read_text().replace('"partition_hash": "', '"partition_hash": "x'))
    folders = [str(path) for path in sorted(out.glob("*/seed?"))]
    assert main(["compare", *folders, "--out", str(tmp_path / "new")]) == 2
    assert "other partitions" in capsys.readouterr().err


def test_common_may_be_the_file_of_a_run_whose_method_is_left_out(tmp_path):
    (tmp_path / "small-run.yaml").write_text(yaml.safe_dump(SMALL))
    written_out, by_name = (
        comparison_of(comparison(tmp_path, **change)).jobs()
        for change in ({}, {"common": "small-run.yaml"})
    )
    for one, other in zip(written_out, by_name, strict=True):
        assert (one.run, one.seed) == (other.run, other.seed)
        assert one.config["model"] == other.config["model"] and other.config["model"]["class_path"]


def test_the_shipped_comparison_can_be_read():
    from pfl.configuration import files

    file = comparison_of(files.find("compare/digits"))
    assert len(file.jobs()) == 12 and file.baseline == "FedAvg"
