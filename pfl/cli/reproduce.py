"""`pfl reproduce FIGURE`: runs what a figure of a paper shows, writes its data and draws it."""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Sequence
from pathlib import Path

from pfl.cli.figure_file import FigureFile, known, read_figure
from pfl.cli.grid import CHANGE, Config, changes_of
from pfl.cli.jobs import made_by, rows_of, run_all, said, side_by_side
from pfl.cli.parser import CommandParser, at_least_one
from pfl.errors import ConfigError
from pfl.files import write_figure

# ---- the command ---------------------------------------------------------------------------------


def reproduce(
    name: str,
    out: Path,
    full: bool = False,
    changes: Sequence[Config] = (),
    workers: int = 1,
) -> list[Path]:
    """Runs the grid of a figure, writes its data and draws it.

    Args:
        name: The name of the figure, or the path of its file.
        out: The folder for runs and results.
        full: Runs the paper's size.
        changes: Changes of the configuration of every run, in this order, after all others.
        workers: Number of processes.

    Returns:
        The paths `<out>/<name>.csv`; `.png` and `.pdf` of panels; `.md` of tables.
    """
    begun = time.monotonic()
    figure = read_figure(name, full)
    jobs, root = [job.changed(changes) for job in figure.jobs()], out / figure.folder
    outcomes: dict[Path, Config] = {}
    for job, outcome in run_all(jobs, root, workers=workers, checkpoints=True):
        outcomes[job.folder] = outcome
        number = f"{len(outcomes):{len(str(len(jobs)))}}/{len(jobs)}"
        print(f"[{number}] {job}: {said(outcome)}", flush=True)
    table = [row for job in jobs for row in rows_of(job, root, outcomes[job.folder])]
    place = ["run", *figure.grid, "seed", "diverged"]
    metrics = list(dict.fromkeys(key for row in table for key in row if key not in place))
    for panel in figure.shown:
        panel.check(figure.name, table, metrics)
    used = dict.fromkeys(name for panel in figure.shown for name in panel.metrics)
    files = [out / f"{figure.name}.csv"]
    shown = used.keys() - {"round"}
    _write(files[0], [*place, *used], [r for r in table if r["diverged"] or shown & r.keys()])
    if figure.panels:
        files += _draw(figure, table, out)
    if figure.tables:
        files.append(out / f"{figure.name}.md")
        parts = [f"# {figure.title}\n", *(entry.markdown(table) for entry in figure.tables)]
        files[-1].write_text("\n".join([*parts, made_by(f"reproduce {name}", outcomes.values())]))
    print(f"{', '.join(map(str, files))} ({time.monotonic() - begun:.0f} s)")
    return files


def _title(name: str) -> str:
    try:
        return read_figure(name).title
    except ConfigError as error:  # the others can still be run
        return f"broken: {error}"


def _draw(figure: FigureFile, table: list[Config], out: Path) -> list[Path]:
    from pfl.report.curves import draw  # matplotlib takes long to import

    drawing = draw(figure.title, figure.panels, table)
    files = [out / f"{figure.name}.{kind}" for kind in ("png", "pdf")]
    for path in files:
        write_figure(path, drawing)
    return files


def _write(path: Path, names: list[str], table: list[Config]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for row in table:
            values = (row.get(name, "") for name in names)
            writer.writerow(f"{v:.7g}" if isinstance(v, float) else v for v in values)


def command(words: list[str]) -> None:
    """Runs `reproduce [FIGURE ...] [--full] [--jobs N] [--change KEY=VALUE] [--out FOLDER]`.

    Without a figure, it lists all figures.

    Args:
        words: The words behind `reproduce`.
    """
    parser = CommandParser(
        prog="pfl reproduce",
        description="Run what figures of the papers show, write their data (CSV) and draw them "
        "(PNG, PDF). Runs of the same configuration and code are not repeated, and a killed run "
        "goes on where it was.",
    )
    parser.add_argument("figure", nargs="*", help="such as fedpd-figure2, or a YAML file")
    parser.add_argument("--full", action="store_true", help="the paper's size, where that is long")
    parser.add_argument("--jobs", type=at_least_one, help="runs at a time; default: as many as fit")
    parser.add_argument("--change", **CHANGE)
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"), help="the folder")
    parser.add_argument("--list", action="store_true", help="the figures there are")
    given = parser.parse_args(words)
    if given.list or not given.figure:
        for name in known():
            print(f"{name:<18} {_title(name)}")
    changes = changes_of("reproduce", given.change)
    workers = given.jobs or side_by_side(os.cpu_count() or 1)
    for name in [] if given.list else given.figure:
        reproduce(name, given.out, given.full, changes, workers)
