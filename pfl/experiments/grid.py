"""Many runs described by one file: a configuration x runs x a grid x seeds.

    seeds: 3                  # repeats every run with the seeds 0, 1, 2; or a list of seeds
    common: {...}             # a configuration of `fit`; or its file, without that file's method
    runs:                     # by name, what a run changes in `common`
      FedAvg: {model: {class_path: FedAvg}}
      FedProx: {model: {class_path: FedProx, init_args: {proximal_weight: 1.0}}}
    grid:                     # repeats every run with each of these values
      data.init_args.heterogeneity: [0.5, 2.0]        # the axis `heterogeneity`
      size: {small: {...}, large: {...}}              # named changes; under `runs` of a change,
                                                      # by run, changes of that run only; under
                                                      # `without`, a list of runs to leave out

A change replaces single values; a change to another class replaces the class and all of its
arguments. A key may be a dotted path.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace

from pfl.configuration import files
from pfl.configuration.keys import closest
from pfl.configuration.messages import complaint
from pfl.datamodules.errors import require_value
from pfl.errors import ConfigError
from pfl.files import make_folder

Config = dict[str, Any]
G = TypeVar("G", bound="Grid")
OF_FIT = ("trainer", "model", "data", "loop")  # keys of a configuration of `fit`, beside the seed
OF_COMMANDS = ("tune", "search")  # keys of files that another command takes
OUR_PACKAGES = ("", "pfl", "models", "datamodules")  # "": a name without a module
OF_A_CHANGE = ("runs", "without")  # keys of a change of the grid that are not of a configuration
# Columns of the tables, which an axis of the same name would overwrite.
COLUMNS = ("run", "method", "model", "seed", "folder", "status", "round", "diverged", "trial")
CONFIGURATIONS = (
    "common",
    "runs",
    "grid",
    "panels",
    "tables",
    "full",
)  # keys that hold configurations
LONGEST = 255  # bytes of a folder's name
INNER = {"inner": True}  # marks a field that no file has
OWNER = ".source"  # in a folder of results: the file that they belong to


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
    def label(self) -> str:
        """The run and its place in the grid, without the seed."""
        return ", ".join([self.run, *(f"{k} {v}" for k, v in self.axes.items())])

    @property
    def folder(self) -> Path:
        """The folder of the run, relative to that of the experiment."""
        return Path(*map(folder_name, self._place()), f"seed{self.seed}")

    def with_changes(self, changes: Sequence[Config]) -> Job:
        """Returns the job with further changes of its configuration."""
        return replace(self, config=functools.reduce(merge, changes, self.config))

    def _place(self) -> list[str]:
        return [self.run, *(f"{k}={v}" for k, v in self.axes.items())]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The runs of an experiment.

    Keys of configurations may be dotted paths; the attributes hold them taken apart.

    Args:
        common: The configuration of `fit` that all runs change.
        runs: What each run changes in it, by name.
        seeds: The seeds of every run, or their number.
        grid: For each axis of the grid a list of values, or by name what each value changes.
        title: What is shown; the name by default.
        name: The name of the experiment.
        source: What the results belong to: the name of a file that comes with pfl, or a path.
        changes: Changes of the configuration of every run, after all others.
        only: The label of the only row that is made, or the name of its run; None: all rows.

    Raises:
        ConfigError: A value does not fit.
    """

    common: Config
    runs: dict[str, Any]
    seeds: int | list[int] = 1
    grid: dict[str, Any] = field(default_factory=dict)
    title: str | None = None
    name: str = field(default="experiment", metadata=INNER)
    source: Path | str | None = field(default=None, metadata=INNER)
    changes: Sequence[Config] = field(default=(), metadata=INNER)
    only: str | None = field(default=None, metadata=INNER)

    def __post_init__(self) -> None:
        for key in ("common", "runs"):
            require_value(
                key, getattr(self, key), bool(getattr(self, key)), "keys and their values"
            )
        if isinstance(self.seeds, int):
            seeds = list(range(self.seeds))
        else:
            seeds = self.seeds
        holds = bool(seeds) and min(seeds) >= 0 and len(set(seeds)) == len(seeds)
        expected = "their number, at least 1, or a list of different whole numbers"
        require_value("seeds", self.seeds, holds, expected)
        runs = {str(run): change or {} for run, change in self.runs.items()}
        axes = [_axis(str(key), values) for key, values in self.grid.items()]
        points = dict(axes)
        _check_names("grid", [axis for axis, _ in axes])
        for where, names in {"runs": runs, **{f"grid.{k}": v for k, v in axes}}.items():
            _check_names(where, [folder_name(str(name)) for name in names])
        for change in (change for values in points.values() for change in values.values()):
            for run in (*change["runs"], *change["without"]):
                require_value("grid", run, run in runs, f"one of the runs {', '.join(self.runs)}")
        values = {
            "common": _change("common", self.common),
            "runs": {run: _change(f"runs.{run}", change) for run, change in runs.items()},
            "grid": points,
            "seeds": seeds,
            "title": self.title or self.name,
            "changes": [nest(change) for change in self.changes],
        }
        for key, value in values.items():
            object.__setattr__(self, key, value)
        jobs = self.jobs()
        if not jobs:
            raise ConfigError("grid: `without` leaves no run")
        for part in dict.fromkeys(part for job in jobs for part in job.folder.parts):
            holds = len(os.fsencode(part)) <= LONGEST
            expected = f"at most {LONGEST} bytes long, as a folder is called like it"
            require_value("runs or grid", part, holds, expected)

    def jobs(self) -> list[Job]:
        """Returns all runs, in the order of the file."""
        jobs = []
        points = itertools.product(*(values.items() for values in self.grid.values()))
        for run, point in itertools.product(self.runs, points):
            if any(run in change["without"] for _, change in point):
                continue
            config = merge(self.common, self.runs[run])
            for _, change in point:
                config = merge(config, {k: v for k, v in change.items() if k not in OF_A_CHANGE})
                config = merge(config, change["runs"].get(run, {}))
            axes = dict(zip(self.grid, (value for value, _ in point), strict=True))
            for seed in cast(list[int], self.seeds):
                job = Job(run, axes, seed, {**config, "seed_everything": seed})
                if self.only in (None, run, job.label):
                    jobs.append(job.with_changes(self.changes))
        return jobs

    def part(self: G, only: str | None, seed: int | None) -> G:
        """Returns the experiment with one row, or one seed, of those that it has.

        Args:
            only: The label of a row, such as "FedSLR, problem users", or the name of a run, which
                stands for all of its rows; None: all rows.
            seed: One of the seeds; None: all of them.

        Raises:
            ConfigError: There is no such row or seed.
        """
        if only is None and seed is None:
            return self
        jobs = self.jobs()
        labels = dict.fromkeys(job.label for job in jobs)
        if only is not None and only not in {*labels, *(job.run for job in jobs)}:
            raise ConfigError(
                f"--only: {only}; there is no such row; there are {'; '.join(labels)}"
            )
        seeds = cast(list[int], self.seeds)
        if seed is None:
            return replace(self, only=only)
        if seed not in seeds:
            known = ", ".join(map(str, seeds))
            raise ConfigError(f"--seed: {seed}; it must be one of {known}")
        return replace(self, only=only, seeds=[seed])

    @classmethod
    def from_file(cls: type[G], name: str | Path, changes: Sequence[Config] = ()) -> G:
        """Reads an experiment.

        Args:
            name: The path of a file, or the name of one that comes with pfl.
            changes: Changes of the configuration of every run, such as `trainer.max_epochs: 2`.

        Raises:
            ConfigError: There is no such file, or it has a mistake.
        """
        path = files.find(str(name))
        if path is None:
            raise ConfigError(f"{name}: there is no such file")
        return cls.from_content(path, read_experiment(path, cls), changes=changes)

    @classmethod
    def from_content(cls: type[G], path: Path, content: Config, **inner: Any) -> G:
        """Returns the experiment that the content of a file, with known keys only, describes.

        `inner` has the values of fields that no file has, in place of those that follow from
        `path`.
        """
        inner = {"name": path.stem, "source": path, **inner}
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(cls, skip={f.name for f in fields(cls) if f.metadata})
        if missing := [key for key in ("common", "runs") if content.get(key) is None]:
            raise ConfigError(f"{path}: {missing[0]}: null; the file needs it")
        given = {key: value for key, value in content.items() if value is not None}
        try:
            parsed = parser.parse_object(deepcopy(given))  # it changes lists in place
            # What the classes in configurations stand for is built when a run begins.
            closed = {
                key: value for key, value in vars(parsed).items() if key not in CONFIGURATIONS
            }
            values = vars(parser.instantiate(Namespace(closed)))
            opened = {key: given[key] for key in CONFIGURATIONS if key in given}
            return cls(**values, **opened, **inner)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        except (ArgumentError, ValueError, TypeError) as error:
            known = sorted(vars(parser.get_defaults(skip_validation=True).as_flat()))
            raise ConfigError(f"{path}: {complaint(error, known)}") from error

    def folder(self, command: str, out: Path | None) -> Path:
        """Returns the folder of the runs, which is created; `runs/<command>/<name>` by default.

        Raises:
            ConfigError: The folder cannot be created, or by default holds another file's results.
        """
        folder = out or Path("runs") / command / self.name
        make_folder(folder, f"{command}: --out")
        if out is not None or self.source is None:
            return folder
        # Another file of the same name has the same default.
        shipped = {path.resolve(): name for name, path in files.names(files.shipped()).items()}
        owner = shipped.get(Path(self.source).resolve()) or os.path.relpath(self.source, folder)
        path = folder / OWNER
        if path.is_file():
            before = path.read_text(encoding="utf-8")
        else:
            before = owner
        if before != owner:
            if before in shipped.values():
                known = before
            else:
                known = os.path.normpath(folder / before)
            raise ConfigError(
                f"{command}: {folder} holds the results of {known}; give another folder as --out"
            )
        path.write_text(owner, encoding="utf-8")
        return folder


def read_experiment(path: Path, experiment: type[Grid]) -> Config:
    """Returns the checked content of a file, without dotted keys in `full`."""
    content = files.read(path)
    keys = [f.name for f in fields(experiment) if not f.metadata]
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: it must have the keys {', '.join(keys)}")
    if "runs" not in content and content.keys() & set(OF_FIT):
        raise ConfigError(
            f"{path} is a configuration of `pfl fit`; a comparison has `common`, which can name "
            f"this file, and `runs`"
        )
    if unknown := [str(key) for key in content if key not in keys]:
        hint = closest(unknown[0], keys)
        if unknown[0] in OF_COMMANDS:
            hint = f"; `pfl {unknown[0]}` takes this file"
        raise ConfigError(f"{path}: there is no key {unknown[0]!r}{hint}")
    if isinstance(content.get("common"), str):
        content["common"] = _without_method(path.parent / content["common"], f"{path}: common")
    return content


def _without_method(path: Path, key: str) -> Config:
    """Returns a configuration of `fit` without its seed and the class of its method."""
    if not path.is_file():
        raise ConfigError(f"{key}: {path}: there is no such file")
    config = files.read(path)
    if not (isinstance(config, dict) and config.keys() <= {"seed_everything", *OF_FIT}):
        raise ConfigError(f"{key}: {path} must be a configuration of `pfl fit`")
    config.pop("seed_everything", None)
    if isinstance(config.get("model"), dict):
        config["model"].pop("class_path", None)
    return config


def folder_name(name: str) -> str:
    """Returns a name with what file systems take; runs with equal ones would share a folder."""
    return re.sub(r"[^\w.=+-]+", "-", name)


def _check_names(where: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"{where}: two are called {name!r}; they need names that differ in letters, digits "
                f"or _ . = + - (an axis of the grid is called as the last part of its key)"
            )
        if not name.strip("."):
            raise ConfigError(f"{where}: {name!r} cannot be the name of a folder")
        if where == "grid" and name in COLUMNS:
            raise ConfigError(
                f"grid: an axis called {name!r} would overwrite that column of the tables; give "
                f"its changes by name, under another name"
            )


def _change(where: str, change: Any) -> Config:
    """Returns a change of a configuration without dotted keys."""
    require_value(where, change, isinstance(change, dict), "keys and their values")
    if "seed_everything" in change:
        raise ConfigError(f"{where}.seed_everything: the seeds of all runs stand under seeds")
    return nest(change)


def _axis(key: str, values: Any) -> tuple[str, dict[Any, Config]]:
    """Returns the name of an axis of the grid, and what each of its values changes."""
    where = f"grid.{key}"
    if isinstance(values, list) and values:
        if any(isinstance(value, list | dict) for value in values):
            raise ConfigError(f"{where}: {values!r}; such values need names: give changes by name")
        if len(set(values)) < len(values):
            raise ConfigError(f"{where}: {values!r}; the values must be different")
        return key.rpartition(".")[2], {v: _point(where, {key: v}) for v in values}
    if isinstance(values, dict) and values:
        return key, {v: _point(f"{where}.{v}", change or {}) for v, change in values.items()}
    raise ConfigError(f"{where}: {values!r}; it must be a list of values, or changes by name")


def _point(where: str, change: Any) -> Config:
    """Returns a change of the grid without dotted keys, with `runs` and `without`."""
    content = _change(where, change)
    runs = change.get("runs") or {}
    without = change.get("without", [])
    require_value(f"{where}.runs", runs, isinstance(runs, dict), "keys and their values")
    require_value(f"{where}.without", without, isinstance(without, list), "a list of runs")
    runs = {str(run): _change(f"{where}.runs.{run}", more or {}) for run, more in runs.items()}
    return {**content, "runs": runs, "without": without}


def parse_changes(command: str, options: Sequence[str]) -> list[Config]:
    """Returns what the options `--change KEY=VALUE` of a command change."""
    changes = []
    for option in options:
        key, equals, value = option.partition("=")
        with suppress(yaml.YAMLError):
            changes.append(nest({key: yaml.safe_load(value)}))
            if key and equals:
                continue
        raise ConfigError(f"{command}: --change: {option}; it must be like trainer.max_epochs=2")
    return changes


def nest(content: Config) -> Config:
    """Returns the content with dotted keys taken apart: {"a.b": 1} becomes {"a": {"b": 1}}."""
    result: Config = {}
    for key, value in content.items():
        head, _, rest = str(key).partition(".")
        if rest or isinstance(value, dict):
            value = nest({rest: value} if rest else value)
        if head in result:
            result[head] = merge(result[head], value)
        else:
            result[head] = value
    return result


def merge(base: Any, change: Any) -> Any:
    """Returns `base` with the values of `change`; another class drops the arguments of `base`."""
    if not (isinstance(base, dict) and isinstance(change, dict)):
        return change
    kind = base.get("class_path")
    if kind is not None and not _is_same_class(kind, change.get("class_path", kind)):
        return change
    return {**base, **{k: merge(base[k], v) if k in base else v for k, v in change.items()}}


def _is_same_class(one: Any, other: Any) -> bool:
    """Returns whether two class paths name one class, as FedAvg and pfl.algorithms.FedAvg do."""
    if one == other:
        return True
    parts = [str(path).rpartition(".") for path in (one, other)]
    ours = all(module.partition(".")[0] in OUR_PACKAGES for module, _, _ in parts)
    return ours and parts[0][2] == parts[1][2]
