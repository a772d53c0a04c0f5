"""`pfl compare`: runs methods on equal terms, and says which of them differ by more than noise."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pfl.cli import configs
from pfl.cli.compare_wandb import send
from pfl.cli.figure_file import known, read_figure, resolved
from pfl.cli.grid import CHANGE, Config, Grid, Job, changes_of, load, read_grid
from pfl.cli.jobs import ended, run_all, said, side_by_side
from pfl.cli.parser import CommandParser, at_least_one
from pfl.errors import ConfigError
from pfl.files import replaced, run_folder_errors, write_figure, write_records
from pfl.report import comparison_tables as tables
from pfl.report.comparison import Comparison, described
from pfl.scores.runs import BUDGETS, Run, find_runs, read_runs

_RUNS = ("title", "seeds", "common", "runs", "grid")
KEYS = (*_RUNS, "baseline", "metric", "budget", "bandwidth", "tuning")
KINDS = {"grid": dict, "baseline": str, "metric": str, "budget": dict, "tuning": dict}
TUNING = ("trials", "rounds", "gradients", "seconds")
SHARE = re.compile(r"([1-9]\d*)/([1-9]\d*)$")


@dataclass(frozen=True, kw_only=True)
class ComparisonFile:
    """The content of a comparison's file.

    Attributes:
        grid: The runs.
        name: The name of the file.
        title: What is compared.
        baseline: The name of the run with which the others are compared.
        metric: The score that counts, such as `f1_score`; None: accuracy, or loss for regression.
        budget: One of `BUDGETS` and its limit; None: whole runs.
        bandwidth: Bits a second of each client; None: no figure of the time of communication.
        tuning: What each run's tuning took: `trials`, `rounds`, `gradients`, `seconds`.
        changes: Changes of the configuration of every run, after all others.
    """

    grid: Grid
    name: str
    title: str
    baseline: str
    metric: str | None
    budget: tuple[str, float] | None
    bandwidth: float | None
    tuning: Mapping[str, Mapping[str, float]]
    changes: Sequence[Config] = ()

    def jobs(self) -> list[Job]:
        """Returns all runs, in the order of the file."""
        return [job.changed(self.changes) for job in self.grid.jobs()]


def read_comparison(path: Path, changes: Sequence[Config] = ()) -> ComparisonFile:
    """Reads the file of a comparison, with further changes of the configuration of every run.

    The file has `title`, `seeds`, `common`, `runs` and `grid` as in pfl/cli/grid.py, and

        baseline: FedAvg           # with which the others are compared; the first run by default
        metric: f1_score           # one of loop.metrics that counts in place of the accuracy
        budget: {bytes: 2.0e+6}    # cuts all runs after so many rounds, bytes or gradients
        bandwidth: 1.0e+8          # bits a second of a client, for a figure of communication's time
        tuning:                    # what each run's tuning took, as `pfl tune` writes it
          FedAvg: {trials: 20, rounds: 800, gradients: 400000, seconds: 60}

    The file of a figure or table of a paper (pfl/cli/figure_file.py) is such a file as well.

    Raises:
        ConfigError: The file has a mistake.
    """
    if any(path.samefile(figure) for figure in known().values()):
        name, _, content = resolved(str(path))
        grid: Grid = read_figure(name)
    else:
        return comparison_of(str(path), path.stem, load(path, KEYS, KINDS), changes)
    return _comparison(str(path), name, content, grid, changes)


def comparison_of(
    where: str, name: str, content: Config, changes: Sequence[Config] = ()
) -> ComparisonFile:
    """Returns the comparison that the content of a file, without dotted keys, describes.

    Args:
        where: The path of the file, for errors.
        name: The name of the comparison.
        content: The content.
        changes: Changes of the configuration of every run.
    """
    return _comparison(where, name, content, read_grid(where, content), changes)


def _comparison(
    where: str, name: str, content: Config, grid: Grid, changes: Sequence[Config]
) -> ComparisonFile:
    baseline = content.get("baseline", grid.jobs()[0].run)
    if baseline not in grid.runs:
        raise ConfigError(
            f"{where}: baseline: {baseline!r}; it must be one of {', '.join(grid.runs)}"
        )
    metric, budget = content.get("metric"), content.get("budget")
    return ComparisonFile(
        grid=grid,
        name=name,
        title=str(content.get("title", name)),
        baseline=baseline,
        metric=_metric(f"{where}: metric", metric),
        bandwidth=_bandwidth(f"{where}: bandwidth", content.get("bandwidth")),
        tuning=_tuning(f"{where}: tuning", content.get("tuning") or {}, grid),
        budget=_budget(f"{where}: budget", budget) if budget is not None else None,
        changes=changes,
    )


def _metric(key: str, name: str | None) -> str | None:
    if name is not None and name.startswith(("val/", "test/")):
        raise ConfigError(
            f"{key}: {name}; it must be a score without its split, such as f1_score or "
            f"global/accuracy"
        )
    return name


def _bandwidth(key: str, value: Any) -> float | None:
    if value is None:
        return None
    if (bandwidth := _positive(value)) is None:
        raise ConfigError(f"{key}: {value!r}; it must be a number of bits a second, such as 1e8")
    return bandwidth


def _positive(value: Any) -> float | None:
    """Returns a number above 0; None for anything else. YAML reads 1e8 as text."""
    try:
        number = float("nan" if isinstance(value, bool) else value)
    except (TypeError, ValueError):
        return None
    return number if 0 < number < float("inf") else None


def _tuning(where: str, content: Config, grid: Grid) -> Config:
    for run, spent in content.items():
        if run not in grid.runs:
            known = ", ".join(grid.runs)
            raise ConfigError(f"{where}: there is no run {run!r}; known are {known}")
        fits = isinstance(spent, dict) and spent.keys() <= set(TUNING)
        if not (fits and all(isinstance(value, int | float) for value in spent.values())):
            raise ConfigError(
                f"{where}.{run}: {spent!r}; it must be numbers of {', '.join(TUNING)}"
            )
    return content


def _budget(key: str, budget: Config) -> tuple[str, float]:
    for name, value in budget.items():
        limit = _positive(value)
        if len(budget) == 1 and name in BUDGETS and limit is not None:
            return name, limit
    raise ConfigError(f"{key}: {budget}; it must be one of {', '.join(BUDGETS)} and a number")


# ---- runs ----------------------------------------------------------------------------------------


def run(file: ComparisonFile, root: Path, workers: int, share: tuple[int, int]) -> list[Run] | None:
    """Runs what has not been run, and returns all runs.

    Args:
        file: The comparison.
        root: The folder of the runs.
        workers: Number of processes.
        share: (k, n): only the k-th of n shares of the runs, for n machines with one file system.

    Returns:
        The runs; None while other machines have not finished theirs.
    """
    jobs, outcomes = file.jobs(), dict[Path, Config]()
    mine = jobs[share[0] - 1 :: share[1]]
    bar = tqdm(total=len(mine), unit="run", disable=None)
    for job, outcome in run_all(mine, root, workers=workers, checkpoints=True, metric=file.metric):
        outcomes[job.folder] = outcome
        bar.write(f"{job}: {said(outcome)}")
        bar.update()
    bar.close()
    outcomes |= {job.folder: ended(job, root) for job in jobs if job.folder not in outcomes}
    if missing := [str(job) for job in jobs if not outcomes[job.folder]]:
        print(
            f"{len(missing)} runs of other machines are missing, or have another configuration or "
            f"other code, such as {missing[0]}"
        )
        return None
    return [_read(job, root, outcomes[job.folder]) for job in jobs]


def _read(job: Job, root: Path, outcome: Config) -> Run:
    diverged = outcome["status"] == "diverged"
    return Run.read(job.run, job.seed, root / job.folder, point=job.axes, diverged=diverged)


def read_folders(folders: Sequence[Path]) -> list[Run]:
    """Returns the runs in finished folders, which must have shared partitions; see `read_runs`."""
    runs = read_runs(folders)
    if len({(run.label, run.seed) for run in runs}) < len(runs):
        raise ConfigError("compare: two of these runs have the same configuration and seed")
    _check_partitions(runs)
    return runs


def _check_partitions(runs: Iterable[Run]) -> None:
    """Refuses runs with the same seed that did not share a partition: nothing would be paired."""
    hashes: dict[int, tuple[str, Path]] = {}
    for run in runs:
        seed, found = run.seed, run.summary.get("partition_hash")
        if found is None:  # the run diverged in its first round
            continue
        known, folder = hashes.setdefault(seed, (found, run.folder))
        if known != found:
            raise ConfigError(
                f"compare: {folder} and {run.folder} have the seed {seed} and other partitions; "
                f"their clients cannot be compared"
            )


# ---- what comes out ------------------------------------------------------------------------------


def write(
    comparisons: Sequence[Comparison], title: str, out: Path, bandwidth: float | None = None
) -> list[Path]:
    """Writes tables and figures, prints the tables, and returns the paths of the files."""
    parts: dict[str, list[str]] = {"md": [f"# {title}\n"], "tex": []}
    if len(comparisons) > 1:
        cells = tables.overview_table(comparisons)
        print(f"\n{tables.text(cells)}")
        parts["md"].append(tables.markdown(cells))
        parts["tex"].append(tables.latex(cells))
    for comparison in comparisons:
        both = [tables.score_table(comparison), tables.statistics_table(comparison)]
        notes = " ".join(comparison.notes())
        head = f"\n{comparison.title}\n" if len(comparisons) > 1 else ""
        print(f"{head}\n{tables.text(both[0])}\n{tables.text(both[1])}\n{notes}")
        parts["md"] += [f"## {comparison.title}\n", *map(tables.markdown, both), notes + "\n"]
        parts["tex"] += map(tables.latex, both)
        parts["tex"].append(rf"\par\footnotesize {tables.escaped(notes)}" + "\n")
    files = [out / f"comparison.{kind}" for kind in parts]
    for path, content in zip(files, parts.values(), strict=True):
        with replaced(path) as part:
            part.write("\n".join(content).encode())
    files += [out / "comparison.csv", out / "runs.csv"]
    write_records(files[-2], tables.records(comparisons))
    write_records(files[-1], tables.run_records(comparisons))
    return files + _draw(comparisons, out, bandwidth)


def _draw(comparisons: Sequence[Comparison], out: Path, bandwidth: float | None) -> list[Path]:
    from pfl.report import comparison_figures as figures  # matplotlib takes long to import

    drawn: dict[str, Any] = {"ranks": figures.rank_diagram(comparisons)}
    for number, comparison in enumerate(comparisons, 1):
        behind = f"-{number}" if len(comparisons) > 1 else ""
        drawn[f"curves{behind}"] = figures.curves(comparison)
        drawn[f"worst-tenth{behind}"] = figures.curves(comparison, "_worst10")
        drawn[f"gains{behind}"] = figures.gains(comparison)
        drawn[f"scatter{behind}"] = figures.scatter(comparison)
        if bandwidth is not None:
            drawn[f"communication{behind}"] = figures.communication(comparison, bandwidth)
    files = []
    for name, figure in drawn.items():
        for kind in ("png", "pdf") if figure is not None else ():
            files.append(out / f"{name}.{kind}")
            write_figure(files[-1], figure)
    return files


# ---- the command ---------------------------------------------------------------------------------


def command(words: list[str]) -> None:
    """Runs `compare FILE` or `compare FOLDER ...`.

    Args:
        words: The words behind `compare`.
    """
    parser = CommandParser(
        prog="pfl compare",
        description="Run several methods with several seeds on the same partitions and cohorts, "
        "and write tables, paired statistics and figures. Runs that were finished with the same "
        "configuration and code are not repeated, and a killed run goes on where it was.",
    )
    parser.add_argument("what", nargs="+", help="a YAML file, or folders of finished runs")
    parser.add_argument("--out", type=Path, help="the folder of runs and results")
    parser.add_argument("--jobs", type=at_least_one, help="runs at a time; default: as many as fit")
    parser.add_argument("--share", help="k/n: the k-th of n shares, for n machines")
    parser.add_argument("--change", **CHANGE)
    parser.add_argument("--baseline", help="the method with which the others are compared")
    parser.add_argument("--metric", help="the score that counts, such as f1_score")
    parser.add_argument("--budget", help="such as bytes=2e6: cuts all runs there")
    parser.add_argument("--wandb", metavar="PROJECT", help="sends tables and figures to W&B")
    parser.add_argument(
        "--bandwidth", help="bits a second of a client, such as 1e8: one more figure"
    )
    given = parser.parse_args(words)
    bandwidth = _bandwidth("compare: --bandwidth", given.bandwidth)
    begun = time.monotonic()
    budget, tuning = None, dict[str, Any]()
    metric = _metric("compare: --metric", given.metric)
    if given.budget is not None:
        name, _, limit = given.budget.partition("=")
        budget = _budget("compare: --budget", {name: limit})
    folders = [Path(word) for word in given.what]
    if all(folder.is_dir() for folder in folders):
        for option in ("jobs", "share", "change"):
            if getattr(given, option):
                raise ConfigError(f"compare: --{option}: folders of finished runs do not take it")
        runs: list[Run] | None = read_folders(find_runs(folders, "compare"))
        title, baseline, out = "Comparison", None, given.out or Path("runs/comparison")
    else:
        file = read_comparison(_path(given.what), changes_of("compare", given.change))
        file = replace(file, metric=metric or file.metric)
        _check_baseline(given.baseline, file.grid.runs)
        title, baseline, budget = file.title, file.baseline, budget or file.budget
        metric = file.metric
        tuning, bandwidth = dict(file.tuning), bandwidth or file.bandwidth
        out = given.out or Path("runs/compare") / file.name
        _make(out)
        workers = given.jobs or side_by_side(len(file.jobs()))
        runs = run(file, out, workers, _share(given.share or "1/1"))
    if runs is None:
        return
    _make(out)
    labels = list(dict.fromkeys(run.label for run in runs))
    _check_baseline(given.baseline, labels)
    baseline = given.baseline or baseline or labels[0]
    comparisons = _by_point(runs, title, baseline, budget, tuning, metric)
    files = write(comparisons, title, out, bandwidth)
    if given.wandb is not None:
        send(given.wandb, title, comparisons, files)
    print(f"\n{', '.join(map(str, files))} ({time.monotonic() - begun:.0f} s)")


def _by_point(
    runs: Sequence[Run],
    title: str,
    baseline: str,
    budget: tuple[str, float] | None,
    tuning: Mapping[str, Mapping[str, float]],
    metric: str | None,
) -> list[Comparison]:
    """Returns a comparison for each point of the grid."""
    points: dict[str, list[Run]] = {}
    for one in runs:
        points.setdefault(json.dumps(one.point, default=str), []).append(one)
    titles = {point: described(here[0].point) or title for point, here in points.items()}
    return [
        Comparison(here, baseline, budget, titles[point], tuning, metric)
        for point, here in points.items()
    ]


def _check_baseline(name: str | None, labels: Iterable[str]) -> None:
    if name is not None and name not in labels:
        raise ConfigError(f"compare: --baseline: {name}; it must be one of {', '.join(labels)}")


def _path(words: Sequence[str]) -> Path:
    path = configs.find(words[0]) if len(words) == 1 else None
    if path is None:
        raise ConfigError(
            f"compare: {' '.join(words)}; it must be a YAML file, or folders of finished runs"
        )
    return path


def _share(text: str) -> tuple[int, int]:
    match = SHARE.match(text)
    if match is None or int(match[1]) > int(match[2]):
        raise ConfigError(f"compare: --share: {text}; it must be like 1/3, the first of three")
    return int(match[1]), int(match[2])


def _make(out: Path) -> None:
    with run_folder_errors(out, "compare: --out"):
        out.mkdir(parents=True, exist_ok=True)
