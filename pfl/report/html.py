"""A report of runs as one HTML page that needs neither a server nor a network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

import numpy as np

from pfl import files
from pfl.errors import ConfigError
from pfl.report.comparison import Comparison
from pfl.report.folders import config_of
from pfl.report.results import Run, kinds
from pfl.report.table import in_words

if TYPE_CHECKING:
    import plotly.graph_objects as go

PLOT = {
    "responsive": True,
    "displaylogo": False,
    "toImageButtonOptions": {"format": "svg"},
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"],
}
COUNTED = ("client", "never trains")  # columns of whole numbers, with those of samples and bytes
OPEN = 3  # number of runs up to which all of them are shown at once
Cell = str | float | None


def page(runs: Sequence[Run], title: str, version: str) -> str:
    """Returns the page of some runs, with Plotly's script in it.

    Args:
        runs: The runs; those with the same label and other seeds are one method in the curves.
        title: The title of the page.
        version: The version of lightning-pfl.

    Raises:
        ConfigError: Plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ConfigError(
            "report: it needs Plotly; install it with: pip install 'lightning-pfl[report]'"
        ) from None
    body = [f"<h1>{escape(title)}</h1>", _overview(runs), *_curves(runs)]
    seen: dict[str, int] = {}
    body += [_run(index, run, len(runs) <= OPEN, seen) for index, run in enumerate(runs)]
    body.append(f"<p>This page was made with lightning-pfl {version}.</p>")
    template = (Path(__file__).parent / "page.html").read_text()
    return Template(template).substitute(
        title=escape(title), plotly=get_plotlyjs(), body="\n".join(body)
    )


def _name(run: Run) -> str:
    return f"{run.label}, seed {run.seed}"


# ---- all runs ------------------------------------------------------------------------------------


def _overview(runs: Sequence[Run]) -> str:
    """Returns a table with a row for each run."""
    comparison = Comparison(runs, runs[0].label)
    number = comparison.number
    shown = kinds(runs, number)
    heads = ["run", "seed", "rounds", "round that counts", *map(in_words, shown), "worst 10%"]
    gained = [comparison.gained_of(run) for run in runs]
    heads += ["gained"] if any(share is not None for share in gained) else []
    costs = {
        "MB up": ("comm/uplink_bytes", 1e6),
        "MB down": ("comm/downlink_bytes", 1e6),
        "sample gradients": ("train/samples", 1),
    }
    rows: list[list[Cell]] = []
    for index, (run, share) in enumerate(zip(runs, gained, strict=True)):
        row, main = comparison.chosen[id(run)] or {}, comparison.main_kind(run.label)
        cells: list[Cell] = [f"#run-{index} {run.label}", run.seed, _rounds(run), row.get("round")]
        cells += [row.get(f"test/{kind}/{number}") for kind in shown]
        cells.append(row.get(f"test/{main}/{number}_worst10"))
        cells += [share] if "gained" in heads else []
        spent = row or (run.rows[-1] if run.rows else {})
        for column, unit in costs.values():
            cells.append(spent[column] / unit if column in spent else None)
        cells += [row.get(f"parameters/{main}"), run.summary.get("wall_seconds")]
        rows.append(cells)
    notes = comparison.notes()[2:]
    words = f"Scores are the clients' mean test {number}. " * bool(shown) + " ".join(notes)
    heads += [*costs, "parameters", "seconds"]
    return f"<h2>Runs</h2><p>{escape(words)}</p>{_table(heads, rows)}"


def _rounds(run: Run) -> float | None:
    return run.rows[-1]["round"] if run.rows else None


def _curves(runs: Sequence[Run]) -> list[str]:
    from pfl.report import html_figures as figures

    mean, worst = figures.curves(runs), figures.curves(runs, "_worst10")
    scores = list(figures.scores_of(runs))
    if mean is None:
        return []
    axes = next(iter(mean.data)).meta["x"]
    boxes = figures.boxes(_scores_by_label(runs), Comparison(runs, runs[0].label).number)
    return [
        "<h2>Curves</h2>",
        "<p>Lines are means over seeds, with a band from the lowest to the highest seed. "
        "Click on a name in a legend to hide its line, and drag in a figure to enlarge a part.</p>",
        f'<p class="choice">{_select("axis", axes)} {_select("score", scores)}</p>',
        '<div class="figures">',
        f'<div class="curves">{_plot(mean)}</div>',
        f'<div class="curves">{_plot(worst)}</div>' if worst else "",
        _plot(boxes),
        "</div>",
    ]


def _scores_by_label(runs: Sequence[Run]) -> dict[str, np.ndarray]:
    comparison = Comparison(runs, runs[0].label)
    scores = {}
    for label in comparison.labels:
        found = [comparison.client_scores(run) for run in comparison.of(label)]
        known = [values for values in found if values is not None]
        if known:
            scores[label] = np.concatenate(known)
    return scores


def _select(name: str, options: Iterable[str]) -> str:
    items = "".join(f"<option>{escape(option)}</option>" for option in options)
    return f'<label>{name} <select id="{name}">{items}</select></label>'


# ---- one run -------------------------------------------------------------------------------------


def client_table(run: Run) -> dict[str, np.ndarray]:
    """Returns what is known of a run's clients, by columns [M], in the round that counts.

    The columns are `client`, the sizes, label counts and bytes of `clients.csv`, the test scores of
    each kind of model (`global`, `personalized`, `unseen/5`, ...) and `alone`, and `gain`, which is
    positive where a client is better off than alone. What the run has not recorded is missing.
    """
    comparison = Comparison([run], run.label)
    row, number = comparison.chosen[id(run)], comparison.number
    table = {}
    for kind in kinds([run], number):
        scores = run.client_scores(row, f"test_{kind}_{number}") if row else None
        if scores is not None:
            table[kind] = scores
    if (alone := run.clients.get(f"test_local_{number}")) is not None:
        table["alone"] = alone
    if (gains := comparison.gains_of(run)) is not None:
        table["gain"] = gains
    known = {
        name: values
        for name, values in run.clients.items()
        if name.startswith("label_") or name.endswith(("_samples", "_bytes"))
    }
    if "unseen" in run.clients:
        known["never trains"] = run.clients["unseen"]
    count = len(next(iter({**table, **known}.values()), []))
    return {"client": np.arange(count), **table, **known}


def _fewer(table: dict[str, np.ndarray], most: int) -> dict[str, np.ndarray]:
    """Returns at most so many clients, evenly spaced by their first score."""
    count = len(table["client"])
    if count <= most:
        return table
    first = next((kind for kind in ("personalized", "global") if kind in table), "client")
    places = np.linspace(0, count - 1, most).round().astype(int)
    chosen = np.sort(np.argsort(table[first], kind="stable")[places])
    return {name: values[chosen] for name, values in table.items()}


def _run(index: int, run: Run, opened: bool, seen: dict[str, int]) -> str:
    """Returns the part of one run.

    Args:
        index: The number of the run.
        run: The run.
        opened: Whether the part is shown at once.
        seen: The first run of each partition, which this function adds to.
    """
    from pfl.report import html_figures as figures

    whole = client_table(run)
    table = _fewer(whole, figures.MOST_CLIENTS)
    partition = figures.partition(table)
    digest = str(run.summary.get("partition_hash", index))
    state = "The run diverged." if run.diverged else "The run has not ended."
    words = [escape(str(run.summary.get("protocol", state)))]
    if (first := seen.setdefault(digest, index)) != index:
        partition = None
        words.append(f'The partition is that of <a href="#run-{first}">this run</a>.')
    if len(table["client"]) < len(whole["client"]):
        words.append(
            f"Of {len(whole['client']):,} clients, {len(table['client']):,} are shown, from the "
            f"lowest to the highest score; all are in clients.csv."
        )
    number = Comparison([run], run.label).number
    plots = [
        figures.clients(table, number),
        partition,
        figures.collaboration(files.last_round(run.folder / "collaboration.csv")),
    ]
    parts = [
        f"<p>{' '.join(words)}</p>",
        f'<div class="figures">{"".join(map(_plot, plots))}</div>',
        _details(f"{len(table['client']):,} clients", _clients(table), 'class="high"'),
        _details("Configuration", f"<pre>{escape(config_of(run.folder))}</pre>"),
        _details("Versions, to cite", _cite(run)),
    ]
    name, state = escape(f"{_name(run)} ({run.folder})"), " open" if opened else ""
    body = "\n".join(parts)
    return (
        f'<section class="run" id="run-{index}"><details{state}><summary>{name}</summary>'
        f"{body}</details></section>"
    )


def _details(title: str, content: str, attributes: str = "") -> str:
    inner = f"<div {attributes}>{content}</div>"
    return f"<details><summary>{escape(title)}</summary>{inner}</details>" if content else ""


def _clients(table: dict[str, np.ndarray]) -> str:
    """Returns the sortable table of the clients; empty if nothing is known of them."""
    columns = {name: values for name, values in table.items() if not name.startswith("label_")}
    heads = [in_words(name).replace("_", " ") for name in columns]
    counted = [name in COUNTED or name.endswith(("_samples", "_bytes")) for name in columns]
    rows: list[list[Cell]] = [
        [int(v) if whole else float(v) for v, whole in zip(row, counted, strict=True)]
        for row in zip(*columns.values(), strict=True)
    ]
    return _table(heads, rows) if rows else ""


def _cite(run: Run) -> str:
    """Returns the versions, the seed and the partition of a run, as a table."""
    facts = dict(run.summary.get("versions", {}))
    names = ("algorithm", "seed", "partition_hash", "engine", "folder")
    facts |= {name: run.summary[name] for name in names if name in run.summary}
    return _table(["what", "value"], [[str(key), str(value)] for key, value in facts.items()])


# ---- pieces --------------------------------------------------------------------------------------


def _plot(figure: go.Figure | None) -> str:
    if figure is None:
        return ""
    title = escape(figure.layout.title.text)  # above the figure, where it wraps on small screens
    figure.update_layout(title=None)
    content = figure.to_html(full_html=False, include_plotlyjs=False, config=PLOT)
    return f'<div role="figure" aria-label="{title}"><h3>{title}</h3>{content}</div>'


def _table(heads: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Returns a table that sorts; each cell has its exact value, and shows it shortened.

    A text that begins with "#" is a link within the page and its words.
    """
    head = "".join(f'<th scope="col"><button>{escape(name)}</button></th>' for name in heads)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    table = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="wide"><table>{table}</table></div>'


def _cell(value: Cell) -> str:
    if value is None or value != value:
        return '<td data-value="">–</td>'
    if isinstance(value, str):
        link, _, words = value.partition(" ") if value.startswith("#") else ("", "", value)
        shown = f'<a href="{link}">{escape(words)}</a>' if link else escape(words)
        return f'<td data-value="{escape(words, quote=True)}">{shown}</td>'
    whole = float(value).is_integer() and (abs(value) > 1 or isinstance(value, int))
    digits = 0 if whole or abs(value) >= 1000 else 1 if abs(value) >= 10 else 4
    return f'<td data-value="{json.dumps(value)}">{value:,.{digits}f}</td>'
