"""The leaderboard of twenty problems: every number of its page, from the published rounds."""

import re
import statistics
from collections import defaultdict

import numpy as np
import pytest
from scipy import stats

from benchmarks import leaderboard20, published
from tests.commands import ROOT

PAGE = ROOT / "docs" / "results.md"
BASELINE = "FedAvg + fine-tuning"


@pytest.fixture(scope="module")
def scores():
    """The accuracy of each method at each problem in points, the mean over seeds.

    The round is the first of those with the best validation accuracy of the model that counts:
    fine-tuned, else personalized, else global.
    """
    runs = defaultdict(list)
    for row in published.rows("results/leaderboard20/rounds"):
        runs[row["run"], row["problem"], row["seed"]].append(row)
    found = defaultdict(lambda: defaultdict(list))
    for (method, problem, _), rounds in runs.items():
        rows = [row for row in rounds if any(row[k] for k in row if k.startswith("val/"))]
        kinds = []
        for kind in ("finetuned", "personalized", "global"):
            names = [k for k in rows[0] if re.match(rf"val/{kind}(/\d+)?/accuracy$", k)]
            kinds += [name for name in names if rows[0][name]]
        best = max(rows, key=lambda row: float(row[kinds[0]]))
        score = 100 * float(best[kinds[0].replace("val/", "test/")])
        found[method][problem].append(score)
    return {
        method: {problem: statistics.fmean(values) for problem, values in by_problem.items()}
        for method, by_problem in found.items()
    }


def holm(values):
    """The k-th smallest of m times m - k, never below the one before, and at most 1."""
    corrected = {}
    before = 0.0
    for place, key in enumerate(sorted(values, key=lambda key: values[key])):
        before = max(before, min(1.0, (len(values) - place) * values[key]))
        corrected[key] = before
    return corrected


def words(value):
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def test_twenty_problems_and_eight_methods_have_all_their_runs():
    rows = published.rows("results/leaderboard20/rounds")
    places = {(row["run"], row["problem"], row["seed"]) for row in rows}
    seeds = {place[2] for place in places}
    assert len(places) == 8 * 20 * len(seeds)
    trials = defaultdict(int)
    for row in published.rows("results/leaderboard20/trials"):
        trials[row["method"], row["problem"]] += 1
    assert len(trials) == 8 * 20 and len(set(trials.values())) == 1


def test_the_page_has_the_differences_their_intervals_and_their_tests(scores):
    differences = {}
    for method, by_problem in scores.items():
        if method != BASELINE:
            values = [value - scores[BASELINE][p] for p, value in by_problem.items()]
            differences[method] = np.array(values)
    families = defaultdict(dict)
    for method, d in differences.items():
        error = statistics.stdev(d) / len(d) ** 0.5
        families["wilcoxon"][method] = stats.wilcoxon(d.round(6)).pvalue
        families["t"][method] = 2 * stats.t.sf(abs(d.mean()) / error, len(d) - 1)
        nearest = (1 - abs(d.mean())) / error  # from the nearer end of one point
        families["equivalence"][method] = stats.t.sf(nearest, len(d) - 1)
    corrected = {name: holm(values) for name, values in families.items()}
    page = PAGE.read_text()
    for method, d in differences.items():
        half = stats.t.ppf(0.975, len(d) - 1) * statistics.stdev(d) / len(d) ** 0.5
        cells = [
            method,
            f"{statistics.fmean(scores[method].values()):.2f}",
            f"{d.mean():+.2f}",
            f"{d.mean() - half:+.2f} to {d.mean() + half:+.2f}",
            *(words(corrected[name][method]) for name in ("wilcoxon", "t", "equivalence")),
            f"{(d > 1).sum()}, {(d < -1).sum()}",
        ]
        assert f"| {' | '.join(cells)} |" in page, cells
    assert f"| {BASELINE} | {statistics.fmean(scores[BASELINE].values()):.2f} |" in page


def test_the_scores_are_the_means_of_the_published_clients(scores):
    clients = defaultdict(lambda: defaultdict(list))
    for row in published.rows("results/leaderboard20/clients"):
        clients[row["run"], row["problem"]][row["seed"]].append(float(row["accuracy"]))
    for method, by_problem in scores.items():
        for problem, score in by_problem.items():
            means = [statistics.fmean(values) for values in clients[method, problem].values()]
            assert 100 * statistics.fmean(means) == pytest.approx(score, abs=2e-3)


def test_the_figure_and_the_tables_can_be_made_from_the_data():
    board = leaderboard20.Board()
    figure = board.figure()
    assert [plot.title for plot in figure.plots] == list(board.tests())
    assert len(board.problem_table().rows) == 20
    mean, low, high = board.interval("LocalTrain", "users")
    assert low < mean < high
    index = board.problems.index("users")
    assert mean == pytest.approx(board.test("LocalTrain").differences[index], abs=2e-3)


def test_equivalence_and_power_by_hand():
    """Twenty differences of +1/2 and -1/2: mean 0, and a deviation of sqrt(20/19) / 2."""
    one = leaderboard20.Test.of(np.tile([0.5, -0.5], 10))
    error = (20 / 19) ** 0.5 / 2 / 20**0.5
    assert one.high == pytest.approx(2.093024 * error, rel=1e-6)  # t, 19 degrees of freedom
    assert one.equivalence == pytest.approx(stats.t.sf(1 / error, 19))
    assert one.student == pytest.approx(1.0)
    # of normal differences: the power at the difference found is 80 %
    shift = one.found() / error
    least = stats.t.ppf(0.975, 19)
    assert stats.nct.sf(least, 19, shift) == pytest.approx(0.8, abs=1e-3)
    assert one.power_of_equivalence() > 0.99
