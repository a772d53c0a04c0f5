"""`pfl tune`: the same number of trials for every method, selected on validation data."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from pfl import files
from pfl.callbacks.pruning import PRUNED, check_validated, open_study, trial_of
from pfl.cli import configs
from pfl.cli.compare import KEYS, KINDS, ComparisonFile, comparison_of
from pfl.cli.grid import CHANGE, Config, Job, changes_of, merge, nest, normal, read
from pfl.cli.jobs import check, code_version, execute, side_by_side, spread
from pfl.cli.parser import CommandParser, at_least_one
from pfl.cli.spaces import Space, read_space, spread_evenly, suggest
from pfl.errors import ConfigError
from pfl.report.table import Cell, Table, markdown, text
from pfl.scores.names import signed
from pfl.scores.runs import Run, best_round

if TYPE_CHECKING:
    from optuna import Study, Trial

OF_TUNE = {"trials": 20, "space": {}, "seed": 0, "prune_after": None, "metric": None}
EVENLY = 10  # so many trials cover the space evenly, before the sampler learns from them
PRUNING = "pfl.callbacks.pruning.Pruning"


@dataclass(frozen=True, kw_only=True)
class TuneFile:
    """The content of a file that `pfl tune` reads.

    Attributes:
        comparison: The comparison that the file describes.
        content: The content of that comparison, without dotted keys.
        spaces: For each run, what is tried: by dotted key.
        trials: Number of trials of each run.
        seed: The seed of every trial, and of the order of trials.
        prune_after: Number of rounds before which no trial is ended early; None: none ever is.
        metric: The score that selects, as in `best_round`.
    """

    comparison: ComparisonFile
    content: Config
    spaces: dict[str, dict[str, Space]]
    trials: int
    seed: int
    prune_after: int | None
    metric: str | None

    def jobs(self) -> list[Job]:
        """Returns each run at each point of the grid, with the seed of the trials."""
        jobs = replace(self.comparison.grid, seeds=[self.seed]).jobs()
        return [job.changed(self.comparison.changes) for job in jobs]


def read_tune(path: Path, changes: Sequence[Config] = ()) -> TuneFile:
    """Reads a file of `pfl compare` that has, besides, `tune`, and `space` in runs.

        tune:
          trials: 20             # of each run
          space:                 # of all runs; a run's own `space` adds to it
            model.init_args.lr: {low: 0.001, high: 1.0, log: true}
            model.init_args.local_epochs: [1, 2, 5]
          seed: 0                # of every trial
          prune_after: 10        # rounds before which no trial is ended early; by default none is
          metric: val/global/accuracy    # by default the comparison's

    Every run is tuned at each value of the grid by itself; the grid has one axis at most.

    Raises:
        ConfigError: The file has a mistake.
    """
    content = read(path, [*KEYS, "tune"], {**KINDS, "tune": dict, "runs": dict})
    tune = content.pop("tune", None) or {}
    if unknown := [key for key in tune if key not in OF_TUNE]:
        known = ", ".join(OF_TUNE)
        raise ConfigError(f"{path}: tune: there is no key {unknown[0]!r}; known are {known}")
    if len(axes := list(content.get("grid") or {})) > 1:
        raise ConfigError(f"{path}: grid: {', '.join(axes)}; it must have one axis")
    given = {**OF_TUNE, **tune}
    for key, least in (("trials", 1), ("seed", 0), ("prune_after", 0)):
        if given[key] is None and OF_TUNE[key] is None:
            continue
        if type(given[key]) is not int or given[key] < least:
            raise ConfigError(
                f"{path}: tune.{key}: {given[key]!r}; it must be a whole number, at least {least}"
            )
    metric = given["metric"]
    if metric is not None and str(metric).startswith("test/"):
        raise ConfigError(
            f"{path}: tune.metric: {metric!r}; it must be a score on validation data, such as "
            f"val/global/accuracy"
        )
    runs = {str(run): dict(change or {}) for run, change in (content.get("runs") or {}).items()}
    common = read_space(f"{path}: tune.space", given.pop("space"))
    spaces = {
        run: {**common, **read_space(f"{path}: runs.{run}.space", change.pop("space", None) or {})}
        for run, change in runs.items()
    }
    if empty := [run for run, space in spaces.items() if not space]:
        raise ConfigError(f"{path}: tune.space: it is empty for {empty[0]}; give it keys to try")
    content = normal({**content, "runs": runs})
    comparison = comparison_of(str(path), path.stem, content, changes)
    given["metric"] = metric or comparison.metric
    return TuneFile(comparison=comparison, content=content, spaces=spaces, **given)


# ---- trials --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tuned:
    """What the trials of a run have found and cost.

    Attributes:
        job: The run at a point of the grid.
        best: The values of the best trial, by dotted key.
        score: The best trial's validation score.
        metric: The name of that score.
        records: A row for each trial.
    """

    job: Job
    best: Config
    score: float
    metric: str
    records: list[Config]

    def spent(self) -> dict[str, int]:
        """Returns the numbers of trials, and their rounds, sample gradients and seconds."""
        names = ("rounds", "gradients", "seconds")
        sums = {name: round(sum(record[name] for record in self.records)) for name in names}
        return {"trials": len(self.records), **sums}


def tune_run(job: Job, file: TuneFile, root: Path) -> Tuned:
    """Makes the trials of a run that have not been made, and returns the best of all.

    A trial that was interrupted goes on. The sampler's draws are a function of the file's seed and
    the trial's number, so that an interrupted search ends like one that was not.

    Args:
        job: The run at a point of the grid, of `TuneFile.jobs`.
        file: The content of the file.
        root: The folder of all trials.

    Raises:
        ConfigError: All trials have diverged, or the clients have no validation samples.
    """
    from optuna.samplers import TPESampler
    from optuna.trial import TrialState

    spaces, place = file.spaces[job.run], ", ".join([job.run, *map(str, job.axes.values())])
    folder = root / job.folder.parent
    storage = str(folder / "optuna.journal")
    settings = [job.config, spaces, file.prune_after, file.metric, file.comparison.budget]
    code = code_version(json.dumps(job.config))
    digest = hashlib.sha256(json.dumps([settings, code], default=str).encode()).hexdigest()
    name = f"study-{digest[:16]}"  # YAML reads some digests, such as 12e34, as numbers
    study = open_study(storage, name, file.prune_after)
    first = spread_evenly(spaces, EVENLY, file.seed)
    records = []
    for number in range(file.trials):
        study.sampler = TPESampler(seed=_seed(file.seed, number))
        known = study.get_trials(deepcopy=False)
        if number == len(known) and number < EVENLY:
            study.enqueue_trial(first[number])
        begun = number < len(known) and known[number].state != TrialState.WAITING
        trial = trial_of(study, storage, number) if begun else study.ask()
        values = {key: suggest(trial, key, space) for key, space in spaces.items()}
        record = _trial(study, trial, job, values, file, storage, folder)
        records.append({"method": job.run, **job.axes, "trial": number, **record, **values})
        shown = ", ".join(f"{key.rpartition('.')[2]} {_short(v)}" for key, v in values.items())
        score = f"{record['score']:.4f}" if record["score"] is not None else "–"
        line = f"{place}, trial {number + 1}/{file.trials}: {score} ({record['state']}; {shown})"
        print(line, flush=True)
    values_told = [trial.value for trial in study.get_trials(deepcopy=False)]
    best = _best(place, records, values_told)
    return Tuned(
        job, {key: best[key] for key in spaces}, best["score"], best["selected_by"], records
    )


def _seed(seed: int, number: int) -> int:
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def _trial(
    study: Study,
    trial: Trial,
    job: Job,
    values: Config,
    file: TuneFile,
    storage: str,
    folder: Path,
) -> Config:
    """Runs a trial, unless it has ended, and returns its record."""
    from optuna.trial import TrialState

    pruning = {"storage": storage, "study": study.study_name, "trial": trial.number}
    budget = file.comparison.budget
    pruning |= {"after": file.prune_after, "metric": file.metric}
    pruning |= {"budget": budget and list(budget)}
    config = job.changed([nest(values)]).config
    callbacks = config.get("trainer", {}).get("callbacks") or []
    callbacks = [*callbacks, {"class_path": PRUNING, "init_args": pruning}]
    config = merge(config, {"trainer": {"callbacks": callbacks}})
    one = Job(f"trial{trial.number}", {}, file.seed, config)
    outcome = execute(one, folder, checkpoints=True)
    run = Run.read(job.run, file.seed, folder / one.folder, unfinished=True)
    best = best_round(run.within(budget), file.metric, run.metrics)
    diverged = outcome["status"] == "diverged"
    if best is None and not diverged:
        check_validated(run.rows[-1] if run.rows else {}, file.metric)
    record: Config = {
        "state": "diverged" if diverged else "finished",
        "score": None,
        "selected_by": best and best["selected_by"],
        "rounds": run.rows[-1]["round"] if run.rows else 0,
        "gradients": run.rows[-1].get("train/samples", 0.0) if run.rows else 0.0,
        "seconds": outcome["seconds"],
    }
    known = study.get_trials(deepcopy=False)[trial.number]
    if PRUNED in known.user_attrs:
        record["state"] = "pruned"
    if best is not None and not diverged:
        record["score"] = best[best["selected_by"]]
    if not known.state.is_finished():
        if record["state"] == "finished" and best is not None:
            study.tell(trial, signed(best["selected_by"], record["score"], run.metrics))
        else:
            study.tell(trial, state=TrialState.PRUNED)
    return record


def _best(place: str, records: Sequence[Config], told: Sequence[float | None]) -> Config:
    """Returns the record with the best score, as told to Optuna, of a trial that ran to its end."""
    done = [
        (value, record)
        for value, record in zip(told, records, strict=False)  # a trial may be queued
        if record["state"] == "finished" and value is not None
    ]
    if not done:
        raise ConfigError(
            f"tune: no trial of {place} has ended without diverging; change its space"
        )
    return max(done, key=lambda pair: pair[0])[1]


# ---- what comes out ------------------------------------------------------------------------------


def table(tuned: Sequence[Tuned]) -> Table:
    """Returns a row for each run: the best values, their score, and what was spent."""
    axes, costs = list(tuned[0].job.axes), ("rounds", "gradients", "seconds")
    head = ["method", *axes, "best values", "validation score", "trials", "pruned", "diverged"]
    rows: list[list[Cell]] = []
    for one in tuned:
        values = ", ".join(f"{k.rpartition('.')[2]} {_short(v)}" for k, v in one.best.items())
        states = [record["state"] for record in one.records]
        spent = one.spent()
        counts = [str(states.count(state)) for state in ("pruned", "diverged")]
        score = f"{one.score:.4f} ({one.metric})"
        place = [one.job.run, *map(str, one.job.axes.values())]
        rows.append([*place, values, score, str(len(states)), *counts])
        rows[-1] += [f"{spent[name]:,.0f}" for name in costs]
    return Table([*head, *costs], rows)


def tuned_content(file: TuneFile, tuned: Sequence[Tuned]) -> Config:
    """Returns the content of a file of `pfl compare` with the best values of every run.

    With a grid, what tuning took is the mean over the points of the grid, whose tables show it.
    """
    grid, changes = file.comparison.grid, file.comparison.changes
    runs = {run: functools.reduce(merge, changes, change) for run, change in grid.runs.items()}
    points = {axis: {v: dict(change) for v, change in p.items()} for axis, p in grid.grid.items()}
    spent: dict[str, list[dict[str, int]]] = {}
    for one in tuned:
        run, best = one.job.run, nest(one.best)
        spent.setdefault(run, []).append(one.spent())
        if not one.job.axes:
            runs[run] = merge(runs[run], best)
        for axis, value in one.job.axes.items():
            of_runs = points[axis][value]["runs"]
            points[axis][value]["runs"] = {**of_runs, run: merge(of_runs.get(run, {}), best)}
    tuning = {
        run: {name: round(sum(s[name] for s in each) / len(each)) for name in each[0]}
        for run, each in spent.items()
    }
    content = {**file.content, "runs": runs, "tuning": tuning}
    return content | ({"grid": points} if points else {})


def write(file: TuneFile, tuned: Sequence[Tuned], out: Path) -> list[Path]:
    """Writes the tables and the tuned comparison, prints the table, and returns the paths."""
    cells = table(tuned)
    print(f"\n{text(cells)}")
    paths = [out / name for name in ("tune.md", "trials.csv", "tuned.yaml")]
    words = (
        f"# Tuning of: {file.comparison.title}\n\nEach method had {file.trials} trials with the "
        f"seed {file.seed}. The best score on validation data selects; test scores are not read.\n"
    )
    paths[0].write_text(f"{words}\n{markdown(cells)}")
    files.write_records(paths[1], [record for one in tuned for record in one.records])
    content = yaml.safe_dump(tuned_content(file, tuned), sort_keys=False, allow_unicode=True)
    paths[2].write_text(
        f"# The best values that `pfl tune` has found: pfl compare {paths[2]}\n{content}"
    )
    return paths


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# ---- the command ---------------------------------------------------------------------------------


def command(words: list[str]) -> None:
    """Runs `tune FILE [--out FOLDER] [--jobs N] [--change KEY=VALUE]`.

    Args:
        words: The words behind `tune`.
    """
    parser = CommandParser(
        prog="pfl tune",
        description="Try values for several methods, the same number of trials for each of them, "
        "select the best on validation data, and write a file for `pfl compare` with these values. "
        "Trials that have ended are not repeated, and a killed search goes on where it was.",
    )
    parser.add_argument("file", help="a YAML file of `pfl compare` with the key `tune`")
    parser.add_argument("--out", type=Path, help="the folder of trials and results")
    parser.add_argument(
        "--jobs", type=at_least_one, help="methods at a time; default: as many as fit"
    )
    parser.add_argument("--change", **CHANGE)
    given = parser.parse_args(words)
    path = configs.find(given.file)
    if path is None:
        raise ConfigError(f"tune: {given.file}: there is no such file")
    file = read_tune(path, changes_of("tune", given.change))
    out = given.out or Path("runs/tune") / path.stem
    with files.run_folder_errors(out, "tune: --out"):
        out.mkdir(parents=True, exist_ok=True)
    jobs = file.jobs()
    first = {run: spread_evenly(space, 1, file.seed)[0] for run, space in file.spaces.items()}
    check((job.changed([nest(first[job.run])]) for job in jobs), file.metric)
    workers = given.jobs or side_by_side(len(jobs))
    work = functools.partial(tune_run, file=file, root=out)
    found = {str(job): tuned for job, tuned in spread(work, jobs, workers)}
    paths = write(file, [found[str(job)] for job in jobs], out)
    print(", ".join(map(str, paths)))
