"""The tables of a comparison, of runs whose numbers are made up."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from pfl.report import comparison_tables as tables
from pfl.report.comparison import ComparedRuns
from pfl.report.comparison_figures import (
    _cliques,
    communication,
    communication_seconds,
    curve_choices,
    curves,
    gains,
    rank_diagram,
    scatter,
)
from pfl.report.plots import Spread, Words
from pfl.report.table import latex, markdown
from pfl.scores.names import models_of
from pfl.scores.runs import Run, column_names
from pfl.scores.table import ScoreTable
from tests.refusal import refused


def run(label, seed, tests, validations=None, kind="global", clients=None, **more):
    """A run with a test score, and perhaps a validation score, after each of its rounds."""
    rows = []
    for number, test in enumerate(tests, 1):
        row = {"round": number, f"test/{kind}/accuracy": test, "train/samples": 10.0 * number}
        row |= {f"test/{kind}/accuracy_worst10": test / 2}
        row |= {"comm/uplink_bytes": 100.0 * number, "comm/downlink_bytes": 200.0 * number}
        if validations:
            row[f"val/{kind}/accuracy"] = validations[number - 1]
        rows.append(row)
    scores = None
    if clients is not None:
        scores = by_round(f"test/{kind}/accuracy", clients)
    summary = {"wall_seconds": 2.0, "finished": True, **more.pop("summary", {})}
    return Run(label, seed, Path(), rows=rows, summary=summary, scores=scores, **more)


def by_round(name, values):
    """The table of a score of all clients, [rounds, clients]."""
    return ScoreTable.from_rounds(
        {number: {name: np.array(scores)} for number, scores in enumerate(values, 1)}
    )


def cell(table, label, column):
    """One cell of a table."""
    row = next(row for row in table.cells if row[0] == label)
    return row[table.heads.index(column)]


def test_a_budget_of_what_a_run_has_not_counted_is_refused():
    """Both runs would stay whole, and the table would say that they were cut."""
    runs = [run("A", 0, [0.5, 0.9]), run("B", 0, [0.6, 0.7])]
    for row in runs[0].rows:
        row["virtual_seconds"] = 2.0 * row["round"]
    assert ComparedRuns(runs[:1], "A", ("virtual_seconds", 3.0)).chosen[id(runs[0])]["round"] == 1
    with refused("budget: virtual_seconds", "has no virtual_seconds", "loop.clock"):
        ComparedRuns(runs, "A", ("virtual_seconds", 3.0))


def test_validation_chooses_the_round_and_not_the_test():
    """The best test score, 0.9 in round 2, must not be seen: validation is best in round 3."""
    comparison = ComparedRuns([run("A", 0, [0.5, 0.9, 0.7], [0.1, 0.2, 0.3])], "A")
    assert cell(tables.score_table(comparison), "A", "global") == "0.7000"
    assert "best one on validation data" in " ".join(comparison.notes())


def test_the_overview_of_a_grid_is_sorted_by_mean_rank():
    """B is better than A in both seeds of the first point and worse in the seed of the second.

    The ranks of A are 2, 2, 1, the ranks of B 1, 1, 2; C, which lacks a run, has none.
    """
    first = [run("A", s, [0.5]) for s in (0, 1)] + [run("B", s, [0.6 + s / 10]) for s in (0, 1)]
    second = [run("A", 0, [0.9]), run("B", 0, [0.8])]
    points = [ComparedRuns(first, "A", title="x"), ComparedRuns(second, "A", title="y")]
    assert tables.overview_table(points).cells == [
        ["method", "model", "x", "y", "mean rank"],
        ["B", "global", "0.6500 ± 0.0707", "0.8000", "1.33"],
        ["A", "global", "0.5000 ± 0.0000", "0.9000", "1.67"],
    ]
    lacking = ComparedRuns([*first, run("C", 0, [0.1])], "A", title="x")
    assert tables.overview_table([lacking]).cells[-1] == ["C", "global", "0.1000", "–"]


def test_without_validation_the_last_round_counts_and_the_table_says_so():
    comparison = ComparedRuns([run("A", 0, [0.5, 0.9, 0.6])], "A")
    assert cell(tables.score_table(comparison), "A", "global") == "0.6000"
    assert "no validation data" in " ".join(comparison.notes())


def test_one_method_without_validation_is_pointed_out():
    runs = [run("A", 0, [0.5], [0.5]), run("B", 0, [0.5])]
    assert "not compared on equal terms" in " ".join(ComparedRuns(runs, "A").notes())


@pytest.mark.parametrize(
    "budget, expected",
    [(("rounds", 2), 0.8), (("bytes", 599), 0.5), (("bytes", 600), 0.8), (("gradients", 29), 0.8)],
)
def test_a_budget_cuts_the_runs(budget, expected):
    """A round costs 300 bytes and 10 gradients."""
    comparison = ComparedRuns([run("A", 0, [0.5, 0.8, 0.9], [0.5, 0.8, 0.9])], "A", budget)
    assert cell(tables.score_table(comparison), "A", "global") == f"{expected:.4f}"


def test_mean_and_sample_deviation_over_seeds():
    """Of 0.5 and 0.7: mean 0.6, standard deviation sqrt(2 * 0.1^2 / (2 - 1)) = 0.1414."""
    comparison = ComparedRuns([run("A", 0, [0.5]), run("A", 1, [0.7])], "A")
    cells = tables.score_table(comparison)
    assert cell(cells, "A", "global") == "0.6000 ± 0.1414"
    assert cell(cells, "A", "worst 10%") == "0.3000 ± 0.0707"
    assert cell(cells, "A", "MB down") == "0.00" and cell(cells, "A", "gradients") == "10"
    assert comparison.notes()[:2] == [
        "The score is accuracy.",
        "± is the standard deviation over 2 seeds.",
    ]


def test_one_run_of_each_method_has_no_deviation():
    comparison = ComparedRuns([run("A", 0, [0.5])], "A")
    assert cell(tables.score_table(comparison), "A", "global") == "0.5000"
    words = " ".join(comparison.notes())
    assert "±" not in words and "Each method has one run" in words


def test_records_have_the_numbers_of_the_tables_for_programs():
    """A has 0.5 and 0.7 (mean 0.6, deviation 0.1414); B is 0.1 better in the one seed it has.

    With one pair Wilcoxon's exact p-value is 1: both signs are equally likely.
    """
    point = {"alpha": 0.1}
    runs = [run("A", s, [0.5 + s / 5], clients=[[0.5 + s / 5]], point=point) for s in (0, 1)]
    runs.append(run("B", 0, [0.6], clients=[[0.6]], point=point))
    a, b = tables.records([ComparedRuns(runs, "A")])
    assert (a["alpha"], a["method"], a["model"], a["runs"]) == (0.1, "A", "global", 2)
    assert (a["global"], a["global std"]) == pytest.approx((0.6, 0.02**0.5))
    assert (a["MB up"], a["gradients"], a["seconds"]) == pytest.approx((1e-4, 10, 2))
    assert a["pairs"] is None is b["global std"]  # A is the baseline; B has one run
    assert (b["baseline"], b["pairs"], b["wins"], b["p (Holm)"]) == ("A", 1, 1, 1.0)
    assert b["difference"] == pytest.approx(0.1, abs=1e-7)
    assert (a["mean rank"], b["mean rank"]) == (1.0, None)  # of seed 1 there is no B
    assert "± is the standard deviation over 1 or 2 seeds." in b["notes"]


def test_records_of_runs_have_all_numbers_of_the_round_that_counts():
    runs = [run("A", 0, [0.5, 0.7], [0.9, 0.8]), run("A", 1, [0.5], diverged=True)]
    first, second = tables.run_records([ComparedRuns(runs, "A")])
    assert (first["seed"], first["status"], first["seconds"]) == (0, "finished", 2.0)
    assert (first["round"], first["test/global/accuracy"]) == (1, 0.5)  # the best by validation
    assert first["comm/uplink_bytes"] == 100 and first["selected_by"] == "val/global/accuracy"
    assert second["status"] == "diverged" and "round" not in second
    (cut, _) = tables.run_records([ComparedRuns(runs, "A", ("rounds", 1))])
    assert cut["seconds"] is None  # known of whole runs only


def seeds_of(name, scores, digests):
    """A run for each seed with the scores of its two clients after two rounds, and a partition."""
    return [
        run(name, seed, [0.1, 0.2], clients=[[9, 9], pair], summary={"partition_hash": digest})
        for seed, (pair, digest) in enumerate(zip(scores, digests, strict=True))
    ]


def test_pairs_are_clients_of_the_same_seed():
    """The order of runs does not matter; the scores are taken from the chosen round.

    The seeds have partitions of their own, and so clients of their own.
    """
    runs = seeds_of("A", [[0.25, 0.5], [0.5, 0.75]], "xy")
    runs += seeds_of("B", [[0.5, 0.25], [0.75, 0.75]], "xy")[::-1]
    comparison = ComparedRuns(runs, "A")
    ours, theirs = comparison.pairs("B")
    assert sorted(zip(ours, theirs, strict=True)) == [
        (0.25, 0.5),
        (0.5, 0.25),
        (0.75, 0.5),
        (0.75, 0.75),
    ]
    (result, _) = comparison.statistics["B"]
    assert (result.wins, result.ties, result.losses) == (2, 1, 1)
    assert result.difference == pytest.approx((-0.25 + 0.25 + 0.25 + 0) / 4)
    assert cell(tables.statistics_table(comparison), "B", "wins") == "2"


@pytest.mark.parametrize("how", ["one partition", "one list of names", "unknown"])
def test_a_client_under_several_seeds_is_one_pair(how, tmp_path):
    """Each client's scores are averaged over the seeds, if its pair is known.

    Client 0: (0.5 + 0.75) / 2 against (0.25 + 0.5) / 2; client 1, which has a pair in the second
    seed only, 0.75 against 0.75.
    """
    digests = {"one partition": "xx", "one list of names": "xy", "unknown": [None] * 2}[how]
    runs = seeds_of("A", [[0.25, np.nan], [0.5, 0.75]], digests)
    runs += seeds_of("B", [[0.5, 0.25], [0.75, 0.75]], digests)
    if how == "one list of names":
        (tmp_path / "clients.csv").write_text("client,name\n0,Köln\n1,Bonn\n")
        runs = [replace(one, folder=tmp_path) for one in runs]
    ours, theirs = ComparedRuns(runs, "A").pairs("B")
    assert sorted(zip(ours, theirs, strict=True)) == [(0.625, 0.375), (0.75, 0.75)]


def test_clients_of_one_name_are_one_pair_though_each_seed_has_others_too(tmp_path):
    """Seeds draw two of three hospitals; Bonn is in both: (0.5 + 0.75) / 2 against 0.25."""
    runs = seeds_of("A", [[0.25, 0.5], [0.25, 0.75]], "xy")
    runs += seeds_of("B", [[0.5, 0.25], [0.75, 0.75]], "xy")
    for seed, names in enumerate((["Bonn", "Köln"], ["Bonn", "Ulm"])):
        folder = tmp_path / str(seed)
        folder.mkdir()
        rows = "".join(f"{number},{name}\n" for number, name in enumerate(names))
        (folder / "clients.csv").write_text(f"client,name\n{rows}")
        runs = [replace(one, folder=folder) if one.seed == seed else one for one in runs]
    ours, theirs = ComparedRuns(runs, "A").pairs("B")
    pairs = sorted(zip(ours, theirs, strict=True))
    assert pairs == [(0.25, 0.5), (0.625, 0.25), (0.75, 0.75)]


def test_equal_methods_on_the_same_clients_are_rarely_told_apart():
    """20 clients, five seeds, methods that are equal on average over all clients that there may be.

    The difference of a client is an effect of its own, standard deviation 1, which all seeds share,
    plus noise of 0.5. Wilcoxon's test at the level of 5% finds a difference in 5% of the draws, or
    in slightly fewer since its p-values are discrete; with 100 pairs, as if clients under several
    seeds were independent, it finds one in a third of the draws.
    """
    rng = np.random.default_rng(0)
    small = 0
    for _ in range(400):
        effect = rng.normal(size=20)
        scores = effect + 0.5 * rng.normal(size=(5, 20))
        runs = [run("A", seed, [0.0], clients=[np.zeros(20)]) for seed in range(5)]
        runs += [run("B", seed, [0.0], clients=[scores[seed]]) for seed in range(5)]
        differences = np.subtract(*ComparedRuns(runs, "A").pairs("B"))
        small += stats.wilcoxon(differences).pvalue < 0.05
    assert small <= 0.06 * 400


def test_a_method_without_scores_of_clients_gets_dashes():
    cells = tables.statistics_table(
        ComparedRuns([run("A", 0, [0.5]), run("B", 0, [0.5])], "A")
    ).cells
    assert cells[1] == ["B", "global", *["–"] * 6]


def test_virtual_time_has_a_column_and_an_axis_where_it_was_counted():
    one = run("A", 0, [0.5, 0.8])
    for number, row in enumerate(one.rows, 1):
        row["virtual_seconds"] = 1.5 * number
    heads, axes = [], []
    for other in (one, run("A", 0, [0.5, 0.8])):
        comparison = ComparedRuns([other], "A")
        heads.append("virtual seconds" in tables.score_table(comparison).heads)
        axes.append(len(curves(comparison).plots))
    assert heads == [True, False] and axes == [4, 3]
    assert cell(tables.score_table(ComparedRuns([one], "A")), "A", "virtual seconds") == "3.0"


def test_unequal_budgets_are_pointed_out():
    runs = [run("A", 0, [0.5]), run("B", 0, [0.5, 0.6])]
    notes = " ".join(ComparedRuns(runs, "A").notes())
    assert "Unequal rounds in the whole run: from 1 (A) to 2 (B)." in notes
    assert "Unequal gradients in the whole run: from 10 (A) to 20 (B)." in notes
    assert "Unequal bytes in the whole run: from 300 (A) to 600 (B)." in notes
    assert "Unequal" not in " ".join(ComparedRuns(runs[:1], "A").notes())
    assert "Unequal" not in " ".join(ComparedRuns(runs, "A", ("rounds", 1)).notes())


def test_unequal_budgets_look_unequal():
    """A has 3 rounds with each of three seeds; B has 2 with one of them, (3 + 3 + 2) / 3."""
    scores = [0.5, 0.5, 0.5]
    runs = [run(label, seed, scores) for label in "AB" for seed in range(2)]
    runs += [run("A", 2, scores), run("B", 2, scores[:2])]
    notes = " ".join(ComparedRuns(runs, "A").notes())
    assert "Unequal rounds in the whole run: from 2.67 (B) to 3 (A)." in notes


def test_a_cut_run_has_no_seconds_and_no_gain_over_training_alone():
    """The seconds are known of the whole run, and the local baseline of its last round only."""
    one = run("A", 0, [0.5, 0.6], clients=[[0.5, 0.5], [0.6, 0.6]])
    local = {2: {"test/local/accuracy": np.array([0.1, 0.1])}}
    one = replace(one, local=ScoreTable.from_rounds(local))
    whole, cut = (
        tables.score_table(ComparedRuns([one], "A", budget)) for budget in (None, ("rounds", 1))
    )
    assert cell(whole, "A", "seconds") == "2.0" and cell(whole, "A", "gained") == "100%"
    assert cell(cut, "A", "seconds") == "–" and "gained" not in cut.heads


@pytest.mark.parametrize("lost", [1, 3])
def test_a_method_that_lost_a_seed_is_not_judged_by_the_others(lost):
    """Neither is the baseline, whose second run is the one at place 1."""
    runs = [run(name, s, [0.5], clients=[[0.5, 0.6]]) for name in "AB" for s in (0, 1)]
    runs[lost] = replace(runs[lost], diverged=True)
    cells = tables.statistics_table(ComparedRuns(runs, "A")).cells
    assert cells[1] == ["B", "global", *["–"] * 6]


def test_runs_with_other_partitions_are_not_paired():
    """Of B's two seeds the first has the baseline's clients."""
    runs = [
        run(name, s, [0.5], clients=[[0.5, 0.6]], summary={"partition_hash": digest})
        for name, s, digest in [("A", 0, "x"), ("A", 1, "y"), ("B", 0, "x"), ("B", 1, "z")]
    ]
    comparison = ComparedRuns(runs, "A")
    assert len(comparison.pairs("B")[0]) == 2
    words = "Not paired with A, since its partition is another one: B, seed 1."
    assert words in comparison.notes()


def test_runs_of_a_seed_that_the_baseline_lacks_are_named():
    """Of B's two seeds the first is the baseline's; its mean is of both, its pairs of one."""
    place = [("A", 0), ("B", 0), ("B", 1), ("C", 0)]
    runs = [run(name, seed, [0.5], clients=[[0.5, 0.6]]) for name, seed in place]
    comparison = ComparedRuns(runs, "A")
    assert len(comparison.pairs("B")[0]) == 2
    words = "Not paired with A, which has no run of the same seed: B, seed 1."
    assert words in comparison.notes()
    assert "Not paired" not in " ".join(ComparedRuns([*runs[:2], runs[3]], "A").notes())


def test_a_run_that_has_not_finished_is_named():
    runs = [run("A", 0, [0.5]), run("B", 0, [0.5], summary={"finished": False})]
    assert "Not finished: B, seed 0." in ComparedRuns(runs, "A").notes()


def test_ranks_of_points_with_other_scores_and_other_methods():
    """The smaller loss is better at the second point, where C is new: it is in the overview."""
    first = [run("A", 0, [0.9]), run("B", 0, [0.8])]
    second = [run("A", 0, [0.5]), run("B", 0, [0.6]), run("C", 0, [0.7])]
    for one in second:
        one.rows[0]["test/global/loss"] = one.rows[0].pop("test/global/accuracy")
    points = [ComparedRuns(first, "A", title="x"), ComparedRuns(second, "A", title="y")]
    rows = [[row[0], row[-1]] for row in tables.overview_table(points).cells[1:]]
    assert rows == [["A", "1.00"], ["B", "2.00"], ["C", "–"]]


def test_a_diverged_run_is_named_and_has_no_mean():
    runs = [run("A", 0, [0.5]), run("A", 1, [0.5], diverged=True)]
    comparison = ComparedRuns(runs, "A")
    assert cell(tables.score_table(comparison), "A", "global") == "–"
    assert "Diverged, and left out: A, seed 1." in comparison.notes()


def with_baseline(one, *alone):
    """The run with scores that its clients reach alone, the same after each round."""
    return replace(one, local=by_round("test/local/accuracy", [alone] * len(one.rows)))


def test_the_share_of_clients_that_gained_over_alone():
    """In round 2, the best by validation: 1 of 2, then 0 of 2 clients, a mean of 25%.

    0.1 in float32 is larger than 0.1 in float64, which is no gain.
    """
    scores = [[0.9, 0.9], [0.1, 0.5], [0.9, 0.9]]
    runs = [run("A", s, [0.5] * 3, [0.1, 0.2, 0.0], clients=scores) for s in (0, 1)]
    runs = [with_baseline(runs[0], 0.1, 0.4), with_baseline(runs[1], 0.1, 0.6)]
    cells = tables.score_table(ComparedRuns([*runs, run("B", 0, [0.5])], "A"))
    assert cell(cells, "A", "gained") == "25%"
    assert cell(cells, "B", "gained") == "–"


def test_the_share_that_gained_is_of_all_seeds_or_not_shown():
    """A gains with seed 0 and diverged with seed 1; B's baseline with seed 1 is of another round.

    One of C's two clients gains with either seed.
    """
    runs = [run(name, s, [0.5], clients=[[0.5, 0.6]]) for name in "ABC" for s in (0, 1)]
    runs = [with_baseline(one, 0.4, 0.7) for one in runs]
    runs[1] = replace(runs[1], diverged=True)
    runs[3] = replace(runs[3], local=ScoreTable.from_rounds({9: {"test/local/accuracy": [0.1]}}))
    table = tables.score_table(ComparedRuns(runs, "A"))
    assert [cell(table, label, "gained") for label in "ABC"] == ["–", "–", "50%"]


def test_metrics_of_the_model_that_counts_have_columns():
    runs = [run("A", 0, [0.5, 0.6]), run("B", 0, [0.5])]
    for number, row in enumerate(runs[0].rows):
        row |= {"test/global/f1": 0.25 + number, "test/global/f1_clients": 3.0}
    cells = tables.score_table(ComparedRuns(runs, "A"))
    assert cell(cells, "A", "f1") == "1.2500" and cell(cells, "B", "f1") == "–"
    assert len({len(row) for row in cells.cells}) == 1


@pytest.mark.parametrize(("smaller_is_better", "row", "wins"), [(True, 1, 2), (False, 2, 1)])
def test_another_score_can_count(smaller_is_better, row, wins):
    """A's error is 0.3, 0.1 and 0.5 by round on validation, so that round 2 or round 3 counts.

    Of A's three clients, two have a smaller error than under B in round 2, and one has a larger one
    in round 3; the accuracies, 0.9 and 0.1, do not count.
    """
    error, better = "test/global/error", not smaller_is_better
    runs = [run("A", 0, [0.1, 0.9, 0.1], [0.1, 0.2, 0.3]), run("B", 0, [0.2])]
    values = {"A": [[9, 9, 9], [1, 1, 3], [2, 2, 3]], "B": [[2, 2, 2]]}
    for one in runs:
        for number, entry in enumerate(one.rows):
            entry |= {"test/global/error": np.mean(values[one.label][number])}
            entry |= {"test/global/error_clients": 3.0}
            entry |= {"val/global/error": [0.3, 0.1, 0.5][number]}
    scores = {label: by_round(error, np.array(rounds, float)) for label, rounds in values.items()}
    runs = [
        replace(one, scores=scores[one.label], summary={"higher_is_better": {"error": better}})
        for one in runs
    ]
    comparison = ComparedRuns(runs, "B", metric="error")
    cells = tables.score_table(comparison)
    assert cell(cells, "A", "global") == f"{np.mean(values['A'][row]):.4f}"
    assert cell(cells, "A", "accuracy") == ("0.9000" if row == 1 else "0.1000")
    assert cell(tables.statistics_table(comparison), "A", "wins") == str(wins)
    assert comparison.notes()[0] == "The score is error."


def test_kinds_come_in_the_order_of_the_table():
    names = ["unseen/0", "finetuned/10", "finetuned/5", "personalized", "global"]
    runs = [run("A", 0, [0.5], kind=name) for name in names]
    assert (
        models_of(column_names(row for one in runs for row in one.rows), "accuracy") == names[::-1]
    )
    heads = tables.score_table(ComparedRuns(runs[:3], "A")).heads
    expected = ["score that counts", "finetuned/5", "finetuned/10", "unseen/0"]
    assert heads[2:6] == expected


def test_cliques_are_the_longest_groups_within_the_difference():
    ranks = np.array([1.0, 1.5, 2.4, 4.0])
    assert _cliques(ranks, 1.0) == [(1.0, 1.5), (1.5, 2.4)]
    assert _cliques(ranks, 1.4) == [(1.0, 2.4)]
    assert _cliques(ranks, 0.1) == []


def test_figures_show_what_there_is():
    """Curves of every method; violins of the gains over the baseline; ranks of three methods."""
    names, seeds = ("A", "B", "C"), (0, 1)
    runs = [
        run(name, seed, [0.5, 0.6 + 0.1 * place], clients=[[0.5, 0.5], [0.5, 0.7 + 0.1 * place]])
        for place, name in enumerate(names)
        for seed in seeds
    ]
    comparison = ComparedRuns(runs, "A", title="Title")
    plots = curves(comparison).plots
    assert [curve.label for curve in plots[0].marks] == list(names)
    np.testing.assert_allclose(plots[1].marks[2].x, [300e-6, 600e-6])  # MB
    np.testing.assert_allclose(plots[2].marks[2].y, [0.5, 0.8])
    violins = gains(comparison).plots[0].marks
    assert [mark.label for mark in violins if isinstance(mark, Spread)] == ["B", "C"]
    marks = rank_diagram([comparison]).plots[0].marks
    words = {mark.text for mark in marks if isinstance(mark, Words)}
    assert {"C (1.00)", "B (2.00)", "A (3.00)"} <= words
    assert scatter(comparison) is None  # no method has both models
    assert rank_diagram([ComparedRuns(runs[:4], "A")]) is None  # two methods only


def test_tuning_is_a_column_and_unequal_tuning_is_pointed_out():
    runs = [run("A", 0, [0.5]), run("B", 0, [0.5])]
    tuning = {"A": {"trials": 20, "rounds": 100}, "B": {"trials": 5, "rounds": 100}}
    comparison = ComparedRuns(runs, "A", tuning=tuning)
    cells = tables.score_table(comparison)
    assert [cell(cells, label, "tuning trials") for label in "AB"] == ["20", "5"]
    notes = " ".join(comparison.notes())
    assert "Unequal trials of tuning: from 5 (B) to 20 (A)." in notes and "100" not in notes
    notes = ComparedRuns(runs, "A", tuning={"A": {"trials": 20}}).notes()
    assert "Unequal trials of tuning: from 0 (B) to 20 (A)." in notes
    assert "tuned with equal" in ComparedRuns(runs, "A", tuning={"A": {}}).notes()[-1]
    assert "tuning trials" not in tables.score_table(ComparedRuns(runs, "A")).heads


@pytest.mark.parametrize(("tests", "shown"), [([], []), ([0.2], [0.35])])
def test_a_curve_ends_before_the_first_seed_diverged(tests, shown):
    """A's second seed diverged before its first evaluation, or after one: (0.5 + 0.2) / 2 = 0.35.

    The first seed, which went on, is no line of its own.
    """
    runs = [run("A", 0, [0.5, 0.6]), run("A", 1, tests, diverged=True), run("B", 0, [0.4, 0.5])]
    comparison = ComparedRuns(runs, "A")
    for plot in curves(comparison).plots:
        lines = {curve.label: curve for curve in plot.marks}
        assert ("A" in lines) == bool(shown) and lines["B"].y.tolist() == [0.4, 0.5]
        if shown:
            np.testing.assert_allclose(lines["A"].y, shown)
    labels = [curve.label for curve in curve_choices(runs).plots[0].marks]
    assert labels.count("A, global") == len(shown) and "B, global" in labels


def test_communication_takes_the_mean_clients_bytes():
    """A round costs 300 bytes, of 3 clients and then of 2: 800 bits, then 1,200 for each of them.

    At 400 bits a second this is 2 and 3 seconds; nobody takes part in the third round.
    """
    one = run("A", 0, [0.5, 0.6, 0.7])
    for row, count in zip(one.rows, (3, 2, 0), strict=True):
        row["participants"] = count
    one.rows[2] |= {"comm/uplink_bytes": 200.0, "comm/downlink_bytes": 400.0}
    assert communication_seconds(one.rows, 400) == [(1, 2), (2, 5), (3, 5)]
    comparison = ComparedRuns([one], "A", ("rounds", 2))
    (curve,) = communication(comparison, 400).plots[0].marks
    assert (curve.x.tolist(), curve.y.tolist()) == ([1, 2], [2, 5])
    assert communication(ComparedRuns([run("A", 0, [0.5])], "A"), 400) is None


# ---- which model counts --------------------------------------------------------------------------


def finetuned(label, seed=0, **choice):
    """A run with global models (0.5, and per client) and after 1 and 5 steps (0.6 and 0.7)."""
    one = run(label, seed, [0.5], [0.5], clients=[[0.25, 0.75]], summary=choice)
    scores = {"test/global/accuracy": np.array([0.25, 0.75])}
    for steps, mean in ((1, 0.6), (5, 0.7)):
        one.rows[0][f"test/finetuned/{steps}/accuracy"] = mean
        one.rows[0][f"test/finetuned/{steps}/accuracy_worst10"] = mean / 7
        scores[f"test/finetuned/{steps}/accuracy"] = np.array([mean, mean])
    return replace(one, scores=ScoreTable.from_rounds({1: scores}))


@pytest.mark.parametrize(
    ("metric", "select_by", "model", "difference", "worst"),
    [
        (None, None, "finetuned/5", 0.7 - 0.4, "0.1000"),  # the file asks for fine-tuning
        (None, "global/accuracy", "global", 0.5 - 0.4, "0.2500"),  # told otherwise
        ("finetuned/1/accuracy", "global/accuracy", "finetuned/1", None, "0.0857"),
        ("global/accuracy", None, "global", 0.5 - 0.4, "0.2500"),
    ],
)
def test_a_run_with_fine_tuning_is_scored_by_it(metric, select_by, model, difference, worst):
    """Statistics, worst tenth and ranks belong to the model that the table names."""
    runs = [run("A", 0, [0.4], [0.4], clients=[[0.4, 0.4]]), finetuned("B", select_by=select_by)]
    comparison = ComparedRuns(runs, "A", metric=metric)
    cells = tables.score_table(comparison)
    assert cell(cells, "B", "model") == model and cell(cells, "B", "worst 10%") == worst
    (result, _) = comparison.statistics["B"]
    if difference is None:  # A has no such model
        assert cell(cells, "A", "model") == "–" and result.pairs == 0
    else:
        assert result.difference == pytest.approx(difference, abs=1e-6)
        assert cell(tables.overview_table([comparison]), "B", "mean rank") == "1.00"


def test_select_by_chooses_the_round_and_not_the_number_of_the_table():
    """docs/metrics.md: the loss is best in round 1, where the accuracy is 0.5."""
    one = run("A", 0, [0.5, 0.9], [0.1, 0.2], summary={"select_by": "loss"})
    for row, loss in zip(one.rows, (1.0, 2.0), strict=True):
        row |= {"val/global/loss": loss, "test/global/loss": loss}
    comparison = ComparedRuns([one], "A")
    assert cell(tables.score_table(comparison), "A", "score that counts") == "0.5000"
    assert comparison.notes()[0] == "The score is accuracy."


def test_the_best_score_that_counts_is_bold_whatever_its_model():
    """A has a personalized 0.5, B a global 0.4 and, fine-tuned, the best score of all, 0.7.

    B's 0.5 in the column of global models is no best score of the table.
    """
    runs = [run("A", 0, [0.5], kind="personalized"), finetuned("B"), run("C", 0, [0.4])]
    table = tables.score_table(ComparedRuns(runs, "A"))
    shown = [cell(table, label, "score that counts") for label in "ABC"]
    assert shown == ["0.5000", "0.7000", "0.4000"]
    in_latex = latex(table)
    assert r"finetuned/5 & \textbf{0.7000} & " in in_latex and in_latex.count(r"\textbf") == 1
    in_markdown = markdown(table)
    assert "| finetuned/5 | **0.7000** |" in in_markdown and in_markdown.count("**") == 2


def test_fine_tuning_costs_gradients():
    """B's training took 10 sample gradients, five steps of fine-tuning 30 and one step 6."""
    runs = [run("A", 0, [0.5]), finetuned("B", finetuning_samples={"1": 6.0, "5": 30.0})]
    comparison = ComparedRuns(runs, "A")
    cells = tables.score_table(comparison)
    assert cell(cells, "A", "gradients") == "10" and cell(cells, "B", "gradients") == "40"
    notes = " ".join(comparison.notes())
    assert "Unequal gradients in the whole run: from 10 (A) to 40 (B)." in notes
    lines = {curve.label: curve for curve in curves(comparison).plots[2].marks}
    assert [lines[label].x.tolist() for label in "AB"] == [[10], [40]]
    one_step = tables.score_table(ComparedRuns(runs[1:], "B", metric="finetuned/1/accuracy"))
    assert cell(one_step, "B", "gradients") == "16"
    without = tables.score_table(ComparedRuns(runs, "A", metric="global/accuracy"))
    assert cell(without, "B", "gradients") == "10"


def test_a_fine_tuned_model_is_as_large_as_the_global_one_beside_personalized_methods():
    """A's model that counts is fine-tuned from its only model, of 100 numbers; B's has 130."""
    one = finetuned("A")
    one.rows[0]["parameters/global"] = 100.0
    two = run("B", 0, [0.5], kind="personalized")
    two.rows[0] |= {"parameters/global": 100.0, "parameters/personalized": 130.0}
    cells = tables.score_table(ComparedRuns([one, two], "A"))
    assert [cell(cells, label, "parameters") for label in "AB"] == ["100", "130"]


def test_a_score_that_no_run_has_is_named_with_those_that_there_are():
    with refused("metric: finetuned/9/accuracy", "global/accuracy, finetuned/1/accuracy"):
        ComparedRuns([finetuned("A")], "A", metric="finetuned/9/accuracy")


def test_gained_compares_the_same_round_of_both():
    """Round 1 is the best: 0.6 beats the baseline's 0.5 of that round, and not its later 0.7."""
    one = run("A", 0, [0.6, 0.4], [0.9, 0.1], clients=[[0.6, 0.6], [0.4, 0.4]])
    local = by_round("test/local/accuracy", [[0.5, 0.7], [0.7, 0.7]])
    one = replace(one, local=local)
    assert ComparedRuns([one], "A").gained_of(one) == 0.5
