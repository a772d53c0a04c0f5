"""A run of an experiment, made once: it is recognised by its configuration, code and data."""

from __future__ import annotations

import ast
import functools
import gc
import hashlib
import importlib.util
import io
import json
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from pfl.callbacks.run_result import versions
from pfl.configuration.app import CheckCLI, FederatedCLI
from pfl.configuration.files import callbacks_of
from pfl.configuration.messages import explain
from pfl.datamodules.errors import add_note, require_value
from pfl.datamodules.files import files_below
from pfl.errors import ConfigError, Diverged
from pfl.experiments.callbacks import NOT_VALIDATED
from pfl.experiments.grid import Config, Job, merge
from pfl.experiments.progress import Expected, Watch, live_page, say
from pfl.experiments.room import Room, used_memory, visible_cards
from pfl.experiments.workers import side_by_side
from pfl.files import content, locked, make_folder, read_json, write_json
from pfl.method.scoring import BACKDOOR
from pfl.rounds.checkpoint_io import last_checkpoint
from pfl.rounds.loop import FederatedLoop
from pfl.scores.metrics import known_models
from pfl.scores.names import HIGHER_IS_BETTER, scores_among
from pfl.scores.runs import OUTCOME, REPLACED, Run, column_names

QUIET_TRAINER = {
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": True,
}
NAMED_BY = {"WandbLogger": "name", "MLFlowLogger": "run_name"}  # a logger's argument
OUR_PACKAGES = ("pfl", "pfl.models", "pfl.datamodules")
DOTTED = re.compile(r'"([A-Za-z_]\w*)\.[\w.]*\w"')  # such as "mine.Net" in JSON
INSTALLED = {"site-packages", "dist-packages"}
STDLIB = Path(sysconfig.get_path("stdlib"))
DATA_KEYS = ("model", "data", "loop")  # the groups whose files a run reads
DOWNLOADS = ("root", "cache")  # keys of folders into which a run writes published data sets


# ---- one run -------------------------------------------------------------------------------------


def execute(job: Job, root: Path, kept: Config | None = None) -> Config:
    """Runs a job in `root`, unless a run of the same configuration, code and data has ended there.

    The run saves checkpoints, so that one that was killed continues where it was. They are removed
    once the run has ended, unless `kept`, the arguments of `BestRound`, asks for the last one, and
    for that of the best round. A run that has ended in the same folder, with another configuration,
    code or data, moves into the folder `.replaced` of `root`.

    Returns:
        `status` ("finished", or "diverged" if the models were no longer finite), `seconds`,
        `reused`, which is True for an earlier run, and else `again`, which names in words what has
        changed since the earlier run, and `used`, the memory of this process.

    Raises:
        ConfigError: Another process makes this run, or the run has failed by a mistake.
    """
    if known := finished_outcome(job, root, kept):
        return {**known, "reused": True}
    folder = root / job.folder
    make_folder(folder.parent, "--out")
    taken = f"{folder}: another process makes this run; wait until it has ended, or end it"
    with locked(folder.with_name(f".{folder.name}.lock"), taken):
        if known := finished_outcome(job, root, kept):  # by the process that had the lock
            return {**known, "reused": True}
        return _execute(job, root, kept)


def _execute(job: Job, root: Path, kept: Config | None) -> Config:
    """Makes a run that no other process makes, as `execute`."""
    folder = root / job.folder
    identity = _identity(job)
    again = _changed(_recorded_outcome(folder), identity)
    settings: Config = {
        **QUIET_TRAINER,
        "name": folder.name,
        "default_root_dir": str(folder.parent),
    }
    config = with_own_logs(merge(job.config, {"trainer": settings}), folder)
    if kept is not None:
        config = with_callback(config, "pfl.experiments.callbacks.BestRound", kept)
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    path = folder.with_name(f"{folder.name}.yaml")
    text = f"# code {identity['code']}, data {identity['data']}\n{text}"
    last = last_checkpoint(folder)
    interrupted = path.is_file() and path.read_text(encoding="utf-8") == text and last.is_file()
    begun = time.monotonic()
    if interrupted:
        status = _fit(path, last)
    else:
        status = None
    if status is None or not (folder / "summary.json").is_file():
        if again:
            _move(folder, root / REPLACED / job.folder)
        shutil.rmtree(folder, ignore_errors=True)  # a run that has not ended, or the same run
        path.write_text(text, encoding="utf-8")
        status = _fit(path)
    folder.mkdir(exist_ok=True)  # there is none if the first round failed
    if kept is None:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    # `label` is the name that a report shows.
    outcome = {**identity, "status": status, "seconds": time.monotonic() - begun, "kept": kept}
    write_json(folder / OUTCOME, {**outcome, "label": job.label})
    return {**outcome, "reused": False, "again": again, "used": used_memory()}


def finished_outcome(job: Job, root: Path, kept: Config | None = None) -> Config:
    """Returns the outcome of a run of the same configuration, code and data; empty if none ended.

    With `kept` it is that of a run that has kept the same checkpoints, or diverged.
    """
    outcome = _recorded_outcome(root / job.folder)
    last = last_checkpoint(root / job.folder)
    lacks = kept is not None and not (last.is_file() and outcome.get("kept") == kept)
    if not outcome or (lacks and outcome.get("status") != "diverged"):
        return {}
    if _identity(job).items() <= outcome.items():
        return outcome
    return {}


def _changed(before: Config, identity: Config) -> str:
    """Returns in words what has changed since the outcome of a run, if there is one; or ""."""
    words = {"config": "configuration", "code": "code", "data": "data"}
    parts = [words[key] for key, value in identity.items() if before.get(key, value) != value]
    return " and ".join(parts)


def _move(folder: Path, place: Path) -> None:
    """Moves a run's folder to a place, or beside it if there is one already."""
    number = 1
    free = place
    while free.exists():
        number += 1
        free = place.with_name(f"{place.name}-{number}")
    free.parent.mkdir(parents=True, exist_ok=True)
    folder.rename(free)


def _recorded_outcome(folder: Path) -> Config:
    """Returns what was recorded of a run in its folder; empty before its end, or if damaged."""
    try:
        return read_json(folder / OUTCOME)
    except ConfigError:
        return {}


def read_run(job: Job, root: Path, outcome: Config) -> Run:
    """Returns the run that a job has left in `root`."""
    known = {"point": job.axes, "diverged": outcome["status"] == "diverged"}
    return Run.read(job.run, job.seed, root / job.folder, **known)


def with_callback(config: Config, class_path: str, arguments: Config) -> Config:
    """Returns a configuration with one callback more."""
    known = callbacks_of(config.get("trainer", {}))
    callbacks = [*known, {"class_path": class_path, "init_args": arguments}]
    return merge(config, {"trainer": {"callbacks": callbacks}})


def with_own_logs(config: Config, folder: Path) -> Config:
    """Returns a configuration whose loggers keep the run in `folder` apart from the others.

    The files of Lightning's CSV logger and TensorBoard are below `logs` beside the run's folder:
    runs that begin at the same moment would take the same version of a common folder. The runs of
    W&B and MLflow get the folder as a name, unless they have one.
    """
    given = config["trainer"].get("logger")
    if isinstance(given, dict | str):
        given = [given]
    if not isinstance(given, list):
        return config
    loggers = []
    for logger in given:
        if isinstance(logger, str):
            logger = {"class_path": logger}
        arguments = dict(logger.get("init_args", {}))
        kind = logger["class_path"].rpartition(".")[2]
        if kind in ("CSVLogger", "TensorBoardLogger"):
            arguments["save_dir"] = str(folder.parent / "logs" / folder.name)
        if kind in NAMED_BY:
            arguments.setdefault(NAMED_BY[kind], folder.as_posix())
        loggers.append({**logger, "init_args": arguments})
    return merge(config, {"trainer": {"logger": loggers}})


class JobCLI(FederatedCLI):
    """The command line of `fit` for one of several runs, which their command continues."""

    go_on = "the same command, given again, goes on from the last checkpoint"


def _fit(config: Path, checkpoint: Path | None = None) -> str:
    """Returns the status of a run of `fit`, whose output is dropped."""
    words = ["fit", "--config", str(config)]
    before = _wandb_run()
    gc.collect()  # a run's trainer, data and models refer to each other, and outlive it for long
    try:
        with _mistakes_of(config), redirect_stdout(io.StringIO()):
            JobCLI([*words, "--ckpt_path", str(checkpoint)] if checkpoint else words)
    except Diverged:
        return "diverged"
    finally:
        own = _wandb_run()
        if own is not None and own is not before:
            own.finish()  # the next run of this process would be a part of it
    return "finished"


def _wandb_run() -> Any:
    """Returns the run of W&B in this process, if there is one."""
    return getattr(sys.modules.get("wandb"), "run", None)  # slow to import, and mostly not needed


@contextmanager
def _mistakes_of(what: object) -> Iterator[None]:
    """Puts what a mistake of the user belongs to before its line.

    Any other error, as of a method's own code, has a note.
    """
    try:
        yield
    except Diverged:
        raise
    except Exception as error:
        if line := explain(error):
            raise ConfigError(f"{what}: {line}") from error
        add_note(error, f"({what})")
        raise


# ---- what a run is recognised by -----------------------------------------------------------------


def _identity(job: Job) -> Config:
    config = json.dumps(job.config, default=str)
    return {"config": config, "code": code_version(config), "data": data_version(job.config)}


def code_version(config: str = "") -> str:
    """Returns a hash of the code that a run executes, 16 hexadecimal digits.

    It covers the source files of this framework, the versions of the packages that could change a
    result, the modules that the configuration (as JSON) names and that are not installed, and what
    these import of such modules.
    """
    return _version_of(frozenset(match[1] for match in DOTTED.finditer(config)) - {*OUR_PACKAGES})


@functools.cache  # the same modules for many configurations
def _version_of(named: frozenset[str]) -> str:
    """Returns the hash of this framework, some modules, and what these import."""
    digest = hashlib.sha256(_framework())
    files = dict[Path, None]()
    modules = sorted(named)
    known = {*named, *OUR_PACKAGES}
    for module in modules:  # the list grows by what modules import
        for path in _sources(module):
            files[path] = None
            names = _imports(path) - known
            modules += sorted(names)
            known |= names
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def _framework() -> bytes:
    """Returns a hash of this framework's source files and of versions."""
    digest = hashlib.sha256(json.dumps(versions()).encode())
    for package in OUR_PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            for path in sorted(Path(folder).rglob("*.py")):
                digest.update(path.read_bytes())
    return digest.digest()


def _sources(module: str) -> list[Path]:
    """Returns the files of a module or package of the user: of one that is not installed."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # such as __main__
        spec = None
    if spec is None:
        return []
    places = [*(spec.submodule_search_locations or ()), *filter(None, [spec.origin])]
    paths = map(Path, places)
    files = (path.rglob("*.py") if path.is_dir() else [path] for path in paths if _own(path))
    # Installed files are in a virtual environment within a package; "built-in" is no file.
    return sorted({p for found in files for p in found if _own(p) and p.is_file()})


def own_file(module: str) -> Path | None:
    """Returns the file of a module of the user; None if it is installed, or there is none."""
    files = _sources(module)
    if len(files) != 1:
        return None
    return files[0]


def _own(path: Path) -> bool:
    """Returns whether a file or folder is neither installed nor of the standard library."""
    return not INSTALLED & {*path.parts} and STDLIB not in path.parents


def _imports(path: Path) -> set[str]:
    """Returns the packages that a source file imports; all files of its own one count anyway."""
    try:
        nodes = [*ast.walk(ast.parse(path.read_bytes()))]
    except (SyntaxError, ValueError):  # a data file, or code that fails when it is imported
        return set()
    names = [alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names]
    names += [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom) and not n.level]
    return {name.partition(".")[0] for name in names}


def data_version(config: Config) -> str:
    """Returns a hash of the files and folders that a configuration names, 16 hexadecimal digits.

    Of a file the content counts; of a folder the names, sizes and times of all files in it. Folders
    for downloads do not count: the data sets in them are published ones, but for those that LEAF's
    scripts have made.
    """
    digest = hashlib.sha256()
    for path in sorted(set(_paths({key: config.get(key) for key in DATA_KEYS}))):
        found = sorted(files_below(path))
        for entry in (entry for entry in found or [path] if entry.is_file()):
            about = entry.stat()
            stamp = (str(entry), about.st_size, about.st_mtime_ns)
            digest.update(json.dumps(stamp).encode() if path.is_dir() else _content(*stamp))
    return digest.hexdigest()[:16]


def _paths(value: Any, key: str = "") -> Iterator[Path]:
    """Yields the files and folders that a part of a configuration names."""
    if isinstance(value, dict | list):
        items = [(key, entry) for entry in value]
        if isinstance(value, dict):
            items = list(value.items())
        for name, entry in items:
            yield from _paths(entry, str(name))
    elif isinstance(value, str) and value and key != "class_path":
        try:
            path = Path(value).expanduser()
            if key in DOWNLOADS:
                yield from path.glob("data/*/data")  # in LEAF's repository
            elif path.exists():
                yield path
        except (OSError, ValueError, RuntimeError):  # too long, a NUL, or an unknown home
            return


@functools.lru_cache(maxsize=1 << 12)
def _content(path: str, size: int, changed: int) -> bytes:
    """Returns a hash of a file of this size and time."""
    return hashlib.sha256(content(Path(path)).numpy().data).digest()


# ---- all runs ------------------------------------------------------------------------------------


def run_all(
    jobs: Sequence[Job],
    root: Path,
    *,
    workers: int | None = 1,
    keep: bool = False,
    metric: str | None = None,
    budget: tuple[str, float] | None = None,
    live: bool = False,
    check: Callable[[Sequence[str]], None] | None = None,
) -> dict[Path, Config]:
    """Runs jobs in `root`, and prints a line when one has ended; returns the outcomes by folder.

    All runs must compute the score `metric`, if there is one. With `keep` they keep the checkpoint
    of the round that counts by it, within the `budget`, and the last one. With `live` a page in
    `root` tells how far they are. Before the first run `check` is called with the scores that some
    run can have, such as `global/accuracy`; if it raises, no run begins.
    """
    kept: Config | None = None
    if keep:
        kept = {"metric": metric, "budget": budget and list(budget)}
    before = {job.folder: finished_outcome(job, root, kept) for job in jobs}
    made = {root / folder for folder, outcome in before.items() if outcome}
    scores = check_jobs([job for job in jobs if not before[job.folder]], metric, budget)
    if check is not None and len(made) < len(jobs):
        for job in jobs:
            if before[job.folder]:
                columns = column_names(read_run(job, root, before[job.folder]).rows)
                scores += [f"{name.model}/{name.number}" for name in scores_among(columns)]
        check(list(dict.fromkeys(scores)))
    _tell_made_again([job for job in jobs if not before[job.folder]], root)
    work = functools.partial(execute, root=root, kept=kept)
    outcomes: dict[Path, Config] = {}
    room = room_for(jobs, len(jobs), workers)
    expected = [Expected.of(str(job), root / job.folder, job.config) for job in jobs]
    with Watch(expected, made, metric, live_page(root, live)):
        if workers is None and len(jobs) > 1:
            say(str(room))
        for job, outcome in side_by_side(work, jobs, room):
            used = outcome.pop("used", None)
            outcomes[job.folder] = outcome
            number = f"{len(outcomes):{len(str(len(jobs)))}}/{len(jobs)}"
            say(f"[{number}] {job}: {_outcome_words(outcome)}")
            if room.note(used) and len(outcomes) < len(jobs):
                say(str(room))
    return outcomes


def _tell_made_again(jobs: Sequence[Job], root: Path) -> None:
    """Says how many of the runs that are made had ended before, and what has changed since."""
    befores = ((job, _recorded_outcome(root / job.folder)) for job in jobs)
    changes = Counter(_changed(before, _identity(job)) for job, before in befores if before)
    tell_made_again("runs", changes, str(root / REPLACED))


def tell_made_again(what: str, changes: Counter[str], place: str) -> None:
    """Says how many runs that had ended are made again, by what has changed, and where they move.

    Args:
        what: What the runs are called.
        changes: How many runs there are, by what has changed, in words; "" is for those of which
            nothing has, and which do not move.
        place: The folder.
    """
    for again, count in changes.items():
        if again:
            say(
                f"{what} made again, since the {again} changed: {count}; what they had left moves "
                f"to {place}"
            )


def changed_apart(folders: Iterable[Path], config: Config) -> Counter[str]:
    """Returns in how many folders a run has ended, by what has changed since, in words.

    It is the code and the data that `config` names; and where these are the same, the
    configuration.
    """
    outcomes = map(_recorded_outcome, folders)
    befores = [before for before in outcomes if before]
    if not befores:
        return Counter()
    code = code_version(json.dumps(config, default=str))
    identity = {"code": code, "data": data_version(config)}
    return Counter(_changed(before, identity) or "configuration" for before in befores)


def _outcome_words(outcome: Config) -> str:
    """Returns how a run has ended, in words."""
    words = f"{outcome['seconds']:.1f} s"
    if outcome["reused"]:
        words = "as before"
    elif outcome.get("again"):
        words += f" (again, since the {outcome['again']} changed)"
    if outcome["status"] != "finished":
        words += f", {outcome['status']}"
    return words


def room_for(jobs: Iterable[Job], tasks: int, workers: int | None = None) -> Room:
    """Returns the places for runs, and the GPUs that these share out.

    Runs on the CPU, and runs that take several GPUs each, share none out; the latter take place one
    at a time.

    Args:
        jobs: The runs.
        tasks: The number of tasks that make them.
        workers: The number of processes that the user asks for; None: as many as fit.
    """
    trainers = [job.config.get("trainer") or {} for job in jobs]
    if all(one.get("accelerator") == "cpu" for one in trainers):
        return Room(tasks, workers)
    cards = visible_cards()
    several = any(str(one.get("devices", 1)) not in ("1", "[0]", "None") for one in trainers)
    if cards and several:
        return Room(tasks, workers or 1)
    return Room(tasks, workers, cards)


def check_jobs(
    jobs: Iterable[Job],
    metric: str | None = None,
    budget: tuple[str, float] | None = None,
    *,
    validated: bool = False,
    tested: bool = False,
) -> list[str]:
    """Builds the method and the data module of each run at each point of the grid, and no run.

    A mistake in the last run is so found before the first begins. All runs must compute the score
    `metric`, if there is one, count what the `budget` limits, evaluate validation samples if they
    are to be `validated`, and have test samples if they, or runs of their data, are to be `tested`.

    Returns:
        The scores that some run can have, such as `global/accuracy`.
    """
    scores: dict[str, None] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        points = {job.folder.parent: job for job in jobs}.values()  # one seed of each
        for job in tqdm(points, "configurations checked", leave=False, disable=None):
            text = yaml.safe_dump(job.config, sort_keys=False, allow_unicode=True)
            path.write_text(text, encoding="utf-8")
            with _mistakes_of(job):
                loop = CheckCLI(["fit", "--config", str(path)]).loop
                _check_loop(loop, metric, budget, validated=validated, tested=tested)
                scores.update(dict.fromkeys(_scores_of(loop)))
    return list(scores)


def _check_loop(
    loop: FederatedLoop,
    metric: str | None,
    budget: tuple[str, float] | None,
    *,
    validated: bool,
    tested: bool,
) -> None:
    """Refuses a loop that does not give what `check_jobs` asks for."""
    loop.metrics.check_score("metric", metric, loop.finetuning.steps)
    loop.participation.check_count(loop.datamodule.num_clients)
    timed = budget is None or budget[0] != "virtual_seconds"
    holds = timed or loop.participation.clock is not None
    expected = "another one, or these runs need loop.clock, which counts them"
    require_value("budget", "virtual_seconds", holds, expected)
    share = getattr(loop.datamodule.protocol, "validation", 1)
    if validated and not ("val" in loop.evaluate and share):
        raise ConfigError(NOT_VALIDATED)
    share = getattr(loop.datamodule.protocol, "test", 1)
    expected = "above 0, as a look is judged on test samples"
    require_value("data.protocol.test", share, bool(share) or not tested, expected)


def _scores_of(loop: FederatedLoop) -> list[str]:
    """Returns the scores that a run can have, such as `global/accuracy`."""
    numbers = [*HIGHER_IS_BETTER, *loop.metrics.names]
    if loop.participation.attackers is not None:
        numbers.append(BACKDOOR)
    models = known_models(loop.finetuning.steps)
    return [f"{model}/{number}" for model in models for number in numbers]
