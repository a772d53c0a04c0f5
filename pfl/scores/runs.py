"""Runs that are read from their folders: rows, results, scores of clients, configurations."""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pfl import files
from pfl.datamodules.files import files_below
from pfl.errors import ConfigError
from pfl.scores.names import (
    Directions,
    ScoreName,
    candidates,
    scores_among,
    signed_score,
    wanted_score,
)
from pfl.scores.table import LOCAL, ScoreTable

Row = dict[str, Any]
BUDGETS = {
    "rounds": ("round",),
    "bytes": ("comm/uplink_bytes", "comm/downlink_bytes"),
    "gradients": ("train/samples",),
    "virtual_seconds": ("virtual_seconds",),
}
"""What a budget may limit: the columns of `metrics.csv` whose sum must not exceed it."""
OUTCOME = "outcome.json"  # what `pfl compare` and `pfl reproduce` record of their runs
REPLACED = ".replaced"  # their folder of runs that have ended, and that others have replaced
OF_A_RUN = ("seed_everything", "ckpt_path")  # keys of a configuration that seeds do not share
OF_A_TRAINER = ("name", "default_root_dir")  # the same in `trainer`, its loggers included
OF_A_SEED = re.compile(r"seed\d+$")


def column_names(rows: Iterable[Row]) -> list[str]:
    """Returns the names of all columns that some row has."""
    return list(dict.fromkeys(name for row in rows for name in row))


def best_round(
    rows: Sequence[Row], metric: str | None = None, metrics: Directions | None = None
) -> Row | None:
    """Returns the row with the best validation score, and that score as `selected_by`.

    The score is the first of `pfl.scores.names.candidates`, perhaps the one called `metric`, that a
    row has. The first of equal rounds wins. None if no round was validated.
    """
    for score in map(str, candidates(column_names(rows), "val", metric)):
        have = [row for row in rows if not math.isnan(row.get(score, math.nan))]
        if have:
            best = max(have, key=lambda row: signed_score(score, row[score], metrics))
            return {"selected_by": score, **best}
    return None


def cost_of(row: Row, what: str) -> float:
    """Returns what a run has spent up to a round's row of one of `BUDGETS`."""
    return float(sum(row.get(name, 0.0) for name in BUDGETS[what]))


@dataclass(frozen=True)
class Run:
    """A run that is read from its folder.

    Attributes:
        label: The name of the method in the comparison.
        seed: The seed of the run.
        folder: The folder of the run.
        point: The run's values on the axes of a grid.
        rows: The rows of `metrics.csv`.
        summary: The content of `summary.json`; empty if the run diverged in its first round.
        scores: Every client's scores by round, if the run has recorded them.
        local: The same of the local baseline, in the rounds that are compared with it.
        diverged: Whether the models were no longer finite.
    """

    label: str
    seed: int
    folder: Path
    point: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    summary: Row = field(default_factory=dict)
    scores: ScoreTable | None = None
    local: ScoreTable | None = None
    diverged: bool = False

    @classmethod
    def read(
        cls, label: str, seed: int, folder: Path, *, unfinished: bool = False, **known: Any
    ) -> Run:
        """Returns the run in a folder; `point` and `diverged`, which no file has, may be `known`.

        Raises:
            ConfigError: A file of the run is damaged, or the run has not ended and must have.
        """
        if not (unfinished or known.get("diverged") or (folder / "summary.json").is_file()):
            raise ConfigError(
                f"compare: {folder} has no summary.json; it must be the folder of a run that has "
                f"ended"
            )
        known |= {"rows": _rows(folder / "metrics.csv"), "summary": _summary(folder)}
        if known["summary"].get("finished") and not (folder / "clients.csv").is_file():
            raise ConfigError(f"{folder} has no clients.csv; restore it, or leave its run out")
        known |= {"scores": ScoreTable.read(folder), "local": ScoreTable.read(folder, LOCAL)}
        return cls(label, seed, folder, **known)

    @property
    def finished(self) -> bool:
        """Whether the run has ended as it was meant to."""
        return bool(self.summary.get("finished", False))

    @property
    def metrics(self) -> Directions:
        """For each metric beside accuracy and loss whether large values are good."""
        return self.summary.get("higher_is_better") or {}

    def finetuning_samples(self, model: str | None) -> float:
        """Returns the sample gradients of every client's fine-tuning, once, to a kind of model.

        0 for models that are not fine-tuned, such as "global"; see `RunRecorder`.
        """
        kind, _, steps = (model or "").partition("/")
        if kind != "finetuned":
            return 0.0
        return float(self.summary.get("finetuning_samples", {}).get(steps, 0.0))

    def shares_partition(self, other: Run) -> bool | None:
        """Returns whether two runs have the same partition; None if a run has not recorded it."""
        one, two = (run.summary.get("partition_hash") for run in (self, other))
        if None in (one, two):
            return None
        return one == two

    def within(self, budget: tuple[str, float] | None) -> list[Row]:
        """Returns the rows of rounds that a budget, one of `BUDGETS` and its limit, allows."""
        if budget is None:
            return self.rows
        return [row for row in self.rows if cost_of(row, budget[0]) <= budget[1]]

    def selected(
        self, budget: tuple[str, float] | None = None, metric: str | None = None
    ) -> Row | None:
        """Returns the row of the round that counts: the best by validation, else the last.

        None if the run diverged, or has no evaluated round within the budget.
        """
        rows = [row for row in self.within(budget) if scores_among(row, "test")]
        if self.diverged or not rows:
            return None
        return self.best_round(rows, metric) or rows[-1]

    def best_round(self, rows: Sequence[Row], metric: str | None = None) -> Row | None:
        """Returns the best of some rows by validation, with `selected_by`; None without any score.

        Without a `metric`, or without a model in it, the run's own `loop.select_by` counts.
        """
        wanted = wanted_score(metric, self.summary.get("select_by"))
        return best_round(rows, wanted, self.metrics)

    def client_scores(self, row: Row, name: ScoreName) -> np.ndarray | None:
        """Returns the clients' scores [M] in a round; None if the run has not recorded them."""
        if name.model == "local":
            table = self.local
        else:
            table = self.scores
        if table is not None and not table.percentiles:
            return table.of(int(row["round"]), name)
        if not self.rows or row["round"] != self.rows[-1]["round"]:
            return None
        return self.clients.get(str(name))

    @cached_property
    def clients(self) -> dict[str, np.ndarray]:
        """The columns of `clients.csv` [M], text or float64; none before the end."""
        path = self.folder / "clients.csv"
        table = self.scores
        with files.reading(path):
            if not path.is_file():
                return {}
            text = path.read_text(encoding="utf-8")
            names, *rows = list(csv.reader(io.StringIO(text))) or [[]]
            if not rows or not text.endswith("\n"):
                raise ValueError("its end is missing")
            if table is not None and table.names and not table.percentiles:
                clients = table.values(table.names[0]).shape[1]
                if len(rows) != clients:
                    raise ValueError(f"it has {len(rows)} rows, client_scores.npy {clients}")
            columns = dict(zip(names, zip(*rows, strict=True), strict=True))
            if columns.get("client") not in (None, tuple(map(str, range(len(rows))))):
                raise ValueError("its clients are not 0, 1, 2 and so on, in this order")
            numbers = {
                k: np.array([v or "nan" for v in values], np.float64)
                for k, values in columns.items()
                if k != "name"
            }
            return {k: numbers.get(k, np.array(values)) for k, values in columns.items()}


def _summary(folder: Path) -> Row:
    """Returns the content of `summary.json`, whose values that are read have the right types."""
    types: dict[str, Any] = {"seed": int, "select_by": str, "wall_seconds": int | float}
    types |= {"higher_is_better": dict, "versions": dict, "finetuning_samples": dict}
    path = folder / "summary.json"
    with files.reading(path):
        content = files.read_json(path)
        for key, kind in types.items():
            if content.get(key) is not None and not isinstance(content[key], kind):
                raise ValueError(f"{key}: {content[key]!r}")
        return content


def _rows(path: Path) -> list[Row]:
    if not path.is_file():
        return []
    with files.reading(path):
        records = files.read_records(path)
        rows = [{k: float(v) for k, v in row.items() if v} for row in records]
        if not all(math.isfinite(row.get("round", math.nan)) for row in rows):
            raise ValueError("a row without a round")
        return rows


# ---- folders -------------------------------------------------------------------------------------


def find_runs(folders: Sequence[Path], command: str) -> list[Path]:
    """Returns the folders of runs among folders and below them, in the order of their names.

    Links to folders are followed, and a run that is found twice counts once. Runs that another run
    has replaced, in a folder `.replaced`, count if that one is given.

    Raises:
        ConfigError: A folder does not exist, or holds no run; the line begins with the `command`.
    """
    found: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(
                f"{command}: {folder} is not a folder; it must be the folder of a run"
            )
        below = sorted(p for p in files_below(folder) if p.name in ("metrics.csv", OUTCOME))
        below = [path for path in below if REPLACED not in path.relative_to(folder).parts]
        here = [path.parent for path in below if path.name == OUTCOME or _is_ours(path)]
        if not here:
            raise ConfigError(
                f"{command}: {folder} has no metrics.csv; it must be the folder of a run, after "
                f"its first round"
            )
        for run in here:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def _is_ours(metrics: Path) -> bool:
    """Whether a `metrics.csv` is a run's, and not the file of a logger in the run's folder."""
    with files.reading(metrics), metrics.open(encoding="utf-8") as file:
        return file.readline().partition(",")[0].strip() == "round"


def read_runs(folders: Sequence[Path], *, unfinished: bool = False) -> list[Run]:
    """Returns the runs in folders; runs that differ in their seed only have the same label.

    The label is the name of the method, or the path of the folder, as far as the folders differ, if
    two configurations have the same method.

    Raises:
        ConfigError: A file of a run is damaged, or a run has not ended, unless `unfinished`.
    """
    runs = []
    keys = []
    for place, folder in zip(_short_names(folders), folders, strict=True):
        outcome = files.read_json(folder / OUTCOME)  # what a comparison has recorded of the run
        diverged = outcome.get("status") == "diverged"
        run = Run.read(place, 0, folder, unfinished=unfinished, diverged=diverged)
        text = config_of(folder)
        with files.reading(folder / "config.yaml"):
            config = yaml.safe_load(text) or {}
            if not isinstance(config, dict):
                raise ValueError("it must be a mapping")
            known = run.summary.get("seed")
            model = config.get("model") or {}
            if known is None:
                seed = config.get("seed_everything", 0)
            else:
                seed = known
            name = run.summary.get("algorithm") or model.get("class_path") or folder.name
            runs.append(replace(run, seed=int(seed)))
        # The name that an experiment has given the run, or else that of its method.
        method = str(outcome.get("label") or str(name).rpartition(".")[2])
        keys.append((method, _without_seed(config) if config else str(folder)))
    first = {key: run.label for key, run in reversed(list(zip(keys, runs, strict=True)))}
    methods = [method for method, _ in first]
    return [
        replace(run, label=key[0] if methods.count(key[0]) == 1 else first[key])
        for run, key in zip(runs, keys, strict=True)
    ]


def _without_seed(config: dict[str, Any]) -> str:
    """Returns a text that configurations share that differ in their seed and their folder only."""
    rest = {key: value for key, value in config.items() if key not in OF_A_RUN}
    return repr({**rest, "trainer": _without_names(rest.get("trainer"))})


def _without_names(value: Any) -> Any:
    """Returns a part of `trainer` without the keys `OF_A_TRAINER`, at any depth."""
    if isinstance(value, dict):
        kept = {key: one for key, one in value.items() if key not in OF_A_TRAINER}
        return {key: _without_names(one) for key, one in kept.items()}
    if isinstance(value, list):
        return [_without_names(one) for one in value]
    return value


def config_of(folder: Path) -> str:
    """Returns the text of a run's configuration; empty if a program, not a file, described it."""
    path = folder / "config.yaml"
    with files.reading(path):
        if path.is_file():
            return path.read_text(encoding="utf-8")
        return ""


def _short_names(folders: Sequence[Path]) -> list[str]:
    """Returns the folders' paths below their common folder, without `seed0` at the end."""
    paths = [folder.resolve() for folder in folders]
    paths = [path.parent if OF_A_SEED.match(path.name) else path for path in paths]
    common = Path(os.path.commonpath(paths))
    return [path.name if path == common else str(path.relative_to(common)) for path in paths]
