"""What an experiment must notice: other data and code, other files' results, ends by force."""

import gc
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from pfl.algorithms import FedAvg
from pfl.cli.main import main
from pfl.experiments import Comparison, jobs
from pfl.experiments.callbacks import open_study, trial_of
from pfl.experiments.grid import Job, nest
from pfl.experiments.jobs import _version_of, code_version, data_version, execute
from pfl.experiments.room import Room
from pfl.experiments.workers import WorkerLost, side_by_side
from pfl.method import FederatedAlgorithm
from tests.commands import ROOT, call
from tests.experiments.test_compare import RUNS, comparison
from tests.forks import Popen
from tests.refusal import refused

# ---- what a run is recognised by ----------------------------------------------------------------


def write_arrays(path, seed):
    draws = np.random.default_rng(seed)
    arrays = {"inputs": draws.normal(size=(60, 4)), "targets": draws.integers(0, 2, 60)}
    np.savez(path, **arrays)


def test_a_run_is_repeated_where_its_data_or_its_trace_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_arrays("mine.npz", 0)
    Path("trace.json").write_text("[[0]]")
    config = nest(
        {
            "model.class_path": "FedAvg",
            "model.init_args.network": {"class_path": "MLP", "init_args": {"in_features": 4}},
            "data": {"class_path": "ArrayDataModule", "init_args": {"file": "mine.npz"}},
            "data.init_args.num_clients": 3,
            "loop.trace": "trace.json",
            "trainer": {"max_epochs": 1, "accelerator": "cpu"},
        }
    )
    config["model"]["init_args"]["network"]["init_args"]["num_classes"] = 2
    job = Job("run", {}, 0, config)
    first = execute(job, tmp_path / "out")
    assert execute(job, tmp_path / "out")["reused"]
    write_arrays("mine.npz", 1)
    second = execute(job, tmp_path / "out")
    assert (second["reused"], second["again"]) == (False, "data")
    Path("trace.json").write_text("[[1]]")
    assert execute(job, tmp_path / "out")["again"] == "data"
    assert first["code"] == second["code"] and first["config"] == second["config"]


def test_two_commands_do_not_make_a_run_at_the_same_time(tmp_path, monkeypatch):
    """The second one had deleted the folder of the first, and read what both had written."""
    job = Comparison.from_file(comparison(tmp_path)).jobs()[0]
    fit = jobs._fit

    def fit_while_another_begins(*words):
        with refused(f"{tmp_path / 'out' / job.folder}: another process makes this run"):
            execute(job, tmp_path / "out")
        return fit(*words)

    monkeypatch.setattr(jobs, "_fit", fit_while_another_begins)
    assert execute(job, tmp_path / "out")["status"] == "finished"
    assert execute(job, tmp_path / "out")["reused"]
    (tmp_path / "out" / job.folder / "outcome.json").unlink()
    monkeypatch.setattr(jobs, "_fit", fit)
    assert not execute(job, tmp_path / "out")["reused"]  # the lock was released


def test_a_run_does_not_keep_the_memory_of_those_before_it(tmp_path):
    """Trainer, data and models refer to each other, so that only the collector frees them."""
    gc.disable()
    try:
        for job in Comparison.from_file(comparison(tmp_path)).jobs()[:3]:
            assert execute(job, tmp_path)["status"] == "finished"
        kept = [one for one in gc.get_objects() if issubclass(type(one), FederatedAlgorithm)]
    finally:
        gc.enable()
    assert len(kept) == 1


class Fails(FedAvg):
    """A method with a mistake that shows in a round."""

    def client_update(self, clients, w):
        raise ValueError("planted")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
def test_an_error_of_a_method_says_in_which_run_and_round(tmp_path):
    runs = {"mine": {"model": {"class_path": f"{__name__}.Fails"}}}
    job = Comparison.from_file(comparison(tmp_path, runs=runs)).jobs()[1]
    with pytest.raises(ValueError, match="planted") as caught:
        execute(job, tmp_path / "out")
    when, run = caught.value.__notes__
    assert when.startswith("(client ") and when.endswith(", in round 1)")
    assert run == f"({tmp_path / 'out/mine/seed1.yaml'})"


def test_folders_of_samples_count_and_downloads_do_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("home/images", "linked", "downloads/data/femnist/data/train"):
        Path(name).mkdir(parents=True)
    Path("home/images/more").symlink_to(Path("linked").absolute())
    config = {"data": {"init_args": {"folder": "~/images", "root": "downloads"}}}
    config["trainer"] = {"logger": {"save_dir": "logs"}}
    before = data_version(config)
    for name in ("downloads/set.gz", "logs"):
        Path(name).touch()
    assert data_version(config) == before
    seen = {before}
    files = ("home/images/a.png", "linked/b.png", "downloads/data/femnist/data/train/c.json")
    for name in files:
        Path(name).touch()
        seen.add(data_version(config))
    assert len(seen) == 1 + len(files)


def test_modules_that_the_users_module_imports_are_its_code(tmp_path, monkeypatch):
    for folder in ("here", "elsewhere"):
        (tmp_path / folder).mkdir()
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    monkeypatch.chdir(tmp_path / "here")
    Path("helpers_of_mine").mkdir()
    sources = {
        "mine_a.py": "from helpers_of_mine import deep",
        "helpers_of_mine/__init__.py": "",
        "helpers_of_mine/deep.py": "import mine_b, json, sys, torch",
        "../elsewhere/mine_b.py": "",
    }
    for name, text in sources.items():
        Path(name).write_text(text)
    seen = set()
    for name in [None, *sources, "unused_by_mine.py"]:
        if name is not None:
            Path(name).write_text(sources.get(name, "") + "\nchanged = True")
        _version_of.cache_clear()
        seen.add(code_version('"mine_a.Net"'))
    _version_of.cache_clear()
    assert len(seen) == 1 + len(sources)  # the last file changes nothing


@pytest.mark.usefixtures("quick_figures")
def test_a_truncated_outcome_file_counts_as_missing(tmp_path, capsys):
    path, out = comparison(tmp_path, seeds=1), tmp_path / "out"
    assert main(["compare", str(path), "--out", str(out), "--jobs", "1"]) == 0
    record = out / "FedAvg" / "seed0" / "outcome.json"
    record.write_text(record.read_text()[:20])
    capsys.readouterr()
    assert main(["compare", str(path), "--out", str(out), "--jobs", "1"]) == 0
    assert capsys.readouterr().out.count("as before") == 1
    for name, content in (("summary.json", "{"), ("metrics.csv", "round,a\n1,x\n")):
        whole = (out / "FedAvg" / "seed0" / name).read_bytes()
        (out / "FedAvg" / "seed0" / name).write_text(content)
        for what in ([str(path)], [str(out / "FedAvg"), str(out / "LocalTrain")]):
            jobs = ["--jobs", "1", "--out", str(out)] if len(what) == 1 else []
            assert main(["compare", *what, *jobs]) == 2
            error = capsys.readouterr().err
            assert error.count("\n") == 1 and "FedAvg/seed0" in error and "damaged" in error
        (out / "FedAvg" / "seed0" / name).write_bytes(whole)


# ---- folders ------------------------------------------------------------------------------------


def test_comparisons_of_the_same_name_do_not_share_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = []
    for name in ("one", "two"):
        Path(name).mkdir()
        places.append(Comparison.from_file(comparison(tmp_path / name)))
    folder = places[0].folder("compare", None)
    assert folder == places[0].folder("compare", None) == Path("runs/compare/small")
    with refused("compare: runs/compare/small holds the results of one/small.yaml", "--out"):
        places[1].folder("compare", None)
    assert places[1].folder("compare", Path("other")) == Path("other")


def test_tables_and_figures_are_written_as_a_whole(tmp_path, capsys):
    path, out = comparison(tmp_path, seeds=1, runs={"FedAvg": RUNS["FedAvg"]}), tmp_path / "out"
    for name in ("comparison.md", "runs.csv", "curves.pdf"):
        part = out / f"{name}.{platform.node()}.{os.getpid()}.part"
        part.mkdir(parents=True)  # in the way of the new file
        assert main(["compare", str(path), "--out", str(out), "--jobs", "1"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and f"{name}: the file cannot be written" in error
        assert not (out / name).exists()
        part.rmdir()


def read_run_of(out):
    """What is recorded of FedAvg's run."""
    return json.loads((out / "FedAvg" / "seed0" / "outcome.json").read_text())


@pytest.mark.usefixtures("quick_figures")
def test_kept_checkpoints_can_be_exported(tmp_path):
    """The checkpoint of the best round on validation data is of the round that the table shows."""
    validated = {"class_path": "SplitOwn", "init_args": {"test": 0.3, "validation": 0.3}}
    path, out = comparison(tmp_path, seeds=1, runs={"FedAvg": RUNS["FedAvg"]}), tmp_path / "out"
    content = yaml.safe_load(path.read_text())
    content["common"]["data"]["init_args"]["protocol"] = validated
    content["common"]["trainer"]["max_epochs"] = 6
    content["common"]["model"]["init_args"]["lr"] = 1.0
    path.write_text(yaml.safe_dump(content))
    words = ["compare", path, "--out", out, "--jobs", "1"]
    assert call(*words)[0] == 0
    status, text, _ = call(*words, "--keep")
    assert status == 0 and "as before" not in text  # its checkpoint was not kept
    assert "as before" in call(*words, "--keep")[1]
    # Another score, or a budget, has another best round.
    assert "as before" not in call(*words, "--keep", "--metric", "loss")[1]
    assert "as before" not in call(*words, "--keep", "--budget", "rounds=1")[1]
    assert "as before" in call(*words, "--keep", "--budget", "rounds=1")[1]
    assert read_run_of(out)["kept"] == {"metric": None, "budget": ["rounds", 1.0]}
    assert "as before" not in call(*words, "--keep")[1]
    (row,) = Comparison.from_file(path).run(out, keep=True).runs().to_dict("records")
    checkpoint = out / "FedAvg" / "seed0" / "checkpoints" / "best.ckpt"
    exported = tmp_path / "model"
    assert call("export", "--ckpt_path", checkpoint, "--global", "--out", exported)[0] == 0
    card = json.loads((exported / "global" / "card.json").read_text())
    assert card["rounds"] == row["round"]


@pytest.mark.usefixtures("quick_figures")
def test_reports_have_the_names_of_the_file(tmp_path):
    fast = {"model": {"class_path": "FedAvg", "init_args": {"lr": 0.5}}}
    runs = {"slow": RUNS["FedAvg"], "fast": fast}
    path, out = comparison(tmp_path, seeds=1, runs=runs), tmp_path / "out"
    assert call("compare", path, "--out", out, "--jobs", "1")[0] == 0
    assert call("report", out)[0] == 0
    page = (out / "report.html").read_text()
    assert ">slow<" in page and ">fast<" in page


# ---- ends by force -------------------------------------------------------------------------------

COMMAND = """
import sys
from pfl.cli import main
from pfl.cli import commands
from pfl.experiments.room import Room
from pfl.experiments.workers import WorkerLost, side_by_side
from tests.experiments.test_faults import sleep

def report(_):
    list(side_by_side(sleep, {tasks}, Room(2, 2)))


commands.report = report
if __name__ == "__main__":
    sys.exit(main(["report", "x"]))
"""


def sleep(path: str) -> None:
    """Writes the id of this process, and takes ten minutes."""
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)


def wait_for(done, seconds):
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.05)
    assert done()


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("number", "of_parent", "status", "line"),
    [
        (signal.SIGTERM, True, 143, "error: ended by SIGTERM"),
        (signal.SIGINT, True, 130, "error: ended by SIGINT"),
        (signal.SIGKILL, True, -9, ""),
        (signal.SIGKILL, False, 1, "its process was killed by SIGKILL"),
    ],
)
def test_no_process_outlives_a_command(tmp_path, number, of_parent, status, line):
    tasks = [tmp_path / "a", tmp_path / "b"]
    script = tmp_path / "work.py"
    script.write_text(COMMAND.format(tasks=[str(task) for task in tasks]))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = Popen([sys.executable, script], env=environment, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: all(task.exists() and task.read_text() for task in tasks), 120)
        workers = [int(task.read_text()) for task in tasks]
        os.kill(parent.pid if of_parent else workers[0], number)
        _, error = parent.communicate(timeout=20)
    finally:
        parent.kill()
    assert parent.returncode == status and error.count("\n") == bool(line) and line in error, error
    wait_for(lambda: not any(map(is_running, workers)), 10)


def fail_first(task: str) -> None:
    """Refuses the first task, and records each of the others."""
    if task.endswith("0"):
        raise ValueError(task)
    Path(task).touch()
    time.sleep(60)  # longer than the news of the refusal takes, which ends it


@pytest.mark.slow
@pytest.mark.processes
def test_tasks_do_not_begin_after_one_has_failed(tmp_path):
    """The other process may have made a task, and may have begun another one."""
    tasks = [str(tmp_path / str(number)) for number in range(20)]
    with refused("fail_first failed: ValueError: "):
        list(side_by_side(fail_first, tasks, Room(20, 2)))
    assert len(list(tmp_path.iterdir())) <= 2


def end_after(task: str) -> str:
    """Ends the process a moment after its first result was sent."""
    threading.Timer(0.2, os._exit, [3]).start()
    return task


@pytest.mark.slow
@pytest.mark.processes
def test_a_process_that_dies_between_two_tasks_is_one_line():
    work = side_by_side(end_after, ["a", "b", "c", "d"], Room(4, 2))
    next(work)
    time.sleep(1)
    with pytest.raises(WorkerLost, match=r"^[abcd]: its process ended with 3; the same command"):
        list(work)


def test_a_search_continues_after_a_kill_within_a_write(tmp_path, monkeypatch):
    """The lock of Optuna's own is a link to a relative path; half a line ends the journal."""
    monkeypatch.chdir(tmp_path)
    study, _ = open_study("search/optuna.journal", "s", None)
    study.tell(study.ask(), 1.0)
    os.symlink("search/optuna.journal", "search/optuna.journal.lock")
    with open("search/optuna.journal", "a") as journal:
        journal.write('{"op_code": 4, "wor')
    begun = time.monotonic()
    study, storage = open_study("search/optuna.journal", "s", None)
    study.tell(study.ask(), 2.0)
    assert trial_of(study, storage, 1).number == 1
    study, _ = open_study("search/optuna.journal", "s", None)
    assert [trial.value for trial in study.trials] == [1.0, 2.0]
    assert time.monotonic() - begun < 10


def test_tuning_without_optuna_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "optuna", None)
    status, _, error = call("tune", "tune/digits", "--out", tmp_path)
    assert (status, error.count("\n")) == (2, 1)
    assert "tune; the package optuna" in error and "pip install" in error
