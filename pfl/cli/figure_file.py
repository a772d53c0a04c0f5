"""The file of a figure or a table of a paper, which `pfl reproduce` runs.

One figure or table is one file, `configs/papers/<paper>/figure<k>.yaml`; its name is
`<paper>-figure<k>`:

    title: What the figure shows
    seeds, common, runs, grid: ...  # see pfl/cli/grid.py
    panels: [...]             # what to draw; see pfl/report/curves.py
    tables: [...]             # what to write as a table; see pfl/report/crosstab.py
    full: {...}               # what --full changes in all of the above
    baseline: FedAvg          # the run with which `pfl compare` compares the others
    base: paper-figure1       # start from the file of that figure, and share its runs; a grid
                              # replaces that of the base, and panels or tables replace both of its

Runs and points of the grid that no panel and no table shows are left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfl.cli import configs
from pfl.cli.grid import Config, Grid, Job, load, merge, read_grid
from pfl.errors import ConfigError
from pfl.report.crosstab import Table, read_table
from pfl.report.curves import Panel, read_panel

KEYS = ("title", "seeds", "common", "runs", "grid", "panels", "tables", "full", "base", "baseline")
KINDS = {"grid": dict, "full": dict, "panels": list, "tables": list, "base": str, "baseline": str}


@dataclass(frozen=True)
class FigureFile(Grid):
    """The content of the file of a figure.

    Attributes:
        name: The name of the figure.
        folder: The folder of the runs, inside the output folder; figures that share runs share it.
        title: What the figure shows.
        panels: What to draw.
        tables: What to write as a table.
    """

    name: str
    folder: str
    title: str
    panels: list[Panel]
    tables: list[Table]

    @property
    def shown(self) -> list[Panel]:
        """The panels, and the content of the tables as panels."""
        return [*self.panels, *(entry.panel for entry in self.tables)]

    def jobs(self) -> list[Job]:
        """Returns the runs that a panel or a table shows, in the order of the file."""
        return [
            job for job in super().jobs() if any(p.shows(job.run, job.axes) for p in self.shown)
        ]


def known() -> dict[str, Path]:
    """Returns the files of all figures and tables, by name.

    Those of `configs/papers/` in the current folder come before those that come with pfl.
    """
    folders = (configs.shipped(), Path("configs"))
    paths = {k: v for folder in folders for k, v in configs.names(folder / "papers").items()}
    by_name = {key.replace("/", "-"): path for key, path in paths.items()}
    return dict(sorted(by_name.items(), key=lambda item: _natural(item[0])))


def read_figure(name: str, full: bool = False) -> FigureFile:
    """Reads a figure.

    Args:
        name: The name of the figure, with or without its folder, or the path of its file.
        full: Applies the changes under `full`.

    Raises:
        ConfigError: There is no such figure, or its file has a mistake.
    """
    name, folder, content = resolved(name)
    if full:
        content = merge(content, content.get("full") or {})
        name, folder = f"{name}-full", f"{folder}-full"
    grid = read_grid(name, content)
    if not (content.get("panels") or content.get("tables")):
        raise ConfigError(f"{name}: panels: null; a figure needs panels, or tables")
    runs, axes = list(grid.runs), grid.grid
    panels = [read_panel(name, panel, runs, axes) for panel in content.get("panels", [])]
    tables = [read_table(name, entry, runs, axes) for entry in content.get("tables", [])]
    title = str(content.get("title", name))
    return FigureFile(
        **vars(grid), name=name, folder=folder, title=title, panels=panels, tables=tables
    )


def resolved(name: str) -> tuple[str, str, Config]:
    """Returns the name of a figure, the folder of its runs, and its content with that of its base.

    The content is checked and has no dotted keys.
    """
    figures = known()
    path = figures.get(name) or configs.find(name)
    if path is None:
        raise ConfigError(f"reproduce: there is no figure {name!r}; known are {', '.join(figures)}")
    name = next((key for key, file in figures.items() if file.samefile(path)), path.stem)
    content = load(path, KEYS, KINDS)
    if "base" not in content:
        return name, name, content
    _, folder, base = resolved(content["base"])
    shown = {"panels", "tables"} if content.keys() & {"panels", "tables"} else set()
    replaced = shown | (content.keys() & {"grid"})
    return name, folder, merge({k: v for k, v in base.items() if k not in replaced}, content)


def _natural(name: str) -> list[Any]:
    """Returns a sort key that puts figure10 behind figure9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
