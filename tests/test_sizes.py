"""Every number of docs/record/sizes.md, from the accuracies of clients alone."""

import re
import statistics
from collections import defaultdict

import pytest
from scipy import stats

from benchmarks import published
from tests.commands import ROOT

PAGE = (ROOT / "docs" / "record" / "sizes.md").read_text()
ROWS = published.rows("results/sizes/clients")
ALONE = "clients alone"
SIZES = 5


def table(head):
    """The cells of a table of the page, by the name of the method."""
    text = PAGE[PAGE.index(head) :].split("\n\n")[0]
    lines = [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines()[2:]]
    return {name: cells for name, *cells in lines}


@pytest.fixture(scope="module")
def rounds():
    """By method and seed, the rounds with the rows of their twenty clients."""
    found = defaultdict(lambda: defaultdict(list))
    for row in ROWS:
        found[row["run"], row["seed"]][int(row["round"])].append(row)
    return found


def accuracies(rows):
    return [100 * float(row["test"]) for row in rows]


def best(run):
    """The round with the best mean on validation data, the first one of equals."""
    means = {t: statistics.fmean(float(row["val"]) for row in rows) for t, rows in run.items()}
    return run[max(means, key=lambda t: (means[t], -t))]


def words(values):
    """The mean and half of its 95 % interval by Student's t."""
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.fmean(values):+.1f} ± {half:.1f}"


def test_each_method_has_five_seeds_of_twenty_clients_in_five_rounds(rounds):
    methods = {method for method, _ in rounds}
    assert methods == set(table("| method | accuracy")) == set(table("| method | 1 MB"))
    assert {seed for _, seed in rounds} == set("12345")
    assert len(ROWS) == len(methods) * 5 * 5 * 20
    for run in rounds.values():
        for rows in run.values():
            assert [int(row["client"]) for row in rows] == list(range(20))


def test_the_gains_are_those_of_the_rounds_that_validation_data_choose(rounds):
    for method, cells in table("| method | accuracy").items():
        scores = [accuracies(best(rounds[method, seed])) for seed in "12345"]
        base = [accuracies(best(rounds[ALONE, seed])) for seed in "12345"]
        assert float(cells[0]) == pytest.approx(
            statistics.fmean(map(statistics.fmean, scores)), abs=0.0501
        )
        if method == ALONE:
            continue
        gains = [
            [a - b for a, b in zip(*pair, strict=True)] for pair in zip(scores, base, strict=True)
        ]
        assert cells[1] == words([statistics.fmean(one) for one in gains])
        for size in range(SIZES):
            of_size = [statistics.fmean(one[size::SIZES]) for one in gains]
            assert cells[2 + size] == words(of_size)


def test_equal_costs_are_the_last_rounds_within_them(rounds):
    alone = int(rounds[ALONE, "5"][25][0]["gradients"])
    for method, cells in table("| method | 1 MB").items():
        limits = [("bytes", 10**6), ("bytes", 10**7), ("bytes", 10**8), ("gradients", alone)]
        for cell, (name, limit) in zip(cells, limits, strict=True):
            found = []
            for seed in "12345":
                run = rounds[method, seed]
                within = [t for t, rows in run.items() if int(rows[0][name]) <= limit]
                if within:
                    found.append(statistics.fmean(accuracies(run[max(within)])))
            if found:
                assert float(cell) == pytest.approx(statistics.fmean(found), abs=0.0501)
            else:
                assert cell == "–"


def test_the_page_says_how_many_trials_there_were():
    trials = published.rows("results/sizes/trials")
    assert len(trials) == int(re.search(r"the (\d+) trials", PAGE)[1])
    lost = [row for row in trials if row["state"] == "diverged"]
    protocol = (ROOT / "docs" / "record" / "sizes-protocol.md").read_text()
    assert f"Twelve of the {len(trials)} trials diverged" in protocol and len(lost) == 12
