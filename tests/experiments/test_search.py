"""`pfl search`: tries on validation data, and looks on seeds that nobody has seen."""

import json
import math

import numpy as np
import pytest
import yaml
from scipy import stats

from benchmarks.search import Planted, drawn_verdict
from pfl.errors import ConfigError
from pfl.experiments.grid import Job
from pfl.experiments.jobs import check_jobs
from pfl.experiments.search import Rules, Scores, Search
from pfl.scores.statistics import (
    pooled_deviation,
    seeds_test,
    seeds_to_choose,
    seeds_to_find,
)
from tests.cli.configurations import SMALL
from tests.commands import call, python
from tests.refusal import refused

MINE = "from pfl.algorithms import FedAvg\n\n\nclass Mine(FedAvg):\n    number = 1\n"
RUNS = {"FedAvg": {"model.class_path": "FedAvg"}, "Mine": {"model.class_path": "mine.Mine"}}


def planted(effects, deviation=0.001, rules=None, seeds=3):
    """A search whose versions are better than the baseline by these effects."""
    return Planted(
        common={"model.init_args.lr": 0.1},
        runs=RUNS,
        seeds=seeds,
        search=rules or Rules(),
        number=1,
        effects=effects,
        deviation=deviation,
    )


def attempts(search, root, versions):
    """The records of tries of some versions."""
    records = []
    for version in versions:
        search.now[0] = version
        records.append(search.attempt(root))
    return records


# ---- statistics ----------------------------------------------------------------------------------


def test_the_test_of_seeds_is_students():
    differences = np.array([0.01, 0.03, -0.005, 0.02, 0.015, 0.02])
    expected = stats.ttest_1samp(differences, 0.0)
    low, high = expected.confidence_interval(0.9)
    found = seeds_test(differences, 0.1)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-12)
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-12)
    assert found.sign == 1 and seeds_test(-differences, 0.1).sign == -1
    assert seeds_test(differences, expected.pvalue / 2).sign == 0


def test_equal_differences_and_missing_ones_have_a_verdict():
    assert seeds_test(np.zeros(8), 0.05).sign == 0
    assert seeds_test(np.full(8, 0.01), 0.05).sign == 1
    assert seeds_test(np.array([0.1, np.nan, 0.1]), 0.05).sign == 0


def test_an_infinite_loss_is_worse_and_no_rounding():
    ours = Scores("val/global/loss", np.array([np.inf, 1.0, 2.0]), larger_is_better=False)
    theirs = Scores("val/global/loss", np.array([1.0, np.inf, 2.0]), larger_is_better=False)
    assert ours.gains(theirs).tolist() == [-np.inf, np.inf, 0.0]


def test_the_spread_is_that_within_tries():
    """Deviations -1, 1 and -2, 0, 2 of the means 5 and 7: (2 + 8) / (1 + 2)."""
    groups = [np.array([4.0, 6.0]), np.array([5.0, 7.0, 9.0])]
    assert pooled_deviation(groups) == pytest.approx(math.sqrt(10 / 3))
    assert pooled_deviation([np.array([1.0])]) is None


def test_so_many_seeds_find_and_choose_as_often_as_planned():
    """Counted in draws; one seed fewer is too few. Twenty thousand draws are exact to 0.007."""
    draws = np.random.default_rng(0)
    size = seeds_to_find(0.02, 0.02, 0.05, 0.9, 2, 99)
    for n, above in ((size, True), (size - 1, False)):
        gains = draws.normal(0.02, 0.02, [20_000, n])
        t = gains.mean(axis=1) / gains.std(axis=1, ddof=1) * math.sqrt(n)
        found = (t > stats.t.ppf(0.975, n - 1)).mean()
        assert (found > 0.893) if above else (found < 0.9)
    size = seeds_to_choose(0.02, 0.02, 10, 0.9, 99)
    for n, above in ((size, True), (size - 1, False)):
        means = draws.normal(0.0, 0.02 / math.sqrt(n), [20_000, 10])
        means[:, 3] += 0.02
        chosen = (means.argmax(axis=1) == 3).mean()
        assert (chosen > 0.893) if above else (chosen < 0.9)
    assert seeds_to_find(0.02, 0.0, 0.05, 0.9, 8, 99) == 8
    assert seeds_to_find(0.001, 0.5, 0.05, 0.9, 8, 99) == 99


# ---- verdicts ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_luck_is_refused_and_a_true_gain_is_found():
    """Of forty planted searches each; benchmarks/results/search.md has more, and larger ones."""
    luck = [drawn_verdict(number, 0.0, 0.01, tries=10) for number in range(40)]
    assert luck.count("improves") <= 2
    gain = [drawn_verdict(number, 0.02, 0.01, tries=10) for number in range(40)]
    assert gain.count("improves") >= 36


def test_a_worse_method_is_called_so(tmp_path):
    search = planted([-0.05])
    attempts(search, tmp_path, [0])
    record = search.judge(tmp_path)
    assert record["verdict"] == "worse" and record["high"] < 0


def test_looks_share_the_level(tmp_path):
    """Two looks have half of 0.05 each, on seeds of their own."""
    search = planted([0.0, 0.05], rules=Rules(looks=2))
    attempts(search, tmp_path, [0])
    assert search.judge(tmp_path)["level"] == 0.025
    attempts(search, tmp_path, [1])
    assert search.judge(tmp_path)["verdict"] == "improves"
    first, second = [set(r["seeds"]) for r in search.records(tmp_path) if "seeds" in r]
    assert not first & second


def test_held_out_seeds_are_drawn_by_the_system(tmp_path):
    seeds = [Search.draw(planted([0.0]), 8, set()) for _ in range(2)]
    assert len({*seeds[0], *seeds[1]}) == 16


# ---- budgets and refusals ------------------------------------------------------------------------


def test_a_version_that_was_tried_costs_nothing(tmp_path):
    search = planted([0.0, 0.01], rules=Rules(tries=2))
    first, second, again = attempts(search, tmp_path, [0, 1, 0])
    assert (first["try"], second["try"], again) == (1, 2, first)
    with pytest.raises(ConfigError, match="all 2 tries are used up"):
        attempts(planted([0.0] * 3, rules=Rules(tries=2)), tmp_path, [2])


def test_the_best_try_is_judged_and_only_once(tmp_path):
    search = planted([0.05, 0.0], rules=Rules(looks=2))
    with pytest.raises(ConfigError, match="no try has a score"):
        search.judge(tmp_path)
    attempts(search, tmp_path, [0, 1])
    with pytest.raises(ConfigError, match="the best one is try 1, and this code is another; copy"):
        search.judge(tmp_path)
    search.now[0] = 0
    assert search.judge(tmp_path)["verdict"] == "improves"
    with pytest.raises(ConfigError, match="try 1 has been judged"):
        search.judge(tmp_path)


def test_a_look_that_was_interrupted_goes_on_with_its_seeds(tmp_path):
    """A better try after it uses the look up."""
    search = planted([0.0, 0.05])
    attempts(search, tmp_path, [0])
    search.note(tmp_path, {"look": 1, "best": 1, "version": search.version(), "seeds": [5, 6, 7]})
    assert len(search.judge(tmp_path)["gains"]) == 3
    other = tmp_path / "other"
    other.mkdir()
    attempts(search, other, [0])
    search.note(other, {"look": 1, "best": 1, "version": search.version(), "seeds": [5, 6, 7]})
    attempts(search, other, [1])
    with pytest.raises(ConfigError, match="no look is left of 1"):
        search.judge(other)


class Twice(Planted):
    """A search in whose steps another process begins one."""

    def measure(self, run, seeds, root, *rest):
        for step in (self.attempt, self.judge):
            with refused(f"search: another process works in {root.parent};"):
                step(root.parent)
        return super().measure(run, seeds, root, *rest)


def test_two_steps_at_the_same_time_do_not_share_a_budget(tmp_path):
    """Two looks at once had drawn seeds each, where the file allows one look."""
    given = {"common": {"model.init_args.lr": 0.1}, "runs": RUNS, "seeds": 3, "number": 1}
    search = Twice(**given, search=Rules(), effects=[0.05], deviation=0.001)
    attempts(search, tmp_path, [0])
    assert search.judge(tmp_path)["verdict"] == "improves"
    assert len(search.records(tmp_path)) == 3  # a try, the beginning of a look, and its verdict


def test_another_file_does_not_continue_a_search(tmp_path):
    attempts(planted([0.0]), tmp_path, [0])
    with pytest.raises(ConfigError, match="the file has changed since"):
        attempts(planted([0.0], rules=Rules(tries=99)), tmp_path, [0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"search": {"held_out": 7}}, "search.held_out: 7; it must be at least 8"),
        ({"search": {"level": 1.0}}, "level"),
        ({"search": {"trys": 2}}, "trys"),
        (
            {"runs": {"FedAvg": {"model.class_path": "FedAvg"}}},
            "runs: 'FedAvg'; it must be two runs",
        ),
        (
            {"baseline": "FedAvg", "runs": {"FedAvg": {}, "Ditto": {"model.class_path": "Ditto"}}},
            "search: runs.Ditto.model.class_path: Ditto; it must be a class of a file",
        ),
    ],
)
def test_a_mistake_in_the_file_gets_one_line(tmp_path, changes, words):
    common = {"model": {"class_path": "FedAvg"}}
    path = tmp_path / "search.yaml"
    path.write_text(yaml.safe_dump({"common": common, "runs": RUNS, **changes}))
    status, out, error = call("search", "try", path, "--out", tmp_path / "out")
    assert (status, out, error.count("\n")) == (2, "", 1), error
    assert words in error


@pytest.mark.cli
def test_a_search_without_test_samples_is_refused_at_its_first_try():
    protocol = {"class_path": "SplitOwn", "init_args": {"test": 0.0}}
    data = {**SMALL["data"]["init_args"], "protocol": protocol}
    job = Job("a", {}, 0, {**SMALL, "data": {**SMALL["data"], "init_args": data}})
    check_jobs([job], validated=True)
    with refused("data.protocol.test: 0.0; it must be above 0"):
        check_jobs([job], validated=True, tested=True)


# ---- real runs -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.cli
def test_a_search_of_real_runs(tmp_path):
    """Every line of the standard output is a record; the tries have no test scores.

    The looks have them, also where the file asks for validation scores alone.
    """
    protocol = {"class_path": "SplitOwn", "init_args": {"test": 0.3, "validation": 0.3}}
    common = {key: SMALL[key] for key in ("data", "loop")}
    arguments = {**SMALL["data"]["init_args"], "protocol": protocol}
    common["data"] = {**SMALL["data"], "init_args": arguments}
    common["loop"] = {**SMALL["loop"], "evaluate": ["val"]}
    common["trainer"] = {"max_epochs": 1, "accelerator": "cpu"}
    common["model"] = {"init_args": SMALL["model"]["init_args"]}
    content = {"seeds": 2, "common": common, "runs": RUNS, "search": {"tries": 2, "held_out": 8}}
    (tmp_path / "search.yaml").write_text(yaml.safe_dump(content))
    file = tmp_path / "mine.py"

    def step(word):
        done = python("-m", "pfl", "search", word, "search.yaml", "--jobs", "1", cwd=tmp_path)
        return [json.loads(line) for line in done.stdout.splitlines()]

    file.write_text(MINE)
    (record,) = step("try")
    assert (record["try"], record["best"], record["gains"]) == (1, 1, [0.0, 0.0])  # it is FedAvg
    root = tmp_path / "runs/search/search"
    head = (root / "tries/Mine/seed0/metrics.csv").read_text().splitlines()[0]
    assert "val/global/accuracy" in head and "test/" not in head
    assert (root / "versions/1/mine.py").read_text() == MINE
    (look,) = step("judge")
    assert look["verdict"] == "cannot be told from it" and look["gains"] == [0.0] * 8
    assert look["metric"] == "test/global/accuracy"
    lines = (root / "search.jsonl").read_text().splitlines()
    assert [next(iter(json.loads(line))) for line in lines] == ["try", "look", "look"]
    assert json.loads(lines[0]).items() >= record.items()
