"""Runs of a grid: one after another or side by side, each of them once."""

from __future__ import annotations

import csv
import functools
import hashlib
import importlib.util
import io
import json
import math
import os
import platform
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import TypeVar

import torch
import yaml
from tqdm import tqdm

from pfl.callbacks.run_result import versions
from pfl.cli.app import CheckCLI, FederatedCLI
from pfl.cli.grid import Config, Job, merge
from pfl.cli.messages import explain, quiet
from pfl.errors import ConfigError, Diverged
from pfl.files import run_folder_errors, write_json
from pfl.scores.runs import OUTCOME, outcome_of

QUIET = {"enable_progress_bar": False, "enable_model_summary": False}
PACKAGES = ("pfl", "models", "datamodules")
T = TypeVar("T")
R = TypeVar("R")
DOTTED = re.compile(r'"([A-Za-z_]\w*)\.[\w.]*\w"')  # such as "mine.Net" in JSON
RUN_MEMORY = 2 << 30  # bytes that a run on a CPU may take, where nothing more is known


# ---- one run -------------------------------------------------------------------------------------


def execute(job: Job, root: Path, *, checkpoints: bool = False) -> Config:
    """Runs a job in `root`, unless the same code has finished a run of the same configuration.

    Args:
        job: The run.
        root: The folder of all runs.
        checkpoints: Saves checkpoints, so that a run that was killed goes on where it was. They
            are removed once the run has ended.

    Returns:
        `status` ("finished", or "diverged" if the models were no longer finite), `seconds` of the
        run, `reused`, which is True for an earlier run, and else `again`, which is True if other
        code has finished a run of the same configuration.
    """
    if known := ended(job, root):
        return {**known, "reused": True}
    folder = root / job.folder
    identity, before = _identity(job), outcome_of(folder)
    with run_folder_errors(folder.parent, "--out"):
        folder.parent.mkdir(parents=True, exist_ok=True)
    place = {"name": folder.name, "default_root_dir": str(folder.parent)}
    settings = {**QUIET, "enable_checkpointing": checkpoints, **place}
    text = yaml.safe_dump(
        merge(job.config, {"trainer": settings}), sort_keys=False, allow_unicode=True
    )
    path, text = folder.with_name(f"{folder.name}.yaml"), f"# code {identity['code']}\n{text}"
    last = folder / "checkpoints" / "last.ckpt"
    interrupted = path.is_file() and path.read_text() == text and last.is_file()
    begun = time.monotonic()
    status = _fit(path, last) if interrupted else None
    if status is None or not (folder / "summary.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)  # of another configuration or code
        path.write_text(text)
        status = _fit(path)
    outcome = {**identity, "status": status, "seconds": time.monotonic() - begun}
    folder.mkdir(exist_ok=True)  # there is none if the first round failed
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    write_json(folder / OUTCOME, outcome)
    again = before.get("config") == identity["config"]
    return {**outcome, "reused": False, "again": again}


def _identity(job: Job) -> Config:
    """Returns what a run is recognised by: its configuration and the code that it executes."""
    config = json.dumps(job.config)
    return {"config": config, "code": code_version(config)}


def ended(job: Job, root: Path) -> Config:
    """Returns the outcome of a run of the same configuration and code; empty if there is none."""
    outcome = outcome_of(root / job.folder)
    return outcome if _identity(job).items() <= outcome.items() else {}


def said(outcome: Config) -> str:
    """Returns in words what `execute` has done."""
    again = " (again, since the code has changed)" if outcome.get("again") else ""
    done = "as before" if outcome["reused"] else f"{outcome['seconds']:.1f} s{again}"
    return done if outcome["status"] == "finished" else f"{done}, {outcome['status']}"


def made_by(command: str, outcomes: Collection[Config]) -> str:
    """Returns in words how results were made: the command, its cost, versions and the machine.

    Args:
        command: The words behind `pfl`.
        outcomes: What `execute` has returned for each run.
    """
    used = ", ".join(f"{name} {version}" for name, version in versions().items())
    minutes = sum(outcome["seconds"] for outcome in outcomes) / 60
    return (
        f"Made by `pfl {command}`: {len(outcomes)} runs that took {minutes:.1f} minutes in all, "
        f"with {used}, on {platform.system()} {platform.machine()} with {os.cpu_count()} cores.\n"
    )


def _fit(config: Path, checkpoint: Path | None = None) -> str:
    """Returns the status of a run of `fit`, whose output is dropped."""
    words = ["fit", "--config", str(config)]
    try:
        with redirect_stdout(io.StringIO()):
            FederatedCLI([*words, "--ckpt_path", str(checkpoint)] if checkpoint else words)
    except Diverged:
        return "diverged"
    except Exception as error:
        if line := explain(error):
            raise ConfigError(f"{config}: {line}") from error
        raise
    return "finished"


def rows_of(job: Job, root: Path, outcome: Config) -> Iterator[Config]:
    """Yields the rows of a run's `metrics.csv`, each with the run's place in the grid.

    A diverged run has one more row, without values, for the round in which it diverged.
    """
    place = {"run": job.run, **job.axes, "seed": job.seed}
    diverged = outcome["status"] == "diverged"
    rounds = 0
    path = root / job.folder / "metrics.csv"
    if path.is_file():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                rounds = int(float(row["round"]))
                values = {key: float(value) for key, value in row.items() if value}
                finite = {key: value for key, value in values.items() if math.isfinite(value)}
                yield {**place, "diverged": 0, **finite}
    if diverged:
        yield {**place, "diverged": 1, "round": rounds + 1}


@functools.cache
def code_version(config: str = "") -> str:
    """Returns a hash of the code that a run executes, 16 hexadecimal digits.

    It covers the source files of this framework, the versions of the packages that could change a
    result, and the files of the user's own classes.

    Args:
        config: The configuration as JSON; the modules in the current folder that it names are the
            user's own.
    """
    digest = hashlib.sha256(_framework())
    modules = {match[1] for match in DOTTED.finditer(config)}
    for module in sorted(modules - {*PACKAGES}):
        for path in _sources(module):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def _framework() -> bytes:
    """Returns a hash of this framework's source files and of versions."""
    digest = hashlib.sha256(json.dumps(versions()).encode())
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            for path in sorted(Path(folder).rglob("*.py")):
                digest.update(path.read_bytes())
    return digest.digest()


def _sources(module: str) -> list[Path]:
    """Returns the files of a module or package of the user, in the current folder."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # such as __main__
        spec = None
    if spec is None:
        return []
    places = [*(spec.submodule_search_locations or ()), *filter(None, [spec.origin])]
    own = [Path(place) for place in places if Path.cwd() in Path(place).parents]
    own = [path for path in own if "site-packages" not in path.parts]  # of a .venv that is here
    return sorted({p for path in own for p in (path.rglob("*.py") if path.is_dir() else [path])})


# ---- all runs ------------------------------------------------------------------------------------


def run_all(
    jobs: Sequence[Job],
    root: Path,
    *,
    workers: int = 1,
    checkpoints: bool = False,
    metric: str | None = None,
) -> Iterator[tuple[Job, Config]]:
    """Runs jobs in `root` and yields each with its outcome when the job has ended.

    Args:
        jobs: The runs.
        root: The folder of all runs.
        workers: Number of processes. With 1, the runs take place in this process.
        checkpoints: As in `execute`.
        metric: A score that all runs must compute.
    """
    check([job for job in jobs if not ended(job, root)], metric)
    work = functools.partial(execute, root=root, checkpoints=checkpoints)
    yield from spread(work, jobs, workers)


def check(jobs: Iterable[Job], metric: str | None = None) -> None:
    """Builds the method and the data module of each run at each point of the grid, and no run.

    A mistake in the last run is so found before the first begins.

    Args:
        jobs: The runs.
        metric: A score that all runs must compute, such as `f1_score` or `val/global/f1_score`.

    Raises:
        ConfigError: A configuration has a mistake.
    """
    checker: CheckCLI | None = None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        points = {job.folder.parent: job for job in jobs}.values()  # of each, one of its seeds
        for job in tqdm(points, "configurations checked", leave=False, disable=None):
            path.write_text(yaml.safe_dump(job.config, sort_keys=False, allow_unicode=True))
            words = ["fit", "--config", str(path)]
            try:
                if checker is None:
                    checker = CheckCLI(words)
                else:
                    checker.check(words)
                loop = checker.loop
                loop.metrics.check_score("metric", metric, loop.finetuning.steps)
            except Exception as error:
                if line := explain(error):
                    raise ConfigError(f"{job}: {line}") from error
                raise


def spread(work: Callable[[T], R], tasks: Sequence[T], workers: int) -> Iterator[tuple[T, R]]:
    """Yields each task with its result when it has ended.

    Args:
        work: What is done with a task; it can be pickled.
        tasks: The tasks.
        workers: Number of processes. With 1, the work takes place in this process.
    """
    if workers == 1:
        for task in tasks:
            yield task, work(task)
        return
    threads = max(1, (os.cpu_count() or 1) // workers)
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _begin_worker, (threads,))
    try:
        futures = {pool.submit(work, task): task for task in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:  # where a task has failed, those that have not begun do not begin
        pool.shutdown(cancel_futures=True)


def _begin_worker(threads: int) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.path.append(os.getcwd())  # for classes of the user
    torch.set_num_threads(threads)
    quiet()


def _end_with_parent() -> None:
    """Ends this process when the one that started it is gone; else its tasks would go on."""
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)


def side_by_side(jobs: int) -> int:
    """Returns how many runs fit on this machine at a time, by its cores and its free memory.

    One if there is a GPU, whose memory the runs would share.
    """
    if torch.cuda.is_available():
        return 1
    room = jobs
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        room = free // RUN_MEMORY
    return max(1, min(jobs, os.cpu_count() or 1, room))
