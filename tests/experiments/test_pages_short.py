"""The papers' short pages: tables from data, numbers of the record, the size of the evidence."""

import re

import numpy as np
import pytest

from benchmarks import paper_figures, papers
from tests.commands import ROOT
from tests.experiments.pages import RECORD, SHORT

pytestmark = pytest.mark.cli
NAMES = ("fedslr", "fedclup", "fedagg", "fedacs", "fedpd")
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e-\d+)?")
OTHER_PAGE = ROOT / "docs" / "compared-with-other-implementations.md"


def numbers(text):
    """Returns the numbers of a text; those of addresses, code and other marks are left out."""
    text = re.sub(r"```.*?```|\]\([^)]*\)|<!--.*?-->|arXiv\s[\d.]+", " ", text, flags=re.S)
    return set(NUMBER.findall(text))


def cells_of_claims(page):
    """Yields the names and the cells of each row of the tables of claims."""
    names = None
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith(("| the paper says |", "| paper |")):
            names = cells
        elif not line.startswith("|"):
            names = None
        elif names and not line.startswith("|--"):
            yield dict(zip(names, cells, strict=True))


def test_the_marked_tables_are_those_of_the_data():
    found = list(papers.pages())
    assert {path.stem for path in found} == {*NAMES, OTHER_PAGE.stem}
    marks = [mark for path in found for mark in papers.MARKED.findall(path.read_text())]
    assert sorted(name for _, name, _, _ in marks) == sorted(papers.TABLES)
    for path in found:
        assert papers.with_tables(path.read_text()) == path.read_text(), path


@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_of_a_short_page_are_on_the_long_one(name):
    """Or in its tables, which are made from the data."""
    page = (SHORT / f"{name}.md").read_text()
    tables = " ".join(text for _, _, text, _ in papers.MARKED.findall(page))
    known = numbers((RECORD / f"{name}.md").read_text()) | numbers(tables)
    assert {one for one in numbers(page) - known if len(one) > 1} == set()


@pytest.mark.parametrize("name", NAMES)
def test_the_page_of_all_papers_repeats_the_number_of_each(name):
    page = (SHORT / f"{name}.md").read_text()
    rows = cells_of_claims((SHORT / "index.md").read_text())
    (row,) = (row for row in rows if f"({name}.md)" in row["paper"])
    assert numbers(row["one number"]) <= numbers(page)
    assert re.match(r"\*\*(holds|fails|in part)\*\*", row["verdict"]) and row["n"]


@pytest.mark.parametrize("name", NAMES)
def test_every_verdict_says_its_evidence(name):
    page = (SHORT / f"{name}.md").read_text()
    rows = list(cells_of_claims(page))
    assert len(rows) >= 10
    for row in rows:
        assert row["verdict"] and row["n"], row
        assert re.search(r"\d|closed form", row["n"]), row  # a sample is counted


@pytest.mark.parametrize(
    "path, most",
    [
        *((SHORT / f"{name}.md", 1200) for name in NAMES),
        (SHORT / "index.md", 500),
        (OTHER_PAGE, 1200),
        (ROOT / "docs" / "results.md", 1400),
    ],
    ids=lambda value: getattr(value, "stem", str(value)),
)
def test_a_short_page_is_short_and_says_first_what_was_found(path, most):
    page = path.read_text()
    assert len(page.split()) <= most
    assert page.split("\n")[2].startswith("**In short**")
    if most > 500:
        head = page.partition("\n\n")[2].partition("\n\n")[2].partition("\n\n")[0]
        for word in ("Found", "One number", "Evidence"):
            assert f"* **{word}**:" in head


def test_what_is_said_of_every_run_of_fedslr():
    sets = ("digits", "mnist", "fashion")
    runs = 0
    for name in sets:
        own = papers.last(f"results/fedslr-{name}", papers.PERSONALIZED, "run")
        common = papers.last(f"results/fedslr-{name}", papers.GLOBAL, "run")
        runs += len(own["FedSLR",])
        means = {run: np.mean(values) for (run,), values in own.items()}
        assert means["FedSLR"] >= max(v for k, v in means.items() if k != "FedSLR" and v == v)
        for run in ("LG-FedAvg", "Ditto", "FedSpa", "LocalTrain"):
            assert (np.array(own["FedSLR",]) > own[run,]).all()
        if name != "digits":
            assert (np.array(common["FedSLR",]) > common["FedAvg",]).all()
    assert runs == 5


def test_what_is_said_of_every_seed_of_fedacs():
    own = papers.last("results/fedacs-fashion/runs", papers.PERSONALIZED, "setting", "run")
    scarce = np.array(own["(b) 50 samples", "FedACS"])
    assert (scarce < own["(b) 50 samples", "APFL"]).all()
    assert (scarce > own["(b) 50 samples", "LocalTrain"]).all()
    many = np.array(own["(b) 500 clients", "FedACS"])
    assert (many < own["(b) 500 clients", "LocalTrain"]).all()


def test_what_is_said_of_the_columns_of_fedagg():
    keys = ("run", "setting", "participation")
    ahead = []
    for name in ("results/fedagg-linear", "results/fedagg-fashion"):
        ends = papers.last(name, papers.GLOBAL, *keys)
        for run, setting, share in ends:
            if run == "FedAgg":
                less = np.mean(ends["FedAvg", setting, share])
                ahead.append(100 * (np.mean(ends["FedAgg", setting, share]) - less))
    assert len(ahead) == 6
    behind, most = sorted(value for value in ahead if abs(value) >= 0.6)
    text = f"within 0.6 points of FedAvg, in one {most:.2f} ahead, in one {-behind:.1f} behind"
    assert text in (SHORT / "fedagg.md").read_text()


def test_what_is_said_of_a_larger_penalty_of_fedslr():
    small = papers.last("results/fedslr-digits", papers.GLOBAL, "digits", "run")
    large = papers.last("results/fedslr-ablations", papers.GLOBAL, "run")
    fall = np.mean(small["non-IID", "FedSLR"]) - np.mean(large["FedSLR, λ = 5e-3",])
    assert f"the global model loses {100 * fall:.1f} points" in (SHORT / "fedslr.md").read_text()
    own = papers.last("results/fedslr-digits", papers.PERSONALIZED, "digits", "run")
    less = np.subtract(own["IID", "FedSpa"], own["IID", "FedSLR"])
    assert (less > 0).all()
    assert f"by {100 * less.mean():.1f} points" in (RECORD / "fedslr.md").read_text()


def test_what_is_said_of_skipped_rounds_of_fedpd():
    """The medians of the last 75 rounds stand beside FedAvg-GD's last gap."""
    gaps = papers.lines_of("results/fedpd-seeds", "train/global/gap", "run", "seed")
    below = []
    for share in ("0.25", "0.5"):
        medians = [np.median(gaps[f"FedPD-GD, p={share}, η=0.5", seed][-75:]) for seed in "012"]
        below.append([medians[k] < gaps["FedAvg-GD", str(k)][-1] for k in range(3)])
    assert list(map(sum, below)) == [2, 0]


@pytest.mark.parametrize(
    "panels, baseline, own",
    [
        (paper_figures.fedslr, "LocalTrain", "FedSLR"),
        (paper_figures.fedacs, "LocalTrain", "FedACS"),
        (paper_figures.fedagg, "FedAvg", "FedAgg"),
    ],
)
def test_figures_show_every_method_with_as_many_seeds_as_the_baseline(panels, baseline, own):
    for title, scores in panels().items():
        assert own in scores and len(scores) >= 8, title
        for values in scores.values():
            assert len(values) == len(scores[baseline]) and np.isfinite(values).all()


def test_the_records_are_in_the_menu_and_not_in_the_search():
    menu = (ROOT / "mkdocs.yml").read_text()
    pages = list((ROOT / "docs" / "record").glob("*.md"))
    assert len(pages) >= 7
    for page in pages:
        assert page.read_text().startswith("---\nsearch:\n  exclude: true\n---\n\n# ")
        assert f"record/{page.name}" in menu
