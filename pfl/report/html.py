"""Runs as one HTML page that opens without a server or a network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pfl import files
from pfl.datamodules.errors import ConfigError, optional_module
from pfl.report import comparison_figures, figures
from pfl.report.comparison import ComparedRuns
from pfl.report.comparison_tables import run_numbers
from pfl.report.plots import Figure
from pfl.report.table import Cell, Column, Link, Table, html, number_of, template
from pfl.scores.names import ScoreName, models_of
from pfl.scores.runs import Run, config_of

PLOT = {
    "responsive": True,
    "displaylogo": False,
    "toImageButtonOptions": {"format": "svg"},
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"],
}
WHOLE = ("client", "never trains")  # columns of whole numbers, as samples and bytes are
WHOLE_ENDS = ("_samples", "_bytes")
MOST_SHOWN = 1000  # clients in a figure or a table
MOST_OPEN = 3  # number of runs up to which all of them are shown at once


def page(runs: Sequence[Run], title: str, version: str, metric: str | None = None) -> str:
    """Returns the page about runs, which may be unfinished.

    Raises:
        ConfigError: Plotly is not installed, a file of a run is damaged, or no run has the score.
    """
    from markupsafe import Markup

    plotly = optional_module("report", "plotly.offline", "plotly")

    comparison = ComparedRuns(runs, runs[0].label, metric=metric)
    seen: dict[str, int] = {}
    parts = []
    for index, run in enumerate(runs):
        if comparison.score_of(run.label):
            of_run = comparison
        else:
            of_run = ComparedRuns([run], run.label)
        with files.reading(run.folder):
            parts.append(_part(index, run, of_run, seen) | {"is_open": len(runs) <= MOST_OPEN})
    notes = " ".join(comparison.notes()[2:])
    scores = bool(models_of(comparison.columns, comparison.number))
    return template((Path(__file__).parent / "page.html").read_text(encoding="utf-8")).render(
        title=title,
        plotly=Markup(plotly.get_plotlyjs()),
        version=version,
        notes=f"Scores are the clients' mean test {comparison.number}. " * scores + notes,
        overview=Markup(html(_overview(comparison))),
        curves=_curves(comparison),
        parts=parts,
        html=lambda table: Markup(html(table)),
    )


# ---- all runs ------------------------------------------------------------------------------------


def _overview(comparison: ComparedRuns) -> Table:
    """Returns a table with a row for each run, with the columns of a comparison's table."""
    rows: list[dict[str, Cell]] = []
    for index, run in enumerate(comparison.runs):
        row = comparison.chosen[id(run)] or {}
        if run.rows:
            last = run.rows[-1]
        else:
            last = {}
        place: dict[str, Cell] = {"run": Link(f"#run-{index}", run.label), "seed": run.seed}
        name = comparison.score_of(run.label)
        counts = {"rounds": last.get("round"), "score of the last round": last.get(str(name))}
        counts["round that counts"] = row.get("round")
        place |= {**counts, "model": comparison.main_kind(run.label)}
        rows.append({**place, **run_numbers(comparison, run, row or last)})
    known = any(number_of(row["gained"]) is not None for row in rows)
    heads = [head for head in rows[0] if known or head != "gained"]
    return Table(heads, [[row[head] for head in heads] for row in rows])


def _curves(comparison: ComparedRuns) -> dict[str, Any] | None:
    """Returns the figures of all runs, and what can be chosen in them; None without curves."""
    runs = comparison.runs
    mean = comparison_figures.curve_choices(runs)
    worst = comparison_figures.curve_choices(runs, "_worst10")
    if mean is None:
        return None
    found: dict[str, list[np.ndarray]] = {}
    for run in runs:
        scores = comparison.client_scores(run)
        if scores is not None:
            found.setdefault(run.label, []).append(scores)
    scored = {label: np.concatenate(parts) for label, parts in found.items()}
    return {
        "lines": _drawn(mean, worst),
        "boxes": _drawn(comparison_figures.boxes(scored, comparison.number)),
        "axes": list(comparison_figures.axes_of(runs)),
        "scores": list(comparison_figures.columns_by_title(runs)),
    }


# ---- one run -------------------------------------------------------------------------------------


def client_table(run: Run, comparison: ComparedRuns) -> dict[str, np.ndarray]:
    """Returns what the run has recorded of its clients, by columns [M], in the round that counts.

    The columns are `client`, the names, sizes, label counts and bytes of `clients.csv`, the test
    scores of each kind of model (`global`, `personalized`, `unseen/5`, `local`, ...), and `gain`,
    which is positive where a client is better off than with its local baseline.
    """
    row = comparison.chosen[id(run)]
    number = comparison.number
    models: list[str] = []
    if row:
        models = [*models_of(comparison.columns, number), "local"]
    scores = {m: run.client_scores(row or {}, ScoreName("test", m, number)) for m in models}
    scores["gain"] = comparison.gains_of(run)
    table = {name: values for name, values in scores.items() if values is not None}
    known = {
        "never trains" if name == "unseen" else name: values
        for name, values in run.clients.items()
        if name in ("name", "unseen") or name.startswith("label_") or name.endswith(WHOLE_ENDS)
    }
    count = len(next(iter({**table, **known}.values()), []))
    columns = {"client": np.arange(count), **table, **known}
    if len({len(values) for values in columns.values()}) > 1:
        raise ConfigError(f"{run.folder}: its files have different numbers of clients")
    return columns


def _fewer(table: dict[str, np.ndarray], most: int) -> dict[str, np.ndarray]:
    """Returns at most so many clients, evenly spaced by their first score."""
    count = len(table["client"])
    if count <= most:
        return table
    first = next((kind for kind in ("personalized", "global") if kind in table), "client")
    places = np.linspace(0, count - 1, most).round().astype(int)
    chosen = np.sort(np.argsort(table[first], kind="stable")[places])
    return {name: values[chosen] for name, values in table.items()}


def _part(index: int, run: Run, comparison: ComparedRuns, seen: dict[str, int]) -> dict[str, Any]:
    """Returns what the page shows of a run; `seen` has the first run of each partition."""
    whole = client_table(run, comparison)
    table = _fewer(whole, MOST_SHOWN)
    digest = str(run.summary.get("partition_hash", index))
    if run.diverged:
        state = "The run diverged."
    else:
        state = "The run has not ended."
    words = [str(run.summary.get("protocol", state)), *_round_words(run, comparison)]
    if "privacy" in run.summary:
        epsilon = run.summary["privacy/epsilon"]
        words.append(f"Privacy: epsilon {epsilon:.4g}, {run.summary['privacy']}.")
    if len(table["client"]) < len(whole["client"]):
        words.append(
            f"Of {len(whole['client']):,} clients, {len(table['client']):,} are shown, from the "
            f"lowest to the highest score; all are in clients.csv."
        )
    first = seen.setdefault(digest, index)
    shown = [figures.client_page_figure(table, comparison.number)]
    same_as: int | None = first  # the run whose partition this run has
    if first == index:
        same_as = None
        shown.append(figures.label_page_figure(table))
    weights = files.last_round(run.folder / "collaboration.csv")
    if weights:
        columns = {name: weights[name] for name in ("client", "partner", "weight")}
        title = "Who learned from whom in the last round"
        shown.append(figures.collaboration_figure(**columns, title=title))
    facts = dict(run.summary.get("versions") or {})
    names = ("algorithm", "seed", "partition_hash", "engine", "folder")
    facts |= {name: run.summary[name] for name in names if name in run.summary}
    return {
        "title": f"{run.label}, seed {run.seed} ({run.folder})",
        "words": words,
        "same_as": same_as,
        "plots": _drawn(*shown),
        "clients": _clients(table),
        "facts": Table(["what", "value"], [[str(key), str(value)] for key, value in facts.items()]),
        "config": config_of(run.folder),
    }


def _round_words(run: Run, comparison: ComparedRuns) -> list[str]:
    """Returns the scores after the last round, and after the best round by validation, in words."""
    name = comparison.score_of(run.label)
    chosen = comparison.chosen[id(run)] or {}
    tested = [row for row in run.rows if str(name) in row]
    words = []
    if tested:
        score = f"{comparison.main_kind(run.label)} {comparison.number}"
        last = tested[-1]
        words.append(f"Last round: round {last['round']:.0f}, test {score} {last[str(name)]:.4f}.")
        if "selected_by" in chosen and str(name) in chosen:
            best = f"round {chosen['round']:.0f}, test {score} {chosen[str(name)]:.4f}"
            words.append(f"Best by validation: {best}.")
    return words


def _clients(table: dict[str, np.ndarray]) -> Table | None:
    """Returns the table of the clients; None if nothing is known of them."""
    names = [name for name in table if not name.startswith("label_")]
    names.sort(key=lambda name: name not in ("client", "name"))
    whole = {name for name in names if name in WHOLE or name.endswith(WHOLE_ENDS)}
    columns = []
    for name in names:
        values = table[name]
        if name in whole:
            values = values.astype(int)
        columns.append(values.tolist())
    heads = [Column(name.replace("_", " ")) for name in names]
    if len(table["client"]):
        return Table(heads, list(zip(*columns, strict=True)))
    return None


def _drawn(*shown: Figure | None) -> list[dict[str, Any]]:
    """Returns the titles of figures, which stand above them and wrap, and their HTML."""
    from markupsafe import Markup

    from pfl.report.plotly_drawer import draw  # Plotly takes long to import

    found = []
    for figure in shown:
        if figure is not None:
            content = draw(figure).to_html(full_html=False, include_plotlyjs=False, config=PLOT)
            found.append({"title": figure.plots[0].title, "content": Markup(content)})
    return found
