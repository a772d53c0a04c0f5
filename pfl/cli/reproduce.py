"""`python -m pfl reproduce FIGURE`: runs what a paper's figure shows, writes its data and draws it.

A figure, or a table, is one file, `configs/papers/<paper>/figure<k>.yaml`, called
`<paper>-figure<k>`:

    title: What the figure shows
    seeds: 3                  # every run is repeated with the seeds 0, 1, 2; or a list of seeds
    common: {...}             # a configuration of `fit`
    runs:                     # by name, what a run changes in it
      FedAvg: {model: {class_path: FedAvg}}
      FedProx: {model: {class_path: FedProx, init_args: {proximal: 1.0}}}
    grid:                     # every run with every one of these values
      data.init_args.heterogeneity: [0.5, 2.0]        # called `heterogeneity`
      size: {small: {...}, large: {...}}              # or by name, what it changes; under `runs`
                                                      # by run, what it changes in that one
    panels: [...]             # what to draw; see pfl/report/curves.py
    tables: [...]             # what to write as a table; see pfl/report/crosstab.py
    full: {...}               # laid over all this by --full
    base: paper-figure1       # begin with that figure's file, and share its runs

What is laid over a configuration replaces single values, and a class with all of its arguments
where it names another class. A key may be a dotted path.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import itertools
import json
import math
import re
import shutil
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

import pfl
from pfl.callbacks.run_files import run_folder_errors
from pfl.errors import ConfigError
from pfl.report.crosstab import Table, read_table
from pfl.report.curves import Panel, read_panel

Config = dict[str, Any]
KEYS = ("title", "seeds", "common", "runs", "grid", "panels", "tables", "full", "base")
KINDS: Config = {"grid": dict, "full": dict, "panels": list, "tables": list, "base": str}
NAMES = {dict: "mapping", list: "list", str: "name"}
QUIET = {
    "enable_progress_bar": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
}


@dataclass(frozen=True)
class Job:
    """One run: its name, its place in the grid, its seed and its configuration."""

    run: str
    axes: dict[str, Any]
    seed: int
    config: Config

    def __str__(self) -> str:
        return ", ".join([*self._place(), f"seed={self.seed}"])

    @property
    def folder(self) -> Path:
        """Where it writes, inside the figure's folder."""
        parts = (re.sub(r"[^\w.=+-]+", "-", part) for part in self._place())
        return Path(*parts, f"seed{self.seed}")

    def _place(self) -> list[str]:
        return [self.run, *(f"{k}={v}" for k, v in self.axes.items())]


@dataclass(frozen=True)
class FigureFile:
    """What the file of a figure says.

    Attributes:
        folder: Of the runs, inside the output folder; that of the figure whose runs it shares.
    """

    name: str
    folder: str
    title: str
    seeds: list[int]
    common: Config
    runs: dict[str, Config]
    grid: dict[str, dict[str, Config]]
    panels: list[Panel]
    tables: list[Table]

    def jobs(self) -> list[Job]:
        """All runs, in the order of the file."""
        points = list(itertools.product(*(values.items() for values in self.grid.values())))
        return [self._job(*choice) for choice in itertools.product(self.runs, points, self.seeds)]

    def _job(self, run: str, point: tuple[tuple[str, Config], ...], seed: int) -> Job:
        config = merge(self.common, self.runs[run])
        for _, change in point:
            config = merge(config, {k: v for k, v in change.items() if k != "runs"})
            config = merge(config, change["runs"].get(run, {}))
        axes = dict(zip(self.grid, (value for value, _ in point), strict=True))
        return Job(run, axes, seed, {**config, "seed_everything": seed})


# ---- the file of a figure ------------------------------------------------------------------------


def known() -> dict[str, Path]:
    """The figures and tables there are, by name: in the current folder and in this project."""
    roots = (Path.cwd(), Path(pfl.__file__).parents[1])
    paths = [path for root in roots for path in root.glob("configs/papers/*/*.yaml")]
    names = {f"{path.parent.name}-{path.stem}": path for path in reversed(paths)}
    return dict(sorted(names.items(), key=lambda item: _natural(item[0])))


def read_figure(name: str, full: bool = False) -> FigureFile:
    """A figure by name, or by the path of its file; `full` lays its part `full` over the rest."""
    content = _read(name)
    name = Path(name).stem if name.endswith(".yaml") else name
    folder = content.get("base", name)
    if "base" in content:
        content = merge(_read(folder), content)
    if full:
        content = merge(content, content.get("full") or {})
        name, folder = f"{name}-full", f"{folder}-full"
    for key in ("common", "runs"):
        if not isinstance(content.get(key), dict) or not content[key]:
            raise ConfigError(f"{name}: {key}: {content.get(key)!r}; a figure needs some")
    if not (content.get("panels") or content.get("tables")):
        raise ConfigError(f"{name}: panels: null; a figure needs panels, or tables")
    seeds = content.get("seeds", 1)
    try:
        seeds = list(range(seeds)) if isinstance(seeds, int) else [int(seed) for seed in seeds]
    except (TypeError, ValueError):
        raise ConfigError(f"{name}: seeds: {seeds!r}; give their number, or a list") from None
    grid = dict(_axis(name, *item) for item in (content.get("grid") or {}).items())
    common, runs = content["common"], content["runs"]
    named = {
        run for values in grid.values() for change in values.values() for run in change["runs"]
    }
    if unknown := sorted(named - runs.keys()):
        raise ConfigError(
            f"{name}: grid: there is no run {unknown[0]!r}; known are {', '.join(runs)}"
        )
    panels = [read_panel(name, panel, list(runs), grid) for panel in content.get("panels", [])]
    tables = [read_table(name, entry, list(runs), grid) for entry in content.get("tables", [])]
    title = str(content.get("title", name))
    return FigureFile(name, folder, title, seeds, common, runs, grid, panels, tables)


def _read(name: str) -> Config:
    figures = known()
    path = Path(name) if name.endswith(".yaml") else figures.get(name)
    if path is None or not path.is_file():
        raise ConfigError(f"reproduce: there is no figure {name!r}; known are {', '.join(figures)}")
    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: it must have the keys {', '.join(KEYS)}")
    if unknown := [key for key in content if key not in KEYS]:
        raise ConfigError(f"{path}: there is no key {unknown[0]!r}; known are {', '.join(KEYS)}")
    for key, kind in KINDS.items():
        value = content.get(key)
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"{path}: {key}: {value!r}; it must be a {NAMES[kind]}")
    return _normal(content)


def _normal(content: Config) -> Config:
    """The same with dotted keys taken apart, so that files can be laid over one another."""
    result = dict(content)
    for key, take_apart in (("common", nest), ("runs", _each_run), ("full", _normal)):
        if isinstance(content.get(key), dict):
            result[key] = take_apart(content[key])
    return result


def _each_run(runs: Config) -> Config:
    for name, change in runs.items():
        _check_change(f"runs.{name}", change or {})
    return {str(name): nest(change or {}) for name, change in runs.items()}


def _check_change(where: str, change: Any) -> None:
    if not isinstance(change, dict):
        raise ConfigError(f"{where}: {change!r}; it must be keys and their values")


def _axis(figure: str, key: str, values: Any) -> tuple[str, dict[Any, Config]]:
    """Name and values of an axis of the grid, and what each value changes."""
    if isinstance(values, list) and values:
        if any(isinstance(value, list | dict) for value in values):
            raise ConfigError(
                f"{figure}: grid.{key}: {values!r}; such values need names: give changes by name"
            )
        return key.rpartition(".")[2], {v: {**nest({key: v}), "runs": {}} for v in values}
    if isinstance(values, dict) and values:
        changes = {value: change or {} for value, change in values.items()}
        for value, change in changes.items():
            _check_change(f"{figure}: grid.{key}.{value}", change)
            _check_change(f"{figure}: grid.{key}.{value}.runs", change.get("runs") or {})
        return key, {
            value: {**nest(change), "runs": _each_run(change.get("runs") or {})}
            for value, change in changes.items()
        }
    raise ConfigError(f"{figure}: grid.{key}: {values!r}; it must be a list, or changes by name")


def nest(content: Config) -> Config:
    """The same with dotted keys taken apart: {"a.b": 1} is {"a": {"b": 1}}."""
    result: Config = {}
    for key, value in content.items():
        head, _, rest = str(key).partition(".")
        value = nest({rest: value} if rest else value) if rest or isinstance(value, dict) else value
        result[head] = merge(result[head], value) if head in result else value
    return result


def merge(base: Any, change: Any) -> Any:
    """`change` laid over `base`; where it names another class, base's arguments are not kept."""
    if not (isinstance(base, dict) and isinstance(change, dict)):
        return change
    if "class_path" in base and change.get("class_path", base["class_path"]) != base["class_path"]:
        return change
    return {**base, **{k: merge(base[k], v) if k in base else v for k, v in change.items()}}


def _natural(name: str) -> list[Any]:
    """Sorts figure10 behind figure9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


# ---- runs ----------------------------------------------------------------------------------------


def execute(job: Job, root: Path) -> Config:
    """Run a job in `root`, or find it there as it was run before.

    Returns:
        `status` ("finished" or "diverged", where the models were no longer finite), `seconds`, and
        `reused`.
    """
    folder = root / job.folder
    record = folder / "outcome.json"
    config = json.dumps(job.config)
    if record.is_file():
        before = json.loads(record.read_text())
        if before["config"] == config:
            return {**before, "reused": True}
    shutil.rmtree(folder, ignore_errors=True)  # broken off, or of another configuration
    with run_folder_errors(folder.parent, "reproduce: --out"):
        folder.parent.mkdir(parents=True, exist_ok=True)
    place = {"name": folder.name, "default_root_dir": str(folder.parent)}
    path = folder.with_name(f"{folder.name}.yaml")
    whole = merge(job.config, {"trainer": {**QUIET, **place}})
    path.write_text(yaml.safe_dump(whole, sort_keys=False, allow_unicode=True))
    begun = time.monotonic()
    outcome = {"config": config, "status": _fit(path, job), "seconds": time.monotonic() - begun}
    folder.mkdir(exist_ok=True)  # it is not there where the first round failed
    part = record.with_suffix(".part")  # at once or not at all: a kill leaves no half record
    part.write_text(json.dumps(outcome) + "\n")
    part.replace(record)
    return {**outcome, "reused": False}


def _fit(config: Path, job: Job) -> str:
    from pfl.cli.app import FederatedCLI
    from pfl.cli.messages import explain

    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            # It has both our own command line and these arguments, and that is right here.
            warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
            FederatedCLI(["fit", "--config", str(config)])
    except Exception as error:
        line = explain(error)
        if line is None:
            raise
        if "no longer finite" not in line:
            raise ConfigError(f"{config}: {line}") from error
        return "diverged"
    return "finished"


def rows_of(job: Job, root: Path, outcome: Config) -> Iterator[Config]:
    """The rows of a run's `metrics.csv` with its place in the grid before them.

    A diverged run has one more, of the round in which that happened, with nothing in it.
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


# ---- the command ---------------------------------------------------------------------------------


def reproduce(name: str, out: Path, full: bool = False) -> list[Path]:
    """Run a figure's grid, write its data and draw it.

    Returns:
        The files `<out>/<name>.csv`, of a figure `.png` and `.pdf`, of tables `.md`.
    """
    begun = time.monotonic()
    figure = read_figure(name, full)
    jobs, root = figure.jobs(), out / figure.folder
    table: list[Config] = []
    for number, job in enumerate(jobs, 1):
        outcome = execute(job, root)
        table += rows_of(job, root, outcome)
        done = "as before" if outcome["reused"] else f"{outcome['seconds']:.1f} s"
        note = "" if outcome["status"] == "finished" else f", {outcome['status']}"
        print(f"[{number:{len(str(len(jobs)))}}/{len(jobs)}] {job}: {done}{note}", flush=True)
    place = ["run", *figure.grid, "seed", "diverged"]
    metrics = list(dict.fromkeys(key for row in table for key in row if key not in place))
    shown = [*figure.panels, *(entry.panel for entry in figure.tables)]
    for panel in shown:
        panel.check(figure.name, table, metrics)
    used = dict.fromkeys(name for panel in shown for name in panel.metrics)
    files = [out / f"{figure.name}.csv"]
    _write(files[0], [*place, *used], table)
    if figure.panels:
        files += _draw(figure, table, out)
    if figure.tables:
        files.append(out / f"{figure.name}.md")
        parts = [f"# {figure.title}\n", *(entry.markdown(table) for entry in figure.tables)]
        files[-1].write_text("\n".join(parts))
    print(f"{', '.join(map(str, files))} ({time.monotonic() - begun:.0f} s)")
    return files


def _draw(figure: FigureFile, table: list[Config], out: Path) -> list[Path]:
    from pfl.report.curves import draw  # matplotlib is slow to import

    drawing = draw(figure.title, figure.panels, table)
    files = [out / f"{figure.name}.{kind}" for kind in ("png", "pdf")]
    drawing.savefig(files[0], dpi=150)
    drawing.savefig(files[1], metadata={"CreationDate": None})  # the same run, the same file
    return files


def _write(path: Path, names: list[str], table: list[Config]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for row in table:
            values = (row.get(name, "") for name in names)
            writer.writerow(f"{v:.7g}" if isinstance(v, float) else v for v in values)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"reproduce: {message}")


def command(words: list[str]) -> None:
    """`reproduce [FIGURE ...] [--full] [--out FOLDER]`; without a figure it lists them."""
    parser = _Parser(
        prog="python -m pfl reproduce",
        description="Run what figures of the papers show; write their data (CSV), and draw them "
        "(PNG, PDF). Runs whose configuration has not changed are not run again.",
    )
    parser.add_argument("figure", nargs="*", help="such as fedpd-figure2, or a YAML file")
    parser.add_argument("--full", action="store_true", help="the paper's size, where that is long")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"), help="the folder")
    parser.add_argument("--list", action="store_true", help="the figures there are")
    given = parser.parse_args(words)
    if given.list or not given.figure:
        for name in known():
            print(f"{name:<18} {read_figure(name).title}")
    for name in [] if given.list else given.figure:
        reproduce(name, given.out, given.full)
