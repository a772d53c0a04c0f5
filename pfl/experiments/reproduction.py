"""A figure or a table of a paper: its runs, its data, and how they are drawn.

One figure or table is one file, `configs/papers/<paper>/figure<k>.yaml`; its name is
`<paper>-figure<k>`. It is the file of a comparison with

    panels: [...]             # what to draw; see pfl/report/curves.py
    tables: [...]             # what to write as a table; see pfl/report/table.py
    full: {...}               # what --full changes in all of the above
    base: paper-figure1       # start from the file of that figure, and share its runs; a grid
                              # replaces that of the base, and panels or tables replace both of its

Runs and points of the grid that no panel and no table shows are left out.
"""

from __future__ import annotations

import itertools
import math
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from pfl.callbacks.run_result import versions
from pfl.configuration import files
from pfl.errors import ConfigError
from pfl.experiments.comparison import Comparison
from pfl.experiments.grid import INNER, Config, Job, merge, nest, read_experiment
from pfl.experiments.jobs import read_run, run_all
from pfl.experiments.results import save_figure
from pfl.files import csv_lines, make_folder, write
from pfl.machine import free_cores
from pfl.report.curves import Panel, figure_of, read_panel
from pfl.report.table import Cell, Crosstab, Table, read_table, text


@dataclass(frozen=True, kw_only=True)
class Reproduction(Comparison):
    """The runs of a figure or a table, and what it shows.

    Args:
        panels: What to draw, as in `pfl.report.curves`.
        tables: What to write as tables, as in `pfl.report.table`.
        full: What `full` has changed in all of the above.
        base: The name of the figure from which this one starts.
        runs_of: The name of the folder of the runs; figures that share runs share it.
    """

    panels: list[Any] = field(default_factory=list)
    tables: list[Any] = field(default_factory=list)
    full: dict[str, Any] = field(default_factory=dict)
    base: str | None = None
    runs_of: str = field(default="", metadata=INNER)

    drawn: list[Panel] = field(init=False, repr=False, compare=False, metadata=INNER)
    written: list[Crosstab] = field(init=False, repr=False, compare=False, metadata=INNER)
    shown: list[Panel] = field(init=False, repr=False, compare=False, metadata=INNER)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shown", [])
        baseline = self.baseline
        super().__post_init__()
        if not (self.panels or self.tables):
            raise ConfigError("panels: null; a figure needs panels, or tables")
        runs = list(self.runs)
        axes = self.grid
        panels = [read_panel(self.name, panel, runs, axes) for panel in self.panels]
        tables = [read_table(self.name, entry, runs, axes) for entry in self.tables]
        shown = [*panels, *(entry.panel for entry in tables)]
        for key, value in {"drawn": panels, "written": tables, "shown": shown}.items():
            object.__setattr__(self, key, value)
        if baseline is None:
            object.__setattr__(self, "baseline", self.jobs()[0].run)

    def jobs(self) -> list[Job]:
        jobs = super().jobs()
        shown = self.shown
        return [j for j in jobs if not shown or any(p.shows(j.run, j.axes) for p in shown)]

    def part(self, only: str | None, seed: int | None) -> Reproduction:
        part = super().part(only, seed)
        if part is self:
            return part
        return replace(part, name=f"{self.name}-part")

    @classmethod
    def from_file(
        cls, name: str | Path, changes: Sequence[Config] = (), *, full: bool = False
    ) -> Reproduction:
        """Reads a figure by its name, or by the path of its file.

        Args:
            name: The name of the figure, with or without its folder, or the path of its file.
            changes: Changes of the configuration of every run.
            full: Applies the changes under `full`.
        """
        path, name, runs_of, content = _resolve(str(name))
        if full:
            content = merge(content, content.get("full") or {})
            name = f"{name}-full"
            runs_of = f"{runs_of}-full"
        return cls.from_content(path, content, name=name, runs_of=runs_of, changes=changes)

    def plan(self) -> str:
        """Returns what the file remarks on the paper's values and ours, and all runs with sizes."""
        remarks = ""
        path = Path(str(self.source))
        while True:
            lines = path.read_text(encoding="utf-8").splitlines()
            comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
            remarks += "".join(f"{line[1:].strip()}\n" for line in comment) + "\n"
            base = (files.read(path) or {}).get("base")
            if base is None:
                break
            path = _resolve(base)[0]
        rows: dict[Path, list[Cell]] = {}
        for job in self.jobs():
            model = job.config["model"]
            data = job.config["data"]
            loop = job.config.get("loop") or {}
            trainer = job.config["trainer"]
            clients = (data.get("init_args") or {}).get("num_clients", "all")
            sampled = loop.get("clients_per_round") or clients
            names = [entry["class_path"].rpartition(".")[2] for entry in (model, data)]
            sizes = [str(trainer.get("max_epochs")), f"{sampled} of {clients}"]
            seeds = len(cast(list[int], self.seeds))
            rows[job.folder.parent] = [job.label, *names, *sizes, str(seeds)]
        heads = ["run", "method", "data", "rounds", "clients a round", "seeds"]
        count = f"{len(self.jobs())} runs, of which none was made"
        return f"{self.title}\n\n{remarks}{text(Table(heads, [*rows.values()]))}\n{count}"

    def reproduce(
        self, out: str | Path, command: str = "", *, jobs: int | None = 1, live: bool = False
    ) -> list[Path]:
        """Makes the runs that have not been made, writes their data and draws them.

        Args:
            out: The folder for runs and results.
            command: The words after `pfl` that made the results, for the tables.
            jobs: Number of processes; None: as many as fit. With more than one, a script needs
                `if __name__ == "__main__"`.
            live: Writes `live.html` beside the runs, a page that tells how far they are.

        Returns:
            The paths `<out>/<name>.csv`; `.png` and `.pdf` of panels; `.md` of tables. Of a part
            `<out>/<name>-part.csv`, and of one row nothing else.
        """
        out = Path(out)
        all_jobs = self.jobs()
        root = out / self.runs_of
        make_folder(root, "reproduce: --out")
        outcomes = run_all(all_jobs, root, workers=jobs, live=live, check=self._check_scores)
        rows = [row for job in all_jobs for row in rows_of(job, root, outcomes[job.folder])]
        place = ["run", *self.grid, "seed", "diverged"]
        metrics = list(dict.fromkeys(key for row in rows for key in row if key not in place))
        panels = self.shown
        if self.only is not None:  # the others have no runs, or runs without their metrics
            panels = [p for p in panels if any(p.shows(job.run, job.axes) for job in all_jobs)]
            panels = [p for p in panels if p.finds(rows)] or panels
        for panel in panels:
            panel.check(self.name, rows, metrics)
        used = dict.fromkeys(name for panel in panels for name in panel.metrics)
        shown = used.keys() - {"round"}
        lines = [[*place, *used]]
        for row in (row for row in rows if row["diverged"] or shown & row.keys()):
            values = (row.get(name, "") for name in lines[0])
            lines.append([written(value) for value in values])
        paths = [out / f"{self.name}.csv"]
        write(paths[0], csv_lines(lines))
        if self.only is not None:
            return paths
        if self.drawn:
            paths += save_figure(figure_of(str(self.title), self.drawn, rows), out / self.name)
        if self.written:
            paths.append(out / f"{self.name}.md")
            parts = [f"# {self.title}\n", *(entry.markdown(rows) for entry in self.written)]
            packages = ", ".join(f"{name} {version}" for name, version in versions().items())
            minutes = sum(outcome["seconds"] for outcome in outcomes.values()) / 60
            parts.append(
                f"Made by `pfl {command or f'reproduce {self.name}'}`: {len(outcomes)} runs that "
                f"took {minutes:.1f} minutes in all, with {packages}, on {platform.system()} "
                f"{platform.machine()} with {free_cores()} cores.\n"
            )
            write(paths[-1], "\n".join(parts))
        return paths

    def _check_scores(self, scores: Sequence[str]) -> None:
        """Refuses panels and tables with scores that no run can have."""
        if self.only is None:  # of one row the others' scores may be missing
            for panel in self.shown:
                panel.check_scores(self.name, scores)


def written(value: Any) -> str:
    """Returns a value as the data of figures have it: seven digits of a number with a point."""
    if isinstance(value, float):
        return f"{value:.7g}"
    if value is None:
        return ""
    return str(value)


def rows_of(job: Job, root: Path, outcome: Config) -> Iterator[Config]:
    """Yields the rows of a run's `metrics.csv`, each with the run's place in the grid.

    A diverged run has one more row, without values, for the round in which it diverged.
    """
    place = {"run": job.run, **job.axes, "seed": job.seed}
    run = read_run(job, root, outcome)
    for row in run.rows:
        finite = {key: value for key, value in row.items() if math.isfinite(value)}
        yield {**place, "diverged": 0, **finite}
    if run.diverged:
        if run.rows:
            last = run.rows[-1]["round"]
        else:
            last = 0
        yield {**place, "diverged": 1, "round": int(last) + 1}


def figure_files() -> dict[str, Path]:
    """Returns the files of all figures and tables, by name.

    Those of `configs/papers/` in the current folder come before those that come with pfl.
    """
    folders = (files.shipped(), Path("configs"))
    paths = {k: v for folder in folders for k, v in files.names(folder / "papers").items()}
    by_name = {key.replace("/", "-"): path for key, path in paths.items()}

    def place(name: str) -> list[Any]:  # figure10 after figure9
        return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]

    return {name: by_name[name] for name in sorted(by_name, key=place)}


def comparison_of(name: str | Path, changes: Sequence[Config] = ()) -> Comparison:
    """Reads the file of a comparison, or of a figure of a paper, whose runs it compares."""
    path = files.find(str(name))
    is_figure = path is not None and any(map(path.samefile, figure_files().values()))
    return (Reproduction if is_figure else Comparison).from_file(name, changes)


def _resolve(name: str) -> tuple[Path, str, str, Config]:
    """Returns a figure's file, its name, the folder of its runs, and its whole content."""
    figures = figure_files()
    path = figures.get(name) or files.find(name)
    if path is None:
        raise ConfigError(f"reproduce: there is no figure {name!r}; known are {', '.join(figures)}")
    name = next((key for key, file in figures.items() if file.samefile(path)), path.stem)
    content = _nest_content(path, read_experiment(path, Reproduction))
    base_name = content.get("base")
    if base_name is None:
        return path, name, name, content
    if not isinstance(base_name, str):
        raise ConfigError(f"{path}: base: {base_name!r}; it must be a name")
    _, _, folder, base = _resolve(base_name)
    if content.keys() & {"panels", "tables"}:
        shown = {"panels", "tables"}
    else:
        shown = set()
    replaced_keys = shown | (content.keys() & {"grid"})
    whole = merge({k: v for k, v in base.items() if k not in replaced_keys}, content)
    return path, name, folder, whole


def _nest_content(path: Path, content: Config) -> Config:
    """Returns the content with dotted keys taken apart, ready for `merge`."""
    result = dict(content)
    if not isinstance(content.get("full") or {}, dict):
        raise ConfigError(f"{path}: full: {content['full']!r}; it must be keys and their values")
    for key, value in content.items():
        if key == "common" and isinstance(value, dict):
            result[key] = nest(value)
        elif key == "full" and value:
            result[key] = _nest_content(path, value)
        elif key == "runs" and isinstance(value, dict):
            result[key] = {
                str(run): nest(change) if isinstance(change, dict) else change
                for run, change in value.items()
            }
    return result
