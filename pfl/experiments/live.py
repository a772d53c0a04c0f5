"""A page about many runs that the browser loads again by itself, from a local file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from pfl import files

REFRESH = 5  # seconds after which the browser loads the page again
NAME = "live.html"
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">{refresh}
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; }}
body {{ padding: 0 1rem; }}
table {{ border-collapse: collapse; width: 100%; }}
td, th {{ border-bottom: 1px solid #ccc; padding: .3rem .6rem; text-align: left; }}
progress {{ width: 8rem; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{head}</p>
<table>
<tr><th>run</th><th>rounds</th><th></th><th>score so far</th></tr>
{rows}
</table>
</body>
</html>
"""


@dataclass(frozen=True)
class Row:
    """A run on the page: its name, how many of its rounds are done, and its score so far.

    `early` says in a word that it ended before its last round, and how; empty for others.
    """

    label: str
    done: float
    rounds: int
    score: str
    early: str = ""


def write_page(path: Path, title: str, head: str, rows: Sequence[Row], ended: bool = False) -> None:
    """Writes the page as a whole; once all has `ended`, browsers load it no more."""
    refresh = f'\n<meta http-equiv="refresh" content="{REFRESH}">'
    if ended:
        refresh = ""
    lines = []
    for row in rows:
        bar = f'<progress max="{row.rounds}" value="{row.done:.0f}"></progress>'
        rounds = f"{row.done:.0f}"
        if row.done <= row.rounds:  # else nobody knows how many there will be
            rounds += f" of {row.rounds}"
        if row.early:
            rounds += f", {row.early}"
        lines.append(
            f"<tr><td>{escape(row.label)}</td><td>{rounds}</td>"
            f"<td>{bar}</td><td>{escape(row.score)}</td></tr>"
        )
    text = PAGE.format(
        refresh=refresh, title=escape(title), head=escape(head), rows="\n".join(lines)
    )
    files.write(path, text)
