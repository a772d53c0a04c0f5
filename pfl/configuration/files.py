"""Configurations: those that come with pfl, found by name, and what their files hold."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from textwrap import shorten
from typing import Any

import yaml

import pfl
from pfl.configuration.keys import closest
from pfl.errors import ConfigError

CONFIG = ("--config", "-c")
# Files of other commands than `fit`.
OTHERS = ("papers/", "compare/", "tune/", "sweep/", "results/")


def shipped() -> Path:
    """Returns the folder of the configurations that come with pfl."""
    in_wheel = Path(str(files("pfl"))) / "configs"
    in_checkout = Path(pfl.__file__).parents[1] / "configs"
    if in_wheel.is_dir():
        return in_wheel
    return in_checkout


def names(folder: Path) -> dict[str, Path]:
    """Returns the configurations in a folder, by names such as `quickstart`, `logger/wandb`."""
    paths = sorted(folder.rglob("*.yaml"))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in paths}


def find(name: str) -> Path | None:
    """Returns the file `name`, else the one that comes with pfl under this name, else None.

    The name may have a folder `configs/` before it and `.yaml` after it.
    """
    if Path(name).is_file():
        return Path(name)
    return names(shipped()).get(name.removeprefix("configs/").removesuffix(".yaml"))


def find_run(name: str) -> str:
    """Returns the file of a configuration of `fit`; text and addresses are returned as they are."""
    if "://" in name or "{" in name:  # jsonargparse reads these, too
        return name
    path = find(name)
    if path is None:
        known = [key for key in names(shipped()) if not key.startswith(OTHERS)]
        raise ConfigError(f"config: {name}: there is no such file{closest(name, known)}")
    return str(path)


class _Loader(yaml.SafeLoader):
    """Reads `<<` as YAML has it: PyYAML 6.0.4 forgets values of one-letter keys, such as `y`.

    It knows merged keys by their identity, and one-letter strings are the same object everywhere.
    """

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        merged = []
        own = []
        for key, value in node.value:
            if key.tag != "tag:yaml.org,2002:merge":
                own.append((key, value))
                continue
            parts = [value]
            if isinstance(value, yaml.SequenceNode):
                parts = value.value
            if not all(isinstance(part, yaml.MappingNode) for part in parts):
                raise yaml.MarkedYAMLError(problem="<< needs keys", problem_mark=value.start_mark)
            for part in reversed(parts):
                self.flatten_mapping(part)
                merged += part.value
        node.value = merged + own


def read(path: Path) -> Any:
    """Returns the content of a YAML file; no key is double, and no alias stands in itself."""
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if node is None:
            return None
        _check(node, path, {})
        return loader.construct_document(node)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error


def _check(node: yaml.Node, path: Path, seen: dict[int, bool]) -> None:
    """Checks a part of a file, once: `seen` has by identity whether a part is checked."""
    line = f"{path}: line {node.start_mark.line + 1}"
    if not seen.setdefault(id(node), False) and isinstance(node, yaml.CollectionNode):
        keys: set[str] = set()
        is_mapping = isinstance(node, yaml.MappingNode)
        for entry in node.value:
            key = ""
            parts = (entry,)
            if is_mapping:
                key = entry[0].value
                parts = entry
            for inner in parts:
                if seen.get(id(inner)) is False:
                    raise ConfigError(f"{line}: an alias in this value stands for the value itself")
                if id(inner) not in seen:
                    _check(inner, path, seen)
            if isinstance(key, str) and key in keys and key != "<<":
                where = f"{path}: line {entry[0].start_mark.line + 1}"
                raise ConfigError(f"{where}: {key}: the key is there twice; it must be there once")
            if is_mapping and isinstance(key, str):
                keys.add(key)
    elif isinstance(node.value, str) and "\0" in node.value:
        raise ConfigError(f"{line}: {node.value!r}; it must be without the character NUL")
    seen[id(node)] = True


def callbacks_of(trainer: Mapping[str, Any]) -> list[Any]:
    """Returns the callbacks in the part `trainer` of a configuration, which may be a single one."""
    callbacks = trainer.get("callbacks") or []
    if isinstance(callbacks, list):
        return callbacks
    return [callbacks]


def find_configs(args: list[str]) -> list[str]:
    """Returns the command line with the path of each configuration, checked, in place of its name.

    The parser names neither the file nor the line of a mistake in YAML.
    """
    words: list[str] = []
    for arg in args:
        if arg.startswith(tuple(f"{key}=" for key in CONFIG)):
            words += arg.split("=", 1)
        else:
            words.append(arg)
    for index, (key, name) in enumerate(pairwise(words), 1):
        if key not in CONFIG:
            continue
        words[index] = path = find_run(name)
        if not Path(path).is_file():
            continue
        try:
            content = read(Path(path))
        except ConfigError as error:
            raise ConfigError(f"config: {error}") from error
        if not isinstance(content, dict):
            value = shorten(repr(content), 60)
            raise ConfigError(f"config: {path}: {value}; it must have keys: model, data, ...")
        if {"common", "base"} & content.keys():
            raise ConfigError(
                f"config: {path} describes many runs; use `pfl compare`, or `pfl reproduce` for a "
                f"figure or table of a paper"
            )
        check_groups(content)
    return words


def check_groups(content: Any, kind: type = dict) -> None:
    """Refuses a group without options, that is not a `kind`: it would stand for the defaults."""
    for key in ("trainer", "loop"):
        group = content.get(key, kind())
        if not isinstance(group, dict | kind):
            value = shorten(repr(group), 60)
            if group is None:
                value = "null"
            raise ConfigError(f"{key}: {value}; it must hold options, or be left out")
