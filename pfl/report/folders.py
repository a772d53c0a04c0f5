"""Runs found in folders, each with the name of its method."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from pfl.errors import ConfigError
from pfl.report.results import Run

OF_A_RUN = re.compile(r"(?m)^(seed_everything|ckpt_path|\s+name|\s+default_root_dir):.*\n")
OUTCOME = "outcome.json"  # what `pfl compare` and `pfl reproduce` record of their runs
OF_A_SEED = re.compile(r"seed\d+$")


def find_runs(folders: Sequence[Path], command: str) -> list[Path]:
    """Returns the folders of runs among folders and below them, in the order of their names.

    Args:
        folders: Folders of runs, or folders that hold such folders.
        command: The command, for errors.

    Raises:
        ConfigError: A folder does not exist, or holds no run.
    """
    found: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{command}: {folder} is no folder; it must be the folder of a run")
        below = sorted(p for name in ("metrics.csv", OUTCOME) for p in folder.rglob(name))
        here = {path.parent: None for path in below if path.name == OUTCOME or _is_ours(path)}
        if not here:
            raise ConfigError(
                f"{command}: {folder} has no metrics.csv; it must be the folder of a run, after "
                f"its first round"
            )
        found |= here
    return list(found)


def _is_ours(metrics: Path) -> bool:
    """Whether a `metrics.csv` is a run's, and not the file of a logger in the run's folder."""
    with metrics.open() as file:
        return file.readline().partition(",")[0].strip() == "round"


def read_runs(folders: Sequence[Path], *, unfinished: bool = False) -> list[Run]:
    """Returns the runs in folders; runs that differ in their seed only have the same label.

    The label is the name of the method, or the path of the folder, as far as the folders differ, if
    two configurations have the same method.

    Args:
        folders: The folders of runs.
        unfinished: Allows runs that have not ended.
    """
    names = _short_names(folders)
    known = [
        {"unfinished": unfinished, "diverged": outcome_of(folder).get("status") == "diverged"}
        for folder in folders
    ]
    runs = [
        Run.read(name, 0, folder, **more)
        for name, folder, more in zip(names, folders, known, strict=True)
    ]
    configs = [config_of(folder) for folder in folders]
    keys = [
        (_label(run, yaml.safe_load(config) or {}), OF_A_RUN.sub("", config) or str(run.folder))
        for run, config in zip(runs, configs, strict=True)
    ]
    first = {key: run.label for key, run in reversed(list(zip(keys, runs, strict=True)))}
    common = [name for name, _ in first]
    result = []
    for run, key, config in zip(runs, keys, configs, strict=True):
        label = key[0] if common.count(key[0]) == 1 else first[key]
        result.append(replace(run, label=label, seed=_seed(run, config)))
    return result


def outcome_of(folder: Path) -> dict[str, Any]:
    """Returns what a comparison has recorded of a run in its folder; empty before the run's end."""
    path = folder / OUTCOME
    return json.loads(path.read_text()) if path.is_file() else {}


def config_of(folder: Path) -> str:
    """Returns the text of a run's configuration; empty if a program, not a file, described it."""
    path = folder / "config.yaml"
    return path.read_text() if path.is_file() else ""


def _short_names(folders: Sequence[Path]) -> list[str]:
    """Returns the folders' paths below their common folder, without `seed0` at the end."""
    paths = [folder.resolve() for folder in folders]
    paths = [path.parent if OF_A_SEED.match(path.name) else path for path in paths]
    common = Path(os.path.commonpath(paths))
    return [path.name if path == common else str(path.relative_to(common)) for path in paths]


def _label(run: Run, config: dict[str, Any]) -> str:
    """Returns the name that an experiment has given a run, or else that of its method."""
    if label := outcome_of(run.folder).get("label"):
        return str(label)
    model = config.get("model") or {}
    name = run.summary.get("algorithm") or model.get("class_path") or run.folder.name
    return str(name).rpartition(".")[2]


def _seed(run: Run, config: str) -> int:
    known = run.summary.get("seed")
    return int((yaml.safe_load(config) or {}).get("seed_everything", 0) if known is None else known)
