"""`pfl report`: runs as one HTML page that opens without a server or a network."""

from __future__ import annotations

from pathlib import Path

import pfl
from pfl import files
from pfl.cli.parser import CommandParser
from pfl.scores.runs import find_runs, read_runs


def command(words: list[str]) -> None:
    """Runs `report FOLDER ... [--out FILE] [--title TEXT]`.

    Args:
        words: The words behind `report`.
    """
    parser = CommandParser(
        prog="pfl report",
        description="Write one HTML page about runs: curves, clients, maps, tables, configurations "
        "and versions. The page opens in any browser, without a network.",
    )
    parser.add_argument(
        "folder", nargs="+", type=Path, help="folders of runs, or folders that hold such folders"
    )
    parser.add_argument("--out", type=Path, help="the page; default: report.html in the folder")
    parser.add_argument("--title", help="the title of the page")
    parser.add_argument("--metric", help="the score that counts, such as finetuned/5/accuracy")
    given = parser.parse_args(words)
    from pfl.report.html import page

    runs = read_runs(find_runs(given.folder, "report"), unfinished=True)
    out = given.out or (given.folder[0] if len(given.folder) == 1 else Path()) / "report.html"
    title = given.title or ", ".join(folder.resolve().name for folder in given.folder)
    with files.run_folder_errors(out.parent, "report: --out"):
        out.parent.mkdir(parents=True, exist_ok=True)
    with files.replaced(out) as file:
        file.write(page(runs, title, pfl.__version__, given.metric).encode())
    print(f"{out} ({len(runs)} runs)" if len(runs) > 1 else out)
