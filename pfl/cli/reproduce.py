"""`pfl reproduce FIGURE`: runs what a figure of a paper shows, writes its data and draws it."""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import NoReturn

import yaml

from pfl.callbacks.run_files import run_folder_errors
from pfl.cli.app import FederatedCLI
from pfl.cli.figure_file import Config, FigureFile, Job, known, merge, read_figure
from pfl.cli.messages import explain
from pfl.errors import ConfigError, Diverged

QUIET = {
    "enable_progress_bar": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
}


# ---- runs ----------------------------------------------------------------------------------------


def execute(job: Job, root: Path) -> Config:
    """Runs a job in `root`, unless an earlier run with the same configuration is there.

    Returns:
        `status` ("finished", or "diverged" if the models were no longer finite), `seconds` of the
        run, and `reused`, which is True for an earlier run.
    """
    folder = root / job.folder
    record = folder / "outcome.json"
    config = json.dumps(job.config)
    if record.is_file():
        before = json.loads(record.read_text())
        if before["config"] == config:
            return {**before, "reused": True}
    shutil.rmtree(folder, ignore_errors=True)  # interrupted, or of another configuration
    with run_folder_errors(folder.parent, "reproduce: --out"):
        folder.parent.mkdir(parents=True, exist_ok=True)
    place = {"name": folder.name, "default_root_dir": str(folder.parent)}
    path = folder.with_name(f"{folder.name}.yaml")
    whole = merge(job.config, {"trainer": {**QUIET, **place}})
    path.write_text(yaml.safe_dump(whole, sort_keys=False, allow_unicode=True))
    begun = time.monotonic()
    outcome = {"config": config, "status": _fit(path), "seconds": time.monotonic() - begun}
    folder.mkdir(exist_ok=True)  # there is none if the first round failed
    part = record.with_suffix(".part")  # a killed process leaves no half of a record
    part.write_text(json.dumps(outcome) + "\n")
    part.replace(record)
    return {**outcome, "reused": False}


def _fit(config: Path) -> str:
    """Returns the status of a run of `fit`, whose output is dropped."""
    try:
        with redirect_stdout(io.StringIO()):
            FederatedCLI(["fit", "--config", str(config)])
    except Diverged:
        return "diverged"
    except Exception as error:
        if line := explain(error):
            raise ConfigError(f"{config}: {line}") from error
        raise
    return "finished"


def rows_of(job: Job, root: Path, outcome: Config) -> Iterator[Config]:
    """Yields the rows of a run's `metrics.csv`, each with the run's place in the grid.

    A diverged run has one more row, without values, for the round in which it diverged.
    """
    place = {"run": job.run, **job.axes, "seed": job.seed}
    diverged = outcome["status"] == "diverged"
    rounds = 0
    path = root / job.folder / "metrics.csv"
    if path.is_file():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                rounds = int(float(row["round"]))
                values = {key: float(value) for key, value in row.items() if value}
                finite = {key: value for key, value in values.items() if math.isfinite(value)}
                yield {**place, "diverged": 0, **finite}
    if diverged:
        yield {**place, "diverged": 1, "round": rounds + 1}


# ---- the command ---------------------------------------------------------------------------------


def reproduce(name: str, out: Path, full: bool = False) -> list[Path]:
    """Runs the grid of a figure, writes its data and draws it.

    Args:
        name: The name of the figure, or the path of its file.
        out: The folder for runs and results.
        full: Runs the paper's size.

    Returns:
        The paths `<out>/<name>.csv`; `.png` and `.pdf` of panels; `.md` of tables.
    """
    begun = time.monotonic()
    figure = read_figure(name, full)
    jobs, root = figure.jobs(), out / figure.folder
    table: list[Config] = []
    for number, job in enumerate(jobs, 1):
        outcome = execute(job, root)
        table += rows_of(job, root, outcome)
        done = "as before" if outcome["reused"] else f"{outcome['seconds']:.1f} s"
        note = "" if outcome["status"] == "finished" else f", {outcome['status']}"
        print(f"[{number:{len(str(len(jobs)))}}/{len(jobs)}] {job}: {done}{note}", flush=True)
    place = ["run", *figure.grid, "seed", "diverged"]
    metrics = list(dict.fromkeys(key for row in table for key in row if key not in place))
    shown = [*figure.panels, *(entry.panel for entry in figure.tables)]
    for panel in shown:
        panel.check(figure.name, table, metrics)
    used = dict.fromkeys(name for panel in shown for name in panel.metrics)
    files = [out / f"{figure.name}.csv"]
    _write(files[0], [*place, *used], table)
    if figure.panels:
        files += _draw(figure, table, out)
    if figure.tables:
        files.append(out / f"{figure.name}.md")
        parts = [f"# {figure.title}\n", *(entry.markdown(table) for entry in figure.tables)]
        files[-1].write_text("\n".join(parts))
    print(f"{', '.join(map(str, files))} ({time.monotonic() - begun:.0f} s)")
    return files


def _draw(figure: FigureFile, table: list[Config], out: Path) -> list[Path]:
    from pfl.report.curves import draw  # matplotlib takes long to import

    drawing = draw(figure.title, figure.panels, table)
    files = [out / f"{figure.name}.{kind}" for kind in ("png", "pdf")]
    drawing.savefig(files[0], dpi=150)
    drawing.savefig(files[1], metadata={"CreationDate": None})  # equal runs give equal files
    return files


def _write(path: Path, names: list[str], table: list[Config]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for row in table:
            values = (row.get(name, "") for name in names)
            writer.writerow(f"{v:.7g}" if isinstance(v, float) else v for v in values)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"reproduce: {message}")


def command(words: list[str]) -> None:
    """Runs `reproduce [FIGURE ...] [--full] [--out FOLDER]`; without a figure, lists all figures.

    Args:
        words: The words behind `reproduce`.
    """
    parser = _Parser(
        prog="pfl reproduce",
        description="Run what figures of the papers show, write their data (CSV) and draw them "
        "(PNG, PDF). Runs whose configuration has not changed are not repeated.",
    )
    parser.add_argument("figure", nargs="*", help="such as fedpd-figure2, or a YAML file")
    parser.add_argument("--full", action="store_true", help="the paper's size, where that is long")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"), help="the folder")
    parser.add_argument("--list", action="store_true", help="the figures there are")
    given = parser.parse_args(words)
    if given.list or not given.figure:
        for name in known():
            print(f"{name:<18} {read_figure(name).title}")
    for name in [] if given.list else given.figure:
        reproduce(name, given.out, given.full)
