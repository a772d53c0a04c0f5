"""Draws the figures of docs/images again, from the published data and the figures' files.

    python -m benchmarks.redraw [NAME ...]     # such as fedpd-figure2; all by default

A picture `docs/images/*/NAME.png` is drawn if docs/data has its data, and a file of its name in
configs/ has panels. Other pictures have scripts of their own, such as `benchmarks.paper_figures`.
"""

import sys
from pathlib import Path
from typing import Any

from benchmarks import published
from pfl.configuration.files import read
from pfl.experiments.reproduction import Reproduction, written
from pfl.files import write_figure
from pfl.report.curves import figure_of
from pfl.report.matplotlib_drawer import draw
from pfl.report.plots import Figure

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"


def files() -> dict[str, tuple[str, str]]:
    """Returns the names of the file and of the data of each figure that can be drawn."""
    found = {}
    for data in published.names():
        name = data.rpartition("/")[2]
        path = ROOT / "configs" / f"{data}.yaml"
        if path.exists() and "panels" in read(path):
            found[name] = (str(path), data)
        elif "/" not in data:
            found[name] = (data, data)
    return found


def figure(file: str, data: str) -> Figure:
    """Returns the figure of a file, from published data."""
    reproduction = Reproduction.from_file(file)
    table = []
    for row in published.rows(data):
        entry: dict[str, Any] = {"run": row["run"], "diverged": int(row["diverged"])}
        for axis, values in reproduction.grid.items():
            entry[axis] = {written(value): value for value in values}[row[axis]]
        for key, text in row.items():
            if key not in entry and text:
                entry[key] = float(text)
        table.append(entry)
    return figure_of(str(reproduction.title), reproduction.drawn, table)


def main(names: list[str]) -> None:
    """Draws the pictures of these names, or all."""
    found = files()
    for path in sorted(IMAGES.rglob("*.png")):
        if path.stem in found and (not names or path.stem in names):
            write_figure(path, draw(figure(*found[path.stem])))
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main(sys.argv[1:])
