"""What runs have left in their folders, compared: tables, statistics and figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pfl.report.comparison_tables as tables
from pfl.errors import ConfigError
from pfl.files import make_folder, write, write_figure, write_records
from pfl.report import comparison_figures as figures
from pfl.report.comparison import ComparedRuns, point_text
from pfl.report.plots import Figure
from pfl.report.table import latex, markdown, text
from pfl.scores.runs import Run, find_runs, read_runs

NOT_IN_LATEX = ("parameters", "seconds")  # columns that papers do not print
NARROW = 2  # as many numbers, each with its deviation, fit into one of two columns of text


@dataclass(frozen=True)
class Results:
    """The results of a comparison.

    Attributes:
        points: A comparison of the methods for each point of the grid.
        title: What is compared.
        bandwidth: Bits a second of each client, for a figure of the time of communication.
    """

    points: Sequence[ComparedRuns]
    title: str = "Comparison"
    bandwidth: float | None = None

    @classmethod
    def of(
        cls,
        runs: Sequence[Run],
        *,
        baseline: str | None = None,
        budget: tuple[str, float] | None = None,
        metric: str | None = None,
        title: str = "Comparison",
        tuning: Mapping[str, Mapping[str, float]] | None = None,
        bandwidth: float | None = None,
    ) -> Results:
        """Compares runs.

        Args:
            runs: The runs of all points of the grid.
            baseline: The run with which the others are compared; None: the first one.
            budget: One of `pfl.scores.runs.BUDGETS` and its limit; None: whole runs.
            metric: The score that counts, such as `f1_score`; None: accuracy, or loss.
            title: What is compared.
            tuning: What the tuning of each run took.
            bandwidth: As the attribute.

        Raises:
            ConfigError: There is no such run or score.
        """
        labels = list(dict.fromkeys(run.label for run in runs))
        if baseline is not None and baseline not in labels:
            known = ", ".join(labels)
            raise ConfigError(f"compare: --baseline: {baseline}; it must be one of {known}")
        groups: dict[str, list[Run]] = {}
        for run in runs:
            groups.setdefault(json.dumps(run.point, default=str), []).append(run)
        first = baseline or labels[0]
        taken = tuning or {}
        points = [
            ComparedRuns(group, first, budget, point_text(group[0].point) or title, taken, metric)
            for group in groups.values()
        ]
        return cls(points, title, bandwidth)

    @classmethod
    def from_folders(cls, folders: Sequence[str | Path], **settings: Any) -> Results:
        """Compares finished runs.

        Args:
            folders: Folders of runs, or folders that hold such folders.
            settings: As the arguments of `of`.

        Raises:
            ConfigError: The runs have not ended, or their clients cannot be compared.
        """
        runs = read_runs(find_runs([Path(folder) for folder in folders], "compare"))
        if len({(run.label, run.seed) for run in runs}) < len(runs):
            raise ConfigError("compare: two of these runs have the same configuration and seed")
        first: dict[int, Run] = {}
        for run in runs:
            if "partition_hash" not in run.summary:  # it diverged in its first round
                continue
            other = first.setdefault(run.seed, run)
            if other.shares_partition(run) is False:
                raise ConfigError(
                    f"compare: {other.folder} and {run.folder} have the seed {run.seed} and other "
                    f"partitions; their clients cannot be compared"
                )
        return cls.of(runs, **settings)

    def table(self) -> Any:
        """Returns a row for each method at each point of the grid: all numbers of the tables.

        A `pandas.DataFrame`, or a list of dicts if pandas is not installed.
        """
        return _frame(tables.records(self.points))

    def runs(self) -> Any:
        """Returns a row for each run: what it is, and the numbers of the round that counts.

        A `pandas.DataFrame`, or a list of dicts if pandas is not installed.
        """
        return _frame(tables.run_records(self.points))

    def __str__(self) -> str:
        """Returns the tables as text."""
        if len(self.points) > 1:
            parts = [text(tables.overview_table(self.points))]
        else:
            parts = []
        for point in self.points:
            if len(self.points) > 1:
                head = f"{point.title}\n\n"
            else:
                head = ""
            pair = (tables.score_table(point), tables.statistics_table(point))
            parts.append(f"{head}{text(pair[0])}\n{text(pair[1])}\n{' '.join(point.notes())}\n")
        return "\n".join(parts)

    def write(self, folder: Path, paper: Sequence[str] = ()) -> list[Path]:
        """Writes tables and figures into a folder, and returns the paths of the files.

        Args:
            folder: Where they are written.
            paper: The columns of `paper.tex`, as `comparison_tables.paper_table` has them; none: no
                such file, and no figures for papers.

        Raises:
            ConfigError: There is no such column, or a file cannot be written.
        """
        printed_table = None
        if paper:
            printed_table = tables.paper_table(self.points, paper)
        make_folder(folder, "--out")
        page = [f"# {self.title}\n"]
        tex = []
        if len(self.points) > 1:
            overview = tables.overview_table(self.points)
            page.append(markdown(overview))
            tex.append(latex(overview))
        for point in self.points:
            pair = [tables.score_table(point), tables.statistics_table(point)]
            notes = " ".join(point.notes())
            if len(self.points) > 1:
                page.append(f"## {point.title}\n")
            page += [*map(markdown, pair), notes + "\n"]
            printed = [head for head in pair[0].heads if head not in NOT_IN_LATEX]
            tex += [latex(pair[0], columns=printed, notes=notes), latex(pair[1])]
        names = ("comparison.md", "comparison.tex", "comparison.csv", "runs.csv")
        files = [folder / name for name in names]
        write(files[0], "\n".join(page))
        write(files[1], "\n".join(tex))
        write_records(files[2], tables.records(self.points))
        write_records(files[3], tables.run_records(self.points))
        if printed_table is not None:
            wide = len(printed_table.columns) > 1 + NARROW
            files.append(folder / "paper.tex")
            write(files[-1], latex(printed_table, wide=wide, fits=True))
        return files + self._draw(folder, printed_table is not None)

    def _draw(self, folder: Path, paper: bool) -> list[Path]:
        drawn: dict[str, Figure | None] = {"ranks": figures.rank_diagram(self.points)}
        for point, end in zip(self.points, self._endings(), strict=True):
            drawn[f"curves{end}"] = figures.curves(point)
            drawn[f"worst-tenth{end}"] = figures.curves(point, "_worst10")
            drawn[f"gains{end}"] = figures.gains(point)
            drawn[f"scatter{end}"] = figures.scatter(point)
            if self.bandwidth is not None:
                drawn[f"communication{end}"] = figures.communication(point, self.bandwidth)
        pairs = [(folder / name, figure) for name, figure in drawn.items() if figure is not None]
        paths = [path for name, figure in pairs for path in save_figure(figure, name)]
        if paper:
            paths += [save_for_paper(figure, name) for name, figure in pairs]
        return paths

    def _endings(self) -> list[str]:
        """Returns the ends of the names of each point's files."""
        several = len(self.points) > 1
        return [f"-{number}" if several else "" for number in range(1, len(self.points) + 1)]

    def send(self, project: str, files: Sequence[Path]) -> None:
        """Sends tables and figures to W&B, as a run with the job type `compare`.

        `files` are what `write` has returned: the PNG images are sent, and W&B's own files come
        into their folder.
        """
        import wandb

        content: dict[str, Any] = {p.stem: wandb.Image(str(p)) for p in files if p.suffix == ".png"}
        for point, end in zip(self.points, self._endings(), strict=True):
            made = {"scores": tables.score_table, "statistics": tables.statistics_table}
            for name, table in ((name, build(point)) for name, build in made.items()):
                content[name + end] = wandb.Table(columns=[*table.heads], data=table.cells[1:])
        about = {"points": [point.title for point in self.points]}
        place: dict[str, Any] = {"project": project, "name": self.title, "dir": files[0].parent}
        try:
            run = wandb.init(job_type="compare", config=about, **place)
        except wandb.errors.UsageError as error:
            line = " ".join(str(error).split())
            raise ConfigError(f"compare: --wandb: {line} Without: WANDB_MODE=offline") from error
        with run:
            run.log(content)


def _frame(records: list[dict[str, Any]]) -> Any:
    try:
        import pandas
    except ImportError:
        return records
    return pandas.DataFrame(records)


def save_for_paper(figure: Figure, path: Path) -> Path:
    """Draws a figure as `paper-<name>.pdf`, as wide as one or both columns of a paper's text."""
    import matplotlib

    from pfl.report.matplotlib_drawer import PAPER, draw, paper_size

    file = path.with_name(f"paper-{path.name}.pdf")
    with matplotlib.rc_context(PAPER):
        write_figure(file, draw(replace(figure, size=paper_size(figure))))
    return file


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Draws a figure as `.png` and `.pdf` after `path`, and returns both paths."""
    from pfl.report.matplotlib_drawer import draw  # matplotlib takes long to import

    drawn = draw(figure)
    files = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "pdf")]
    for file in files:
        write_figure(file, drawn)
    return files
