"""The tuning of several methods: as many trials for each of them, selected on validation data."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import pydoc
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from pfl import algorithms
from pfl.datamodules.errors import require_value
from pfl.datamodules.ranges import Checked, Count, CountOrZero, limits
from pfl.errors import ConfigError
from pfl.experiments.callbacks import PRUNED, check_validated, import_optuna, open_study, trial_of
from pfl.experiments.comparison import Comparison
from pfl.experiments.grid import INNER, Config, Job, merge, nest
from pfl.experiments.jobs import (
    changed_apart,
    check_jobs,
    code_version,
    data_version,
    execute,
    read_run,
    room_for,
    tell_made_again,
    with_callback,
)
from pfl.experiments.progress import Expected, Watch, live_page, say
from pfl.experiments.room import Used
from pfl.experiments.workers import side_by_side
from pfl.files import locked, make_folder, write, write_records
from pfl.report.table import Cell, Table, markdown, text
from pfl.scores.names import signed_score
from pfl.scores.runs import REPLACED

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.storages import JournalStorage

PRUNING = "pfl.experiments.callbacks.Pruning"
COSTS = ("rounds", "gradients", "seconds")


@dataclass(frozen=True, kw_only=True)
class Range:
    """Numbers that may be tried.

    Args:
        low: The least one.
        high: The largest one; whole numbers as `low` and `high` give whole numbers.
        log: Draws from the logarithms.
    """

    low: int | float
    high: int | float
    log: bool = False

    def __post_init__(self) -> None:
        if not (self.low < self.high and (self.low > 0 or not self.log)):
            raise ValueError("low must be below high, and above 0 with log")


Space = dict[str, list[Any] | Range]  # all values or a range, by dotted key


def read_space(where: str, content: Any) -> Space:
    """Returns the checked values to try, by dotted key: lists, and ranges or their arguments."""
    require_value(where, content, isinstance(content, dict), "keys and the values to try")
    parser = ArgumentParser(exit_on_error=False)
    space = Space()
    parser.add_argument("--tried", type=list[bool | int | float | str | None] | Range)
    for key, values in content.items():
        try:
            if isinstance(values, Range):
                given = asdict(values)
            else:
                given = values
            space[str(key)] = parser.instantiate(parser.parse_object({"tried": given})).tried
            if values == []:
                raise ValueError
        except (ArgumentError, TypeError, ValueError):
            expected = "like {low: 0.001, high: 1.0, log: true}, or a list of values"
            require_value(f"{where}.{key}", values, False, expected)
    return space


def check_space(job: Job, space: Space) -> None:
    """Refuses values to try that are outside of the range of a method's argument."""
    path = job.config["model"]["class_path"]
    method: Any = getattr(algorithms, path, None) or pydoc.locate(path)
    known = limits(method)
    for key, values in space.items():
        group, _, rest = key.partition(".")
        limit = known.get(rest.removeprefix("init_args."))
        if group == "model" and limit is not None:
            tried = [values.low, values.high] if isinstance(values, Range) else values
            for value in tried:  # a text may stand for a number
                if isinstance(value, int | float):
                    limit.require(f"{job.run}: space.{key}", value)


def _with_other_values(job: Job, first: Config, space: Space) -> Iterator[Job]:
    """Yields a job for each value of a list but the first one, with the `first` of other keys."""
    for key, values in space.items():
        if isinstance(values, list):
            for value in values[1:]:
                changed = job.with_changes([nest({**first, key: value})])
                yield replace(changed, axes={**job.axes, f"space.{key}": value})


@dataclass(frozen=True, kw_only=True)
class Tune(Checked):
    """How runs are tuned.

    Args:
        trials: Number of trials of each run.
        space: What is tried in all runs, by dotted key: a list of values, or a range. A run's own
            `space` adds to it.
        seed: The first seed of every trial, and the seed of what is tried.
        seeds: Number of seeds of every trial, whose scores are averaged.
        prune_after: Number of rounds before which no trial is ended early; None: none ever is.
        metric: The score that selects, such as `val/global/accuracy`; the comparison's by default.

    Raises:
        ConfigError: A value does not fit.
    """

    argument_group: ClassVar[str] = "tune"
    trials: Count = 20
    space: dict[str, Any] = field(default_factory=dict)
    seed: CountOrZero = 0
    seeds: Count = 1
    prune_after: CountOrZero | None = None
    metric: str | None = None

    def __post_init__(self) -> None:
        holds = self.prune_after is None or self.seeds == 1
        expected = f"null, since trials of {self.seeds} seeds run to their end"
        require_value("tune.prune_after", self.prune_after, holds, expected)
        object.__setattr__(self, "space", read_space("tune.space", self.space))
        holds = self.metric is None or not self.metric.startswith("test/")
        expected = "a score on validation data, such as val/global/accuracy"
        require_value("tune.metric", self.metric, holds, expected)


@dataclass(frozen=True, kw_only=True)
class Tuning(Comparison):
    """A comparison whose runs are tuned first.

    Its file is that of a comparison with the key `tune`, and `space` in runs (docs/tune.md).
    Every run is tuned at each value of the grid by itself; the grid has one axis at most.

    Args:
        tune: How runs are tuned.
        spaces: What is tried in each run, by the run; from `tune.space` and the runs' `space`.
    """

    tune: Tune = field(default_factory=Tune)
    spaces: dict[str, Space] = field(default_factory=dict, metadata=INNER)

    def __post_init__(self) -> None:
        runs = dict(self.runs)
        spaces = dict(self.spaces)
        for run, change in runs.items():
            own: Any = {}
            if isinstance(change, dict) and "space" in change:
                own = read_space(f"runs.{run}.space", change["space"])
                runs[run] = {key: value for key, value in change.items() if key != "space"}
            spaces.setdefault(str(run), {**self.tune.space, **own})
        object.__setattr__(self, "runs", runs)
        object.__setattr__(self, "spaces", spaces)
        super().__post_init__()
        if len(self.grid) > 1:
            raise ConfigError(f"grid: {', '.join(self.grid)}; it must have one axis")
        if empty := [run for run, space in spaces.items() if not space]:
            raise ConfigError(f"tune.space: it is empty for {empty[0]}; give it keys to try")

    @property
    def score(self) -> str | None:
        """The score that selects, as in `best_round`."""
        return self.tune.metric or self.metric

    def search(
        self, out: str | Path | None = None, *, jobs: int | None = 1, live: bool = False
    ) -> Tuned:
        """Makes the trials that have not been made, and returns what they have found.

        Args:
            out: The folder of the trials; `runs/tune/<name>` by default.
            jobs: Number of processes; None: as many as fit. With more than one, a script needs
                `if __name__ == "__main__"`.
            live: Writes `live.html`, a page that tells how far the trials are.

        Raises:
            ConfigError: A configuration has a mistake, Optuna is not installed, the clients have no
                validation samples, or all trials of a run have diverged.
        """
        import_optuna()
        root = self.folder("tune", None if out is None else Path(out))
        places = replace(self, seeds=[self.tune.seed]).jobs()
        first = {
            run: {k: v[0] if isinstance(v, list) else v.low for k, v in space.items()}
            for run, space in self.spaces.items()
        }
        tried = [job.with_changes([nest(first[job.run])]) for job in places]
        check_jobs(tried, self.score, self.limit, validated=True)
        for job in places:
            check_space(job, self.spaces[job.run])
            check_jobs(_with_other_values(job, first[job.run], self.spaces[job.run]))
        work = functools.partial(tune_run, tuning=self, root=root)
        room = room_for(tried, len(places), jobs)
        trials = []
        made = set[Path]()
        changes: Counter[str] = Counter()
        for place in places:
            study, _, _ = _study_of(place, self, root)
            ended = [trial.state.is_finished() for trial in study.get_trials(deepcopy=False)]
            new = list[Path]()
            for number in range(self.tune.trials):
                name = f"{place.label}, trial {number + 1}"
                folders = [root / folder for folder in _trial_folders(place, number, self.tune)]
                trials += [Expected.of(name, folder, place.config) for folder in folders]
                if number < len(ended) and ended[number]:
                    made.update(folders)
                if number >= len(ended):
                    new += folders
            changes += changed_apart(new, place.config)
        tell_made_again("trials", changes, f"folders {REPLACED} in {root}")
        with Watch(trials, made, self.score, live_page(root, live)):
            if jobs is None and len(places) > 1:
                say(str(room))
            found: dict[str, Found] = {}
            for job, one in side_by_side(work, places, room):
                found[str(job)] = one
                if room.note(one.used) and len(found) < len(places):
                    say(str(room))
        return Tuned(self, [found[str(job)] for job in places])


# ---- trials --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What the trials of a run at a point of the grid have found and cost.

    Attributes:
        job: The run.
        best: The values of the best trial, by dotted key.
        score: The best trial's validation score, called `metric`.
        records: A row for each trial.
        used: The memory of the trials' process; None: all trials were made before.
    """

    job: Job
    best: Config
    score: float
    metric: str
    records: list[Config]
    used: Used | None = None

    def cost(self) -> dict[str, int]:
        """Returns the numbers of trials, and their rounds, sample gradients and seconds."""
        sums = {name: round(sum(record[name] for record in self.records)) for name in COSTS}
        return {"trials": len(self.records), **sums}


def tune_run(job: Job, tuning: Tuning, root: Path) -> Found:
    """Makes the trials of a run that have not been made, and returns the best of all.

    A trial that was interrupted continues. What Optuna's sampler draws is a function of the seed,
    the run and the trial's number, so that an interrupted search ends like one that was not.

    Raises:
        ConfigError: Another process makes these trials, or all of them have diverged.
    """
    folder = root / job.folder.parent
    taken = f"{folder}: another process makes these trials; wait until it has ended, or end it"
    make_folder(folder, "--out")
    with locked(folder / ".lock", taken):
        return _tune_run(job, tuning, root)


def _tune_run(job: Job, tuning: Tuning, root: Path) -> Found:
    """Makes the trials that no other process makes, as `tune_run`."""
    from optuna.samplers import TPESampler

    space = tuning.spaces[job.run]
    folder = root / job.folder.parent
    study, storage, pruning = _study_of(job, tuning, root)
    records = []
    best = None
    used = None
    for number in range(tuning.tune.trials):
        study.sampler = TPESampler(seed=int(_digest([tuning.tune.seed, job.label, number])[:8], 16))
        known = number < len(study.get_trials(deepcopy=False))
        if known:
            trial = trial_of(study, storage, number)
        else:
            trial = study.ask()
        values = {key: _suggest(trial, key, space[key]) for key in space}
        config = job.with_changes([nest(values)]).config
        if tuning.tune.seeds == 1 or tuning.limit is not None:  # it ends runs at the budget
            config = with_callback(config, PRUNING, {**pruning, "trial": number})
        one = Job(f"trial{number}", {}, job.seed, config)
        record = _try(study, trial, one, tuning, folder)
        used = record.pop("used") or used
        records.append({"method": job.run, **job.axes, "trial": number, **record, **values})
        if record["score"] is not None:
            score = f"{record['score']:.4f}"
        else:
            score = "–"
        say(
            f"{job.label}, trial {number + 1}/{tuning.tune.trials}: {score} ({record['state']}; "
            f"{_values_text(values)})"
        )
        value = study.get_trials(deepcopy=False)[number].value
        if record["state"] == "finished" and value is not None and (not best or value > best[0]):
            best = value, values, record
    if best is None:
        raise ConfigError(
            f"tune: no trial of {job.label} has ended without diverging; change its space"
        )
    _, values, record = best
    return Found(job, values, record["score"], record["selected_by"], records, used)


def _study_of(job: Job, tuning: Tuning, root: Path) -> tuple[Study, JournalStorage, Config]:
    """Opens, or creates, the study of a run, its storage, and the arguments of `Pruning`.

    Another configuration, space, code or data has another study in the same journal.
    """
    after = tuning.tune.prune_after
    space = tuning.spaces[job.run]
    settings = [job.config, space, after, tuning.score, tuning.limit, tuning.tune.seeds]
    settings += [code_version(json.dumps(job.config, default=str)), data_version(job.config)]
    name = f"study-{_digest(settings)[:16]}"  # YAML reads some digests, such as 12e34, as numbers
    path = str(root / job.folder.parent / "optuna.journal")
    study, storage = open_study(path, name, after)
    pruning: Config = {"storage": path, "study": name, "after": after, "metric": tuning.score}
    pruning["budget"] = tuning.limit and list(tuning.limit)
    return study, storage, pruning


def _trial_folders(place: Job, number: int, tune: Tune) -> list[Path]:
    """Returns the folders of a trial's runs, one for each seed, below that of the experiment."""
    seeds = range(place.seed, place.seed + tune.seeds)
    folders = [Job(f"trial{number}", {}, seed, {}).folder for seed in seeds]
    return [place.folder.parent / folder for folder in folders]


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()


def _suggest(trial: Trial, key: str, values: list[Any] | Range) -> Any:
    """Returns the value of a trial for a key, which the trial may already have."""
    if isinstance(values, list):
        return trial.suggest_categorical(key, values)
    if isinstance(values.low, int) and isinstance(values.high, int):
        return trial.suggest_int(key, values.low, values.high, log=values.log)
    return trial.suggest_float(key, values.low, values.high, log=values.log)


def _try(study: Study, trial: Trial, job: Job, tuning: Tuning, folder: Path) -> Config:
    """Runs a trial in `folder`, unless it has ended; returns its record, and the memory `used`."""
    from optuna.trial import TrialState

    scores = list[float]()
    state = "finished"
    name = None
    used = None
    costs: dict[str, float] = dict.fromkeys(COSTS, 0)
    for seed in range(job.seed, job.seed + tuning.tune.seeds):
        one = replace(job, seed=seed, config={**job.config, "seed_everything": seed})
        outcome = execute(one, folder)
        used = outcome.get("used", used)
        run = read_run(one, folder, outcome)
        if run.rows:
            last = run.rows[-1]
        else:
            last = {}
        best = run.best_round(run.within(tuning.limit), tuning.score)
        costs["rounds"] += last.get("round", 0)
        costs["gradients"] += last.get("train/samples", 0.0)
        costs["seconds"] += outcome["seconds"]
        if run.diverged:
            state = "diverged"
            break
        if best is None:
            check_validated(last, tuning.score, run.summary.get("select_by"))
        else:
            name = best["selected_by"]
            scores.append(best[str(name)])
    known = study.get_trials(deepcopy=False)[trial.number]
    if PRUNED in known.user_attrs:
        state = "pruned"
    record: Config = {
        "state": state,
        "score": sum(scores) / len(scores) if scores and state != "diverged" else None,
        "selected_by": name,
        "used": used,
        **costs,
    }
    if known.state.is_finished():
        pass
    elif state == "finished" and scores:
        study.tell(trial, signed_score(str(name), record["score"], run.metrics))
    else:
        study.tell(trial, state=TrialState.PRUNED)
    return record


# ---- what comes out ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tuned:
    """What a tuning has found.

    Attributes:
        tuning: What was tried.
        found: The best values of each run at each point of the grid.
    """

    tuning: Tuning
    found: Sequence[Found]

    def table(self) -> Table:
        """Returns a row for each run: the best values, their score, and the costs."""
        axes = list(self.tuning.grid)
        head = ["method", *axes, "best values", "validation score", "trials", "pruned", "diverged"]
        rows: list[list[Cell]] = []
        for one in self.found:
            states = [record["state"] for record in one.records]
            spent = one.cost()
            place = [one.job.run, *map(str, one.job.axes.values())]
            counts = [len(states), states.count("pruned"), states.count("diverged")]
            score = f"{one.score:.4f} ({one.metric})"
            rows.append([*place, _values_text(one.best), score, *map(str, counts)])
            rows[-1] += [f"{spent[name]:,.0f}" for name in COSTS]
        return Table([*head, *COSTS], rows)

    def __str__(self) -> str:
        return text(self.table())

    def _content(self) -> Config:
        """Returns the content of a comparison's file with the best values of every run.

        With a grid, what tuning took is the mean over the points of the grid.
        """
        tuning = self.tuning
        spent = dict[str, list[dict[str, int]]]()
        runs = {run: functools.reduce(merge, tuning.changes, c) for run, c in tuning.runs.items()}
        grid = {a: {v: dict(c) for v, c in values.items()} for a, values in tuning.grid.items()}
        for one in self.found:
            run = one.job.run
            best = nest(one.best)
            spent.setdefault(run, []).append(one.cost())
            if not one.job.axes:
                runs[run] = merge(runs[run], best)
            for axis, value in one.job.axes.items():
                of_runs = grid[axis][value]["runs"]
                grid[axis][value]["runs"] = {**of_runs, run: merge(of_runs.get(run, {}), best)}
        content: Config = {"title": tuning.title, "seeds": tuning.seeds, "common": tuning.common}
        content |= {"runs": runs, "grid": grid, "baseline": tuning.baseline}
        content |= {"metric": tuning.metric, "bandwidth": tuning.bandwidth, "budget": tuning.budget}
        content["tuning"] = {
            run: {name: round(math.fsum(s[name] for s in each) / len(each)) for name in each[0]}
            for run, each in spent.items()
        }
        return {key: value for key, value in content.items() if value not in (None, {})}

    def write(self, folder: Path) -> list[Path]:
        """Writes the tables and the tuned comparison, and returns the paths of the files."""
        paths = [folder / name for name in ("tune.md", "trials.csv", "tuned.yaml")]
        tune = self.tuning.tune
        chosen = range(tune.seed, tune.seed + tune.seeds)
        about = (
            f"Each method had {tune.trials} trials (seed {_listed(chosen)}). The best score on "
            f"validation data selects; test scores are not read."
        )
        both = [seed for seed in cast(list[int], self.tuning.seeds) if seed in chosen]
        if both:
            about += (
                f" The comparison in tuned.yaml has seed {_listed(both)}, too: other `seeds` would "
                f"judge values that they have not chosen."
            )
        title = f"# Tuning of: {self.tuning.title}"
        write(paths[0], f"{title}\n\n{about}\n\n{markdown(self.table())}")
        write_records(paths[1], [record for one in self.found for record in one.records])
        yaml_text = yaml.safe_dump(self._content(), sort_keys=False, allow_unicode=True)
        head = f"# The best values that `pfl tune` has found: pfl compare {paths[2]}\n"
        write(paths[2], head + yaml_text)
        return paths


def _listed(seeds: Iterable[int]) -> str:
    return ", ".join(map(str, seeds))


def _values_text(values: Config) -> str:
    return ", ".join(
        f"{key.rpartition('.')[2]} {f'{v:.4g}' if isinstance(v, float) else v}"
        for key, v in values.items()
    )
