"""The papers' pages have every figure, and their data every run of the figures' files."""

import re

import pytest

from benchmarks import published
from pfl.experiments import Reproduction
from tests.commands import ROOT
from tests.experiments.pages import RECORD
from tests.experiments.test_reproduce import ALL, drawn

pytestmark = pytest.mark.cli

# The figures that have a page with results.
FIGURES = [figure.name for figure in ALL if figure.panels and all(map(drawn, figure.jobs()))]
PAGES = [RECORD / f"{paper}.md" for paper in ("fedpd", "fedclup")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_show_every_figure_and_its_data(page):
    links = re.findall(r"\]\((?!http)([^)#]+)", page.read_text())
    assert not [link for link in links if not (page.parent / link).exists()]
    names = [name for name in FIGURES if name.startswith(page.stem)]
    ends = {link.rpartition("/")[2].removesuffix(".gz") for link in links}
    for file in (f"{name}.{kind}" for name in names for kind in ("png", "csv")):
        assert file in ends
    for name in names:
        assert name in page.read_text()


RESULTS = [f"results/{path.stem}" for path in (ROOT / "configs/results").glob("*.yaml")]


@pytest.mark.parametrize(
    "name",
    [name for name in FIGURES + RESULTS if name in published.names()],
)
def test_data_of_the_pages_are_those_of_the_figures_file(name):
    """The data have every run at every point of the grid, and no other."""
    figure = Reproduction.from_file(name)
    data = published.rows(name)
    assert {"run", *figure.grid, "seed"} <= set(data[0])

    def place(*values):
        return tuple(f"{v:.7g}" if isinstance(v, float) else str(v) for v in values)

    last = {place(r["run"], *(r[k] for k in figure.grid), r["seed"]): r for r in data}
    jobs = {place(job.run, *job.axes.values(), job.seed): job for job in figure.jobs()}
    assert last.keys() == jobs.keys()
    if "round" not in data[0]:  # a table of last rounds alone, without curves
        return
    for key, job in jobs.items():
        trainer = job.config["trainer"]
        stops = any(
            "EarlyStopping" in entry["class_path"] for entry in trainer.get("callbacks", [])
        )
        ends = stops or last[key]["diverged"] == "1"
        assert ends or float(last[key]["round"]) == trainer["max_epochs"]
