"""The language of a file that describes many runs: configurations x a grid x seeds.

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
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from pfl.cli.configs import read as read_yaml
from pfl.errors import ConfigError

Config = dict[str, Any]
NAMES: dict[type, str] = {dict: "mapping", list: "list", str: "name"}
CHANGE: dict[str, Any] = {  # the option `--change` of a command
    "action": "append",
    "default": [],
    "metavar": "KEY=VALUE",
    "help": "changes every run, such as trainer.max_epochs=2; can be repeated",
}
CONFIG_KEYS = ("seed_everything", "trainer", "model", "data", "loop")  # of a configuration of `fit`
OF_A_CHANGE = ("runs", "without")  # keys of a change of the grid that are not of a configuration


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
        """The folder of the run, relative to that of the figure."""
        return Path(*map(_of_a_file, self._place()), f"seed{self.seed}")

    def changed(self, changes: Sequence[Config]) -> Job:
        """Returns the job with further changes of its configuration."""
        return replace(self, config=functools.reduce(merge, changes, self.config))

    def _place(self) -> list[str]:
        return [self.run, *(f"{k}={v}" for k, v in self.axes.items())]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The runs of a file.

    Attributes:
        seeds: The seeds of every run.
        common: The configuration of `fit` that all runs change.
        runs: What each run changes in it.
        grid: For each axis of the grid, by value, what that value changes.
    """

    seeds: list[int]
    common: Config
    runs: dict[str, Config]
    grid: dict[str, dict[str, Config]]

    def jobs(self) -> list[Job]:
        """Returns all runs, in the order of the file."""
        points = list(itertools.product(*(values.items() for values in self.grid.values())))
        return [
            self._job(run, point, seed)
            for run, point, seed in itertools.product(self.runs, points, self.seeds)
            if not any(run in change["without"] for _, change in point)
        ]

    def _job(self, run: str, point: tuple[tuple[str, Config], ...], seed: int) -> Job:
        config = merge(self.common, self.runs[run])
        for _, change in point:
            config = merge(config, {k: v for k, v in change.items() if k not in OF_A_CHANGE})
            config = merge(config, change["runs"].get(run, {}))
        axes = dict(zip(self.grid, (value for value, _ in point), strict=True))
        return Job(run, axes, seed, {**config, "seed_everything": seed})


def load(path: Path, keys: Collection[str], kinds: Mapping[str, type]) -> Config:
    """Returns the checked content of a file, without dotted keys; see `read`."""
    return normal(read(path, keys, kinds))


def read(path: Path, keys: Collection[str], kinds: Mapping[str, type]) -> Config:
    """Returns the checked content of a file.

    Args:
        path: The file.
        keys: The keys that the file may have.
        kinds: The types of some of their values.
    """
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: it must have the keys {', '.join(keys)}")
    if unknown := [key for key in content if key not in keys]:
        raise ConfigError(f"{path}: there is no key {unknown[0]!r}; known are {', '.join(keys)}")
    if isinstance(content.get("common"), str):
        content["common"] = _without_method(path.parent / content["common"], f"{path}: common")
    for key, kind in kinds.items():
        value = content.get(key)
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"{path}: {key}: {value!r}; it must be a {NAMES[kind]}")
    return content


def _without_method(path: Path, key: str) -> Config:
    """Returns a configuration of `fit` without the class of its method, which each run names."""
    if not path.is_file():
        raise ConfigError(f"{key}: {path}: there is no such file")
    config = load(path, CONFIG_KEYS, {"model": dict})
    if "model" in config:
        config["model"] = {k: v for k, v in config["model"].items() if k != "class_path"}
    return config


def normal(content: Config) -> Config:
    """Returns the content with dotted keys taken apart, ready for `merge`."""
    result = dict(content)
    for key, take_apart in (("common", nest), ("runs", _each_run), ("full", normal)):
        if isinstance(content.get(key), dict):
            result[key] = take_apart(content[key])
    return result


def read_grid(name: str, content: Config) -> Grid:
    """Returns the runs that the content of a file describes.

    Args:
        name: The name of the file, for errors.
        content: The content without dotted keys.

    Raises:
        ConfigError: A key has a value that does not fit.
    """
    for key in ("common", "runs"):
        if not isinstance(content.get(key), dict) or not content[key]:
            raise ConfigError(f"{name}: {key}: {content.get(key)!r}; the file needs some")
    axes = [_axis(name, *item) for item in (content.get("grid") or {}).items()]
    grid, common, runs = dict(axes), content["common"], content["runs"]
    _check_distinct(f"{name}: grid", [axis for axis, _ in axes])
    for where, names in {"runs": runs, **{f"grid.{k}": v for k, v in grid.items()}}.items():
        _check_distinct(f"{name}: {where}", [_of_a_file(str(each)) for each in names])
    named = {
        run
        for values in grid.values()
        for change in values.values()
        for run in (*change["runs"], *change["without"])
    }
    if unknown := sorted(named - runs.keys()):
        raise ConfigError(
            f"{name}: grid: there is no run {unknown[0]!r}; known are {', '.join(runs)}"
        )
    return Grid(seeds=_seeds(name, content.get("seeds", 1)), common=common, runs=runs, grid=grid)


def _of_a_file(name: str) -> str:
    """Returns a name with what file systems take; runs with equal ones would share a folder."""
    return re.sub(r"[^\w.=+-]+", "-", name)


def _check_distinct(where: str, names: Sequence[str]) -> None:
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            f"{where}: two are called {twice[0]!r}; they need names that differ in letters, digits "
            f"or _ . = + - (an axis of the grid is called as the last part of its key)"
        )


def _seeds(name: str, given: Any) -> list[int]:
    seeds = list(range(given)) if type(given) is int else given
    whole = isinstance(seeds, list) and all(type(seed) is int and seed >= 0 for seed in seeds)
    if not (whole and seeds and len(set(seeds)) == len(seeds)):
        raise ConfigError(
            f"{name}: seeds: {given!r}; it must be their number, at least 1, or a list of "
            f"different whole numbers"
        )
    return seeds


def _each_run(runs: Config) -> Config:
    for name, change in runs.items():
        _check_change(f"runs.{name}", change or {})
    return {str(name): nest(change or {}) for name, change in runs.items()}


def _check_change(where: str, change: Any) -> None:
    if not isinstance(change, dict):
        raise ConfigError(f"{where}: {change!r}; it must be keys and their values")


def _axis(figure: str, key: str, values: Any) -> tuple[str, dict[Any, Config]]:
    """Returns the name of an axis of the grid, and what each of its values changes."""
    if isinstance(values, list) and values:
        if any(isinstance(value, list | dict) for value in values):
            raise ConfigError(
                f"{figure}: grid.{key}: {values!r}; such values need names: give changes by name"
            )
        return key.rpartition(".")[2], {v: _of_axis({key: v}) for v in values}
    if isinstance(values, dict) and values:
        changes = {value: change or {} for value, change in values.items()}
        for value, change in changes.items():
            _check_change(f"{figure}: grid.{key}.{value}", change)
            _check_change(f"{figure}: grid.{key}.{value}.runs", change.get("runs") or {})
            without = change.get("without", [])
            if not isinstance(without, list):
                raise ConfigError(
                    f"{figure}: grid.{key}.{value}.without: {without!r}; it must be a list of runs"
                )
        return key, {value: _of_axis(change) for value, change in changes.items()}
    raise ConfigError(
        f"{figure}: grid.{key}: {values!r}; it must be a list of values, or changes by name"
    )


def _of_axis(change: Config) -> Config:
    """Returns a checked change of the grid without dotted keys."""
    runs, without = _each_run(change.get("runs") or {}), change.get("without", [])
    return {**nest(change), "runs": runs, "without": without}


def changes_of(command: str, options: Sequence[str]) -> list[Config]:
    """Returns what the options `--change KEY=VALUE` of a command change."""
    changes = []
    for option in options:
        key, equals, value = option.partition("=")
        try:
            changes.append(nest({key: yaml.safe_load(value)}))
        except yaml.YAMLError:
            equals = ""
        if not (key and equals):
            raise ConfigError(
                f"{command}: --change: {option}; it must be like trainer.max_epochs=2"
            )
    return changes


def nest(content: Config) -> Config:
    """Returns the content with dotted keys taken apart: {"a.b": 1} becomes {"a": {"b": 1}}."""
    result: Config = {}
    for key, value in content.items():
        head, _, rest = str(key).partition(".")
        value = nest({rest: value} if rest else value) if rest or isinstance(value, dict) else value
        result[head] = merge(result[head], value) if head in result else value
    return result


def merge(base: Any, change: Any) -> Any:
    """Returns `base` with the values of `change`; another class drops the arguments of `base`."""
    if not (isinstance(base, dict) and isinstance(change, dict)):
        return change
    if "class_path" in base and change.get("class_path", base["class_path"]) != base["class_path"]:
        return change
    return {**base, **{k: merge(base[k], v) if k in base else v for k, v in change.items()}}
